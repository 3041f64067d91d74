"""run.json: what a run was made from, and how it went."""

import json
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..paths import ROOT

PACKAGES = ("torch", "lightning", "torchmetrics", "hydra-core", "numpy", "dvc")


@contextmanager
def manifest(folder: Path, facts: dict[str, Any]) -> Iterator[None]:
    """Keep run.json while a run goes on.

    Its status is `running`, then `finished`, `stopped` (by a signal, after saving) or `failed`.

    Args:
        folder: The run folder.
        facts: What the caller knows: seed, command, data fingerprint, ….
    """
    record = {
        **facts,
        "git": git_state(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "hardware": hardware(),
        "start": _now(),
        "end": None,
        "status": "running",
        "earlier": _parts(folder),
    }
    write_manifest(folder, record)
    try:
        yield
    except SystemExit:
        write_manifest(folder, {**record, "end": _now(), "status": "stopped"})
        raise
    except BaseException as error:
        cause = (str(error) or type(error).__name__).strip().splitlines()[-1]
        write_manifest(folder, {**record, "end": _now(), "status": "failed", "error": cause})
        raise
    write_manifest(folder, {**record, "end": _now(), "status": "finished"})


def read_manifest(folder: Path) -> dict[str, Any]:
    """run.json; empty where there is none that can be read."""
    try:
        return json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def write_manifest(folder: Path, record: dict[str, Any]) -> None:
    """Write run.json, whole."""
    text = json.dumps(record, indent=2, ensure_ascii=False)
    scratch = folder / ".run.json.part"
    scratch.write_text(text + "\n", encoding="utf-8")
    scratch.replace(folder / "run.json")


def _parts(folder: Path) -> list[dict[str, Any]]:
    """When the earlier parts of a resumed run ran, and how they ended."""
    before = read_manifest(folder)
    if "start" not in before:
        return []
    part = {key: before.get(key) for key in ("command", "start", "end", "status")}
    return [*before.get("earlier", []), part]


def git_state() -> dict[str, Any]:
    """The commit that is checked out and whether files differ from it; None without git."""
    try:
        commit = _git("rev-parse", "HEAD")
        dirty = bool(_git("status", "--porcelain"))
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}
    return {"commit": commit, "dirty": dirty}


def hardware() -> dict[str, Any]:
    """Host, processor, cores and accelerators."""
    import torch

    gpus = range(torch.cuda.device_count())
    return {
        "host": platform.node(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(index) for index in gpus],
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    )
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
