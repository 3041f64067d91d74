"""Released models: tagged, fetched by name and version, and handed to others."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import ROOT, Done
from pipeline import Pipeline

from {{ cookiecutter.package_name }} import registry

FILE = "model.ckpt"


@pytest.fixture
def house(fresh: Pipeline, trained: Path, tmp_path: Path) -> Pipeline:
    """The project with a model that DVC keeps and that is not pushed yet."""
    house = fresh.copied_to(tmp_path / "a project (1)")
    content = {"artifacts": {"model": {"path": FILE, "type": "model"}}}
    (house.root / "dvc.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    succeed(house, "dvc", "remote", "add", "-f", "-d", "storage", str(tmp_path / "storage"))
    keep(house, trained / "checkpoints/best.ckpt")
    return house


def keep(house: Pipeline, checkpoint: Path) -> None:
    """Make a checkpoint the model, and commit that."""
    shutil.copy(checkpoint, house.root / FILE)
    succeed(house, "dvc", "add", FILE)
    house.commit()


def succeed(house: Pipeline, *words: str, cwd: Path | None = None) -> str:
    done = house.call(*words, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def release(house: Pipeline, version: str) -> Done:
    return house.call("python", "-m", registry.__name__, version)


def find(house: Pipeline, run: str) -> Done:
    """What run= leads to, or the line that a script would end with."""
    package = registry.__name__.partition(".")[0]
    code = (
        f"from {package}.paths import find_checkpoint\n"
        f"from {package}.errors import UserError\n"
        f"try: print(find_checkpoint({run!r}), end='')\n"
        "except UserError as error: raise SystemExit(str(error))"
    )
    return house.call("python", "-c", code)


def test_the_pipeline_names_its_model() -> None:
    pipeline = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))
    assert registry.artifacts()[registry.MODEL]["path"] in pipeline["stages"]["train"]["outs"]


@pytest.mark.slow
def test_a_release_travels(house: Pipeline, trained: Path, tmp_path: Path) -> None:
    assert "take a version such as v1.2.3" in release(house, "1.0").stderr
    assert f"{FILE} is not in the remote: dvc push" in release(house, "v1.0.0").stderr
    succeed(house, "dvc", "push")
    (house.root / "note").touch()
    assert "note is not committed" in release(house, "v1.0.0").stderr
    (house.root / "note").unlink()
    assert "git push origin HEAD model@v1.0.0" in release(house, "v1.0.0").stdout
    assert "already registered" in release(house, "v1.0.1").stderr
    keep(house, trained / "checkpoints/last.ckpt")
    succeed(house, "dvc", "push")
    assert release(house, "v1.10.0").returncode == 0
    first, newest = (trained / f"checkpoints/{name}.ckpt" for name in ("best", "last"))

    consumer = tmp_path / "consumer"  # without the project's code
    consumer.mkdir()
    words = ("dvc", "artifacts", "get", str(house.root), "model", "--rev", "v1.0.0")
    succeed(house, *words, cwd=consumer)
    assert (consumer / FILE).read_bytes() == first.read_bytes()

    clone = Pipeline(tmp_path / "clone")
    succeed(house, "git", "clone", "--quiet", str(house.root), str(clone.root))
    np.save(clone.root / "images.npy", np.zeros((2, 8, 8), np.uint8))
    succeed(clone, "python", "predict.py", "run=model@v1.0.0", "input=images.npy")
    kept = clone.root / "runs/registry"
    assert (kept / "model@v1.0.0/best.ckpt").read_bytes() == first.read_bytes()
    assert find(clone, "model@latest").stdout == str(kept / "model@v1.10.0/best.ckpt")
    assert (kept / "model@v1.10.0/best.ckpt").read_bytes() == newest.read_bytes()


@pytest.mark.slow
def test_what_cannot_be_fetched_is_one_line(house: Pipeline, tmp_path: Path) -> None:
    assert "model has no version here: git fetch --tags" in find(house, "model@latest").stderr
    assert "no artifact modle. Did you mean model?" in find(house, "modle@v1.0.0").stderr
    succeed(house, "dvc", "push")
    assert release(house, "v1.0.0").returncode == 0
    assert "no such version (v1.0.0)" in find(house, "model@v2.0.0").stderr
    shutil.rmtree(house.root / ".dvc/cache")
    (tmp_path / "storage").rename(tmp_path / "elsewhere")
    done = find(house, "model@v1.0.0")
    assert "DVC cannot fetch it" in done.stderr
    assert not list((house.root / "runs/registry").rglob("best.ckpt"))
    (tmp_path / "elsewhere").rename(tmp_path / "storage")
    assert find(house, "model@v1.0.0").returncode == 0
    (house.root / "runs").rename(tmp_path / "runs")
    shutil.rmtree(house.root / ".git")
    assert "not a git repository" in find(house, "model@v1.0.0").stderr
    (tmp_path / "runs").rename(house.root / "runs")
    assert find(house, "model@v1.0.0").returncode == 0  # it is kept
