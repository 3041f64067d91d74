"""The default bake in use: it is typed, and its own tests pass."""

from pathlib import Path

from conftest import Run


def test_types(project: Path, run: Run) -> None:
    """Mypy has nothing to say about a fresh project."""
    done = run(project, "python", "-m", "mypy")
    assert done.returncode == 0, done.stdout + done.stderr


def test_own_tests(project: Path, run: Run) -> None:
    """What a user types first passes; here side by side, to save time."""
    side_by_side = ("-n", "2", "--dist", "loadfile")
    done = run(project, "python", "-m", "pytest", "-q", *side_by_side, timeout=2400)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
