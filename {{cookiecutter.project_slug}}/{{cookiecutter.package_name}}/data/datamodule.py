"""Batches from prepared arrays: one indexed read of the memory map a batch."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ..errors import UserError
from .arrays import ImageArrays
from .augment import Augment
from .folds import fold_splits, split_facts

Batch = tuple[Tensor, Tensor]


class BatchDataset(Dataset[Batch]):
    """Indexed by the rows of a whole batch: images uint8 [B, C, H, W] and labels int64 [B]."""

    def __init__(self, arrays: ImageArrays) -> None:
        self.arrays = arrays

    def __getitem__(self, rows: np.ndarray) -> Batch:
        images = torch.from_numpy(self.arrays.images[rows])
        return images, torch.from_numpy(self.arrays.labels[rows])


class BatchRows(Sampler[np.ndarray]):
    """The rows of each batch of this rank.

    A batch of all ranks is cut into equal parts, so that ranks together read just what one
    process would. In training the last, incomplete batch of an epoch is left out (the order is
    another in the next one). In evaluation every row is read once, none twice: ranks get uneven
    parts of the last batch, which takes in a remainder smaller than the number of ranks, since a
    rank without a row would leave the others waiting.

    Args:
        rows: The rows of the split, int64 [N].
        batch_size: Rows of a batch over all ranks.
        rank: Of this process.
        world_size: Number of ranks.
        seed: Of the shuffle; None keeps the order and every row.

    Attributes:
        trained: An epoch, and how many of its batches are left out: a continued run has seen them.
    """

    def __init__(
        self, rows: np.ndarray, batch_size: int, rank: int, world_size: int, seed: int | None
    ) -> None:
        if 0 < len(rows) < world_size:
            raise UserError(f"{world_size} ranks cannot share a split of {len(rows)} images.")
        self.rows, self.batch_size = rows, batch_size
        self.rank, self.world_size = rank, world_size
        self.seed, self.epoch, self.trained = seed, 0, (0, 0)

    def set_epoch(self, epoch: int) -> None:
        """Shuffle anew; Lightning calls it before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        full, rest = divmod(len(self.rows), self.batch_size)
        if self.seed is not None:
            return full
        return full + (rest >= self.world_size)

    def __iter__(self) -> Iterator[np.ndarray]:
        rows = self.rows
        if self.seed is not None:
            rows = np.random.default_rng((self.seed, self.epoch)).permutation(rows)
        epoch, batches = self.trained
        start = batches if epoch == self.epoch else 0
        for index in range(start, len(self)):
            last = self.seed is None and index == len(self) - 1
            stop = None if last else (index + 1) * self.batch_size
            batch = rows[index * self.batch_size : stop]
            yield np.array_split(batch, self.world_size)[self.rank]


