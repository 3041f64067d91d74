"""Cross-validation: what each fold trains on, and that evaluation and ranks know of it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, SHORT, Run, composed, overrides_for, path_override, python_here

from {{ cookiecutter.package_name }}.data import datamodule, folds, prepare
from {{ cookiecutter.package_name }}.data.arrays import ImageArrays
from {{ cookiecutter.package_name }}.errors import UserError
from {{ cookiecutter.package_name }}.models.network import load_model

TWO_RANKS = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]


def in_fold(prepared: Path, fold: int | None, **options: Any) -> datamodule.ImageDataModule:
    return datamodule.ImageDataModule(str(prepared), 64, fold=fold, **options)


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def test_every_image_to_learn_from_is_validated_on_once(prepared: Path) -> None:
    arrays = ImageArrays(prepared)
    cuts = [in_fold(prepared, fold).splits for fold in range(5)]
    pool = sorted([*arrays.splits["train"], *arrays.splits["val"]])
    assert sorted(np.concatenate([cut["val"] for cut in cuts])) == pool
    for cut in cuts:
        assert sorted([*cut["train"], *cut["val"]]) == pool
        assert cut["test"].tolist() == arrays.splits["test"].tolist()
        counts = np.bincount(arrays.labels[cut["val"]])
        assert np.abs(counts - np.bincount(arrays.labels[pool]) / 5).max() <= 1


def test_folds_are_those_of_the_split_whatever_the_seed_of_a_run(
    prepared: Path, tmp_path: Path
) -> None:
    first, again = in_fold(prepared, 1, seed=1), in_fold(prepared, 1, seed=2)
    assert first.splits["val"].tolist() == again.splits["val"].tolist()
    data = composed("prepare", "data.split.seed=1").data
    data.prepared_dir = str(tmp_path / "other")
    prepare.prepare(data)
    assert in_fold(tmp_path / "other", 1).splits["val"].tolist() != first.splits["val"].tolist()


def test_facts_are_those_of_what_a_fold_trains_on(prepared: Path) -> None:
    module = in_fold(prepared, 3)
    rows = module.splits["train"]
    pixels = module.arrays.images[rows] / 255
    assert module.facts["mean"] == pytest.approx([pixels.mean()])
    assert module.facts["std"] == pytest.approx([pixels.std()])
    assert module.facts["mean"] != module.arrays.meta.mean
    assert module.facts["counts"]["train"] == np.bincount(module.arrays.labels[rows]).tolist()
    assert sum(map(sum, module.facts["counts"].values())) == 1797


def test_without_a_fold_the_split_is_the_prepared_one(prepared: Path) -> None:
    module = in_fold(prepared, None)
    arrays = ImageArrays(prepared)
    assert module.splits["train"].tolist() == arrays.splits["train"].tolist()
    assert module.facts["counts"] == arrays.meta.counts
    assert module.facts["mean"] == arrays.meta.mean


@pytest.mark.parametrize(
    ("fold", "count", "said"),
    [
        (5, 5, r"data.fold=5: take null, or 0 to 4 \(data.folds=5\)"),
        (-1, 5, "data.fold=-1: take null, or 0 to 4"),
        (1.5, 5, "data.fold=1.5"),
        (True, 5, "data.fold=True"),
        ([0, 1], 5, r"data.fold=\[0, 1\]"),
        (0, 1, "data.folds=1: take a whole number above 1"),
        (0, None, "data.folds=None"),
    ],
)
def test_a_fold_that_there_is_not_is_one_line(fold: Any, count: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        folds.check_folds(fold, count)
    folds.check_folds(None, count)


def test_a_class_with_fewer_images_than_folds_is_named(prepared: Path) -> None:
    with pytest.raises(UserError, match=r"class 8 has 139 .* data.folds=200: set data.folds=139"):
        in_fold(prepared, 0, folds=200)
    assert in_fold(prepared, 138, folds=139).splits["val"].size > 0


def test_a_batch_larger_than_what_the_fold_trains_on_is_refused(prepared: Path) -> None:
    with pytest.raises(UserError, match="more than the 719 training images"):
        datamodule.ImageDataModule(str(prepared), 1000, fold=0, folds=2)


@pytest.mark.parametrize("word", ["data.fold=5", "data.fold=0 data.folds=1", "data.fold=first"])
def test_training_refuses_it_before_there_is_a_run(word: str, run: Run, tmp_path: Path) -> None:
    done = run("train.py", *word.split())
    assert done.returncode == 1
    assert done.stderr.startswith("error: data.fold")
    assert not (tmp_path / "runs").exists()


@pytest.fixture(scope="module")
def trained_fold(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a short training on fold 2."""
    return train(tmp_path_factory.mktemp("fold"), prepared, *SHORT, "data.fold=2")


