"""The gate: what passes it and what does not, what it writes, and how a model is accepted."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, Done, python_here

METRICS = {"test/acc": 0.97, "test/f1": 0.96, "test/loss": 0.1, "test/count": 100}
CLASSES: dict[str, tuple[float, ...]] = {
    "cat": (0.95, 0.96, 0.955, 50),
    "dog": (0.97, 0.96, 0.965, 50),
}
# Whatever configs/gate.yaml and baseline.json have come to say.
LIMITS = """
metrics:
  test:
    acc: {min: 0.9, max_drop: 0.01}
    f1: {min: 0.9, max_drop: 0.01}
    loss: {max_rise: 0.05}
classes:
  recall: {min: 0.7, max_drop: 0.1}
  f1: {min: 0.7, max_drop: 0.1}
accept: false
runs_dir: runs
requires: {}
"""
NOTHING_ACCEPTED = '{"metrics": {}, "classes": {}}'
COLUMNS = ("precision", "recall", "f1", "count")
Rows = Mapping[str, tuple[float, ...]]


class Gate:
    """The script on figures that a test makes up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.baseline = folder / "baseline.json"
        self.baseline.write_text(NOTHING_ACCEPTED, encoding="utf-8")
        self.settings: dict[str, Any] = yaml.safe_load(LIMITS)
        self.settings |= {"evaluated": "evaluate", "baseline": str(self.baseline)}
        self.settings |= {"out_dir": str(folder / "gate")}
        self.evaluated()

    def evaluated(self, classes: Rows = CLASSES, **metrics: float) -> None:
        """Write what evaluate would have; a metric is given without its `test/`."""
        folder = self.folder / "evaluate"
        folder.mkdir(exist_ok=True)
        changed = {f"test/{name}": value for name, value in metrics.items()}
        (folder / "metrics.json").write_text(json.dumps(METRICS | changed), encoding="utf-8")
        with (folder / "per_class.csv").open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerows(
                [("class", *COLUMNS), *((name, *row) for name, row in classes.items())]
            )

    def __call__(self, *overrides: str) -> Done:
        text = yaml.safe_dump(self.settings, sort_keys=False)
        (self.folder / "gate.yaml").write_text(text, encoding="utf-8")
        words = ["--config-path", str(self.folder), "--config-name", "gate"]
        return python_here(ROOT / "gate.py", *words, *overrides, cwd=self.folder)

    def accept(self, *overrides: str) -> None:
        """Make what was evaluated the baseline."""
        done = self("accept=true", *overrides)
        assert done.returncode == 0, done.stderr

    def report(self) -> dict[str, Any]:
        """What the gate has written for machines."""
        return json.loads((self.folder / "gate/report.json").read_text(encoding="utf-8"))

    def text(self) -> str:
        """What the gate has written for people."""
        return (self.folder / "gate/report.md").read_text(encoding="utf-8")

    def failing(self) -> set[str]:
        """The figures that fall short."""
        figures = [one for one in self.report()["figures"] if one["broken"]]
        return {" ".join(filter(None, (one["metric"], one["label"]))) for one in figures}


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """A model that nobody has accepted yet."""
    return Gate(tmp_path)


def error_of(done: Done) -> str:
    """The one line that a failure ends with."""
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def test_without_a_baseline_fixed_limits_hold(gate: Gate) -> None:
    done = gate()
    assert done.returncode == 0, done.stderr
    assert gate.report()["passed"] is True
    assert gate.text().startswith("## Quality gate passed\n")
    assert "No model is accepted yet" in gate.text()
    assert "make accept" in done.stdout
    gate.evaluated(acc=0.5)
    assert "test/acc" in error_of(gate())
    assert gate.failing() == {"test/acc"}


