"""Cross-validation: stratified folds of the images to train and validate with."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import UserError
from .arrays import ImageArrays, Meta, channel_statistics


def check_folds(fold: Any, folds: Any, meta: Meta | None = None) -> None:
    """Refuse a fold that there is none of.

    Args:
        fold: The fold to validate on; None for the split as it was prepared.
        folds: How many there are.
        meta: Of the data, where they are known: each fold needs an image of each class.

    Raises:
        UserError: If a number is not what it must be, or a class has fewer images than folds.
    """
    if fold is None:
        return
    if type(folds) is not int or folds < 2:
        raise UserError(f"data.folds={folds}: take a whole number above 1.")
    if type(fold) is not int or not 0 <= fold < folds:
        raise UserError(f"data.fold={fold}: take null, or 0 to {folds - 1} (data.folds={folds}).")
    if meta is None:
        return
    counts = np.add(meta.counts["train"], meta.counts["val"])
    least = int(counts.min())
    if least < folds:
        mend = f"set data.folds={least}, or add images." if least > 1 else "add images."
        raise UserError(
            f"class {meta.classes[counts.argmin()]} has {least} images in train and val together, "
            f"fewer than data.folds={folds}: {mend}"
        )


def fold_splits(arrays: ImageArrays, fold: int | None, folds: int) -> dict[str, np.ndarray]:
    """The rows of each split where `fold` is validated on and the others are trained on.

    The images of the train and val splits are dealt out anew, each class evenly, by the seed of
    the prepared split: whatever a run's own seed is, folds are the same. The test split stays.

    Raises:
        UserError: See `check_folds`.
    """
    check_folds(fold, folds, arrays.meta)
    if fold is None:
        return arrays.splits
    from sklearn.model_selection import StratifiedKFold

    rows = np.sort(np.concatenate([arrays.splits["train"], arrays.splits["val"]]))
    seed = arrays.meta.settings["split"]["seed"] or 0  # null: every rank must come to the same
    dealer = StratifiedKFold(folds, shuffle=True, random_state=seed % 2**32)
    train, val = list(dealer.split(rows, arrays.labels[rows]))[fold]
    return {"train": rows[train], "val": rows[val], "test": arrays.splits["test"]}


def split_facts(arrays: ImageArrays, splits: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """What `Meta` tells of the prepared splits, of others: reads the training images once."""
    labels, classes = arrays.labels, len(arrays.meta.classes)
    counts = {n: np.bincount(labels[rows], minlength=classes) for n, rows in splits.items()}
    mean, std = channel_statistics(arrays.images, splits["train"])
    return {"counts": {n: c.tolist() for n, c in counts.items()}, "mean": mean, "std": std}