def train(folder: Path, prepared: Path, *words: str) -> Path:
    given = [*overrides_for("train.py", folder, prepared), *words]
    done = python_here(ROOT / "train.py", *given, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (folder / "runs/digits").iterdir()
    return run


@pytest.mark.slow
def test_evaluation_measures_the_images_of_the_fold(
    trained_fold: Path, prepared: Path, run: Run
) -> None:
    model, arrays = load_model(trained_fold), ImageArrays(prepared)
    for split, told in (("train", None), ("val", "val/acc"), ("test", "test/acc")):
        done = run("evaluate.py", path_override("run", trained_fold), f"split={split}")
        assert done.returncode == 0, done.stderr
        measured = read_json(trained_fold / "evaluate/metrics.json")
        rows = folds.fold_splits(arrays, 2, 5)[split]
        with torch.inference_mode():
            right = model(torch.from_numpy(arrays.images[rows])).argmax(-1).numpy()
        assert measured[f"{split}/count"] == len(rows)
        assert measured[f"{split}/acc"] == pytest.approx((right == arrays.labels[rows]).mean())
        if told:
            assert measured[told] == pytest.approx(read_json(trained_fold / "metrics.json")[told])


@pytest.mark.slow
def test_a_checkpoint_from_before_there_were_folds(
    trained: Path, prepared: Path, run: Run, tmp_path: Path
) -> None:
    checkpoint = torch.load(trained / "checkpoints/best.ckpt", weights_only=True)
    for key in ("fold", "folds"):
        del checkpoint["hyper_parameters"]["data"][key]
    torch.save(checkpoint, tmp_path / "old.ckpt")
    done = run("evaluate.py", "run=old.ckpt", "split=val", "out_dir=.")
    assert done.returncode == 0, done.stderr
    assert read_json(tmp_path / "metrics.json")["val/count"] == 269


@pytest.mark.slow
def test_a_fold_goes_on_as_that_fold(trained_fold: Path, run: Run) -> None:
    more = [*SHORT, "trainer.max_epochs=6", "allow_changes=true"]
    there = path_override("resume", trained_fold)
    done = run("train.py", *SHORT, "data.fold=3", there)
    assert done.returncode == 1
    assert "data.fold: 2 → 3" in done.stderr
    done = run("train.py", *more, "data.fold=2", there)
    assert done.returncode == 0, done.stderr
    config = (trained_fold / "config.yaml").read_text(encoding="utf-8")
    assert "fold: 2\n" in config


@pytest.mark.slow
def test_ranks_share_a_fold(prepared: Path, tmp_path: Path) -> None:
    # Nothing random in a step, and no statistics of a part of the batch.
    words = ["data.fold=4", "trainer.max_epochs=1", "data.augment=null"]
    words += ["model=vit", "model.dropout=0", "model.depth=1"]
    places = [tmp_path / name for name in ("one", "two")]
    for place in places:
        place.mkdir()
    one = train(places[0], prepared, *words)
    two = train(places[1], prepared, *words, *TWO_RANKS)
    assert read_json(two / "run.json")["world_size"] == 2
    assert read_json(two / "metrics.json") == pytest.approx(
        read_json(one / "metrics.json"), rel=1e-3
    )


@pytest.mark.slow
def test_data_without_a_val_split_are_cross_validated(run: Run, tmp_path: Path) -> None:
    place = path_override("data.prepared_dir", tmp_path / "prepared")
    words = ["model=mlp", "debug=fast", "data.split.val=0", place]
    done = run("train.py", *words, "data.fold=0")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs/debug").iterdir()
    assert "val/acc" in read_json(folder / "metrics.json")