def test_the_accepted_model_passes_and_a_worse_one_does_not(gate: Gate) -> None:
    gate.accept()
    assert gate().returncode == 0
    assert gate.report()["notes"] == []
    worse = CLASSES | {"dog": (0.97, 0.8, 0.85, 50)}
    gate.evaluated(worse, acc=0.95, loss=0.2)
    line = error_of(gate())
    assert "test/acc, test/loss, recall of dog and 1 more" in line
    assert "make accept" in line
    assert gate.failing() == {"test/acc", "test/loss", "recall dog", "f1 dog"}
    assert gate.report()["passed"] is False
    head, *lines = gate.text().splitlines()
    assert head == "## Quality gate failed: 4 of 7 figures fall short"
    assert (
        "| test/acc | 0.9500 | 0.9700 | -0.0200 | ≥ 0.9, drop ≤ 0.01 | ❌ **drop ≤ 0.01** |"
        in lines
    )
    assert "| test/f1 | 0.9600 | 0.9600 | +0.0000 | ≥ 0.9, drop ≤ 0.01 | ok |" in lines
    assert not any(line.startswith("| recall of cat") for line in lines)
    assert "recall is ok in 1 of 2 classes: 0.9600 (cat) to 0.9600." in lines


@pytest.mark.parametrize(
    ("limit", "exact", "beyond"),
    [
        ("min", 0.96, 0.9599),
        ("max", 0.98, 0.9801),
        ("max_drop", 0.96, 0.9599),
        ("max_rise", 0.98, 0.9801),
    ],
)
def test_a_limit_is_kept_exactly(limit: str, exact: float, beyond: float, gate: Gate) -> None:
    """0.97 - 0.96 is a little more than 0.01 in floats."""
    gate.accept()
    number = exact if limit in ("min", "max") else 0.01
    gate.settings |= {"metrics": {"test/acc": {limit: number}}, "classes": None}
    gate.evaluated(acc=exact)
    assert gate().returncode == 0
    gate.evaluated(acc=beyond)
    assert gate().returncode == 1


def test_what_is_not_finite_fails(gate: Gate) -> None:
    gate.evaluated(acc=float("nan"), loss=float("inf"))
    assert "test/acc, test/loss" in error_of(gate())
    figures = {one["metric"]: one for one in gate.report()["figures"]}
    assert (figures["test/acc"]["value"], figures["test/acc"]["broken"]) == (None, ["is nan"])
    assert "NaN" not in (gate.folder / "gate/report.json").read_text(encoding="utf-8")
    assert "test/acc, test/loss" in error_of(gate("accept=true"))


def test_classes_that_come_and_go(gate: Gate) -> None:
    gate.accept()
    gate.evaluated({"cat": CLASSES["cat"], "eel|*": (0.9, 0.6, 0.72, 30), "fox": (0, 0, 0, 0)})
    assert "recall of eel|*" in error_of(gate())
    assert gate.failing() == {"recall eel|*", "recall dog", "f1 dog"}
    text = gate.text()
    assert r"| recall of eel\|\* | 0.6000 | – | – | ≥ 0.7, drop ≤ 0.1 | ❌ **≥ 0.7** |" in text
    assert "| recall of dog | – | 0.9600 | – | ≥ 0.7, drop ≤ 0.1 | ❌ **is gone** |" in text
    assert "no image of it: fox." in text
    assert r"other images than for the baseline: dog 50 → 0, eel\|\* 0 → 30." in text


def test_a_changed_split_is_said_and_not_judged(gate: Gate) -> None:
    gate.accept()
    gate.evaluated(CLASSES | {"cat": (*CLASSES["cat"][:3], 60)})
    done = gate()
    assert done.returncode == 0, done.stderr
    assert "do not compare like for like" in done.stdout
    assert "cat 50 → 60" in gate.text()


def test_a_new_metric_waits_for_the_next_baseline(gate: Gate) -> None:
    gate.accept()
    gate.evaluated(auc=0.8)
    assert gate("+metrics.test.auc.max_drop=0.1").returncode == 0
    assert "Not in the baseline, so only min and max hold: test/auc." in gate.text()
    assert gate("+metrics.test.auc.min=0.9").returncode == 1


