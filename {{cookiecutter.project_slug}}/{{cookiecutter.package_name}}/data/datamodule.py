"""The LightningDataModule over prepared arrays."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from ..errors import UserError
from .arrays import ImageArrays
from .batches import BatchLoader, BatchRows
from .folds import fold_splits, split_facts
from .seeded import SeededDataModule


class ImageDataModule(SeededDataModule):
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
        super().__init__(seed, augment)
        self.prepared_dir, self.arrays = prepared_dir, ImageArrays(prepared_dir)
        self.fold, self.folds = fold, folds
        self.splits = fold_splits(self.arrays, fold, folds)
        self.batch_size, self.num_workers = batch_size, num_workers
        self.pin_memory = torch.cuda.is_available() if pin_memory == "auto" else bool(pin_memory)
        self.prefetch_factor = prefetch_factor if num_workers else None
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
