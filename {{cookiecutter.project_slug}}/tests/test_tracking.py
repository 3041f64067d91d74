"""Raw images under DVC: a run says which version it is of, and others are noticed."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import composed
from omegaconf import DictConfig
from PIL import Image
from pipeline import Pipeline

from {{ cookiecutter.package_name }} import paths
from {{ cookiecutter.package_name }}.data import records
from {{ cookiecutter.package_name }}.data.arrays import Meta
from {{ cookiecutter.package_name }}.data.prepare import prepare
from {{ cookiecutter.package_name }}.errors import UserError

RAW, RECORD = "data/raw/flowers", "data/raw/flowers.dvc"
STRICT = "data.strict=true"
CONFIG = f"""defaults:
  - image_folder
  - _self_
name: flowers
source:
  raw_dir: {RAW}
  size: [8, 8]
batch_size: 4
"""


def add_images(root: Path, count: int, first: int = 0) -> None:
    """Write `count` images of each of two classes, numbered from `first`."""
    random = np.random.default_rng(first)
    for name in ("rose", "tulip"):
        (root / RAW / name).mkdir(parents=True, exist_ok=True)
        for number in range(first, first + count):
            pixels = random.integers(256, size=(8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / RAW / name / f"{number}.png")


def flowers(*overrides: str) -> DictConfig:
    return composed("prepare", "data=image_folder", "data.name=flowers", *overrides).data


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project's root with images that DVC has recorded, without git."""
    from dvc.repo import Repo

    monkeypatch.setattr(paths, "ROOT", tmp_path)
    monkeypatch.setattr(records, "ROOT", tmp_path)
    add_images(tmp_path, count=6)
    with Repo.init(str(tmp_path), no_scm=True) as repo:
        repo.add(str(tmp_path / RAW))
        yield tmp_path


def prepare_lazily(*overrides: str) -> Meta:
    """As train.py does it: prepared arrays are enough where nothing speaks against them."""
    return prepare(flowers(*overrides), check_files=False)


def images(meta: Meta) -> int:
    return sum(map(sum, meta.counts.values()))


