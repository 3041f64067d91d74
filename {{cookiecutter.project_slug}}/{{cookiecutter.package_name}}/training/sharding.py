"""Lightning's strategy for sharded training, with checkpoints that any other training reads."""

import logging
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_map_with_path

from ..errors import UserError
from .checkpoints import put_in_place

REST = "meta.pt"  # of a sharded checkpoint: all but its cut tensors, of which it has the shapes
INDEX = {  # what the index of a sharded checkpoint is made of, beside dtypes
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
}
# It says on each rank, where layers are cut twice, that gathering them takes two operations.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


class Sharded(ModelParallelStrategy):
    """Weights, gradients and the optimizer's state are cut over ranks.

    Checkpoints are one file, or a folder that each rank writes its part of
    (`save_distributed_checkpoint`). Both hold what one process would save, the optimizer's state
    by numbers too, so that a run can go on with another strategy and number of ranks.
    """

    @property
    def lightning_restore_optimizer(self) -> bool:
        """By `load_optimizer_state_dict`."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's part where checkpoints are folders, else all, and on the first rank alone."""
        assert self.lightning_module is not None
        return self._to_save(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """As above."""
        state: dict[str, Any] = super(ModelParallelStrategy, self).optimizer_state(optimizer)
        return {**state, "state": {k: self._to_save(v) for k, v in state["state"].items()}}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write beside the target, then rename.

        Raises:
            UserError: If a disk refuses.
        """
        target = Path(self.broadcast(str(filepath)))
        scratch = target.with_name(f".{target.name}.sharding")
        if self._save_distributed_checkpoint:
            if self.is_global_zero:
                shutil.rmtree(scratch, ignore_errors=True)  # of a run that was killed
            self.barrier()
            rest, tensors = take_out(checkpoint)
            try:
                save(tensors, storage_writer=FileSystemWriter(scratch))
            except (CheckpointException, OSError) as error:
                raise UserError(f"cannot write {target}: {_reason(error)}") from error
            if self.is_global_zero:
                self.checkpoint_io.save_checkpoint(rest, scratch / REST)
                put_in_place(scratch, target)
        elif self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, target)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read this rank's part; never more than tensors and builtins."""
        path = Path(self.broadcast(str(checkpoint_path)))
        assert self.lightning_module is not None
        own = self.lightning_module.state_dict()
        likes: dict[tuple[Any, ...], Any] = {("state_dict", key): own[key] for key in own}
        for index, optimizer in enumerate(self.optimizers):
            params = [one for group in optimizer.param_groups for one in group["params"]]
            for number, one in enumerate(params):
                likes["optimizer_states", index, "state", number] = one
        left_out = [] if self._is_fitting() else ["optimizer_states"]
        return read_checkpoint_parts(path, likes, left_out)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """As other strategies do, now that the tensors are cut."""
        super(ModelParallelStrategy, self).load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """As above."""
        super(ModelParallelStrategy, self).load_optimizer_state_dict(checkpoint)

    def _is_fitting(self) -> bool:
        assert self.lightning_module is not None
        return self.lightning_module.trainer.state.fn == TrainerFn.FITTING

    def _to_save(self, state: Mapping[str, Any]) -> dict[str, Any]:
        if self._save_distributed_checkpoint:
            return dict(state)
        whole = {}
        for key, value in state.items():  # one at a time: each is whole on all ranks for a moment
            full = value.full_tensor() if isinstance(value, DTensor) else value
            if self.is_global_zero:
                whole[key] = full.detach().cpu() if isinstance(full, Tensor) else full
        return whole


def take_out(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A checkpoint with nothing but the shapes of its cut tensors, and these tensors by name."""
    tensors = {}

    def outline(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf
        tensors[keystr(path)] = leaf
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")

    return tree_map_with_path(outline, checkpoint), tensors


def read_checkpoint_parts(
    path: Path, likes: Mapping[tuple[Any, ...], Any], left_out: list[str]
) -> dict[str, Any]:
    """Read a checkpoint, a file or a folder, each tensor cut as the one that takes it.

    Args:
        path: Written by any strategy on any number of ranks.
        likes: Tensors, by the keys that lead to them in the checkpoint; of an optimizer's state
            by the number of the parameter. Where there is none, the whole is read.
        left_out: First keys of what is not needed.

    Raises:
        UserError: If it is no checkpoint, or a damaged one.
    """
    targets: dict[str, Tensor] = {}

    def place(keys: Any, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        names = tuple(getattr(key, "key", getattr(key, "idx", None)) for key in keys)
        like = likes.get(names, likes.get(names[:-1]))
        is_cut = isinstance(like, DTensor) and like.shape == leaf.shape
        if not leaf.is_meta:
            if not is_cut:
                return leaf
            return distribute_tensor(leaf, like.device_mesh, like.placements, src_data_rank=None)
        shape = torch.empty_like(like if is_cut else leaf, dtype=leaf.dtype)
        targets[keystr(keys)] = shape if is_cut else torch.empty_like(shape, device="cpu")
        return targets[keystr(keys)]

    try:
        file = path / REST if path.is_dir() else path
        rest = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        kept = {key: value for key, value in rest.items() if key not in left_out}
        checkpoint: dict[str, Any] = tree_map_with_path(place, kept)
        if targets:
            load(targets, storage_reader=SafeReader(path), no_dist=not likes)
    except (Exception, CheckpointException) as error:  # whatever torch trips over
        raise UserError(f"{path} is no checkpoint that can be read: {_reason(error)}") from error
    return checkpoint


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):  # of several ranks
        error = next(iter(error.failures.values()))[0]
    return str(error).partition("\n")[0]


class SafeReader(FileSystemReader):
    """torch's reader of sharded checkpoints; it would unpickle anything from their index."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Which tensors there are, and where."""
        with (Path(self.path) / ".metadata").open("rb") as stream:
            metadata: Metadata = _IndexUnpickler(stream).load()
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in INDEX.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} in the index of a checkpoint")
