"""Where things lie: the project's root, a run folder, a checkpoint. No torch here."""

import re
from importlib import import_module
from pathlib import Path
from shlex import quote

from .errors import UserError

ROOT = Path(__file__).resolve().parent.parent


def from_root(path: str | Path) -> Path:
    """An absolute path; a relative one starts at the project's root, wherever one stands."""
    return ROOT / path


def from_here(path: str | Path) -> Path:
    """A path as it was typed: from the working directory, or else from the project's root."""
    typed = Path(path).expanduser().absolute()
    return typed if typed.exists() else from_root(path)


def find_checkpoint(run: str | Path, prefer: str = "best", key: str = "run") -> Path:
    """The checkpoint that `run` means.

    Args:
        run: A run folder, a folder that holds a .ckpt, or a .ckpt, which may be sharded; or a
            released model, `<name>@<version>`, which DVC then fetches.
        prefer: `best` or `last`, where a run folder has both.
        key: The config key that `run` was given to, for errors.

    Raises:
        UserError: If nothing lies there, the folder holds no checkpoint, or DVC cannot fetch it.
    """
    path = from_here(run)
    if not path.exists() and (released := re.fullmatch(r"([^/@]+)@([^/@]+)", str(run))):
        if key == "resume":
            raise UserError(f"resume={run}: a released model is no run to resume: init_from={run}.")
        # By name: stages of the pipeline, which take files, do not depend on that module.
        return import_module(f"{__package__}.registry").fetch(released[1], released[2], key)
    if path.is_file() or is_sharded(path):
        return path
    if not path.is_dir():
        raise UserError(f"{key}={run}: there is no such folder or file.")
    for name in dict.fromkeys((prefer, "best", "last")):
        for folder in (path / "checkpoints", path):
            found = folder / f"{name}.ckpt"
            if found.is_file() or is_sharded(found):
                return found
    raise UserError(f"{key}={run}: this folder holds no checkpoint (best.ckpt or last.ckpt).")


def is_sharded(path: Path) -> bool:
    """Whether this is a checkpoint that each rank has written a part of: a folder."""
    return (path / ".metadata").is_file()


def sharded_error(path: Path) -> str:
    """What to tell whoever needs one file."""
    module = f"{__package__}.training.consolidate"
    return f"{as_typed(path)} is sharded, make it one file: python -m {module} {quote(str(path))}"


def run_folder_of(checkpoint: Path) -> Path:
    """The run folder that a checkpoint belongs to; for one that lies alone, its own folder."""
    folder = checkpoint.parent
    return folder.parent if folder.name == "checkpoints" else folder


def as_typed(path: Path) -> str:
    """The shortest way to name a path from the working directory."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
