"""Checkpoint files: written whole or not at all, and never taken for good unread."""

import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from ..errors import UserError
from ..log import log


class SafeCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, flushes to the disk, reads back, and only then renames.

    A run that is killed while it saves, or a full disk, leaves the checkpoint before in place.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Write tensors and builtins.

        Raises:
            UserError: If the disk refuses, or the checkpoint holds anything else.
        """
        target = Path(path)
        scratch = target.with_name(f".{target.name}.part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with scratch.open("wb") as stream:
                torch.save(checkpoint, stream)
                stream.flush()
                os.fsync(stream.fileno())
            readable(scratch)
            put_in_place(scratch, target)
        except (OSError, RuntimeError) as error:  # torch wraps what its writer meets
            raise UserError(f"cannot write {target}: {_cause(error)}") from error
        finally:
            scratch.unlink(missing_ok=True)


def put_in_place(scratch: Path, target: Path) -> None:
    """Give what was written its final name, in place of what has it now: a file or a folder.

    A folder is not replaced in one step: the one before is `<name>-previous.ckpt` meanwhile.
    """
    before = target.with_name(f"{target.stem}-previous{target.suffix}")
    if target.is_dir() or (target.exists() and scratch.is_dir()):
        _remove(before)
        target.rename(before)
    scratch.replace(target)
    sync_folder(target.parent)
    _remove(before)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make a rename in a folder outlast a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def readable(path: Path) -> dict[str, Any]:
    """A checkpoint's content, its tensors not yet read from the disk.

    Raises:
        UserError: If it is no checkpoint, is cut off, or holds more than tensors and builtins.
    """
    if path.is_dir():  # sharded
        path = path / "meta.pt"
    try:
        return dict(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
    except Exception as error:  # whatever the unpickler trips over
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{path} cannot be loaded again: {reason}") from error


def newest_readable(folder: Path) -> Path | None:
    """last.ckpt of a run folder, or else its newest checkpoint that is whole; None without any.

    Raises:
        UserError: If there are checkpoints, and none can be read.
    """
    files = (folder / "checkpoints").glob("*.ckpt")
    found = sorted(files, key=lambda p: (p.stem == "last", p.stat().st_mtime), reverse=True)
    for path in found:
        try:
            readable(path)
            if path.is_file() and (broken := zipfile.ZipFile(path).testzip()):
                raise UserError(f"{path} is damaged in {broken}.")
        except (UserError, OSError) as error:
            log.warning("Left out: %s", error)
        else:
            return path
    if found:
        raise UserError(
            f"{folder}: none of its checkpoints can be read. Restore one, or start anew in "
            "another folder with run_dir=…."
        )
    return None


def _cause(error: BaseException) -> str:
    """The operating system's words where there are any below an error."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, OSError) and chain.strerror:
            return f"{chain.strerror}."
        chain = chain.__cause__ or chain.__context__
    return str(error).splitlines()[0]
