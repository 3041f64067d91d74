"""Bakes projects as a person would, apart from whatever this machine's user has configured."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import pytest
import yaml
from cookiecutter.main import cookiecutter

TEMPLATE = Path(__file__).parents[1]
IDENTITY = "[user]\n\tname = Template Tests\n\temail = tests@example.com\n"


class Bake(Protocol):
    """Bakes a project in a folder and returns the project's path."""

    def __call__(self, output_dir: Path, **answers: str) -> Path:  # noqa: D102
        ...


class Run(Protocol):
    """Runs a command in a project, under the tests' interpreter where it starts with `python`."""

    def __call__(  # noqa: D102
        self,
        project: Path,
        *args: str | Path,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 600,
    ) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home of the tests' own: no cookiecutter settings, and a git identity."""
    path = tmp_path_factory.mktemp("home")
    gitconfig = path / ".gitconfig"
    gitconfig.write_text(IDENTITY)
    # The tools that a project's Makefile and hooks call come from this environment.
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(path))
        patch.setenv("PATH", search)
        patch.setenv("GIT_CONFIG_GLOBAL", str(gitconfig))
        patch.setenv("GIT_CONFIG_NOSYSTEM", "1")
        patch.delenv("COOKIECUTTER_CONFIG", raising=False)
        yield path


@pytest.fixture(scope="session")
def bake(home: Path) -> Bake:
    """Cookiecutter's own Python API, without input."""
    config = home / "cookiecutter.yaml"
    folders = {"cookiecutters_dir": "cookiecutters", "replay_dir": "replay"}
    config.write_text(yaml.safe_dump({k: str(home / v) for k, v in folders.items()}))

    def bake(output_dir: Path, **answers: str) -> Path:
        path = cookiecutter(
            str(TEMPLATE),
            no_input=True,
            extra_context=answers,
            output_dir=str(output_dir),
            config_file=str(config),
        )
        return Path(path)

    return bake


@pytest.fixture(scope="session")
def project(bake: Bake, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default bake; under pytest-xdist each worker has its own."""
    return bake(tmp_path_factory.mktemp("default"))


@pytest.fixture(scope="session")
def run() -> Run:
    """Run a command in a project and return what it printed; a failure is the test's to judge."""

    def run(
        project: Path,
        *args: str | Path,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 600,
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable if arg == "python" else str(arg) for arg in args]
        return subprocess.run(
            command,
            cwd=cwd or project,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run