def test_null_is_no_limit(gate: Gate) -> None:
    gate.evaluated(acc=0.5, f1=0.5)
    assert gate("metrics.test.acc.min=null", "metrics.test.f1=null", "classes=null").returncode == 0
    assert {one["metric"] for one in gate.report()["figures"]} == {"test/acc", "test/loss"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+metrics.test.ac.min=0.9", "metrics.test.ac: evaluate measured no test/ac. Did you mean"),
        ("+metrics.val.acc.min=0.9", "evaluate measured no val/acc. Did you mean test/acc?"),
        (
            "+classes.recal.min=0.9",
            "classes.recal: evaluate measured no recal. Did you mean recall?",
        ),
        (
            "+metrics.test.acc.max_dorp=0",
            "metrics.test.acc.max_dorp: no such limit. Did you mean max_d",
        ),
        ("metrics.test.acc.min=high", "metrics.test.acc.min=high: a limit is a number"),
        ("metrics.test.acc.min=true", "metrics.test.acc.min=True: a limit is a number"),
        ("metrics.test.acc.min=nan", "metrics.test.acc.min=nan: a limit is a number"),
        ("metrics.test.acc=0.9", "acc=0.9 is no limit: write one as in metrics.test.acc.min=0.9."),
        ("+classes.min=0.9", "classes.min=0.9 is no limit: write one as in classes.precision.min"),
        ("evaluated=nowhere", "nowhere: there is no metrics.json"),
        ("baseline=no.json", "no.json: there is no such file; git checkout"),
    ],
)
def test_a_mistake_is_one_line(override: str, message: str, gate: Gate) -> None:
    assert message in error_of(gate(override))
    assert not (gate.folder / "gate").exists()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("evaluate/metrics.json", "{", "evaluated=evaluate is not as evaluate.py leaves it"),
        ("evaluate/metrics.json", '{"test/acc": "good"}', "evaluated=evaluate is not as"),
        ("evaluate/per_class.csv", "class,recall,f1\n", "per_class.csv has no class"),
        ("evaluate/per_class.csv", "class,recall,f1\na,1\n", "evaluated=evaluate is not as"),
        ("evaluate/per_class.csv", "recall,f1\n1,1\n", "evaluated=evaluate is not as"),
        ("baseline.json", "<<<<<<< HEAD\n", "baseline=baseline.json is broken"),
        ("baseline.json", "[]", "baseline=baseline.json is broken"),
        ("baseline.json", '{"metrics": {"test/acc": null}, "classes": {}}', "is broken"),
        ("baseline.json", '{"metrics": {}, "classes": {"cat": 1}}', "is broken"),
    ],
)
def test_a_broken_file_is_named(name: str, text: str, message: str, gate: Gate) -> None:
    (gate.folder / name).write_text(text, encoding="utf-8")
    assert message in error_of(gate())
    assert not (gate.folder / "gate").exists()


def test_accept_writes_the_figures_and_says_what_changes(gate: Gate) -> None:
    gate.accept()
    gate.evaluated(acc=0.99)
    done = gate("accept=true")
    assert "test/acc  0.9700 → 0.9900" in done.stdout.splitlines()
    accepted = json.loads(gate.baseline.read_text(encoding="utf-8"))
    assert accepted["metrics"] == METRICS | {"test/acc": 0.99}
    assert accepted["classes"]["cat"] == dict(zip(COLUMNS, CLASSES["cat"], strict=True))
    gate.baseline.write_text("<<<<<<< HEAD\n", encoding="utf-8")
    gate.accept()  # what is broken is mended
    assert json.loads(gate.baseline.read_text(encoding="utf-8")) == accepted


def test_accept_refuses_what_would_fail_anyway(gate: Gate) -> None:
    gate.accept()
    before = gate.baseline.read_bytes()
    gate.evaluated(acc=0.5)
    assert "not accepted: test/acc would not pass" in error_of(gate("accept=true"))
    assert "configs/gate.yaml" in error_of(gate())  # and not make accept
    assert gate.baseline.read_bytes() == before
