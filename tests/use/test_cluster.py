"""A bake with every launcher: it is typed, and its launchers' tests pass and leave nothing out."""

from pathlib import Path

import pytest
from conftest import Bake, Run


@pytest.fixture(scope="module")
def clustered(bake: Bake, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SLURM, Kubernetes and Ray."""
    return bake(tmp_path_factory.mktemp("clustered"), cluster="all")


def test_types(clustered: Path, run: Run) -> None:
    """Mypy has nothing to say."""
    done = run(clustered, "python", "-m", "mypy")
    assert done.returncode == 0, done.stdout + done.stderr


def test_launchers(clustered: Path, run: Run) -> None:
    """What is sent to SLURM, Kubernetes' schemas, and a Ray of this machine."""
    files = [f"tests/test_{name}.py" for name in ("slurm", "kubernetes", "ray")]
    done = run(clustered, "python", "-m", "pytest", "-q", *files, timeout=900)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
    assert "skipped" not in done.stdout, done.stdout[-2000:]
