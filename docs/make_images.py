"""Draw docs/images/run.png from a real run of the default bake, after `evaluate.py run=…`.

`python docs/make_images.py <run folder>` needs matplotlib and numpy, which `make install` brings.
"""

import csv
import json
import sys
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

TARGET = Path(__file__).parent / "images/run.png"
TRAIN, VAL, INK, GRID = "#8aa4c8", "#1f4e8c", "#24292f", "#e4e8ee"


def read(file: Path) -> dict[str, np.ndarray]:
    """The columns of a CSV, as text."""
    with file.open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    return {key: np.array([row[key] for row in rows]) for key in rows[0]}


def curves(axes: Axes, history: dict[str, np.ndarray], metric: str, title: str) -> None:
    """One metric over the epochs, train beside val."""
    epochs = history["epoch"].astype(int) + 1
    for split, colour in (("train", TRAIN), ("val", VAL)):
        values = history[f"{split}/{metric}"].astype(float)
        axes.plot(epochs, values, color=colour, linewidth=2, label=f"{split}/{metric}")
    axes.set_title(title)
    axes.set_xlabel("epoch")
    axes.grid(color=GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")


def confusion(axes: Axes, pairs: dict[str, np.ndarray], accuracy: float) -> None:
    """Counts of true against predicted classes, zeros left blank."""
    classes = sorted(set(pairs["actual"]))
    matrix = np.array(
        [
            [np.sum((pairs["actual"] == true) & (pairs["predicted"] == taken)) for taken in classes]
            for true in classes
        ]
    )
    axes.imshow(matrix, cmap="Blues")
    for row, column in zip(*np.nonzero(matrix), strict=True):
        colour = "white" if matrix[row, column] > matrix.max() / 2 else INK
        axes.text(column, row, matrix[row, column], ha="center", va="center", color=colour)
    axes.set_xticks(range(len(classes)), classes)
    axes.set_yticks(range(len(classes)), classes)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    axes.set_title(f"test split: {accuracy:.1%} of {matrix.sum()} right")
    axes.spines[:].set_visible(False)


def main(run: Path) -> None:
    """Draw loss, accuracy and confusion matrix side by side."""
    history = read(run / "history.csv")
    metrics = json.loads((run / "evaluate/metrics.json").read_text("utf-8"))
    figure = Figure(figsize=(13, 4), layout="constrained", facecolor="white")
    loss, accuracy, matrix = figure.subplots(1, 3, width_ratios=(1.15, 1.15, 1))
    curves(loss, history, "loss", "loss")
    loss.set_yscale("log")
    curves(accuracy, history, "acc", "accuracy")
    accuracy.set_ylim(0.8, 1.005)
    confusion(matrix, read(run / "evaluate/confusion.csv"), metrics["test/acc"])
    TARGET.parent.mkdir(exist_ok=True)
    figure.savefig(TARGET, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
