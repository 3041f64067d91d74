"""Prepared data on disk: a few arrays that are memory-mapped, and meta.json that describes them."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..paths import from_root

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Meta:
    """What is known of prepared data without reading them.

    Attributes:
        classes: Class names; a label is an index into them.
        shape: Channels, height and width of every image.
        counts: Images of each class in each split.
        mean: Mean of each channel over the train split, in [0, 1].
        std: Standard deviation of each channel over the train split.
        fingerprint: Hash of the arrays: equal fingerprints, equal data.
        settings: The config that the arrays were made with.
        inputs: Hash of the raw data that they were made from.
        record: The same under DVC: `path` of the record, `md5` of the files; None without one.
        skipped: Unreadable images that were left out.
    """

    classes: list[str]
    shape: list[int]
    counts: dict[str, list[int]]
    mean: list[float]
    std: list[float]
    fingerprint: str
    settings: dict[str, Any]
    inputs: str
    record: dict[str, str] | None = None
    skipped: int = 0

    def write(self, folder: Path) -> None:
        """Write meta.json, the last file of a complete folder."""
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False)
        (folder / "meta.json").write_text(text + "\n", encoding="utf-8")


def read_meta(folder: Path) -> Meta | None:
    """The description of a prepared folder, or None where there is none."""
    if not all((folder / name).is_file() for name in ("images.npy", "labels.npy", "splits.npz")):
        return None
    try:
        return Meta(**json.loads((folder / "meta.json").read_text(encoding="utf-8")))
    except (FileNotFoundError, TypeError, json.JSONDecodeError):
        return None


class ImageArrays:
    """Prepared images, opened without reading them.

    Attributes:
        meta: The description.
        images: uint8 [N, C, H, W], memory-mapped.
        labels: int64 [N].
        splits: The rows of each split.
    """

    def __init__(self, prepared_dir: str | Path) -> None:
        folder = from_root(prepared_dir)
        meta = read_meta(folder)
        if meta is None:
            raise UserError(f"{folder} holds no prepared data: run python prepare.py first.")
        self.meta = meta
        self.images = np.load(folder / "images.npy", mmap_mode="r")
        self.labels = np.load(folder / "labels.npy")
        with np.load(folder / "splits.npz") as splits:
            self.splits = {name: splits[name] for name in SPLITS}


def channel_statistics(images: np.ndarray, rows: np.ndarray) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel of `images[rows]`, pixels scaled to [0, 1]."""
    total = np.zeros(images.shape[1])
    squares = np.zeros(images.shape[1])
    for start in range(0, len(rows), 1024):
        pixels = images[rows[start : start + 1024]] / 255.0
        total += pixels.sum(axis=(0, 2, 3))
        squares += (pixels**2).sum(axis=(0, 2, 3))
    count = len(rows) * images.shape[2] * images.shape[3]
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 0))
    return mean.tolist(), np.maximum(std, 1e-3).tolist()  # a constant channel stays finite
