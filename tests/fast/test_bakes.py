"""Every choice bakes exactly the files it should, and every file is what its name says."""

import ast
import itertools
import json
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from conftest import TEMPLATE, Bake

QUESTIONS = json.loads((TEMPLATE / "cookiecutter.json").read_text("utf-8"))
CHOICES = {k: v for k, v in QUESTIONS.items() if isinstance(v, list) and not k.startswith("_")}
# The choices do not interact, so they are cycled, not multiplied: as many bakes as the longest has
# options. The first one is the default bake.
MATRIX = [
    {question: options[i % len(options)] for question, options in CHOICES.items()}
    for i in range(max(map(len, CHOICES.values())))
]
# What the default bake holds, and how an option differs from the default one.
DEFAULT_FILES = set((TEMPLATE / "tests/fast/files.txt").read_text("utf-8").split())
KUBERNETES = {
    "cluster/kubernetes.yaml",
    "configs/launcher/kubernetes.yaml",
    "my_project/training/kubernetes.py",
    "tests/test_kubernetes.py",
}
RAY = {"configs/launcher/ray.yaml", "my_project/training/ray.py", "tests/test_ray.py"}
ADDED = {
    ("tracker", "wandb"): {"configs/logger/wandb.yaml"},
    ("tracker", "mlflow"): {"configs/logger/mlflow.yaml"},
    ("ci", "gitlab"): {".gitlab-ci.yml"},
    ("cluster", "kubernetes"): KUBERNETES,
    ("cluster", "ray"): RAY,
    ("cluster", "all"): KUBERNETES | RAY,
}
SLURM = {
    "cluster/slurm.sh",
    "configs/launcher/slurm.yaml",
    "my_project/training/slurm.py",
    "tests/test_slurm.py",
}
REMOVED = {
    ("ci", "gitlab"): {".github/workflows/ci.yml"},
    ("ci", "none"): {".github/workflows/ci.yml"},
    ("cluster", "kubernetes"): SLURM,
    ("cluster", "ray"): SLURM,
    ("cluster", "none"): SLURM,
}
# What only one option's text says, of the variants that end up under one name.
MARKS = {
    ("license", "MIT"): ("LICENSE", "MIT License"),
    ("license", "Apache-2.0"): ("LICENSE", "Apache License"),
    ("license", "BSD-3-Clause"): ("LICENSE", "BSD 3-Clause License"),
    ("license", "proprietary"): ("LICENSE", "All rights reserved."),
    ("dvc_remote", "local"): (".dvc/config", "url = ~/dvc-storage/my-project"),
    ("dvc_remote", "s3"): (".dvc/config", "url = s3://"),
    ("dvc_remote", "gs"): (".dvc/config", "url = gs://"),
    ("dvc_remote", "azure"): (".dvc/config", "url = azure://"),
    ("dvc_remote", "ssh"): (".dvc/config", "url = ssh://"),
}
Baked = tuple[Path, dict[str, str]]


@pytest.fixture(scope="session", params=MATRIX, ids=lambda chosen: "-".join(chosen.values()))
def baked(
    request: pytest.FixtureRequest, bake: Bake, tmp_path_factory: pytest.TempPathFactory
) -> Baked:
    """A project of each kind, and the choices that made it."""
    return bake(tmp_path_factory.mktemp("baked"), **request.param), request.param


def files(path: Path) -> set[str]:
    """Every file of a project, git's own aside."""
    found = (p.relative_to(path) for p in path.rglob("*") if p.is_file())
    return {p.as_posix() for p in found if p.parts[0] != ".git"}


def test_every_choice_is_baked() -> None:
    """The cycle leaves no option out."""
    for question, options in CHOICES.items():
        assert {chosen[question] for chosen in MATRIX} == set(options)


