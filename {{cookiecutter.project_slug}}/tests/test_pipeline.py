"""`dvc repro` in a repository of its own: what has changed runs, and nothing else."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, Done

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("git") is None, reason="DVC needs git, which is not here"),
]

STAGES = {"resolve", "prepare", "train", "evaluate"}
WRITTEN = {"dvc.lock", *(f"resolved/{stage}.yaml" for stage in ("prepare", "train", "evaluate"))}
WRITTEN |= {f"artifacts/{stage}/metrics.json" for stage in ("train", "evaluate")}


class Pipeline:
    """The project in a git repository elsewhere."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def call(self, *words: str, cwd: Path | None = None) -> Done:
        """Run a command; `python` is the one that runs the tests."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
        path = os.pathsep.join([str(Path(sys.executable).parent), kept["PATH"]])
        return subprocess.run(
            words,
            cwd=cwd or self.root,
            env={**kept, "PATH": path, "DVC_NO_ANALYTICS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    def commit(self) -> None:
        """Commit all that git does not ignore, without the settings of this machine's user."""
        who = ("-c", "user.name=Tests", "-c", "user.email=tests@example.com")
        assert self.call("git", "add", "--all").returncode == 0
        options = ("--quiet", "--no-verify", "--no-gpg-sign", "--message", "As it is")
        done = self.call("git", *who, "commit", *options)
        assert done.returncode == 0, done.stdout + done.stderr

    def changed(self) -> set[str]:
        """Files that differ from the last commit."""
        done = self.call("git", "status", "--porcelain", "--untracked-files=all")
        return {line[3:] for line in done.stdout.splitlines()}

    def repro(self) -> set[str]:
        """Reproduce and return the stages that ran."""
        done = self.call("python", "-m", "dvc", "repro")
        assert done.returncode == 0, done.stdout + done.stderr
        return set(re.findall(r"Running stage '(\w+)'", done.stdout))

    def set_params(self, stage: str, more: str) -> None:
        """Add overrides to a stage's line in params.yaml."""
        file = self.root / "params.yaml"
        lines = file.read_text(encoding="utf-8").splitlines()
        lines = [f"{one} {more}" if one.startswith(f"{stage}:") else one for one in lines]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def copied_to(self, root: Path) -> "Pipeline":
        """The same, with its cache, elsewhere."""
        shutil.copytree(self.root, root, symlinks=True)
        return Pipeline(root)


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
    pipeline.set_params("train", "trainer=cpu model=mlp trainer.max_epochs=2")
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


def test_first_run_leaves_its_results_alone(reproduced: Pipeline) -> None:
    assert reproduced.changed() == WRITTEN
    metrics = [
        json.loads((reproduced.root / f"artifacts/{stage}/metrics.json").read_text("utf-8"))
        for stage in ("train", "evaluate")
    ]
    assert metrics[0]["test/acc"] == pytest.approx(metrics[1]["test/acc"])
    assert (reproduced.root / "artifacts/train/best.ckpt").is_file()


def test_second_run_skips_everything(pipeline: Pipeline) -> None:
    for file in pipeline.root.glob("*/models/*.py"):
        file.touch()
    assert pipeline.repro() == set()
    assert pipeline.changed() == set()


def test_plots_and_metrics_are_shown(pipeline: Pipeline) -> None:
    shown = pipeline.call("python", "-m", "dvc", "metrics", "show", "--json")
    assert shown.returncode == 0, shown.stderr
    assert "test/acc" in shown.stdout
    plots = pipeline.call("python", "-m", "dvc", "plots", "show", "--out", "plots")
    assert plots.returncode == 0, plots.stderr
    page = (pipeline.root / "plots/index.html").read_text(encoding="utf-8")
    assert "val/loss" in page
    assert "predicted" in page


def test_a_changed_value_runs_what_reads_it(pipeline: Pipeline) -> None:
    before = (pipeline.root / "params.yaml").read_bytes()
    pipeline.set_params("evaluate", "batch_size=100")
    assert pipeline.repro() == {"resolve", "evaluate"}
    assert pipeline.changed() <= {"dvc.lock", "params.yaml", "resolved/evaluate.yaml"} | WRITTEN
    (pipeline.root / "params.yaml").write_bytes(before)
    assert pipeline.repro() == {"resolve"}  # the rest is restored from DVC's cache
    assert pipeline.changed() == set()


def test_an_unused_config_runs_no_stage(pipeline: Pipeline) -> None:
    with (pipeline.root / "configs/optimizer/sgd.yaml").open("a", encoding="utf-8") as stream:
        stream.write("dampening: 0.0\n")
    assert pipeline.repro() == {"resolve"}
    assert pipeline.changed() == {"dvc.lock", "configs/optimizer/sgd.yaml"}
