"""The pipeline's first stage: params.yaml → what each stage is run with, and from which code.

`python -m <package>.resolve` writes two files a stage, which DVC watches in place of the many
that they stand for: `resolved/<stage>.yaml`, the stage's config composed with the overrides in
params.yaml, and `resolved/<stage>.sha256`, the modules of this project that the stage imports. So a
stage runs again when what it reads has changed, and only then.
"""

import shlex
from collections.abc import Iterator
from hashlib import sha256
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from .cli import one_line, run_stage
from .errors import UserError
from .paths import ROOT

# Relative paths stay relative here: the files are the same on every machine.
OmegaConf.register_new_resolver("from_root", str, replace=True)


def main() -> None:
    """Write the files of every stage that params.yaml knows."""
    params = _read("params.yaml")
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        stages = [path.stem for path in (ROOT / "configs").glob("*.yaml") if path.stem in params]
        configs = {name: resolve(name, params[name], params.dataset) for name in stages}
    folder = ROOT / "resolved"
    folder.mkdir(exist_ok=True)
    for name, config in configs.items():
        if "data" in config:
            _check_dataset(name, config.data, params.dataset)
        used = config.data.source if name == "prepare" else config  # it makes nothing else
        named = set(_targets(OmegaConf.to_container(used)))
        if "run" in list(config):  # whoever is given a run builds its model
            named.add(configs["train"].model._target_)
        listing = "".join(f"{_hash(path)}  {path}\n" for path in modules(name, named))
        (folder / f"{name}.sha256").write_text(listing, encoding="utf-8")
        if "code" in config:
            config.code = sha256(listing.encode()).hexdigest()[:12]
        write(folder / f"{name}.yaml", config)


def resolve(stage: str, overrides: Any, dataset: str) -> DictConfig:
    """A stage's config with every interpolation resolved, the same on every machine.

    Raises:
        UserError: If the overrides, as params.yaml has them, do not fit the configs.
    """
    defaults: Any = OmegaConf.to_container(_read(f"configs/{stage}.yaml").defaults)
    data = [f"data={dataset}"] if any("data" in entry for entry in defaults) else []
    try:
        typed = shlex.split(overrides or "")
    except (AttributeError, ValueError) as error:  # no text; no closing quotation
        raise UserError(
            f"params.yaml, {stage}: write overrides as you would type them, not {overrides!r}."
        ) from error
    try:
        # local=none: what configs/local says of this machine has no place in a shared file.
        config = compose(stage, ["local=none", *data, *typed])
        OmegaConf.resolve(config)
    except Exception as error:
        if (line := one_line(error, stage, [*data, *typed])) is None:
            raise
        raise UserError(f"params.yaml, {stage}: {line.removeprefix('error: ')}") from error
    return config


def modules(stage: str, named: set[str]) -> list[str]:
    """The files of this project that a stage imports, anywhere in its code, without running it.

    Args:
        stage: Its script is `<stage>.py`.
        named: Classes and functions that its config names, by their dotted paths.

    Returns:
        Paths from the project's root, sorted.
    """
    finder = ModuleFinder(path=[str(ROOT)])
    finder.run_script(str(ROOT / f"{stage}.py"))
    for target in sorted(named):
        try:
            finder.import_hook(target.rpartition(".")[0])
        except ImportError:  # of another project, which constraints.txt pins
            continue
    files = [getattr(module, "__file__", None) for module in finder.modules.values()]
    return sorted(Path(file).relative_to(ROOT).as_posix() for file in files if file)


def write(path: Path, config: DictConfig) -> None:
    """Write a config, its keys in order, with a line that says where it comes from."""
    note = "# Written by `dvc repro` from params.yaml and configs/: change those instead.\n"
    path.write_text(note + OmegaConf.to_yaml(config), encoding="utf-8")


def _read(name: str) -> DictConfig:
    config = OmegaConf.load(ROOT / name)
    assert isinstance(config, DictConfig)
    return config


def _targets(node: Any) -> Iterator[str]:
    """Every `_target_` below a node."""
    if isinstance(node, dict):
        if target := node.get("_target_"):
            yield target
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            yield from _targets(child)


def _hash(path: str) -> str:
    return sha256((ROOT / path).read_bytes()).hexdigest()


def _check_dataset(stage: str, data: DictConfig, dataset: str) -> None:
    """Refuse data that other stages would not find, or whose changes nobody would notice."""
    if data.prepared_dir != f"data/prepared/{dataset}":
        raise UserError(
            f"params.yaml: {stage} uses {data.prepared_dir}, the pipeline data/prepared/{dataset}: "
            f"choose the data by dataset, and let configs/data/{dataset}.yaml have that name."
        )
    raw = data.source.get("raw_dir")
    deps: Any = OmegaConf.to_container(_read("dvc.yaml").stages.prepare.deps)
    if raw and raw not in [dep.replace("${dataset}", dataset) for dep in deps]:
        raise UserError(
            f"params.yaml: {stage} reads {raw}, which the pipeline does not watch: put the images "
            f"into data/raw/{dataset}, or add {raw} to the deps of prepare in dvc.yaml."
        )


if __name__ == "__main__":
    run_stage(main)
