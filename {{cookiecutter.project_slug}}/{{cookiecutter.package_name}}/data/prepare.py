"""`prepare`: a source of raw images → arrays on disk, once."""

import hashlib
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.progress import track

from ..errors import UserError
from ..log import console, log, setup_logging
from ..paths import from_root
from .arrays import SPLITS, Meta, channel_statistics, read_meta
from .records import check_record
from .sources import Source


def run(config: DictConfig) -> None:
    """The `prepare` stage: prepare `config.data`."""
    setup_logging()
    prepare(config.data, force=config.force)


def prepare(data: DictConfig, check_files: bool = True, force: bool = False) -> Meta:
    """Write `data.prepared_dir` unless it holds just what it would be.

    Args:
        data: The `data` group of a config: `source`, `split` and `prepared_dir`.
        check_files: Read the raw files again to see whether they have changed. Where only the
            settings matter, prepared data are enough and raw ones need not be there, unless DVC
            has recorded others since.
        force: Prepare again although nothing has changed.

    Raises:
        UserError: If the source or the split cannot work, or the raw files are not the recorded
            ones under `data.strict`; what was there before stays.
    """
    folder = from_root(data.prepared_dir)
    settings = {key: OmegaConf.to_container(data[key], resolve=True) for key in ("source", "split")}
    again = check_files or force
    present = _made_with(folder, settings)
    record = check_record(data, None if again else present)
    if present and not again and record in (None, present.record):
        return _up_to_date(folder, present)
    source: Source = instantiate(data.source)
    inputs = source.signature()
    _check_classes(source, data.split)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):  # runs that start together prepare once
        present = _made_with(folder, settings)
        if present and not force and present.inputs == inputs:
            return _up_to_date(folder, replace(present, record=record))
        # Written beside the target and renamed, so that an interrupted call leaves no half of it.
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
            written = Path(scratch) / "arrays"
            written.mkdir()
            meta = write_arrays(source, data.split, settings, inputs, record, written)
            shutil.rmtree(folder, ignore_errors=True)
            written.rename(folder)
    sizes = ", ".join(f"{sum(meta.counts[name])} {name}" for name in SPLITS)
    log.info("Data: wrote %s: %s, %d classes.", folder, sizes, len(meta.classes))
    if meta.skipped:
        log.warning("Data: %d unreadable images were skipped.", meta.skipped)
    return meta


def _made_with(folder: Path, settings: dict[str, Any]) -> Meta | None:
    present = read_meta(folder)
    return present if present and present.settings == settings else None


def _up_to_date(folder: Path, present: Meta) -> Meta:
    log.info("Data: %s is up to date (%s).", folder, present.fingerprint[:12])
    return present


def write_arrays(
    source: Source,
    split: DictConfig,
    settings: dict[str, Any],
    inputs: str,
    record: dict[str, str] | None,
    folder: Path,
) -> Meta:
    """Write images.npy, labels.npy, splits.npz and meta.json into an empty folder."""
    rows = _write_images(source, folder / "images.npy")
    images = np.load(folder / "images.npy", mmap_mode="r")
    labels = source.labels[rows]
    splits = stratified_split(labels, len(source.classes), split.val, split.test, split.seed)
    np.save(folder / "labels.npy", labels)
    np.savez(folder / "splits.npz", **splits)  # type: ignore[arg-type]
    counts = {n: np.bincount(labels[splits[n]], minlength=len(source.classes)) for n in SPLITS}
    _check_counts(source.classes, counts)
    mean, std = channel_statistics(images, splits["train"])
    meta = Meta(
        classes=source.classes,
        shape=list(source.shape),
        counts={name: count.tolist() for name, count in counts.items()},
        mean=mean,
        std=std,
        fingerprint=_fingerprint(images, labels, splits, source.classes),
        settings=settings,
        inputs=inputs,
        record=record,
        skipped=len(source.labels) - len(rows),
    )
    meta.write(folder)
    return meta


def stratified_split(
    labels: np.ndarray, num_classes: int, val: float, test: float, seed: int
) -> dict[str, np.ndarray]:
    """Split rows so that each class has its share in each split; the same seed, the same split.

    Args:
        labels: int64 [N].
        num_classes: Number of classes.
        val: Share of each class for validation; at least one image, unless 0.
        test: Share of each class for testing; at least one image, unless 0.
        seed: Of the shuffle within a class.
    """
    random = np.random.default_rng(seed)
    parts: dict[str, list[np.ndarray]] = {name: [] for name in SPLITS}
    for label in range(num_classes):
        rows = random.permutation(np.flatnonzero(labels == label))
        n_val, n_test = (max(1, round(len(rows) * s)) if s > 0 else 0 for s in (val, test))
        parts["val"].append(rows[:n_val])
        parts["test"].append(rows[n_val : n_val + n_test])
        parts["train"].append(rows[n_val + n_test :])
    return {name: np.sort(np.concatenate(rows)) for name, rows in parts.items()}


def _write_images(source: Source, file: Path) -> np.ndarray:
    """Write images one by one; return the rows of the source that were kept."""
    total = len(source.labels)
    out = np.lib.format.open_memmap(file, "w+", np.uint8, (total, *source.shape))
    kept: list[int] = []
    images = track(source.images(), "Preparing", total=total, console=console, transient=True)
    for row, image in enumerate(images):
        if image is not None:
            out[len(kept)] = image
            kept.append(row)
    out.flush()
    if len(kept) < total:
        np.save(file.with_name("kept.npy"), out[: len(kept)])
        file.with_name("kept.npy").replace(file)
    return np.array(kept, dtype=np.int64)


def _check_classes(source: Source, split: DictConfig) -> None:
    if split.val + split.test >= 1 or min(split.val, split.test) < 0:
        raise UserError(
            f"data.split: val={split.val} and test={split.test} leave nothing to train on."
        )
    counts = np.bincount(source.labels, minlength=len(source.classes))
    needed = 1 + (split.val > 0) + (split.test > 0)
    for name, count in zip(source.classes, counts, strict=True):
        if count < needed:
            raise UserError(
                f"class {name} has {count} images, fewer than the {needed} splits: "
                "add images, or set data.split.val=0 or data.split.test=0."
            )


def _check_counts(classes: list[str], counts: dict[str, np.ndarray]) -> None:
    for name, count in zip(classes, counts["train"], strict=True):
        if count == 0:
            raise UserError(f"class {name} has no image left to train on: add images.")


def _fingerprint(
    images: np.ndarray, labels: np.ndarray, splits: dict[str, np.ndarray], classes: list[str]
) -> str:
    digest = hashlib.sha256(json.dumps(classes).encode())
    for start in range(0, len(images), 4096):
        digest.update(images[start : start + 4096].tobytes())
    for array in (labels, *(splits[name] for name in SPLITS)):
        digest.update(array.astype(np.int64).tobytes())
    return digest.hexdigest()
