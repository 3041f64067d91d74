"""Two ranks on one CPU do what one process does."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, SHORT, Run, overrides_for, python

from {{ cookiecutter.package_name }}.data.arrays import ImageArrays
from {{ cookiecutter.package_name }}.models import network

TWO = ["trainer.accelerator=cpu", "trainer.devices=2"]


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def runs(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The run folders of a short training by DDP and one by FSDP, on two ranks each."""
    folders = {}
    for trainer in ("ddp", "fsdp"):
        place = tmp_path_factory.mktemp(trainer)
        words = [*overrides_for("train.py", place, prepared), *SHORT, f"trainer={trainer}", *TWO]
        done = python(ROOT / "train.py", *words, cwd=place)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("epoch 5/5") == 1
        (folders[trainer],) = (place / "runs/digits").iterdir()
    return folders


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["ddp", "fsdp"])
def test_two_ranks_leave_what_one_process_leaves(
    trainer: str, runs: dict[str, Path], trained: Path, prepared: Path
) -> None:
    run, facts = runs[trainer], read_json(runs[trainer] / "run.json")
    assert facts["world_size"] == 2
    assert facts["status"] == "finished"
    metrics, alone = (read_json(folder / "metrics.json") for folder in (run, trained))
    assert metrics.keys() == alone.keys()
    assert metrics["test/acc"] == pytest.approx(alone["test/acc"], abs=0.05)
    ours, known = (network.read_checkpoint(one / "checkpoints/last.ckpt") for one in (run, trained))
    assert ours["global_step"] == known["global_step"]
    shapes = [{k: v.shape for k, v in one["state_dict"].items()} for one in (ours, known)]
    assert shapes[0] == shapes[1]
    # One process gets from the checkpoint what two ranks measured, image for image.
    arrays, model = ImageArrays(prepared), network.load_model(run)
    rows = arrays.splits["test"]
    with torch.inference_mode():
        right = model(torch.from_numpy(arrays.images[rows])).argmax(-1).numpy()
    assert (right == arrays.labels[rows]).mean() == pytest.approx(metrics["test/acc"])


@pytest.mark.slow
def test_sharding_changes_no_number(runs: dict[str, Path]) -> None:
    histories = []
    for folder in runs.values():
        with (folder / "history.csv").open(newline="", encoding="utf-8") as stream:
            histories.append([float(row["train/loss"]) for row in csv.DictReader(stream)])
    assert histories[0] == pytest.approx(histories[1], rel=1e-4)
    assert len(histories[0]) == 5


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("trainer=ddp data.batch_size=63", "data.batch_size=63 .* take 62 or 64"),
        ("trainer=ddp data.batch_size=1", "data.batch_size=1 .* take 2"),
        ("trainer=ddp data.batch_size=66 trainer.accumulate_grad_batches=4", "take 64 or 72"),
        ("trainer=ddp data.batch_size=0", "data.batch_size=0"),
        ("trainer=ddp data.batch_size=many", "data.batch_size=many"),
        ("trainer=auto", "needs trainer=ddp or trainer=fsdp"),
        ("trainer=ddp trainer.devices=auto", "trainer.devices=2"),
        ("trainer=ddp trainer.devices=-2", "trainer.devices=-2"),
        ("trainer=ddp trainer.devices=0", "trainer.devices=0"),
        ("trainer=ddp trainer.devices=two", "trainer.devices=two"),
    ],
)
def test_ranks_that_cannot_be_are_refused(choice: str, said: str, run: Run, tmp_path: Path) -> None:
    done = run("train.py", *TWO, *choice.split())
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert re.search(said, line)
    assert not (tmp_path / "runs").exists()
