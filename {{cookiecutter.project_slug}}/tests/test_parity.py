"""The same global batch gives the same losses, however many processes share it.

`python -m pytest -s tests/test_parity.py` prints the table.
"""

import csv
from pathlib import Path

import pytest
from conftest import ROOT, overrides_for, python
from rich.console import Console
from rich.table import Table

STEPS = 20
TWO = ("trainer.accelerator=cpu", "trainer.devices=2")
WAYS = {
    "1 process": (),
    "1 process, accumulation 2": ("trainer.accumulate_grad_batches=2",),
    "2 ranks, DDP": ("trainer=ddp", *TWO),
    "2 ranks, FSDP": ("trainer=fsdp", *TWO),
}
# Nothing random in a step, and no statistics of a part of the batch: what is left must be equal.
EXACT = ("model=vit", "model.dropout=0", "data.augment.shift=0", "data.augment.rotation=0")


def losses(folder: Path, prepared: Path, *words: str) -> list[float]:
    """The training loss of each step; an epoch is one step, so that history.csv has them all."""
    batches = 2 if "trainer.accumulate_grad_batches=2" in words else 1
    given = [*overrides_for("train.py", folder, prepared), *EXACT, *words, "test=false"]
    given += [f"trainer.max_epochs={STEPS}", f"trainer.limit_train_batches={batches}"]
    done = python(ROOT / "train.py", *given, "callbacks.early_stopping=null", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (folder / "runs/digits").iterdir()
    with (run / "history.csv").open(newline="", encoding="utf-8") as stream:
        return [float(row["train/loss"]) for row in csv.DictReader(stream)]


@pytest.mark.slow
def test_ranks_and_accumulation_change_no_loss(tmp_path: Path, prepared: Path) -> None:
    found = {}
    for number, (way, words) in enumerate(WAYS.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        found[way] = losses(folder, prepared, *words)
    table = Table("step", *found, title=f"Training loss, batch 64, the first {STEPS} steps")
    for step, row in enumerate(zip(*found.values(), strict=True), start=1):
        table.add_row(str(step), *(f"{loss:.6f}" for loss in row))
    Console(width=100).print(table)
    one = found["1 process"]
    assert len(one) == STEPS
    assert one[-1] < one[0]
    for way, values in found.items():
        assert values == pytest.approx(one, rel=1e-4), way
