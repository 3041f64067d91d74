"""`evaluate`: a checkpoint and a split → metrics, a table a class, a confusion matrix."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.table import Table
from torch import Tensor
from torchmetrics.functional.classification import multiclass_confusion_matrix

from ..data.arrays import SPLITS, ImageArrays
from ..data.folds import fold_splits
from ..errors import UserError
from ..log import console, log, setup_logging
from ..models.network import network_from, read_checkpoint
from ..paths import as_typed, find_checkpoint, from_here, from_root, run_folder_of
from .figures import confusion_figure
from .inference import batch_slices, pick_device, predict_batches


def run(config: DictConfig) -> None:
    """The `evaluate` stage.

    Raises:
        UserError: If checkpoint and data do not fit each other, or are not there.
    """
    setup_logging()
    if config.split not in SPLITS:
        raise UserError(f"split={config.split}: take one of {', '.join(SPLITS)}.")
    path = find_checkpoint(config.run)
    checkpoint = read_checkpoint(path)
    known = checkpoint["hyper_parameters"]["data"]
    arrays = open_arrays(config.prepared_dir, known)
    # The test split is of no fold; a checkpoint from before there were folds knows none.
    fold = None if config.split == "test" else known.get("fold")
    rows = fold_splits(arrays, fold, known.get("folds", 0))[config.split]
    if not len(rows):
        raise UserError(f"split={config.split}: the prepared data have no image in it.")
    network = network_from(checkpoint, path, config.trusted_modules)
    slices = batch_slices(len(rows), config.batch_size)
    batches = (arrays.images[rows[part]] for part in slices)
    device = pick_device(config.device)
    logits = torch.cat(list(predict_batches(network, batches, len(slices), device)))
    labels = torch.from_numpy(arrays.labels[rows])
    matrix = multiclass_confusion_matrix(logits, labels, len(network.classes)).numpy()
    table = per_class(matrix, network.classes)
    metrics = measure(config, logits, labels)
    folder = Path(config.out_dir).absolute() if config.out_dir else run_folder_of(path) / "evaluate"
    write(folder, metrics, table, matrix, network.classes)
    show(metrics, table)
    console.print(f"written to  {as_typed(folder)}", highlight=False, markup=False)


def open_arrays(prepared_dir: str | None, known: Mapping[str, Any]) -> ImageArrays:
    """The prepared data that a checkpoint was trained on, or `prepared_dir` instead.

    Raises:
        UserError: If classes or image shape differ from those the model was trained for.
    """
    folder = from_here(prepared_dir) if prepared_dir else from_root(known["prepared_dir"])
    arrays = ImageArrays(folder)
    for what in ("classes", "shape"):
        if getattr(arrays.meta, what) != known[what]:
            raise UserError(
                f"the data's {what} {getattr(arrays.meta, what)} are not those the model was "
                f"trained for, {known[what]}."
            )
    if arrays.meta.fingerprint != known["fingerprint"]:
        log.warning("The data are not those the model was trained on: its splits may differ.")
    return arrays


def per_class(matrix: np.ndarray, classes: Sequence[str]) -> list[dict[str, Any]]:
    """Precision, recall, F1 and count of each class.

    Args:
        matrix: Counts [K, K]; rows are true classes, columns are predictions.
        classes: K names.
    """
    right, true, predicted = np.diag(matrix), matrix.sum(axis=1), matrix.sum(axis=0)
    precision = right / np.maximum(predicted, 1)
    recall = right / np.maximum(true, 1)
    f1 = 2 * right / np.maximum(true + predicted, 1)
    columns = zip(classes, precision, recall, f1, true, strict=True)
    return [
        {"class": name, "precision": float(p), "recall": float(r), "f1": float(f), "count": int(n)}
        for name, p, r, f, n in columns
    ]


def measure(config: DictConfig, logits: Tensor, labels: Tensor) -> dict[str, float | int]:
    """The config's metrics and loss over a split, named as in training, and the count of images.

    Args:
        config: Of the stage: `split`, and the groups `metrics` and `loss`.
        logits: Float [N, K].
        labels: int64 [N].
    """
    makers = instantiate(config.metrics)
    measures = {name: make(num_classes=logits.shape[1]) for name, make in makers.items()}
    values = {name: metric(logits, labels).item() for name, metric in measures.items()}
    values["loss"] = instantiate(config.loss)()(logits, labels).item()
    values["count"] = len(labels)
    return {f"{config.split}/{name}": value for name, value in values.items()}


def write(
    folder: Path,
    metrics: Mapping[str, float],
    table: list[dict[str, Any]],
    matrix: np.ndarray,
    classes: Sequence[str],
) -> None:
    """Write metrics.json, per_class.csv, confusion.csv and confusion.png."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    with (folder / "per_class.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, table[0].keys())
        writer.writeheader()
        writer.writerows(table)
    with (folder / "confusion.csv").open("w", newline="", encoding="utf-8") as stream:
        rows = csv.writer(stream)
        rows.writerow(["actual", "predicted"])  # one row an image, as `dvc plots` wants it
        for true, predicted in np.ndindex(*matrix.shape):
            rows.writerows([[classes[true], classes[predicted]]] * int(matrix[true, predicted]))
    confusion_figure(matrix, classes).savefig(folder / "confusion.png", dpi=120)


def show(metrics: Mapping[str, float], table: list[dict[str, Any]]) -> None:
    """Print the table a class, then the metrics."""
    out = Table("class", "precision", "recall", "f1", "count")
    for row in table:
        out.add_row(*(f"{v:.4f}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(out)
    texts = (f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in metrics.items())
    console.print("  ".join(texts), highlight=False, markup=False)
