"""The pipeline as people use it: stopped, tried with other values, handed to a colleague."""

import csv
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from filelock import FileLock
from omegaconf import OmegaConf
from pipeline import ROOT, TRAIN, Pipeline

from {{ cookiecutter.package_name }} import resolve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("git") is None, reason="DVC needs git, which is not here"),
]

PACKAGE = Path(resolve.__file__).parent.name


@pytest.mark.parametrize("whom", ["group", "dvc"])
@pytest.mark.skipif(sys.platform != "linux", reason="what becomes of a killed dvc's stage")
def test_a_stopped_training_goes_on(whom: str, pipeline: Pipeline, tmp_path: Path) -> None:
    good = (pipeline.root / "artifacts/train/best.ckpt").read_bytes()
    pipeline.set_params("train", "seed=3")
    trouble = {"TROUBLE": f"0 1 4 {whom}", "SHELL": "/bin/sh"}  # which may stay between them
    done = pipeline.call("python", "-m", "dvc", "repro", env=trouble)
    assert done.returncode == -signal.SIGTERM
    (stopped,) = set(pipeline.runs()) - {pipeline.runs()[0]}
    with FileLock(stopped / ".lock", timeout=60):  # it saves, then nobody is left
        pass
    assert json.loads((stopped / "run.json").read_text("utf-8"))["status"] == "stopped"
    assert not processes_in(pipeline.root)

    pipeline.dvc("checkout", "artifacts/train/best.ckpt")  # the last good model
    assert (pipeline.root / "artifacts/train/best.ckpt").read_bytes() == good

    assert pipeline.repro() == {"train", "evaluate", "gate"}
    assert len(pipeline.runs()) == 2
    again = ("publish_dir=" + str(tmp_path / "whole"), "run_dir=" + str(tmp_path / "run"))
    words = ("train.py", "--config-path", "resolved", "--config-name", "train", "test=false")
    done = pipeline.call("python", *words, *again)
    assert done.returncode == 0, done.stderr
    whole = (tmp_path / "whole/best.ckpt").read_bytes()
    assert (pipeline.root / "artifacts/train/best.ckpt").read_bytes() == whole


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.skipif(sys.platform != "linux", reason="a process follows another on Linux alone")
def test_ends_with_dvc_in_any_shell(shell: str) -> None:
    if (path := shutil.which(shell)) is None:
        pytest.skip(f"{shell} is not here")
    stage = (
        f"import time; from {PACKAGE}.training import launch;"
        "launch.end_with_dvc(); print('ready', flush=True); time.sleep(120)"
    )
    dvc = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    words = [sys.executable, "-c", dvc, path, "-c", shlex.join([sys.executable, "-c", stage])]
    env = {**os.environ, "DVC_STAGE": "train", "SHELL": path}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT) as started:
        assert started.stdout
        assert started.stdout.readline() == "ready\n"
        started.kill()
        started.communicate(timeout=60)  # the stage holds the pipe while it lives


def processes_in(folder: Path) -> list[str]:
    """Command lines of the processes that work below a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "cwd").resolve().is_relative_to(folder):
                found.append((process / "cmdline").read_text())
    return found


def test_changed_code_is_no_reason_to_go_on(pipeline: Pipeline) -> None:
    pipeline.set_params("train", "seed=3")
    pipeline.call("python", "-m", "dvc", "repro", env={"TROUBLE": "0 1 4 SIGTERM"})
    pipeline.add_line(f"{PACKAGE}/models/mlp.py", "# Mended.")
    assert pipeline.repro() == {"resolve", "train", "evaluate", "gate"}
    states = [json.loads((run / "run.json").read_text("utf-8")) for run in pipeline.runs()]
    assert [state["status"] for state in states] == ["finished", "stopped", "finished"]


def test_experiments(fresh: Pipeline, tmp_path: Path) -> None:
    """Straight after the first commit, one now and a grid from the queue."""
    pipeline = fresh.copied_to(tmp_path / "project")
    train = f'"{TRAIN} optimizer.lr=%s"'
    pipeline.dvc("exp", "run", "--name", "now", "--set-param", f"train={train % 0.01}")
    grid = f"train={train % 0.002},{train % 0.003}"
    pipeline.dvc("exp", "run", "--queue", "--set-param", grid)
    pipeline.dvc("exp", "run", "--run-all")
    rows = list(csv.DictReader(pipeline.dvc("exp", "show", "--csv").splitlines()))
    tried = {row["optimizer.lr"]: row for row in rows if row["rev"] not in ("workspace", "master")}
    assert tried.keys() >= {"0.01", "0.002", "0.003"}
    for lr in ("0.01", "0.002", "0.003"):
        assert 0 < float(tried[lr]["test/acc"]) <= 1
        assert tried[lr]["trainer.max_epochs"] == "2"
    assert len({tried[lr]["val/loss"] for lr in tried}) >= 3
    # What DVC runs in a temporary copy leaves its run in the project.
    configs = [OmegaConf.load(run / "config.yaml") for run in pipeline.runs()]
    assert sorted(config.optimizer.lr for config in configs) == [0.002, 0.003, 0.01]
    pipeline.dvc("params", "diff")


def test_a_clone_has_data_model_and_numbers(pipeline: Pipeline, tmp_path: Path) -> None:
    pipeline.dvc("remote", "add", "--force", "--default", "storage", str(tmp_path / "remote"))
    pipeline.commit()
    pipeline.dvc("push")
    clone = Pipeline(tmp_path / "elsewhere/clone")
    done = pipeline.call("git", "clone", "--quiet", str(pipeline.root), str(clone.root))
    assert done.returncode == 0, done.stderr
    clone.dvc("pull")
    assert "up to date" in clone.dvc("status")
    assert clone.repro() == set()
    done = clone.call("python", "evaluate.py", "run=artifacts/train", "out_dir=measured")
    assert done.returncode == 0, done.stderr
    measured = (clone.root / "measured/metrics.json").read_text("utf-8")
    assert json.loads(measured) == json.loads(
        (pipeline.root / "artifacts/evaluate/metrics.json").read_text("utf-8")
    )
