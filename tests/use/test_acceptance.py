"""The default bake as its README promises it: real training, on one process and on two ranks."""

import json
import os
import shlex
import sys
import venv
from pathlib import Path

import pytest
import torch
from conftest import Run

CPU_RANKS = ("trainer.accelerator=cpu", "trainer.devices=2")


@pytest.fixture(scope="session")
def trained(project: Path, run: Run) -> Path:
    """The run folder of a plain `python train.py`."""
    return train(project, run, "one")


def train(project: Path, run: Run, name: str, *overrides: str) -> Path:
    """Train into `runs/<name>` and return the run folder."""
    folder = project / "runs" / name
    done = run(project, "python", "train.py", *overrides, f"run_dir={folder}")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return folder


def metrics(folder: Path) -> dict[str, float]:
    """The final metrics of a run."""
    values: dict[str, float] = json.loads((folder / "metrics.json").read_text("utf-8"))
    return values


def test_default_accuracy(trained: Path) -> None:
    """The digits are learned with nothing said."""
    assert metrics(trained)["test/acc"] >= 0.98


def test_checkpoints_are_plain(trained: Path) -> None:
    """Tensors and builtins alone, in real files."""
    for name in ("best.ckpt", "last.ckpt"):
        path = trained / "checkpoints" / name
        assert not path.is_symlink()
        assert "state_dict" in torch.load(path, weights_only=True)


def test_printed_commands(project: Path, trained: Path, run: Run, tmp_path: Path) -> None:
    """What a run prints last can be typed as it is: here, to evaluate."""
    done = run(project, "python", "train.py", "debug=fast", f"run_dir='{tmp_path}/a (b)=c'")
    line = next(line for line in done.stdout.splitlines() if line.startswith("evaluate "))
    done = run(project, *shlex.split(line.removeprefix("evaluate")))
    assert done.returncode == 0, done.stderr
    assert "test/count 359" in done.stdout


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks(strategy: str, project: Path, trained: Path, run: Run) -> None:
    """Two ranks on the CPU make one run folder and a model as good as one process does."""
    folder = train(project, run, strategy, f"trainer={strategy}", *CPU_RANKS)
    assert json.loads((folder / "run.json").read_text("utf-8"))["world_size"] == 2
    assert abs(metrics(folder)["test/acc"] - metrics(trained)["test/acc"]) <= 0.015
    done = run(project, "python", "evaluate.py", f"run={folder}")
    assert done.returncode == 0, done.stderr
    counted = json.loads((folder / "evaluate/metrics.json").read_text("utf-8"))
    # Two ranks measured just the images that one process measures.
    assert counted["test/acc"] == pytest.approx(metrics(folder)["test/acc"], abs=1e-6)


def test_grid(project: Path, run: Run) -> None:
    """A sweep over a grid makes one run folder a job."""
    runs = project / "runs/grid"
    grid = ("seed=0,1", "optimizer=adamw,sgd", "debug=fast", f"runs_dir={runs}")
    done = run(project, "python", "train.py", "-m", *grid)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    states = [json.loads(path.read_text("utf-8")) for path in runs.glob("debug/*/run.json")]
    assert [state["status"] for state in states] == ["finished"] * 4
    assert len({state["command"] for state in states}) == 4


def test_make(project: Path, run: Run, tmp_path: Path) -> None:
    """`make` makes the environment where it is missing, then trains and checks."""
    # A new environment that sees what is installed here already, so that nothing large is
    # downloaded; pip still installs the project itself.
    venv.create(tmp_path / "venv", with_pip=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    shared = next(path for path in sys.path if path.endswith("site-packages"))
    (site / "shared.pth").write_text(shared + os.linesep)
    (tmp_path / "venv/bin/ruff").symlink_to(Path(sys.executable).with_name("ruff"))
    for target in (["train", "ARGS=debug=fast"], ["lint"]):
        done = run(project, "make", *target, f"VENV={tmp_path}/venv")
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    elsewhere = run(project, tmp_path / "venv/bin/python", "-c", "import my_project", cwd=tmp_path)
    assert elsewhere.returncode == 0, elsewhere.stderr