class BatchLoader:
    """A DataLoader whose items are whole batches.

    Not a DataLoader itself: to Lightning it is any iterable, so it neither swaps the sampler nor
    advises more workers, which cost more than the one indexed read that a batch is.

    Args:
        arrays: The prepared images.
        sampler: The rows of each batch; Lightning sets its epoch.
        trained: How many batches of the epoch the trainer is done with; workers read ahead.
        options: Workers, pinned memory and prefetching of `torch.utils.data.DataLoader`.
    """

    batch_sampler = None  # Lightning asks for it where there is a sampler

    def __init__(
        self, arrays: ImageArrays, sampler: BatchRows, trained: Callable[[], int], **options: Any
    ) -> None:
        self.sampler, self.trained = sampler, trained
        self._batches: DataLoader[Batch] = DataLoader(
            BatchDataset(arrays), sampler=sampler, batch_size=None, **options
        )

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        yield from self._batches  # not before the first batch: the epoch is set after iter()

    def state_dict(self) -> dict[str, int]:
        """Where in the epoch training stands; Lightning keeps it in checkpoints."""
        return {"epoch": self.sampler.epoch, "batches": self.trained()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self.sampler.trained = (state["epoch"], state["batches"])


class ImageDataModule(LightningDataModule):
    """Loaders over the three splits of prepared images.

    Args:
        prepared_dir: What `prepare` wrote.
        batch_size: Images an optimizer step sees, over all ranks and accumulation steps.
        num_workers: Processes that read batches; 0 reads them in this one.
        pin_memory: `auto` pins where CUDA is.
        prefetch_factor: Batches that a worker holds ready.
        augment: Arguments of `Augment`, for training batches.
        seed: Of the order of training batches.
        fold: Validate on this fold of train and val, train on the others; None: as prepared.
        folds: How many folds there are.

    Raises:
        UserError: If the data are not prepared, hold less than one batch, or no such fold.
    """

    def __init__(
        self,
        prepared_dir: str,
        batch_size: int,
        num_workers: int = 0,
        pin_memory: bool | str = "auto",
        prefetch_factor: int = 2,
        augment: Mapping[str, Any] | None = None,
        seed: int = 0,
        fold: int | None = None,
        folds: int = 5,
    ) -> None:
        super().__init__()
        self.prepared_dir, self.arrays = prepared_dir, ImageArrays(prepared_dir)
        self.fold, self.folds = fold, folds
        self.splits = fold_splits(self.arrays, fold, folds)
        self.batch_size, self.num_workers, self.seed = batch_size, num_workers, seed
        self.pin_memory = torch.cuda.is_available() if pin_memory == "auto" else bool(pin_memory)
        self.prefetch_factor = prefetch_factor if num_workers else None
        self.augment = Augment(**(augment or {}))
        available = len(self.splits["train"])
        if batch_size > available:
            raise UserError(
                f"data.batch_size={batch_size} is more than the {available} training images: "
                f"set data.batch_size={available} or less."
            )

    @property
    def facts(self) -> dict[str, Any]:
        """Plain values that models are sized from and checkpoints keep."""
        facts = {**asdict(self.arrays.meta), "prepared_dir": self.prepared_dir}
        facts |= {"fold": self.fold, "folds": self.folds}
        if self.fold is not None:
            facts |= split_facts(self.arrays, self.splits)
        return facts

    def train_dataloader(self) -> BatchLoader:
        """Shuffled; a batch is an accumulation step of this rank."""
        trainer: Any = self.trainer
        if trainer is None:
            return self._loader("train", self.batch_size, self.seed)
        seed = None if trainer.overfit_batches else self.seed  # the same batches each epoch
        return self._loader("train", self.batch_size // trainer.accumulate_grad_batches, seed)

    def val_dataloader(self) -> BatchLoader:
        """In order, every image once."""
        return self._loader("val", self.batch_size, None)

    def test_dataloader(self) -> BatchLoader:
        """In order, every image once."""
        return self._loader("test", self.batch_size, None)

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Start the random numbers of a training step anew, from its place in the run.

        So there is no random state to keep for a run that is resumed, on any number of ranks.
        """
        trainer: Any = self.trainer
        if trainer is not None and trainer.training:
            rank, _ = self._share()
            batch_idx = trainer.fit_loop.epoch_loop.batch_progress.current.processed
            seed = hash((self.seed, trainer.current_epoch, batch_idx, rank))  # whole numbers: fixed
            torch.default_generator.manual_seed(seed & (2**63 - 1))
            device = trainer.strategy.root_device.type
            if device != "cpu":
                getattr(torch, device).manual_seed(seed & (2**63 - 1))
        return batch

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Augment training batches, on the device."""
        if self.trainer is None or not self.trainer.training:
            return batch
        images, labels = batch
        return self.augment(images), labels

    def _loader(self, split: str, batch_size: int, seed: int | None) -> BatchLoader:
        trainer: Any = self.trainer
        return BatchLoader(
            self.arrays,
            BatchRows(self.splits[split], batch_size, *self._share(), seed),
            lambda: trainer.fit_loop.epoch_loop.batch_progress.current.processed,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            prefetch_factor=self.prefetch_factor,
            persistent_workers=self.num_workers > 0,
        )

    def _share(self) -> tuple[int, int]:
        """This rank's part of each batch, of how many; tensor parallel ranks read the same."""
        share = self.trainer and self.trainer.distributed_sampler_kwargs
        return (share["rank"], share["num_replicas"]) if share else (0, 1)
