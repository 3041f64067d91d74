"""Answers: bad ones are refused before a file is written, good ones arrive as they were given."""

import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from conftest import TEMPLATE, Bake
from cookiecutter.exceptions import FailedHookException
from cookiecutter.generate import generate_context, generate_files
from cookiecutter.prompt import prompt_for_config
from hypothesis import given, settings
from hypothesis import strategies as st

# answers → what the refusal must say: the field, the reason, and a name that would work.
REFUSED = {
    "keyword": ({"project_name": "class"}, "package_name: 'class' is a Python keyword", "my_class"),
    "soft keyword": ({"project_name": "match"}, "'match' is a Python keyword", "my_match"),
    "newer soft keyword": ({"project_name": "type"}, "'type' is a Python keyword", "my_type"),
    "standard library": ({"project_name": "email"}, "standard library", "my_email"),
    "standard library, case": ({"package_name": "JSON"}, "standard library", "my_json"),
    "standard library, tests": ({"project_name": "test"}, "standard library", "my_test"),
    "dependency": ({"project_name": "torch"}, "project_slug: 'torch' is the name of", "my-torch"),
    "dependency's other name": ({"project_name": "Hydra Core"}, "'hydra-core'", "my-hydra-core"),
    "dependency's import": ({"package_name": "sklearn"}, "package_name: 'sklearn'", "my_sklearn"),
    "root script": ({"project_name": "train"}, "script or folder of the project", "my_train"),
    "root folder": ({"project_name": "configs"}, "script or folder", "my_configs"),
    "leading digit": ({"project_name": "3d-net"}, "start with no digit", "my_3d_net"),
    "one space": ({"project_name": " "}, "project_name: is blank", "My Project"),
    "nothing to derive from": ({"project_name": "🙂"}, "project_slug: '_'", "my-project"),
    "too long": ({"project_name": "x" * 100}, "longer than 50", "x" * 47),
    "package with a dot": ({"package_name": "a.b"}, "package_name: 'a.b'", "a_b"),
    "package not ASCII": ({"package_name": "模型"}, "package_name", "my_project"),
    "empty package": ({"package_name": ""}, "package_name: ''", "my_project"),
    "slug with a space": ({"project_slug": "a b"}, "project_slug: 'a b'", "a-b"),
    "slug that is an option": ({"project_slug": "-x"}, "project_slug: '-x'", "'x'"),
    "address": ({"author_email": "me at home"}, "author_email: 'me at home'", "you@example.com"),
    "no address": ({"author_email": ""}, "author_email: ''", "you@example.com"),
    "owner": ({"repository_owner": "a b"}, "repository_owner: 'a b'", "your-name"),
    "nobody": ({"author_name": " "}, "author_name: is blank", "Your Name"),
    "line break": ({"description": "a\nb"}, "description: 'a\\nb'", "line break"),
    "bell": ({"author_name": "a\x07b"}, "author_name: 'a\\x07b'", "control character"),
}
ACCEPTED = {
    "my-model": ("my-model", "my_model"),
    "a.b": ("a-b", "a_b"),
    "-x": ("x", "x"),
    "ÄÖ模型": ("aomo-xing", "aomo_xing"),
    "x" * 50: ("x" * 50, "x" * 50),
}
AWKWARD = {
    "project_name": 'The "best" \\ model: 100% #1 模型 🙂',
    "description": 'He said "hi" \u2013 it\'s 100% C:\\new\\t {x} ${y} #z & <b> \\',
    "author_name": 'Zoë "Š" O\'Neil-ß, \\ 😀 \U0001f468‍\U0001f469‍\U0001f467',
}


