"""The hooks: git helps where it can and never hurts, and the last line says what to type."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TEMPLATE, Bake

NEXT = "Next:\n  cd my-project\n  make train\n"


def bake_in(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Type the command in a folder, with standard input closed."""
    return subprocess.run(
        ["/bin/sh", "-c", '"$0" -m cookiecutter "$1" --no-input <&-', sys.executable, TEMPLATE],
        cwd=folder,
        env={**os.environ, "PWD": str(folder), **env},
        capture_output=True,
        text=True,
        check=False,
    )


def git(folder: Path, *args: str) -> str:
    """Ask git about a folder."""
    command = ["git", "-C", str(folder), *args]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_first_commit(bake: Bake, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One commit on main with every file in it, and nothing left over."""
    path = bake(tmp_path)
    assert git(path, "rev-list", "--count", "main") == "1"
    assert git(path, "symbolic-ref", "HEAD") == "refs/heads/main"
    assert git(path, "status", "--porcelain", "--ignored") == ""
    assert "git" not in capfd.readouterr().out


def test_what_to_type_next(tmp_path: Path) -> None:
    """With standard input closed; the last thing printed is what to type."""
    done = bake_in(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(NEXT)


def test_empty_home(tmp_path: Path) -> None:
    """Without an identity the project is kept and staged, and one line says what is missing."""
    home = tmp_path / "home"
    home.mkdir()
    done = bake_in(tmp_path, HOME=str(home), GIT_CONFIG_GLOBAL=os.devnull)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("user.name") == 1
    assert done.stdout.endswith(NEXT)
    assert "A  README.md" in git(tmp_path / "my-project", "status", "--porcelain")


def test_no_git(tmp_path: Path) -> None:
    """Without git the project is kept, and one line says so."""
    done = bake_in(tmp_path, PATH=str(tmp_path / "nothing"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("git was not found") == 1
    assert done.stdout.endswith(NEXT)
    assert not (tmp_path / "my-project/.git").exists()


@pytest.mark.parametrize("option", ["commit.gpgsign", "core.hooksPath"])
def test_settings_that_would_stop_a_commit(option: str, tmp_path: Path) -> None:
    """The user's signing and hooks are for the user's commits."""
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for name in ("pre-commit", "prepare-commit-msg"):
        (hooks / name).write_text("#!/bin/sh\nexit 1\n")
        (hooks / name).chmod(0o755)
    config = tmp_path / "gitconfig"
    config.write_text("[user]\n\tname = A\n\temail = a@example.com\n")
    value = str(hooks) if option == "core.hooksPath" else "true"
    subprocess.run(["git", "config", "--file", config, option, value], check=True)
    bake_in(tmp_path, GIT_CONFIG_GLOBAL=str(config))
    assert git(tmp_path / "my-project", "rev-list", "--count", "main") == "1"


def test_inside_a_repository(tmp_path: Path) -> None:
    """A repository around the project gets no commit, and no second one is made inside it."""
    git(tmp_path, "init")
    done = bake_in(tmp_path, GIT_INDEX_FILE=str(tmp_path / ".git/index"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Inside an existing git repository") == 1
    assert git(tmp_path, "status", "--porcelain") == "?? my-project/"
    assert not (tmp_path / "my-project/.git").exists()


def test_inside_an_ignored_folder(tmp_path: Path) -> None:
    """Where the repository around ignores the project, it gets its own: DVC needs one."""
    git(tmp_path, "init")
    (tmp_path / ".gitignore").write_text("build/\n")
    (tmp_path / "build").mkdir()
    done = bake_in(tmp_path / "build")
    assert done.returncode == 0, done.stderr
    assert git(tmp_path / "build/my-project", "rev-list", "--count", "main") == "1"
    assert git(tmp_path, "status", "--porcelain") == "?? .gitignore"
