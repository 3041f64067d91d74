"""The default bake in use: it is typed, and its own tests pass."""

from pathlib import Path

from conftest import Run


def test_types(project: Path, run: Run) -> None:
    """Mypy has nothing to say about a fresh project."""
    done = run(project, "python", "-m", "mypy")
    assert done.returncode == 0, done.stdout + done.stderr


def test_own_tests(project: Path, run: Run) -> None:
    """What a user types first passes."""
    done = run(project, "python", "-m", "pytest", "-q", timeout=1500)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
