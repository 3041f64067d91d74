"""`dvc repro`: what has changed runs, and nothing else."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from pipeline import METRICS, RESOLVED, ROOT, WRITTEN, Pipeline

from {{ cookiecutter.package_name }} import resolve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("git") is None, reason="DVC needs git, which is not here"),
]

PACKAGE = Path(resolve.__file__).parent.name


def test_first_run_leaves_its_results_alone(reproduced: Pipeline) -> None:
    assert reproduced.changed() == WRITTEN
    metrics = [json.loads((reproduced.root / path).read_text("utf-8")) for path in sorted(METRICS)]
    assert not metrics[0].keys() & metrics[1].keys(), "`dvc exp show` has one column a metric"
    assert (reproduced.root / "artifacts/train/best.ckpt").is_file()


def test_second_run_skips_everything(pipeline: Pipeline) -> None:
    for file in pipeline.root.glob("*/models/*.py"):
        file.touch()
    assert pipeline.repro() == set()
    assert pipeline.changed() == set()


def test_plots_and_metrics_are_shown(pipeline: Pipeline) -> None:
    assert "test/acc" in pipeline.dvc("metrics", "show", "--json")
    pipeline.dvc("plots", "show", "--out", "plots")
    page = (pipeline.root / "plots/index.html").read_text(encoding="utf-8")
    for drawn in ("val/loss", "predicted", "f1"):
        assert drawn in page


def test_a_changed_value_runs_what_reads_it(pipeline: Pipeline) -> None:
    before = (pipeline.root / "params.yaml").read_bytes()
    pipeline.set_params("evaluate", "batch_size=100")
    assert pipeline.repro() - {"gate"} == {"resolve", "evaluate"}  # whose figures may not differ
    assert pipeline.changed() <= {"dvc.lock", "params.yaml", "resolved/evaluate.yaml"} | WRITTEN
    pipeline.set_params("train", "seed=3")
    assert pipeline.repro() == {"resolve", "train", "evaluate", "gate"}
    trained = pipeline.runs()
    (pipeline.root / "params.yaml").write_bytes(before)
    assert pipeline.repro() == {"resolve", "gate"}  # the rest is restored from DVC's cache
    assert pipeline.changed() == set()
    assert pipeline.runs() == trained


def test_an_unused_config_or_module_runs_no_stage(pipeline: Pipeline) -> None:
    changed = {"configs/optimizer/sgd.yaml": "dampening: 0.0"}
    changed |= {f"{PACKAGE}/models/resnet.py": "# Another thought.", "tests/new.py": ""}
    for path, line in changed.items():
        pipeline.add_line(path, line)
    assert pipeline.repro() == {"resolve"}
    assert pipeline.changed() == {"dvc.lock", *changed}


def test_a_changed_module_runs_what_imports_it(pipeline: Pipeline) -> None:
    pipeline.add_line(f"{PACKAGE}/evaluation/evaluate.py", "# Another thought.")
    assert pipeline.repro() == {"resolve", "evaluate"}  # the gate reads the same figures
    pipeline.add_line(f"{PACKAGE}/models/mlp.py", "# Another thought.")
    assert pipeline.repro() == {"resolve", "train", "evaluate"}


SPY = """
import os, sys
log = open(os.environ["SPY"], "a", encoding="utf-8")
def note(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and not arguments[2] & os.O_WRONLY:
        if arguments[1] is None or "w" not in arguments[1] and "a" not in arguments[1]:
            print(os.path.realpath(arguments[0]), file=log, flush=True)
sys.addaudithook(note)
"""


@pytest.mark.parametrize("stage", RESOLVED)
def test_a_stage_reads_what_it_depends_on(stage: str, pipeline: Pipeline, tmp_path: Path) -> None:
    """What it opens is just what dvc.yaml and the list of its modules say."""
    entry = yaml.safe_load((pipeline.root / "dvc.yaml").read_text("utf-8"))["stages"][stage]
    deps = {dep.replace("${dataset}", "digits") for dep in entry["deps"]}
    deps.remove(f"resolved/{stage}.sha256")
    listing = (pipeline.root / f"resolved/{stage}.sha256").read_text("utf-8").splitlines()
    if stage == "prepare":
        shutil.rmtree(pipeline.root / "data/prepared")

    (tmp_path / "spy").mkdir()
    (tmp_path / "spy/sitecustomize.py").write_text(SPY, encoding="utf-8")
    spy = {"SPY": str(tmp_path / "read"), "PYTHONPATH": f"{tmp_path / 'spy'}:{ROOT / 'tests'}"}
    caches = {"PYTHONPYCACHEPREFIX": str(tmp_path / "pyc"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = pipeline.call(*shlex.split(entry["cmd"]), env=spy | caches)
    assert done.returncode == 0, done.stderr

    opened = set(map(Path, (tmp_path / "read").read_text("utf-8").splitlines()))
    inside = (path for path in opened if path.is_relative_to(pipeline.root) and path.is_file())
    names = {path.relative_to(pipeline.root).as_posix() for path in inside}
    code = {name for name in names if name.endswith(".py")}
    assert code == {line.partition("  ")[2] for line in listing}
    written = ("runs/", f"artifacts/{stage}/", f"data/{stage}d/")
    read = {name for name in names - code if not name.startswith(written)}
    assert f"resolved/{stage}.yaml" in read
    read.remove(f"resolved/{stage}.yaml")
    assert all(name.startswith(tuple(deps)) for name in read), read
    unread = {dep for dep in deps if not any(name.startswith(dep) for name in read)}
    assert unread <= {"data/raw/digits"}  # those are bundled with scikit-learn
