"""What every LightningDataModule of images does with a batch on its way to the model."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from .augment import Augment

Batch = tuple[Tensor, Tensor]


class SeededDataModule(LightningDataModule):
    """Seeds each training step and augments its batch, on the device.

    Args:
        seed: Of the augmentation, and of all else that is random in a step.
        augment: Arguments of `Augment`; None leaves batches as they are.
    """

    def __init__(self, seed: int, augment: Mapping[str, Any] | None) -> None:
        super().__init__()
        self.seed, self.augment = seed, Augment(**(augment or {}))

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

    def _share(self) -> tuple[int, int]:
        """This rank's part of each batch, of how many; tensor parallel ranks read the same."""
        share = self.trainer and self.trainer.distributed_sampler_kwargs
        return (share["rank"], share["num_replicas"]) if share else (0, 1)
