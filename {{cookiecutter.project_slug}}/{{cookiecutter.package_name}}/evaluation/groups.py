"""Finished runs, in groups that differ in seed and fold alone. No torch here."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from ..log import log
from ..paths import as_typed
from ..training.comparison import compared
from ..training.manifest import read_manifest

SAMPLE = ("seed", "data.fold")  # by what the runs of a group may differ
TARGET = "._target_"
FINGERPRINT = "data.fingerprint"


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        folder: The run folder.
        start: When it began, as run.json has it.
        sample: Its seed and fold.
        config: What else decides what it computes: values by dotted keys, and which data.
        metrics: Its final values.
    """

    folder: Path
    start: str
    sample: tuple[Any, ...]
    config: dict[str, Any]
    metrics: dict[str, float]


def finished_runs(folders: Sequence[Path]) -> list[Run]:
    """The finished runs in and below folders, the oldest first; what is left out is named.

    Of runs of the same config, data, seed and fold the newest counts.
    """
    found = {file.parent.resolve() for folder in folders for file in folder.rglob("run.json")}
    runs = []
    for folder in sorted(found):
        try:
            runs.append(_read(folder))
        except (OSError, ValueError, TypeError, LookupError, YAMLError) as error:
            log.warning("Left out: %s (%s).", as_typed(folder), " ".join(str(error).split()))
    kept: dict[str, Run] = {}
    for run in sorted(runs, key=lambda run: run.start):
        same = json.dumps([run.sample, run.config], sort_keys=True)
        if before := kept.pop(same, None):
            names = as_typed(before.folder), as_typed(run.folder)
            log.warning("Left out: %s (the same as %s, which is newer).", *names)
        kept[same] = run
    return list(kept.values())


def _read(folder: Path) -> Run:
    """A run from its folder.

    Raises:
        ValueError: If it has not finished; this or another, if a file is not what a run leaves.
    """
    facts = read_manifest(folder)
    if (status := facts.get("status", "its run.json cannot be read")) != "finished":
        raise ValueError(status)
    config = OmegaConf.load(folder / "config.yaml")
    assert isinstance(config, DictConfig)
    values = {key: value for key, value in compared(config).items() if value is not None}
    sample = tuple(values.pop(key, None) for key in SAMPLE)
    values[FINGERPRINT] = facts["data"]["fingerprint"][:12]
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    if not metrics:
        raise ValueError("its metrics.json is empty")
    return Run(folder, facts["start"], sample, values, {k: float(v) for k, v in metrics.items()})


def grouped(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by the name of their group: the values by which groups differ.

    Of parts of different kinds, such as two models, only the kind is told; of keys with the same
    values, as where one takes another's, only the first.
    """
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        groups[json.dumps(run.config, sort_keys=True)].append(run)
    configs = [group[0].config for group in groups.values()]
    told: dict[str, list[Any]] = {}
    for key in sorted({key for config in configs for key in config}, key=_by_depth):
        values = [config.get(key) for config in configs]
        if _differs(key, configs) and values not in told.values():
            told[key] = values
    columns = [_written(key, values) for key, values in told.items()]
    names = [", ".join(parts) for parts in zip(*columns, strict=True)]
    return dict(zip(names or [str(configs[0].get("name"))], groups.values(), strict=True))


def _by_depth(key: str) -> tuple[int, str]:
    return key.count("."), key


def _differs(key: str, configs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a value differs between configs in which what it is a part of is of one kind."""
    kinds: dict[str, list[Any]] = defaultdict(list)
    for config in configs:
        if key == FINGERPRINT:  # that another source or split gives other data goes without saying
            kind = {k: v for k, v in config.items() if k.startswith(("data.source", "data.split"))}
        else:
            own = key.removesuffix(TARGET)
            parents = [own[:place] for place, sign in enumerate(own) if sign == "."]
            kind = {parent: config.get(parent + TARGET) for parent in parents}
        kinds[json.dumps(kind, sort_keys=True)].append(config.get(key))
    return any(values.count(values[0]) < len(values) for values in kinds.values())


def _written(key: str, values: Sequence[Any]) -> list[str]:
    """`key=value`; a class goes by its last name where no other has the same."""
    texts = [v if isinstance(v, str) else json.dumps(v, separators=(",", ":")) for v in values]
    short = [text.rpartition(".")[2] for text in texts]
    if key.endswith(TARGET):
        texts = short if len(set(short)) == len(set(texts)) else texts
    return [f"{key.removesuffix(TARGET)}={text}" for text in texts]