def test_exact_files(baked: Baked) -> None:
    """No file more, no file less, no folder left empty, and git tracks them all."""
    path, chosen = baked
    expected = DEFAULT_FILES
    for choice in chosen.items():
        expected = expected - REMOVED.get(choice, set()) | ADDED.get(choice, set())
    found = files(path)
    report = "".join(f"\n  + {p}" for p in sorted(found - expected))
    report += "".join(f"\n  - {p}" for p in sorted(expected - found))
    assert found == expected, f"more (+) or less (-) than tests/fast/files.txt says:{report}"
    folders = (p for p in path.rglob("*") if p.is_dir() and ".git" not in p.parts)
    assert [p for p in folders if not any(p.iterdir())] == []
    tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=path, text=True)
    assert set(tracked.rstrip("\0").split("\0")) == expected


def test_chosen_variant(baked: Baked) -> None:
    """LICENSE and .dvc/config are the chosen ones."""
    path, chosen = baked
    for name, mark in (MARKS[choice] for choice in chosen.items() if choice in MARKS):
        assert mark in (path / name).read_text("utf-8")


PARSERS: dict[str, Callable[[str], object]] = {
    ".json": json.loads,
    ".py": ast.parse,
    ".toml": tomllib.loads,
    ".yaml": lambda text: list(yaml.safe_load_all(text)),
    ".yml": yaml.safe_load,
}


def test_everything_parses(baked: Baked) -> None:
    """Each file reads as what its name says, and keeps nothing of Jinja."""
    path, _ = baked
    for name in files(path):
        text = (path / name).read_text("utf-8")
        if parse := PARSERS.get(Path(name).suffix):
            parse(text)
        assert "cookiecutter." not in text, name
        assert "{%" not in text, name
        assert "{{" not in text.replace("${{", ""), name
        assert text.endswith("\n") or not text, f"{name}: no newline at its end"


def test_workflows_keep_their_expressions(baked: Baked) -> None:
    """GitHub's `${{ }}` is not eaten by Jinja."""
    path, chosen = baked
    workflows = list(path.glob(".github/workflows/*"))
    assert bool(workflows) == (chosen["ci"] == "github")
    for workflow in workflows:
        text = workflow.read_text("utf-8")
        assert "${{ github." in text
        assert yaml.safe_load(text)["permissions"] == {"contents": "read"}


def test_template_has_no_control_flow() -> None:
    """A choice selects files, never lines."""
    for path in (TEMPLATE / "{{cookiecutter.project_slug}}").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert "{%" not in path.read_text("utf-8"), path


@pytest.mark.parametrize("check", [("check",), ("format", "--check", "--diff")], ids=" ".join)
def test_bakes_are_clean(baked: Baked, check: tuple[str, ...]) -> None:
    """Ruff has nothing to say about a fresh project."""
    path, _ = baked
    command = ["ruff", *check, "--no-cache", "."]
    done = subprocess.run(command, cwd=path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("check", [("check",), ("format", "--check", "--diff")], ids=" ".join)
def test_template_is_clean(check: tuple[str, ...]) -> None:
    """Nor about the template."""
    command = ["ruff", *check, "--no-cache", "."]
    done = subprocess.run(command, cwd=TEMPLATE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("slug", ["a", "zebra", "x" * 50], ids=["first", "last", "longest"])
def test_names_do_not_break_style(slug: str, bake: Bake, tmp_path: Path) -> None:
    """Whatever the package's name, imports stay sorted and lines short enough."""
    path = bake(tmp_path, project_slug=slug)
    for check in (["check"], ["format", "--check"]):
        command = ["ruff", *check, "--no-cache", "."]
        done = subprocess.run(command, cwd=path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_table_knows_every_choice() -> None:
    """The hook's table and the questions have the same options; only `task` owns no path yet."""
    tree = ast.parse((TEMPLATE / "hooks/post_gen_project.py").read_text("utf-8"))
    table = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "PATHS" and node.value
    )
    options = {question: set(owned) for question, owned in table.items()}
    assert options == {q: set(o) for q, o in CHOICES.items() if q != "task"}
    owned = itertools.chain.from_iterable(p for o in table.values() for p in o.values())
    root = TEMPLATE / "{{cookiecutter.project_slug}}"
    assert [p for p in owned if not (root / p).exists()] == []
