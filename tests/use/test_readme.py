"""The project's README and its day with DVC are followed word by word.

Their files are written and their commands run.

A block of `sh` or `python` is run as it stands; a block below a line that is a path in backticks
and a colon is that file; `text` is for eyes alone (what installs, serves or lists).
"""

import csv
import json
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from conftest import Run
from PIL import Image

RECIPES = "Make it yours"
BLOCK = re.compile(
    r"(?:^ *`(?P<path>[^`\n]+)`:\n)?"
    r"^(?P<indent> *)```(?P<language>\w+)\n(?P<body>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
SHORT = "model=mlp trainer.max_epochs=10"  # enough for the gate
INSTALLED = f"--assume-old={sys.prefix}/.installed"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # these nets are too small for more
IMAGES_PER_CLASS = 60


@dataclass(frozen=True)
class Block:
    """A fenced block: the file it is, if any, its language and its text."""

    path: str | None
    language: str
    body: str


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a Markdown text, in order."""
    found = (match.groupdict() for match in BLOCK.finditer(text))
    return [Block(b["path"], b["language"], textwrap.dedent(b["body"])) for b in found]


def sections(text: str, level: int = 2) -> dict[str, str]:
    """What stands below each heading of a level."""
    parts = re.split(rf"^{'#' * level} (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.fixture
def copy(project: Path, tmp_path: Path) -> Path:
    """The default bake, to change freely; the DVC remote is in the home of the tests."""
    return Path(shutil.copytree(project, tmp_path / "house" / project.name))


def readme(project: Path) -> dict[str, str]:
    """The sections of the baked README."""
    return sections((project / "README.md").read_text("utf-8"))


def follow(project: Path, run: Run, text: str, *, shorten: bool = False) -> None:
    """Write the files of a section and run its commands, one after another."""
    for block in blocks(text):
        if block.path:
            file = project / block.path
            assert not file.exists(), f"the recipe for {block.path} would overwrite it"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.body, "utf-8")
        elif block.language == "python":
            succeed(run(project, "python", "-c", block.body, env=ONE_THREAD))
        elif block.language == "sh":
            for line in block.body.splitlines():
                typed = shortened(line) if shorten else line
                typed = re.sub("^make ", f"make VENV={sys.prefix} {INSTALLED} ", typed)
                succeed(run(project, "sh", "-c", typed, env=ONE_THREAD))
        else:
            assert block.language == "text", f"nobody checks blocks of {block.language}"


def shortened(line: str) -> str:
    """A command that would train in full: fewer epochs for DVC, else only its config is composed.

    What every option trains is for the project's own tests.
    """
    if line.startswith("dvc exp run"):
        return re.sub("\"(?=[,'])", f' {SHORT}"', line)
    full = line.startswith("python train.py") and not re.search("max_epochs=|debug=", line)
    return f"{line} --cfg job" if full else line


def succeed(done: subprocess.CompletedProcess[str]) -> None:
    """Show all that a failed command said."""
    assert done.returncode == 0, f"{done.args}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"


def metrics(run_folder: Path) -> dict[str, float]:
    """The final values of a run, after evaluation where it was evaluated."""
    found: dict[str, float] = json.loads((run_folder / "metrics.json").read_text("utf-8"))
    return found


def rows(file: Path) -> list[dict[str, str]]:
    """A CSV."""
    with file.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def write_flowers(project: Path, listing: str) -> Iterator[str]:
    """Images of the classes in the README's listing, each with a colour of its own."""
    random = np.random.default_rng(0)
    folders = dict.fromkeys((project / line).parent for line in listing.splitlines())
    for number, folder in enumerate(folders):
        folder.mkdir(parents=True)
        for index in range(IMAGES_PER_CLASS):
            pixels = random.integers(0, 120, (40, 48, 3), dtype=np.uint8)
            pixels[..., number] += 100
            Image.fromarray(pixels).save(folder / f"{index}.jpg")
        yield folder.name


def test_own_images(copy: Path, run: Run) -> None:
    """Folders of images and one config: it trains, evaluates and predicts."""
    recipe = sections(readme(copy)[RECIPES], 3)["Your own images"]
    listing = next(block.body for block in blocks(recipe) if block.language == "text")
    classes = list(write_flowers(copy, listing))
    follow(copy, run, recipe)
    assert metrics(copy / "runs/flowers/evaluate")["test/acc"] > 0.8
    predicted = rows(copy / "predictions.csv")
    assert len(predicted) == IMAGES_PER_CLASS
    right = sum(row["class"] == classes[0] for row in predicted)
    assert right > 0.8 * IMAGES_PER_CLASS
    assert set(classes) == {key[2:-1] for key in predicted[0] if key.startswith("p(")}


def test_own_model(copy: Path, run: Run) -> None:
    """A module and one config: it trains, evaluates and predicts, and lints."""
    recipe = sections(readme(copy)[RECIPES], 3)["Your own model"]
    follow(copy, run, recipe)
    assert metrics(copy / "runs/tiny/evaluate")["test/acc"] > 0.3
    assert len(rows(copy / "predictions.csv")) == 1797
    check_style(copy, run, recipe)


def test_own_loss_and_metric(copy: Path, run: Run) -> None:
    """A class and one config each: the loss is trained with, the metric is logged."""
    recipe = sections(readme(copy)[RECIPES], 3)["Your own loss or metric"]
    follow(copy, run, recipe)
    found = metrics(copy / "runs/focal")
    assert found["val/top3"] >= found["val/acc"]
    assert "FocalLoss" in (copy / "runs/focal/config.yaml").read_text("utf-8")
    check_style(copy, run, recipe)


def check_style(project: Path, run: Run, recipe: str) -> None:
    """The Python of a recipe passes the project's own lint."""
    files = [b.path for b in blocks(recipe) if b.path and b.language == "python"]
    succeed(run(project, "ruff", "check", *files))
    succeed(run(project, "ruff", "format", "--check", *files))


def test_every_other_command(copy: Path, run: Run) -> None:
    """The rest of the README runs from top to bottom, with fewer epochs."""
    shorten_pipeline(copy)
    for title, text in readme(copy).items():
        if title != RECIPES:
            follow(copy, run, text, shorten=True)
    first = copy / "runs/first"
    assert metrics(first / "evaluate")["test/acc"] > 0.8
    assert metrics(first / "evaluate-val")["val/count"] > 0
    night = rows(copy / "runs/night/history.csv")
    assert len(night) == 8, "resuming goes on where the run ended"
    assert len(rows(copy / "predictions.csv")) == 1797
    assert "lr: 0.001" in (copy / "resolved/train.yaml").read_text("utf-8")


def shorten_pipeline(project: Path) -> None:
    """Let the pipeline train for a moment."""
    params = project / "params.yaml"
    line = re.compile(r"^(train: .*)$", re.MULTILINE)
    params.write_text(line.sub(rf"\1 {SHORT}", params.read_text("utf-8")), "utf-8")


def test_a_day_with_dvc(copy: Path, run: Run) -> None:
    """Run, try, compare, keep, accept, share, release: each command of `docs/dvc.md`."""
    shorten_pipeline(copy)
    follow(copy, run, (copy / "docs/dvc.md").read_text("utf-8"), shorten=True)
    tried = run(copy, "dvc", "exp", "show", "--csv", "--all-commits").stdout
    for value in ("0.001", "0.002", "0.004"):
        assert f",{value}," in tried
    assert "lr: 0.001" in (copy / "resolved/train.yaml").read_text("utf-8")
    done = run(copy, "git", "log", "--format=%s%d")
    assert done.stdout.startswith("Accept the evaluated model as the baseline (HEAD -> main, tag: ")
    assert len(rows(copy / "predictions.csv")) == 1797
    clone = copy.parent / "clone"
    succeed(run(copy, "git", "clone", "--quiet", copy, clone))
    succeed(run(clone, "dvc", "pull"))
    assert "up to date" in run(clone, "dvc", "status").stdout


def test_what_it_names_is_there(project: Path) -> None:
    """Targets of make, options of groups and paths in the layout are the project's own."""
    text = (project / "README.md").read_text("utf-8")
    makefile = (project / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"[`\n]make ([\w-]+)", text))
    assert targets
    assert all(f"\n{target}:" in makefile for target in targets)
    table = re.findall(r"^\| `(\w+)` \| ((?:`\w+` ?)+)", readme(project)["Train"], re.MULTILINE)
    named = {group: set(re.findall(r"`(\w+)`", options)) for group, options in table}
    groups = {path.name for path in (project / "configs").iterdir() if path.is_dir()}
    assert named.keys() == groups - {"local"}
    for group, options in named.items():
        there = {path.stem for path in (project / "configs" / group).glob("*.yaml")} - {"base"}
        assert options == there, group
    layout = blocks(readme(project)["Layout"])[0].body
    for path in re.findall(r"^(\w+\.\w+|\w+/)(?= )", layout, re.MULTILINE):
        assert (project / path).exists(), path
