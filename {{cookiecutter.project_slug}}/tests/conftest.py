"""What several test files share. All that a test writes goes to a temporary folder."""

import os
import runpy
import shutil
import signal
import subprocess
import sys
import traceback
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Protocol

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig
from pipeline import GATE, STAGES, TRAIN, WRITTEN, Pipeline

from {{ cookiecutter.package_name }}.data.prepare import prepare

ROOT = Path(__file__).resolve().parents[1]
SHORT = ["model=mlp", "trainer.max_epochs=5"]  # learns in a second; 9 digits of 10 are right
# These nets are too small for threads, which only wait for each other on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
NO_LOCAL = "local=none"  # what configs/local says of this machine is no matter of the tests
Done = subprocess.CompletedProcess[str]


class Run(Protocol):
    def __call__(self, script: str, *overrides: str) -> Done: ...


def composed(stage: str, *overrides: str) -> DictConfig:
    """A stage's config."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return compose(stage, [NO_LOCAL, *overrides])


def path_override(key: str, path: Path) -> str:
    """An override that survives blanks and brackets in the path."""
    return f'{key}="{path}"'


def python(*words: str | Path, cwd: Path) -> Done:
    """Run this interpreter as a person would, without a terminal; the test judges how it ended."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def python_here(script: Path, *words: str, cwd: Path) -> Done:
    """As `python`, in this process, where torch and Lightning are loaded once for all tests."""
    out, err, code = StringIO(), StringIO(), 0
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    GlobalHydra.instance().clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(script), *words])
        with chdir(cwd), redirect_stdout(out), redirect_stderr(err):
            try:
                runpy.run_path(str(script), run_name="__main__")
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
                print(end.code or "", file=sys.stderr)
            except Exception:
                code = 1
                traceback.print_exc()
            finally:
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                    signal.signal(number, handlers[number])
    return Done([str(script), *words], code, out.getvalue(), err.getvalue())


def overrides_for(script: str, folder: Path, prepared: Path) -> list[str]:
    """What keeps a script's work in `folder` and off other devices than the CPU."""
    words = [NO_LOCAL, path_override("runs_dir", folder / "runs")]
    if script == "train.py":
        words += [path_override("data.prepared_dir", prepared), "trainer=cpu"]
        words += ["trainer.enable_progress_bar=false"]
    return words


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default data, prepared once."""
    data = composed("prepare").data
    data.prepared_dir = str(tmp_path_factory.mktemp("data") / "prepared")
    prepare(data)
    return Path(data.prepared_dir)


@pytest.fixture
def run(tmp_path: Path, prepared: Path) -> Run:
    """Run a root script from `tmp_path`, in this process; its run folders are in `runs/`."""

    def run(script: str, *overrides: str) -> Done:
        words = [*overrides_for(script, tmp_path, prepared), *overrides]
        return python_here(ROOT / script, *words, cwd=tmp_path)

    return run


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> Done:
    """A short but real training, in a process of its own, into an awkward folder."""
    folder = tmp_path_factory.mktemp("trained")
    words = [*overrides_for("train.py", folder, prepared), *SHORT]
    words += [path_override("run_dir", folder / "a run (1)")]
    words += [path_override("publish_dir", folder / "published")]
    return python(ROOT / "train.py", *words, cwd=folder)


@pytest.fixture(scope="session")
def trained(training: Done, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of that training; the tests that share it only read it."""
    assert training.returncode == 0, training.stdout + training.stderr
    return tmp_path_factory.getbasetemp() / "trained0/a run (1)"


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """What git would have of this project, committed; its training is cut short."""
    if yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))["dataset"] != "digits":
        pytest.skip("params.yaml names other data than the bundled ones")
    pipeline = Pipeline(tmp_path_factory.mktemp("pipeline") / "project")
    listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in pipeline.call(*listed, cwd=ROOT).stdout.split("\0"):
        if (ROOT / name).is_file() and name not in WRITTEN:
            (pipeline.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, pipeline.root / name)
    if not (pipeline.root / "dvc.yaml").is_file():
        pytest.skip("this folder is in no git repository, which DVC needs")
    pipeline.set_params("train", TRAIN)
    pipeline.set_params("gate", GATE)
    assert pipeline.call("git", "init", "--quiet").returncode == 0
    pipeline.commit()
    return pipeline


@pytest.fixture(scope="session")
def reproduced(fresh: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """The pipeline after its first run, not committed."""
    pipeline = fresh.copied_to(tmp_path_factory.mktemp("reproduced") / "project")
    assert pipeline.repro() == STAGES
    return pipeline


@pytest.fixture
def pipeline(reproduced: Pipeline, tmp_path: Path) -> Pipeline:
    """The pipeline after its first run, committed; a test may change it."""
    pipeline = reproduced.copied_to(tmp_path / "a project (1)")
    pipeline.commit()
    return pipeline
