"""Runs of several seeds and folds → groups, means and deviations."""

import csv
import json
import re
import statistics
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, SHORT, Done, Run, composed, path_override, python
from omegaconf import OmegaConf
from PIL import Image

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Leave what a run leaves behind; each begins a minute after the one before."""
    minutes = count(10)

    def write(
        *overrides: str,
        acc: float = 0.5,
        status: str = "finished",
        fingerprint: str = "f" * 64,
        into: str = "runs/cv",
    ) -> Path:
        minute = next(minutes)
        folder = tmp_path / into / f"digits/{minute}"
        folder.mkdir(parents=True)
        config = composed("train", *overrides)
        config.run_dir = str(folder)
        OmegaConf.resolve(config)
        OmegaConf.save(config, folder / "config.yaml")
        start = f"2026-01-01T00:{minute}:00+00:00"
        facts = {"status": status, "start": start, "data": {"fingerprint": fingerprint}}
        (folder / "run.json").write_text(json.dumps(facts))
        (folder / "metrics.json").write_text(json.dumps({"val/acc": acc, "test/acc": acc - 0.1}))
        return folder

    return write


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "aggregate.csv").open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def groups(folder: Path) -> dict[str, int]:
    """How many runs each group has."""
    return {row["group"]: int(row["n"]) for row in rows(folder)}


def aggregate(folder: Path, *words: str) -> Done:
    return python(ROOT / "aggregate.py", "local=none", *words, cwd=folder)


@pytest.fixture
def summed_up(run: Run, tmp_path: Path) -> Callable[..., dict[str, int]]:
    """The groups that aggregate.py makes of runs/cv."""

    def summed_up() -> dict[str, int]:
        done = run("aggregate.py", "runs=runs/cv")
        assert done.returncode == 0, done.stderr
        return groups(tmp_path / "runs/cv/aggregate")

    return summed_up


def test_mean_and_deviation_over_seeds_and_folds(write: Write, run: Run, tmp_path: Path) -> None:
    found = {(fold, seed): 0.9 + fold / 50 + seed / 500 for fold in range(3) for seed in (1, 2)}
    for (fold, seed), acc in found.items():
        write(f"data.fold={fold}", f"seed={seed}", "data.folds=3", acc=acc)
    done = run("aggregate.py", "runs=runs/cv")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs/cv/aggregate"
    val, test = rows(folder)
    mean, std = statistics.mean(found.values()), statistics.stdev(found.values())
    assert (val["metric"], test["metric"]) == ("val/acc", "test/acc")
    assert (val["group"], val["n"]) == ("digits", "6")
    assert float(val["mean"]) == pytest.approx(mean)
    assert float(val["std"]) == pytest.approx(std)
    assert float(test["mean"]) == pytest.approx(mean - 0.1)
    told = f"{mean:.4f} ± {std:.4f}"
    assert told in done.stdout
    lines = (folder / "aggregate.md").read_text(encoding="utf-8").splitlines()
    assert f"| val/acc | digits | {told} | 6 |" in lines
    with Image.open(folder / "aggregate.png") as picture:
        assert min(picture.size) > 150


def test_a_single_run_has_no_deviation(write: Write, run: Run, tmp_path: Path) -> None:
    write(acc=0.75)
    done = run("aggregate.py", "runs=runs/cv", "out_dir=elsewhere")
    assert done.returncode == 0, done.stderr
    (row, _) = rows(tmp_path / "elsewhere")
    assert (row["mean"], row["std"], row["n"]) == ("0.75", "", "1")
    assert "0.7500 " in done.stdout
    assert re.search(r"\d ± \d", done.stdout) is None


@pytest.mark.parametrize(
    ("variants", "expected"),
    [
        (
            ["optimizer.lr=0.1", "optimizer.lr=0.01"],
            ["optimizer.lr=0.1", "optimizer.lr=0.01"],
        ),
        (
            ["model=mlp", "model=mlp model.widths=[64]", "model=cnn"],
            [
                "model=MLP, model.widths=[256,128]",
                "model=MLP, model.widths=[64]",
                "model=CNN, model.widths=[32,64,128]",
            ],
        ),
        (["model=mlp", "model=cnn"], ["model=MLP", "model=CNN"]),
        # What follows from another value is not told again.
        (
            ["monitor=val/acc mode=max", "monitor=val/loss mode=min"],
            ["mode=max, monitor=val/acc", "mode=min, monitor=val/loss"],
        ),
        (
            ["callbacks.early_stopping=null", ""],
            ["callbacks.early_stopping=null", "callbacks.early_stopping=EarlyStopping"],
        ),
        (["data.fold=0", ""], ["data.folds=5", "data.folds=null"]),
        # Where and how a run is executed makes no group.
        (["trainer.log_every_n_steps=1 data.num_workers=2", ""], ["digits"]),
    ],
)
def test_groups_are_named_by_what_differs(
    variants: list[str],
    expected: list[str],
    write: Write,
    summed_up: Callable[[], dict[str, int]],
) -> None:
    for seed, variant in enumerate([*variants, *variants]):
        write(*variant.split(), f"seed={seed}")
    assert list(summed_up()) == expected
    assert sum(summed_up().values()) == 2 * len(variants)


def test_other_data_are_another_group(
    write: Write, summed_up: Callable[[], dict[str, int]]
) -> None:
    write(fingerprint="a" * 64)
    write(fingerprint="b" * 64)
    assert summed_up() == {f"data.fingerprint={sign * 12}": 1 for sign in "ab"}
    write("data.split.seed=1", fingerprint="c" * 64)
    assert list(summed_up())[2] == f"data.fingerprint={'c' * 12}, data.split.seed=1"


def test_another_split_is_named_without_its_fingerprint(
    write: Write, summed_up: Callable[[], dict[str, int]]
) -> None:
    write(fingerprint="a" * 64)
    write("data.split.seed=1", fingerprint="b" * 64)
    assert list(summed_up()) == ["data.split.seed=0", "data.split.seed=1"]


def test_long_names_are_numbered(write: Write, run: Run, tmp_path: Path) -> None:
    write("experiment=baseline")
    write("experiment=resnet_sgd")
    done = run("aggregate.py", "runs=runs/cv")
    assert done.returncode == 0, done.stderr
    names = list(groups(tmp_path / "runs/cv/aggregate"))
    for name, said in zip(names, ("CNN, optimizer=AdamW", "ResNet, optimizer=SGD"), strict=True):
        assert f"model={said}" in name
    text = (tmp_path / "runs/cv/aggregate/aggregate.md").read_text(encoding="utf-8")
    assert text.startswith(f"- 1: {names[0]}\n- 2: {names[1]}\n")
    assert "| val/acc | 2 | 0.5000 | 1 |" in text
    assert f"1: {names[0]}" in done.stdout


def test_the_newest_of_the_same_runs_counts(write: Write, run: Run, tmp_path: Path) -> None:
    old, _, new = (write(f"seed={seed}", acc=acc) for seed, acc in ((1, 0), (2, 0.6), (1, 0.8)))
    done = run("aggregate.py", "runs=runs/cv")
    assert done.returncode == 0, done.stderr
    assert float(rows(tmp_path / "runs/cv/aggregate")[0]["mean"]) == pytest.approx(0.7)
    names = [path.relative_to(tmp_path) for path in (old, new)]
    assert f"Left out: {names[0]} (the same as {names[1]}, which is newer)." in done.stdout


def test_what_has_not_finished_or_cannot_be_read_is_named(
    write: Write, run: Run, tmp_path: Path
) -> None:
    write(acc=0.5)
    others = {status: write("seed=1", status=status) for status in ("failed", "running", "stopped")}
    cut, empty, bare = (write(f"seed={seed}") for seed in (2, 3, 4))
    (cut / "metrics.json").write_text('{"val/acc": 0.')
    (empty / "run.json").write_text("")
    (bare / "config.yaml").unlink()
    done = run("aggregate.py", "runs=runs/cv")
    assert done.returncode == 0, done.stderr
    assert groups(tmp_path / "runs/cv/aggregate") == {"digits": 1}
    for status, folder in others.items():
        assert f"Left out: {folder.relative_to(tmp_path)} ({status})." in done.stdout
    for folder in (cut, empty, bare):
        assert f"Left out: {folder.relative_to(tmp_path)} (" in done.stdout


def test_several_folders_and_single_runs(write: Write, run: Run, tmp_path: Path) -> None:
    one = write("seed=1", into="runs/a")
    write("seed=2", into="runs/a")
    write("seed=3", into="runs/b")
    done = run("aggregate.py", "runs=[runs/a,runs/b,runs]")
    assert done.returncode == 0, done.stderr
    assert groups(tmp_path / "runs/a/aggregate") == {"digits": 3}
    done = run("aggregate.py", path_override("runs", one))
    assert done.returncode == 0, done.stderr
    assert groups(one / "aggregate") == {"digits": 1}


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("runs=runs/none", "error: runs=runs/none: there is no such folder."),
        ("runs=[.,nowhere]", "error: runs=nowhere: there is no such folder."),
        ("runs=[]", "error: runs=[]: name a folder that holds runs."),
        ("runs=.", "error: runs=.: no finished run lies there."),
        ("run=.", "error: there is no run in the config. Did you mean runs?"),
    ],
)
def test_mistakes_are_one_line(word: str, said: str, tmp_path: Path) -> None:
    done = aggregate(tmp_path, word)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == said
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_sweep_over_folds_is_summed_up(run: Run, tmp_path: Path) -> None:
    done = run("train.py", *SHORT, "data.fold=0,1,2", "data.folds=3", "-m")
    assert done.returncode == 0, done.stderr
    done = run("aggregate.py", "runs=runs")
    assert done.returncode == 0, done.stderr
    found = {row["metric"]: row for row in rows(tmp_path / "runs/aggregate")}
    runs: list[dict[str, Any]] = [
        json.loads(file.read_text()) for file in (tmp_path / "runs/digits").glob("*/metrics.json")
    ]
    assert found.keys() == runs[0].keys()
    for metric, row in found.items():
        values = [one[metric] for one in runs]
        assert row["n"] == "3"
        assert float(row["mean"]) == pytest.approx(statistics.mean(values))
        assert float(row["std"]) == pytest.approx(statistics.stdev(values))
    assert float(found["val/acc"]["std"]) > 0
