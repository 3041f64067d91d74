"""The gate in the pipeline: it stops a worse model until somebody accepts it."""

import shutil

import pytest
from pipeline import METRICS, REPORT, Done, Pipeline

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which("git") and shutil.which("make")), reason="no git or make"),
]
SUBJECT = "Accept the evaluated model as the baseline"
ACCEPTED = {"baseline.json", "dvc.lock", "params.yaml", "resolved/train.yaml", *METRICS, *REPORT}
WHO = {
    f"GIT_{role}_{what}": "tests@example.com"
    for role in ("AUTHOR", "COMMITTER")
    for what in ("NAME", "EMAIL")
}


def accept(pipeline: Pipeline) -> Done:
    """`make accept` in the environment of the tests."""
    return pipeline.call("make", "accept", "VENV=none", "--assume-old=none/.installed", env=WHO)


def head(pipeline: Pipeline) -> tuple[str, set[str]]:
    """The last commit's subject, and the files that it changes."""
    shown = pipeline.call("git", "show", "--format=%s", "--name-only").stdout
    subject, _, *files = shown.splitlines()
    return subject, set(files)


def test_a_worse_model_waits_for_somebody_to_accept_it(pipeline: Pipeline) -> None:
    (pipeline.root / "mine.txt").write_text("of another piece of work", encoding="utf-8")
    assert pipeline.call("git", "add", "mine.txt").returncode == 0
    done = accept(pipeline)
    assert done.returncode == 0, done.stdout + done.stderr
    assert head(pipeline) == (SUBJECT, {"baseline.json", "dvc.lock", *REPORT})
    assert done.stdout.splitlines()[-2:] == ["Not committed:", "A  mine.txt"]
    assert pipeline.repro() == set()
    assert accept(pipeline).returncode == 0, "nothing is left to commit"

    pipeline.set_params("train", "optimizer.lr=0.00001")
    assert "dvc repro (or pull) first" in accept(pipeline).stderr
    done = pipeline.call("python", "-m", "dvc", "repro")
    assert done.returncode != 0
    assert "the model falls short in test/acc" in done.stderr
    report = (pipeline.root / "artifacts/gate/report.md").read_text(encoding="utf-8")
    assert report.startswith("## Quality gate failed")

    done = accept(pipeline)
    assert done.returncode == 0, done.stdout + done.stderr
    assert head(pipeline) == (SUBJECT, ACCEPTED)
    assert pipeline.repro() == set()
