"""Prepared arrays and the batches that are read from them."""

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import composed
from lightning.pytorch import Callback, Trainer
from omegaconf import DictConfig

from {{ cookiecutter.package_name }}.data import prepare
from {{ cookiecutter.package_name }}.data.arrays import SPLITS, ImageArrays
from {{ cookiecutter.package_name }}.data.augment import Augment
from {{ cookiecutter.package_name }}.data.batches import BatchRows
from {{ cookiecutter.package_name }}.data.datamodule import ImageDataModule
from {{ cookiecutter.package_name }}.data.sources import Digits
from {{ cookiecutter.package_name }}.errors import UserError
from {{ cookiecutter.package_name }}.training import fit

ROWS = np.arange(1000, 1101)  # 101 of them: a prime, so that nothing divides it


def digits_in(folder: Path, *overrides: str) -> DictConfig:
    data = composed("prepare", *overrides).data
    data.prepared_dir = str(folder)
    return data


def written(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def read(
    split: int, batch: int, world: int, seed: int | None, epoch: int = 0
) -> list[list[list[int]]]:
    """What each rank reads: a list of batches, which are lists of rows."""
    ranks = []
    for rank in range(world):
        sampler = BatchRows(ROWS[:split], batch, rank, world, seed)
        sampler.set_epoch(epoch)
        batches = [rows.tolist() for rows in sampler]
        assert len(batches) == len(sampler)
        ranks.append(batches)
    return ranks


def test_splits_hold_every_image_once(prepared: Path) -> None:
    arrays = ImageArrays(prepared)
    rows = np.concatenate([arrays.splits[name] for name in SPLITS])
    assert sorted(rows) == list(range(len(arrays.labels)))
    assert len(rows) == 1797


def test_splits_hold_each_class_by_its_share(prepared: Path) -> None:
    arrays = ImageArrays(prepared)
    shares = {"train": 0.65, "val": 0.15, "test": 0.2}
    whole = np.bincount(arrays.labels)
    for name, share in shares.items():
        counts = np.bincount(arrays.labels[arrays.splits[name]])
        assert counts.tolist() == arrays.meta.counts[name]
        assert np.abs(counts - share * whole).max() <= 1


def test_split_follows_its_seed() -> None:
    labels = np.repeat([0, 1, 2], [50, 30, 3])
    split = partial(prepare.stratified_split, labels, 3, 0.2, 0.2)
    first, again, other = split(0), split(0), split(1)
    for name in SPLITS:
        assert first[name].tolist() == again[name].tolist()
        assert first[name].tolist() != other[name].tolist()
        assert 2 in labels[first[name]]  # however rare a class is, no split goes without it


def test_arrays_are_the_images_and_their_statistics(prepared: Path) -> None:
    arrays, source = ImageArrays(prepared), Digits()
    assert np.array_equal(arrays.images, np.stack(list(source.images())))
    assert np.array_equal(arrays.labels, source.labels)
    pixels = arrays.images[arrays.splits["train"]] / 255
    assert arrays.meta.mean == pytest.approx([pixels.mean()])
    assert arrays.meta.std == pytest.approx([pixels.std()])


def test_prepare_works_once(tmp_path: Path) -> None:
    data = digits_in(tmp_path / "digits")
    first, before = prepare.prepare(data), written(tmp_path / "digits")
    assert prepare.prepare(data) == first
    assert written(tmp_path / "digits") == before
    assert prepare.prepare(data, force=True).fingerprint == first.fingerprint
    assert written(tmp_path / "digits") != before


@pytest.mark.parametrize("change", ["data.split.seed=1", "data.split.val=0.3"])
def test_prepare_works_again_after_a_change(change: str, prepared: Path, tmp_path: Path) -> None:
    before = prepare.prepare(digits_in(tmp_path / "digits"))
    assert before.fingerprint == ImageArrays(prepared).meta.fingerprint
    after = prepare.prepare(digits_in(tmp_path / "digits", change))
    assert after.fingerprint != before.fingerprint
    assert ImageArrays(tmp_path / "digits").meta == after


@pytest.mark.parametrize("lost", ["meta.json", "images.npy", "splits.npz"])
def test_prepare_mends_what_is_incomplete(lost: str, tmp_path: Path) -> None:
    data = digits_in(tmp_path / "digits")
    prepare.prepare(data)
    (tmp_path / "digits" / lost).unlink()
    prepare.prepare(data)
    assert len(ImageArrays(tmp_path / "digits").images) == 1797


def test_a_split_that_leaves_nothing_keeps_what_is_there(tmp_path: Path) -> None:
    before = prepare.prepare(digits_in(tmp_path / "digits"))
    for val, test in ((0.5, 0.5), (-0.1, 0.2)):
        wrong = digits_in(tmp_path / "digits", f"data.split.val={val}", f"data.split.test={test}")
        with pytest.raises(UserError, match=f"val={val}"):
            prepare.prepare(wrong)
    assert ImageArrays(tmp_path / "digits").meta == before


def test_unprepared_data_name_the_command(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"prepare\.py"):
        ImageArrays(tmp_path)


@pytest.mark.parametrize("split", [101, 99, 32, 17, 5])
@pytest.mark.parametrize("batch", [12, 24, 102])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_evaluation_reads_every_row_once(world: int, batch: int, split: int) -> None:
    ranks = read(split, batch, world, seed=None)
    assert len({len(batches) for batches in ranks}) == 1  # or ranks would wait for each other
    rows = [row for batches in ranks for part in batches for row in part]
    assert sorted(rows) == ROWS[:split].tolist()
    assert all(part for batches in ranks for part in batches)


@pytest.mark.parametrize("batch", [12, 24])
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_the_batches_of_one_process(world: int, batch: int) -> None:
    for epoch in (0, 1):
        (alone,) = read(101, batch, 1, seed=7, epoch=epoch)
        ranks = read(101, batch, world, seed=7, epoch=epoch)
        for step, whole in enumerate(alone):
            parts = [batches[step] for batches in ranks]
            assert {len(part) for part in parts} == {batch // world}
            assert sorted(row for part in parts for row in part) == sorted(whole)
        assert {len(batches) for batches in ranks} == {len(alone)} == {101 // batch}


def test_order_follows_seed_and_epoch() -> None:
    orders = [read(101, 10, 1, s, e)[0] for s, e in ((0, 0), (0, 0), (0, 1), (1, 0), (1, 1))]
    assert orders[0] == orders[1]
    assert all(one != other for one, other in pairwise(orders[1:]))
    for batches in orders:
        rows = [row for part in batches for row in part]
        assert len(set(rows)) == len(rows) == 100


def test_workers_read_the_same_batches(prepared: Path) -> None:
    modules = [ImageDataModule(str(prepared), 64, num_workers=n, seed=3) for n in (0, 2)]
    for split in ("train", "val"):
        loaders = [getattr(module, f"{split}_dataloader")() for module in modules]
        for (images, labels), (others, other_labels) in zip(*loaders, strict=True):
            assert torch.equal(images, others)
            assert torch.equal(labels, other_labels)


def test_batches_hold_images_with_their_labels(prepared: Path) -> None:
    arrays = ImageArrays(prepared)
    pairs = zip(arrays.images, arrays.labels, strict=True)
    known = {image.tobytes(): label for image, label in pairs}
    images, labels = next(iter(ImageDataModule(str(prepared), 64).train_dataloader()))
    assert images.shape == (64, 1, 8, 8)
    assert images.dtype == torch.uint8
    assert labels.tolist() == [known[image.numpy().tobytes()] for image in images]


class Batches(Callback):
    """Keeps the labels of training batches, and the types of images."""

    def __init__(self) -> None:
        self.labels: list[list[int]] = []
        self.types: set[tuple[str, torch.dtype]] = set()

    def on_train_batch_start(self, *arguments: Any) -> None:
        images, labels = arguments[2]
        self.labels.append(labels.tolist())
        self.types.add(("train", images.dtype))

    def on_validation_batch_start(self, *arguments: Any) -> None:
        self.types.add(("val", arguments[2][0].dtype))


def test_epochs_are_shuffled_and_only_training_is_augmented(prepared: Path) -> None:
    config = composed("train", "model=mlp", "scheduler=none")
    config.data.prepared_dir = str(prepared)
    module, batches = fit.build_datamodule(config), Batches()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=2,
        callbacks=[batches],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(fit.build_task(config, module.facts), module)
    first, second = batches.labels[:18], batches.labels[18:]
    assert len(first) == len(second) == 18
    assert first != second
    assert batches.types == {("train", torch.float), ("val", torch.uint8)}


def test_a_batch_larger_than_the_data_is_refused(prepared: Path) -> None:
    with pytest.raises(UserError, match=r"batch_size=2000 .* 1169"):
        ImageDataModule(str(prepared), 2000)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "augment",
    [Augment(shift=0.2), Augment(rotation=20), Augment(flip=True), Augment(erasing=1)],
    ids=["shift", "rotation", "flip", "erasing"],
)
def test_augmentation_changes_images_within_their_range(augment: Augment, channels: int) -> None:
    torch.manual_seed(0)
    images = torch.randint(256, (32, channels, 9, 12), dtype=torch.uint8)
    changed = augment(images)
    assert changed.shape == images.shape
    assert changed.dtype == torch.float
    assert changed.min() >= 0
    assert changed.max() <= 1
    assert not torch.allclose(changed, images / 255)


def test_augmentation_draws_anew_for_each_image() -> None:
    torch.manual_seed(0)
    same = torch.randint(256, (1, 1, 9, 9), dtype=torch.uint8).expand(8, -1, -1, -1)
    changed = Augment(shift=0.3, rotation=30)(same)
    assert len({image.numpy().tobytes() for image in changed}) > 4


def test_without_augmentation_images_stay_as_they_are() -> None:
    images = torch.randint(256, (4, 1, 8, 8), dtype=torch.uint8)
    assert torch.equal(Augment()(images), images)