def test_untracked_images_need_no_dvc(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (house / RECORD).unlink()
    for name in [name for name in sys.modules if name.partition(".")[0] == "dvc"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "dvc", None)  # it cannot be imported
    add_images(house, count=1, first=6)
    assert prepare_lazily(STRICT).record is None


def test_images_as_recorded_are_silent(house: Path, caplog: pytest.LogCaptureFixture) -> None:
    meta = prepare_lazily(STRICT)
    assert images(meta) == 12
    assert meta.record == {"path": RECORD, "md5": records.find_record(RAW).md5}  # type: ignore[union-attr]
    shutil.rmtree(house / RAW)  # arrays of this version are enough
    assert prepare_lazily(STRICT) == meta
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_other_images_are_noticed(house: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = prepare_lazily()
    (house / RAW / "rose/0.png").write_bytes((house / RAW / "tulip/0.png").read_bytes())
    with pytest.raises(UserError, match=f"{RAW} differs from its record {RECORD}"):
        prepare_lazily(STRICT)
    after = prepare_lazily()  # of the files that there are
    assert f"dvc pull {RECORD}" in caplog.text
    assert after.fingerprint != before.fingerprint
    assert after.record != before.record
    add_images(house, count=6)
    assert prepare_lazily(STRICT).fingerprint == before.fingerprint


def test_a_record_that_has_moved_on_is_noticed(
    house: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, old = prepare_lazily(), (house / RECORD).read_text()
    add_images(house, count=1, first=6)
    from dvc.repo import Repo

    with Repo(str(house)) as repo:
        repo.add(str(house / RAW))
    new = (house / RECORD).read_text()
    (house / RECORD).write_text(old)
    (house / RAW).rename(house / "elsewhere")
    (house / RECORD).write_text(new)  # git pull, without dvc pull
    with pytest.raises(UserError, match=f"dvc pull {RECORD}"):
        prepare_lazily(STRICT)
    assert prepare_lazily() == before
    assert f"dvc pull {RECORD}" in caplog.text
    with pytest.raises(UserError, match=f"{RAW} is not here: dvc pull {RECORD}"):
        prepare_lazily("data.split.seed=1")
    (house / "elsewhere").rename(house / RAW)
    assert images(prepare_lazily(STRICT)) == 14


def test_arrays_from_before_the_record_serve_on(house: Path) -> None:
    (house / RECORD).rename(house / "kept")
    before = prepare_lazily()
    (house / "kept").rename(house / RECORD)
    stamp = (house / "data/prepared/flowers/meta.json").stat().st_mtime_ns
    after = prepare_lazily(STRICT)
    assert (before.record, after.record) == (None, {"path": RECORD, "md5": after.record["md5"]})  # type: ignore[index]
    assert (house / "data/prepared/flowers/meta.json").stat().st_mtime_ns == stamp


def test_a_record_holds_for_folders_below_it(house: Path) -> None:
    found = records.find_record(f"{RAW}/rose")
    assert found is not None
    assert found.file == house / RECORD
    assert records.find_record("data/raw") is None
    assert records.find_record("/elsewhere/flowers") is None


def test_a_stage_may_ask_while_dvc_works(house: Path) -> None:
    from dvc.repo import Repo

    with Repo(str(house)) as repo, repo.lock:
        assert prepare_lazily(STRICT).record is not None


def test_a_broken_record_is_one_line(house: Path) -> None:
    with (house / RECORD).open("a") as stream:
        stream.write("<<<<<<< HEAD\n")
    with pytest.raises(UserError, match=f"{RECORD} is no record"):
        prepare_lazily()


@pytest.fixture
def tracked(fresh: Pipeline, tmp_path: Path) -> Pipeline:
    """The project with a data set of its own that is recorded, committed and pushed."""
    pipeline = fresh.copied_to(tmp_path / "a project (1)")
    (pipeline.root / "configs/data/flowers.yaml").write_text(CONFIG, encoding="utf-8")
    add_images(pipeline.root, count=8)
    done = pipeline.call("dvc", "remote", "add", "-f", "-d", "storage", str(tmp_path / "storage"))
    assert done.returncode == 0, done.stderr
    share(pipeline)
    return pipeline


def share(pipeline: Pipeline) -> None:
    """Record the images, commit, and push them; git has the record and none of them."""
    for words in (("dvc", "add", RAW), ("git", "add", "--all"), ("dvc", "push", "--quiet")):
        done = pipeline.call(*words)
        assert done.returncode == 0, done.stderr
    pipeline.commit()
    assert pipeline.call("git", "ls-files", "data/raw").stdout.split() == [
        "data/raw/digits/README.md",
        RECORD,
    ]


def trained_on(pipeline: Pipeline, name: str) -> dict[str, Any]:
    """Train on just the recorded images; what the run says of its data."""
    words = ["data=flowers", STRICT, "model=mlp", "trainer=cpu", "trainer.max_epochs=1"]
    done = pipeline.call("python", "train.py", f"run_dir=runs/{name}", *words)
    assert done.returncode == 0, done.stderr
    return json.loads((pipeline.root / f"runs/{name}/run.json").read_text("utf-8"))["data"]


def refused(pipeline: Pipeline) -> str:
    """What is said where the images are not the recorded ones."""
    done = pipeline.call("python", "prepare.py", "data=flowers", STRICT)
    assert done.returncode == 1
    return done.stderr


def pull(pipeline: Pipeline) -> None:
    done = pipeline.call("dvc", "pull", RECORD)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_new_batch_travels(tracked: Pipeline, tmp_path: Path) -> None:
    clone = Pipeline(tmp_path / "clone")
    tracked.call("git", "clone", "--quiet", str(tracked.root), str(clone.root), cwd=tmp_path)
    assert f"{RAW} is not here: dvc pull {RECORD}" in refused(clone)
    pull(clone)
    first = trained_on(clone, "first")
    assert f"md5: {first['record']['md5']}" in (clone.root / RECORD).read_text("utf-8")

    add_images(tracked.root, count=2, first=8)
    assert f"dvc add {RAW}" in refused(tracked)
    share(tracked)
    assert clone.call("git", "pull", "--quiet").returncode == 0
    assert f"dvc pull {RECORD}" in refused(clone)
    pull(clone)
    second = trained_on(clone, "second")  # prepared again, by itself
    assert second["fingerprint"] != first["fingerprint"]
    assert f"md5: {second['record']['md5']}" in (tracked.root / RECORD).read_text("utf-8")


@pytest.mark.slow
def test_the_pipeline_asks_for_the_record(tracked: Pipeline) -> None:
    params = tracked.root / "params.yaml"
    text = params.read_text("utf-8").replace("dataset: digits", "dataset: flowers")
    params.write_text(text, encoding="utf-8")
    tracked.set_params("prepare", STRICT)
    done = tracked.call("dvc", "repro", "prepare")
    assert done.returncode == 0, done.stdout + done.stderr
    meta = json.loads((tracked.root / "data/prepared/flowers/meta.json").read_text("utf-8"))
    assert f"md5: {meta['record']['md5']}" in (tracked.root / RECORD).read_text("utf-8")