def cli(output_dir: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Type a cookiecutter command."""
    command = [sys.executable, "-m", "cookiecutter", str(TEMPLATE), "--no-input", *args]
    return subprocess.run(command, cwd=output_dir, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("answers", "reason", "works"), REFUSED.values(), ids=REFUSED)
def test_refused(
    answers: dict[str, str],
    reason: str,
    works: str,
    bake: Bake,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """One line says where, what and which name works, and no folder is left."""
    with pytest.raises(FailedHookException):
        bake(tmp_path, **answers)
    said = capfd.readouterr().err.splitlines()[0]
    assert reason in said
    assert works in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "answer",
    ["project_name=class", "project_name=torch", "project_name=3d-net", "project_name= "],
)
def test_refused_on_the_command_line(answer: str, tmp_path: Path) -> None:
    """The command fails, too, with the field on stderr."""
    done = cli(tmp_path, answer)
    assert done.returncode != 0
    assert done.stderr.startswith(("project_name: ", "project_slug: ", "package_name: "))
    assert "would work" in done.stderr.splitlines()[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "answer",
    [
        "license=GPL",  # not among the choices
        "project_slug=",  # the output folder itself
        # Jinja in an answer is rendered by cookiecutter before any hook could object.
        "description={{ nonsense }}",
        "description={% if",
    ],
)
def test_refused_by_cookiecutter(answer: str, tmp_path: Path) -> None:
    """What cookiecutter itself refuses leaves nothing, either."""
    (tmp_path / "mine.txt").write_text("stays")
    done = cli(tmp_path, answer)
    assert done.returncode != 0
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_refused_jinja_that_was_typed(tmp_path: Path) -> None:
    """Typed at a prompt it is not rendered, but it would be by the next `cruft update`."""
    context = answered({})
    context["cookiecutter"]["description"] = "a {{ b }}"
    with pytest.raises(FailedHookException):
        generate_files(TEMPLATE, context, output_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_no_dependency_is_a_good_name() -> None:
    """A project that is named like a package it installs would hide it."""
    lines = (TEMPLATE / "{{cookiecutter.project_slug}}/pyproject.toml").read_text("utf-8")
    project = tomllib.loads(lines)["project"]
    extras = project["optional-dependencies"].values()
    needed = [*project["dependencies"], *(one for extra in extras for one in extra)]
    names = {re.split(r"[^\w-]", one)[0].replace("-", "_").lower() for one in needed}
    known = runpy.run_path(str(TEMPLATE / "hooks/pre_gen_project.py"))["DEPENDENCIES"]
    assert names <= known


@pytest.mark.parametrize(("name", "derived"), ACCEPTED.items())
def test_accepted(name: str, derived: tuple[str, str], bake: Bake, tmp_path: Path) -> None:
    """Slug and package are derived from any name that has letters."""
    slug, package = derived
    path = bake(tmp_path, project_name=name)
    assert path == tmp_path / slug
    assert (path / package / "__init__.py").is_file()


def test_baked_as_cruft_does(tmp_path: Path) -> None:
    """Cruft calls with other private answers, and needs its bakes without a repository."""
    context = answered({})
    context["cookiecutter"] |= {"_template": str(TEMPLATE), "_commit": "0" * 40}
    path = Path(generate_files(TEMPLATE, context, output_dir=tmp_path))
    assert (path / "LICENSE").is_file()
    assert not (path / ".git").exists()


@pytest.mark.parametrize("license", ["MIT", "Apache-2.0", "BSD-3-Clause", "proprietary"])
def test_text_arrives_unchanged(license: str, bake: Bake, tmp_path: Path) -> None:
    """Quotes, backslashes, braces and emoji reach every file as they were given."""
    path = bake(tmp_path, **AWKWARD, project_slug="awkward", license=license)
    assert_text_arrived(path, AWKWARD)
    assert AWKWARD["author_name"] in (path / "LICENSE").read_text("utf-8")


# Any text but line breaks, control characters and what YAML excludes (the hook refuses them), and
# Jinja's opening delimiters: without input, cookiecutter renders those itself.
text = st.text(
    st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"], exclude_characters="\ufffe\uffff"),
    max_size=60,
)
pieces = st.sampled_from(r"""\ " ' \u12 \n }} %} #} { $ ${x} # : --- """.split())
awkward = (
    st.lists(pieces | text, max_size=6)
    .map("".join)
    .filter(lambda s: not any(mark in s for mark in ("{{", "{%", "{#")))
)


@settings(derandomize=True, max_examples=50, deadline=None, database=None)
@given(name=awkward, description=awkward, author=awkward)
def test_any_text_arrives_unchanged(
    tmp_path_factory: pytest.TempPathFactory, name: str, description: str, author: str
) -> None:
    """Rendering alone, without hooks, for speed."""
    given = {"project_name": name, "description": description, "author_name": author}
    context = answered({**given, "project_slug": "fuzzed", "package_name": "fuzzed"})
    output = tmp_path_factory.mktemp("fuzz")
    path = generate_files(TEMPLATE, context, output_dir=output, accept_hooks=False)
    assert_text_arrived(Path(path), given)


def answered(given: dict[str, str]) -> dict[str, Any]:
    """Return the context that cookiecutter makes of these answers."""
    context: dict[str, Any] = generate_context(
        str(TEMPLATE / "cookiecutter.json"), extra_context=given
    )
    context["cookiecutter"] = prompt_for_config(context, no_input=True)
    return context


def assert_text_arrived(path: Path, given: dict[str, str]) -> None:
    """Compare what was given with what the files say when they are read back."""
    project = tomllib.loads((path / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["description"] == given["description"]
    assert project["authors"][0]["name"] == given["author_name"]
    readme = (path / "README.md").read_text("utf-8")
    assert readme.startswith(f"# {given['project_name']}\n")
    assert given["description"] in readme
