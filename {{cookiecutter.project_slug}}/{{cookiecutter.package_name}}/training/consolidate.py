"""Sharded checkpoints → portable files: `python -m <package>.training.consolidate <folder>`."""

import sys
import warnings
from pathlib import Path

from ..errors import UserError
from ..paths import as_typed, from_here, is_sharded
from .checkpoints import SafeCheckpointIO
from .sharding import read_checkpoint_parts


def consolidate(folder: Path) -> Path:
    """Put one file, which any training, evaluation or `load_model` reads, in a folder's place.

    Raises:
        UserError: If it is no sharded checkpoint, cannot be read, or the disk refuses.
    """
    if not is_sharded(folder):
        raise UserError(f"{folder} is no sharded checkpoint.")
    with warnings.catch_warnings():  # torch says that there are no other ranks
        warnings.simplefilter("ignore")
        content = read_checkpoint_parts(folder, {}, [])
    SafeCheckpointIO().save_checkpoint(content, folder)
    return folder


def find_sharded(typed: str) -> list[Path]:
    """The sharded checkpoints of a run folder, or the one that was named.

    Raises:
        UserError: If there is none.
    """
    path = from_here(typed)
    if not path.exists():
        raise UserError(f"{typed}: there is no such folder.")
    if path.is_file():
        raise UserError(f"{typed} is one file already.")
    below = sorted([*path.glob("*.ckpt"), *path.glob("checkpoints/*.ckpt")])
    if found := [one for one in (path, *below) if is_sharded(one)]:
        return found
    said = "its checkpoints are files already" if below else "it holds no checkpoint"
    raise UserError(f"{typed}: there is nothing to do, {said}.")


def main(words: list[str]) -> None:
    """Say what was written, or in one line what is wrong."""
    if len(words) != 1 or words[0].startswith("-"):
        sys.exit(f"usage: python -m {__package__}.consolidate <run folder or .ckpt folder>")
    try:
        for folder in find_sharded(words[0]):
            file = consolidate(folder)
            print(f"{as_typed(file)} is one file now ({file.stat().st_size / 1e6:.1f} MB).")
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
