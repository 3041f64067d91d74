"""Rows of prepared arrays → batches: one indexed read of the memory map a batch."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ..errors import UserError
from .arrays import ImageArrays

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
