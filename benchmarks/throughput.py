"""Training samples/s: the project as a user runs it, between a hand-written loop and habit.

python benchmarks/throughput.py [--rounds 5] [--only mlp-128 …]

Four sides train the same network on the same random 28x28 images, in turn:

- bare: a PyTorch loop over batched tensors, fused AdamW, nothing else;
- hand: the same with what the project does by default, gradient clipping and a schedule;
- project: `python train.py` with progress bar, TensorBoard, torchmetrics, checkpoints;
- common: Lightning over a Dataset that makes each sample a PIL image and then a normalised
  tensor, with metric objects updated and logged every step.

An epoch counts from its start to the start of the next one, validation and checkpoint included;
all sides validate. The first epoch of a process is left out.
"""

import argparse
import json
import shutil
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from common import baked, interleaved, python, ratio, report, run, spread, table


@dataclass(frozen=True)
class Case:
    """A network, a batch size, and how long each side trains."""

    model: tuple[str, ...]
    batch_size: int
    images: int
    epochs: int
    common_epochs: int = 2


MLP = ("model=mlp", "model.widths=[64,128,64]", "model.dropout=0")
CASES = {
    "mlp-128": Case(MLP, 128, 55_000, 5),
    "mlp-1024": Case(MLP, 1024, 55_000, 7),
    "cnn-128": Case(("model=cnn", "model.dropout=0"), 128, 8_192, 3),
    "resnet-128": Case(("model=resnet",), 128, 4_096, 3),
}


def main() -> None:
    """Measure the cases, print a table, keep it in results/."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("overrides", nargs="*", help="more overrides for train.py")
    options = parser.parse_args()
    rows = []
    with baked() as project:
        for name in options.only:
            sides = prepared(project, CASES[name], options.overrides)
            figures = interleaved(sides, options.rounds, name)
            ours = figures["project"]
            ratios = [f"{ratio(ours, figures[side]):.2f}" for side in ("bare", "hand", "common")]
            rows.append([name, *(spread(figures[side]) for side in sides), *ratios])
    columns = ["case", "bare", "hand", "project", "common"]
    columns += ["project / bare", "/ hand", "/ common"]
    report("throughput", "Training samples/s", [table(columns, rows)])


def prepared(project: Path, case: Case, overrides: list[str]) -> dict[str, Callable[[], float]]:
    """Prepare the images by a first run of the project; return a measurement a side."""
    val = max(case.batch_size, case.images // 10)
    total = case.images + val
    command = [
        *python("train.py", *case.model),
        f"data.batch_size={case.batch_size}",
        f"data.name=random{case.images}",
        "data.source._target_=bench_data.RandomImages",
        f"+data.source.count={total}",
        f"data.split.val={val / total}",
        "data.split.test=0",
        "data.augment.shift=0",
        "data.augment.rotation=0",
        "test=false",
        "trainer=cpu",
        "callbacks.early_stopping=null",
        "+callbacks.clock._target_=bench_data.EpochClock",
        "+callbacks.clock.file=clock.json",
        f"+callbacks.clock.samples={case.images}",
        "run_dir=runs/bench",
        *overrides,
    ]
    first = [*command, "trainer.max_epochs=1"]
    run(first, project)

    def ours() -> float:
        shutil.rmtree(project / "runs/bench")
        run([*command, f"trainer.max_epochs={case.epochs + 1}"], project)
        return middle(json.loads((project / "clock.json").read_text()))

    def other(script: str, *arguments: str) -> float:
        run(python(script, *arguments), project)
        return middle(json.loads((project / "clock.json").read_text()))

    epochs = str(case.epochs + 1)
    return {
        "bare": partial(other, "bench_hand.py", "runs/bench", epochs, "bare"),
        "hand": partial(other, "bench_hand.py", "runs/bench", epochs, "same"),
        "project": ours,
        "common": partial(
            other, "bench_common.py", "runs/bench", str(case.common_epochs + 1), str(case.images)
        ),
    }


def middle(epochs: list[float]) -> float:
    """Median of all but the first epoch."""
    return statistics.median(epochs[1:])


if __name__ == "__main__":
    main()
