"""The run folder: made for one run alone, or found again so that the run goes on in it."""

import os
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path

from filelock import FileLock, Timeout
from omegaconf import DictConfig, OmegaConf

from ..errors import UserError
from ..log import log
from ..paths import ROOT, as_typed, find_checkpoint, from_here, from_root, run_folder_of
from .checkpoints import newest_readable, readable
from .comparison import differences
from .manifest import read_manifest


@dataclass(frozen=True)
class RunFolder:
    """A folder that this process holds the lock of.

    Attributes:
        path: The folder.
        checkpoint: What the run goes on from; None for a start from scratch.
        lock: Held until the run ends, in whatever way.
    """

    path: Path
    checkpoint: Path | None
    lock: FileLock

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *error: object) -> None:
        self.lock.release(force=True)


def open_folder(config: DictConfig, fingerprint: str | None = None) -> RunFolder:
    """Make the run folder, or take the one that `resume` and `run_dir` mean.

    Args:
        config: Of the run.
        fingerprint: Of the data, where they are known.

    Raises:
        UserError: If the folder holds another run or is in use, there is nothing to resume, or
            the config differs from the one that the run was started with.
    """
    if config.resume is None:
        if config.run_dir is None:
            return _opened(_new_folder(_parent(config)))
        folder = from_root(config.run_dir)
        if (folder / "config.yaml").exists():
            raise UserError(f"run_dir={config.run_dir} holds a run: add resume=auto to go on.")
        return _opened(folder)
    if config.resume != "auto":
        checkpoint = _checkpoint(config.resume)
        origin = run_folder_of(checkpoint)
        _compare(config, origin, fingerprint)
        return _opened(from_root(config.run_dir) if config.run_dir else origin, checkpoint)
    if config.run_dir is None:
        return _unfinished(config) or _opened(_new_folder(_parent(config)))
    opened = _opened(from_root(config.run_dir))
    _compare(config, opened.path, fingerprint)
    return _with_newest(opened)


def _compare(config: DictConfig, folder: Path, fingerprint: str | None) -> None:
    if not (folder / "config.yaml").is_file():
        return
    changed = differences(_config_of(folder), config)
    before = read_manifest(folder).get("data", {}).get("fingerprint")
    if before and fingerprint and before != fingerprint:
        changed.append("the data themselves")
    if not changed:
        return
    if not config.allow_changes:
        raise UserError(
            f"{as_typed(folder)} was started with another config ({'; '.join(changed)}): "
            "allow_changes=true goes on with the new one."
        )
    log.warning("Going on with a changed config: %s", "; ".join(changed))


def _parent(config: DictConfig) -> Path:
    """The folder that the config's runs lie in.

    Where DVC tries an experiment in a temporary copy of the project, that is in the project itself:
    the copy is deleted at the end, a run is not.
    """
    root = Path(os.environ.get("DVC_ROOT", ROOT))
    copied = ROOT.is_relative_to(root / ".dvc/tmp")
    return (root if copied else ROOT) / config.runs_dir / config.name


def _unfinished(config: DictConfig) -> RunFolder | None:
    """The newest run of this config that has begun and has not finished.

    Raises:
        UserError: If it is under way: a second one would do the same.
    """
    folders = sorted(_parent(config).glob("*/run.json"), reverse=True)
    for folder in (file.parent for file in folders):
        status = read_manifest(folder).get("status")
        if status not in ("finished", "submitted") and (folder / "config.yaml").is_file():
            if differences(_config_of(folder), config):
                continue
            opened = _opened(folder)
            try:
                return _with_newest(opened)
            except UserError as error:
                opened.lock.release()
                log.warning("Not resumed: %s", error)
    return None


def _with_newest(opened: RunFolder) -> RunFolder:
    checkpoint = newest_readable(opened.path)
    return RunFolder(opened.path, checkpoint, opened.lock)


def _checkpoint(resume: str) -> Path:
    found = find_checkpoint(resume, prefer="last", key="resume")
    if from_here(resume).is_dir():
        found = newest_readable(run_folder_of(found)) or found
    if "loops" not in readable(found):  # as publish_dir gives it
        raise UserError(
            f"{as_typed(found)} holds a model alone: init_from={resume} starts from it."
        )
    return found


def _opened(folder: Path, checkpoint: Path | None = None) -> RunFolder:
    _make(folder, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"{as_typed(folder)} is in use: another process trains there.") from None
    except OSError as error:
        raise UserError(f"cannot write {folder} ({error.strerror}): set runs_dir=….") from error
    return RunFolder(folder, checkpoint, lock)


def _new_folder(parent: Path) -> Path:
    """`parent/<timestamp>`, or with -1, -2, …: made exclusively, so no two runs share one."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    _make(parent, exist_ok=True)
    for number in count():
        folder = parent / (f"{stamp}-{number}" if number else stamp)
        try:
            _make(folder, exist_ok=False)
        except FileExistsError:
            continue
        break
    return folder


def _make(folder: Path, exist_ok: bool) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
    except OSError as error:
        if isinstance(error, FileExistsError) and not exist_ok:
            raise
        raise UserError(f"cannot write {folder} ({error.strerror}): set runs_dir=….") from error


def _config_of(folder: Path) -> DictConfig:
    config = OmegaConf.load(folder / "config.yaml")
    assert isinstance(config, DictConfig)
    return config
