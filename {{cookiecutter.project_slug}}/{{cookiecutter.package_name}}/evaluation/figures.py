"""Figures that people look at: confusion matrix and worst mistakes."""

from collections.abc import Sequence
from math import ceil

import numpy as np
from matplotlib.figure import Figure


def confusion_figure(matrix: np.ndarray, classes: Sequence[str]) -> Figure:
    """Draw a confusion matrix: counts as numbers, the share of each true class as colour.

    Args:
        matrix: Counts [K, K]; rows are true classes, columns are predictions.
        classes: K names.
    """
    size = min(20.0, 2.5 + 0.45 * len(classes))
    figure = Figure(figsize=(size, size), layout="constrained")
    axes = figure.add_subplot()
    share = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
    ticks = range(len(classes))
    axes.set_xticks(ticks, classes, rotation=45 if max(map(len, classes)) > 3 else 0)
    axes.set_yticks(ticks, classes)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    axes.set_title(f"{np.trace(matrix)} of {matrix.sum()} right")
    if len(classes) <= 30:
        for row, column in zip(*np.nonzero(matrix), strict=True):
            colour = "white" if share[row, column] > 0.5 else "black"
            count = str(matrix[row, column])
            axes.text(column, row, count, ha="center", va="center", color=colour, fontsize=9)
    return figure


def mistakes_figure(
    images: np.ndarray, true: Sequence[str], predicted: Sequence[str], confidence: Sequence[float]
) -> Figure:
    """Draw misclassified images in a grid, each with what it is and what it was taken for.

    Args:
        images: uint8 [N, C, H, W].
        true: N class names.
        predicted: N class names.
        confidence: N probabilities of the predicted class.
    """
    columns = min(4, max(1, len(images)))
    rows = max(1, ceil(len(images) / columns))
    figure = Figure(figsize=(2.0 * columns, 2.3 * rows), layout="constrained")
    for index, axes in enumerate(figure.subplots(rows, columns, squeeze=False).flat):
        axes.axis("off")
        if index < len(images):
            pixels = images[index].transpose(1, 2, 0)
            axes.imshow(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels, cmap="gray")
            label = f"{true[index]} → {predicted[index]} ({confidence[index]:.0%})"
            axes.set_title(label, fontsize=9)
    return figure
