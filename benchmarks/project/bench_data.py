"""Random images: a source for prepare.py, and an epoch clock for the trainer."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer


class RandomImages:
    """Random grey images of ten classes.

    Args:
        count: Images in all.
        size: Height and width, in pixels.
    """

    def __init__(self, count: int, size: int = 28) -> None:
        self.shape = (1, size, size)
        self.classes = [str(label) for label in range(10)]
        self.labels = np.arange(count) % 10
        self.random = np.random.default_rng(0)

    def signature(self) -> str:
        """Says which images they are."""
        return f"{len(self.labels)} {self.shape}"

    def images(self) -> Iterator[np.ndarray]:
        """Images one by one, uint8 [1, H, W]."""
        for start in range(0, len(self.labels), 1024):
            count = min(1024, len(self.labels) - start)
            yield from self.random.integers(0, 256, (count, *self.shape), np.uint8)


class EpochClock(Callback):
    """Writes samples/s of each epoch, its validation and checkpoint included, as JSON.

    Args:
        file: Where to.
        samples: Training images in an epoch.
    """

    def __init__(self, file: str, samples: int) -> None:
        self.file, self.samples, self.marks = Path(file), samples, list[float]()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """An epoch begins, the one before has ended."""
        self.marks.append(time.perf_counter())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write."""
        pairs = zip(self.marks, self.marks[1:], strict=False)
        self.file.write_text(json.dumps([self.samples / (b - a) for a, b in pairs]))
