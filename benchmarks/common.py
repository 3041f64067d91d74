"""What the benchmarks share: a fresh bake, runs beside each other, and the table they print."""

import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from cookiecutter.main import cookiecutter
from rich.console import Console
from rich.progress import track

TEMPLATE = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
HELPERS = Path(__file__).resolve().parent / "project"
console = Console(stderr=True)


@contextmanager
def baked() -> Iterator[Path]:
    """A fresh project of the default answers, with the benchmarks' own modules beside train.py."""
    with TemporaryDirectory(prefix="benchmark-") as folder:
        project = Path(cookiecutter(str(TEMPLATE), no_input=True, output_dir=folder))
        shutil.copytree(HELPERS, project, dirs_exist_ok=True)
        yield project


def run(command: Sequence[str], folder: Path) -> str:
    """Run a command in a project as in a terminal of 100 columns; return what it printed."""
    env = os.environ | {"COLUMNS": "100", "FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"}
    done = subprocess.run(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}")
    return done.stdout


def python(*arguments: str) -> list[str]:
    """A command of this environment's Python."""
    return [sys.executable, *arguments]


def seconds(command: Sequence[str], folder: Path, code: int = 0) -> float:
    """How long a command takes; its output is thrown away, its exit code must be `code`."""
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    took = time.perf_counter() - start
    if done.returncode != code:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return took


def interleaved(
    sides: Mapping[str, Callable[[], float]], rounds: int, title: str
) -> dict[str, list[float]]:
    """Measure all sides once a round, in an order that turns with each round."""
    figures: dict[str, list[float]] = {name: [] for name in sides}
    for index in track(range(rounds), title, console=console, transient=True):
        for name in list(sides)[:: 1 if index % 2 == 0 else -1]:
            figures[name].append(sides[name]())
    return figures


def spread(figures: Sequence[float], form: str = ",.0f") -> str:
    """`median (lowest to highest)`."""
    low, middle, high = min(figures), statistics.median(figures), max(figures)
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median over the rounds of the ratio in a round: what slows a whole round drops out."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def machine() -> str:
    """The machine and what the figures depend on, in a line."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [
            x.split(":")[1].strip() for x in info.read_text().splitlines() if "model name" in x
        ]
        cpu = names[0] if names else cpu
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    packages = ", ".join(f"{n} {version(n)}" for n in ("torch", "lightning", "hydra-core"))
    return f"{cpu}, {cores} cores; Python {platform.python_version()}, {packages}"


def report(name: str, title: str, tables: Sequence[str]) -> None:
    """Print Markdown tables, and keep them in results/<name>.md with the machine's description."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=TEMPLATE, capture_output=True, text=True
    ).stdout.strip()
    day = datetime.now(UTC).date()
    command = " ".join(["python", f"benchmarks/{name}.py", *sys.argv[1:]])
    head = f"# {title}\n\n{machine()}.\n{day}, commit {commit}, `{command}`.\n"
    text = "\n".join([head, *(f"{table.strip()}\n" for table in tables)])
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
