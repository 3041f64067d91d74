"""Two ranks on one CPU do what one process does, and end together."""

import csv
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, SHORT, Run, overrides_for, path_override, python

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
    # The first epoch alone: rounding grows under Adam; test_parity compares step by step.
    assert histories[0][0] == pytest.approx(histories[1][0], rel=1e-4)
    assert histories[0] == pytest.approx(histories[1], rel=0.05)
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
        ("trainer=ddp launcher.nodes=2", "start train.py with torchrun on every node"),
        ("trainer=ddp trainer.accelerator=gpu", "this machine has 0 GPUs"),
    ],
)
def test_ranks_that_cannot_be_are_refused(choice: str, said: str, run: Run, tmp_path: Path) -> None:
    done = run("train.py", *TWO, *choice.split())
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert re.search(said, line)
    assert not (tmp_path / "runs").exists()


TROUBLE = "+callbacks.trouble._target_=trouble.Trouble"


@pytest.fixture
def two(tmp_path: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command that trains two ranks, where TROUBLE may bring one to an end."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    words = overrides_for("train.py", tmp_path, prepared)
    return [str(ROOT / "train.py"), *words, *SHORT, "trainer=ddp", *TWO, TROUBLE, "resume=auto"]


def no_rank_is_left(folder: Path) -> bool:
    """Whether no process works for a run any more."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder) in (process / "cmdline").read_text(encoding="utf-8"):
                return False
        except OSError:
            continue
    return True


@pytest.mark.slow
def test_a_signal_to_one_rank_or_to_all_stops_them_together(
    two: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUBLE", "1 1 3 SIGTERM")  # of rank 1 alone
    done = python(*two, path_override("run_dir", tmp_path / "run"), cwd=tmp_path)
    assert done.returncode == 143, done.stdout + done.stderr
    kept = network.read_checkpoint(tmp_path / "run/checkpoints/last.ckpt")
    assert kept["epoch"] == 1
    # Ctrl-C reaches the launcher and every rank, as it does in a terminal.
    monkeypatch.setenv("TROUBLE", "1 2 3 wait")
    run = subprocess.Popen(
        [sys.executable, *two, path_override("run_dir", tmp_path / "run")],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    log = tmp_path / "run/train.log"
    while log.read_text(encoding="utf-8").count("epoch 2/5") < 1:
        assert run.poll() is None
        time.sleep(0.1)
    os.killpg(run.pid, signal.SIGINT)
    said, _ = run.communicate(timeout=120)
    assert run.returncode == 130, said
    assert no_rank_is_left(tmp_path / "run")
    monkeypatch.delenv("TROUBLE")
    done = python(*two, path_override("run_dir", tmp_path / "run"), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_json(tmp_path / "run/run.json")["earlier"][0]["status"] == "stopped"


@pytest.mark.slow
def test_a_rank_that_fails_ends_all_and_is_heard_last(
    two: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUBLE", "1 1 5 raise")
    done = python(*two, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "RuntimeError: trouble in a step"
    assert "error: rank 1 failed.\nTraceback (most recent call last)" in done.stderr
    (run,) = (tmp_path / "runs/digits").iterdir()
    assert no_rank_is_left(run)
    assert "trouble in a step" in (run / "train.log").read_text(encoding="utf-8")
    assert read_json(run / "run.json")["status"] == "failed"
    # Killed in the same run; then it is continued.
    monkeypatch.setenv("TROUBLE", "0 2 5 SIGKILL")
    done = python(*two, cwd=tmp_path)
    assert done.returncode == 1
    assert "error: rank 0 was ended by SIGKILL" in done.stderr.splitlines()[-1]
    assert no_rank_is_left(run)
    monkeypatch.delenv("TROUBLE")
    done = python(*two, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [part["status"] for part in read_json(run / "run.json")["earlier"]] == ["failed"] * 2
    assert len(read_history(run)) == 5


@pytest.mark.slow
def test_ranks_end_when_their_launcher_is_killed(
    two: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*two, path_override("run_dir", tmp_path / "run"), "trainer.max_epochs=200"]
    run = subprocess.Popen([sys.executable, *words], cwd=tmp_path, stdout=subprocess.DEVNULL)
    log = tmp_path / "run/train.log"
    while not log.is_file() or "epoch 1/" not in log.read_text(encoding="utf-8"):
        assert run.poll() is None
        time.sleep(0.1)
    run.kill()
    run.wait()
    for _ in range(600):
        if no_rank_is_left(tmp_path / "run"):
            break
        time.sleep(0.1)
    assert no_rank_is_left(tmp_path / "run")
    assert (tmp_path / "run/checkpoints/last.ckpt").is_file()


def test_a_port_that_is_taken_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        world = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "TORCHELASTIC_RUN_ID": "x"}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": taken.getsockname()[1]}
        for name, value in world.items():
            monkeypatch.setenv(name, str(value))
        done = run("train.py", "trainer=ddp", "trainer.accelerator=cpu")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()[-1:]
    assert line.startswith(f"error: the ranks cannot meet at 127.0.0.1:{world['MASTER_PORT']}")
    assert "EADDRINUSE" in line or "in use" in line


@pytest.mark.slow
def test_torchrun_and_a_sweep(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that are there share one folder; each job of a sweep has ranks of its own."""
    # Left over from another program: nobody may believe them.
    for name, value in {"RANK": "3", "WORLD_SIZE": "7", "LOCAL_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    monkeypatch.setenv("MASTER_PORT", "1")
    words = [*overrides_for("train.py", tmp_path, prepared), "model=mlp", "trainer.max_epochs=1"]
    words += ["trainer=ddp", "trainer.accelerator=cpu"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = python(*torchrun, ROOT / "train.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((tmp_path / "runs/digits").iterdir())) == 1
    # The middle job of the sweep cannot run; the others do.
    sweep = ["-m", *words, "trainer.devices=2", "data.batch_size=64,63,32", "name=sweep"]
    done = python(ROOT / "train.py", *sweep, cwd=tmp_path)
    assert done.returncode != 0
    assert "data.batch_size=63 cannot be shared" in done.stderr
    runs = [read_json(path) for path in (tmp_path / "runs/sweep").glob("*/run.json")]
    assert [(one["status"], one["world_size"]) for one in runs] == [("finished", 2)] * 2


def read_history(folder: Path) -> list[dict[str, str]]:
    with (folder / "history.csv").open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))
