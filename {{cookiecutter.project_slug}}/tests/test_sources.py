"""Image folders and CSVs, good ones and bad ones; every message names the culprit."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import composed
from omegaconf import DictConfig
from PIL import Image

from {{ cookiecutter.package_name }}.data.arrays import ImageArrays
from {{ cookiecutter.package_name }}.data.prepare import prepare
from {{ cookiecutter.package_name }}.data.sources import ImageFolder, read_image
from {{ cookiecutter.package_name }}.errors import UserError

MODES = {"png": ["L", "RGB", "RGBA", "P", "1", "LA"], "jpg": ["L", "RGB", "CMYK"], "webp": ["RGB"]}
FORMATS = [(end, mode) for end, modes in MODES.items() for mode in modes]


def draw(path: Path, colour: tuple[int, int, int] = (255, 0, 0), mode: str = "RGB") -> Path:
    """An image of one colour, 12 pixels wide and 10 high."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 10), colour).convert(mode).save(path)
    return path


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """Two classes: 6 red images and 5 green ones."""
    for index in range(6):
        draw(tmp_path / f"raw/red/{index}.png")
    for index in range(5):
        draw(tmp_path / f"raw/green/{index}.png", (0, 255, 0))
    return tmp_path / "raw"


@pytest.fixture
def data(raw: Path, tmp_path: Path) -> DictConfig:
    data = composed("prepare", "data=image_folder").data
    data.prepared_dir, data.source.raw_dir = str(tmp_path / "prepared"), str(raw)
    return data


@pytest.fixture
def table(raw: Path) -> Callable[..., Path]:
    """Write a CSV; `lines` follow the one that names the columns."""

    def table(*lines: str, columns: str = "path,label") -> Path:
        rows = ["red/0.png,r", "red/1.png,r", "red/2.png,r"]
        rows += ["green/0.png,g", "green/1.png,g", "green/2.png,g"]
        file = raw / "table.csv"
        file.write_text("\n".join([columns, *rows, *lines]) + "\n", encoding="utf-8")
        return file

    return table


def test_class_folders_become_arrays(data: DictConfig) -> None:
    meta = prepare(data)
    assert meta.classes == ["green", "red"]
    assert meta.shape == [3, 32, 32]
    assert np.sum(list(meta.counts.values()), axis=0).tolist() == [5, 6]
    arrays = ImageArrays(data.prepared_dir)
    green, red = (arrays.images[arrays.labels == label] for label in (0, 1))
    assert (red[:, 0] == 255).all()
    assert (red[:, 1:] == 0).all()
    assert (green[:, 1] == 255).all()


def test_new_and_changed_files_are_noticed(data: DictConfig, raw: Path) -> None:
    first = prepare(data)
    draw(raw / "red/deeper/new.JPG")
    second = prepare(data)
    assert sum(map(sum, second.counts.values())) == sum(map(sum, first.counts.values())) + 1
    draw(raw / "red/0.png", (9, 9, 9))
    os.utime(raw / "red/0.png", (1, 1))
    assert prepare(data).fingerprint != second.fingerprint


def test_hidden_and_foreign_files_are_no_images(data: DictConfig, raw: Path) -> None:
    (raw / "red/notes.txt").write_text("no image")
    draw(raw / "red/.hidden.png")
    draw(raw / "red/.ipynb_checkpoints/0.png")
    draw(raw / ".trash/0.png")
    draw(raw / "beside_the_folders.png")
    assert sum(map(sum, prepare(data).counts.values())) == 11


@pytest.mark.parametrize(("end", "mode"), FORMATS)
@pytest.mark.parametrize("channels", [1, 3])
def test_every_kind_of_image_is_read(end: str, mode: str, channels: int, tmp_path: Path) -> None:
    image = read_image(draw(tmp_path / f"one.{end}", (255, 255, 255), mode), (channels, 6, 9))
    assert image is not None
    assert image.shape == (channels, 6, 9)
    assert image.dtype == np.uint8
    assert (image > 250).all()


@pytest.mark.parametrize("channels", [1, 3])
def test_sixteen_bits_keep_their_greys(channels: int, tmp_path: Path) -> None:
    grey = np.tile(np.linspace(0, 65535, 16).astype(np.uint16), (4, 1))
    Image.fromarray(grey).save(tmp_path / "deep.png")
    image = read_image(tmp_path / "deep.png", (channels, 4, 16))
    assert image is not None
    assert np.abs(image[:, 0] - np.linspace(0, 255, 16)).max() <= 1


def test_a_photo_stands_as_its_camera_says(tmp_path: Path) -> None:
    halves = np.zeros((8, 8, 3), np.uint8)
    halves[:4] = 255  # the upper half is white
    exif = Image.Exif()
    exif[0x0112] = 3  # orientation: turned upside down
    Image.fromarray(halves).save(tmp_path / "photo.png", exif=exif)
    image = read_image(tmp_path / "photo.png", (3, 8, 8))
    assert image is not None
    assert image[:, :4].max() == 0
    assert image[:, 4:].min() == 255


@pytest.mark.parametrize("place", ["relative", "absolute"])
def test_csv_names_images_and_labels(
    place: str, data: DictConfig, raw: Path, tmp_path: Path, table: Callable[..., Path]
) -> None:
    blue = draw(tmp_path / "elsewhere/blue.png", (0, 0, 255))
    path = blue if place == "absolute" else "../elsewhere/blue.png"
    data.source.csv = str(table(f'"{path}",r', ""))
    meta = prepare(data)
    assert meta.classes == ["g", "r"]
    assert np.sum(list(meta.counts.values()), axis=0).tolist() == [3, 4]
    images = ImageArrays(data.prepared_dir).images
    assert (images[:, 2] == 255).all(axis=(1, 2)).sum() == 1


@pytest.mark.parametrize("bad", [b"", b"no image", "cut short"], ids=["empty", "text", "cut"])
def test_an_unreadable_image_is_named(bad: bytes | str, data: DictConfig, raw: Path) -> None:
    good = draw(raw / "red/whole.png", (1, 2, 3)).read_bytes()
    (raw / "red/bad.png").write_bytes(bad if isinstance(bad, bytes) else good[:-30])
    with pytest.raises(UserError, match=r"red.bad\.png: not a readable image"):
        prepare(data)
    assert not Path(data.prepared_dir).exists()
    data.source.on_unreadable = "skip"
    meta = prepare(data)
    assert meta.skipped == 1
    assert meta.counts["train"][1] + meta.counts["val"][1] + meta.counts["test"][1] == 7
    arrays = ImageArrays(data.prepared_dir)
    assert len(arrays.images) == len(arrays.labels) == 12
    assert (arrays.images[arrays.labels == 0][:, 1] == 255).all()  # labels moved up with images


def test_skipping_leaves_no_class_without_images(data: DictConfig, raw: Path) -> None:
    for file in sorted((raw / "green").iterdir())[1:]:
        file.write_bytes(b"no image")
    data.source.on_unreadable = "skip"
    with pytest.raises(UserError, match="class green"):
        prepare(data)


def test_an_empty_class_is_named(raw: Path) -> None:
    (raw / "blue").mkdir()
    with pytest.raises(UserError, match=r"raw.blue: this class folder holds no image"):
        ImageFolder(str(raw))


def test_one_class_is_not_enough(tmp_path: Path) -> None:
    draw(tmp_path / "red/0.png")
    with pytest.raises(UserError, match="only the class folder red"):
        ImageFolder(str(tmp_path))
    with pytest.raises(UserError, match="no class folders"):
        ImageFolder(str(tmp_path / "red"))


def test_a_class_smaller_than_the_splits_is_named(data: DictConfig, raw: Path) -> None:
    draw(raw / "blue/0.png")
    draw(raw / "blue/1.png")
    with pytest.raises(UserError, match=r"class blue has 2 images.*3 splits"):
        prepare(data)
    data.split.val = 0
    assert prepare(data).counts["test"][0] == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"raw_dir": "/there/is/none"}, "/there/is/none"),
        ({"channels": 2}, "channels=2"),
        ({"size": [0, 32]}, "size"),
        ({"size": 32}, "size"),
        ({"on_unreadable": "ignore"}, "on_unreadable=ignore"),
        ({"csv": "/none.csv"}, r"none\.csv"),
    ],
    ids=["raw_dir", "channels", "no pixels", "size", "on_unreadable", "csv"],
)
def test_a_wrong_option_is_named(options: dict[str, Any], said: str, raw: Path) -> None:
    with pytest.raises(UserError, match=said):
        ImageFolder(**{"raw_dir": str(raw), **options})


@pytest.mark.parametrize(
    ("columns", "line", "said"),
    [
        ("file,label", "red/3.png,r", "columns path and label"),
        ("path;label", "red/3.png;r", "columns path and label"),
        ("path,label", "red/none.png,r", r"line 8: .*none\.png does not exist"),
        ("path,label", "red/3.png,", "line 8: the label is empty"),
        ("path,label", "red/3.png", "line 8: the label is empty"),
    ],
)
def test_a_wrong_csv_is_named(
    columns: str, line: str, said: str, raw: Path, table: Callable[..., Path]
) -> None:
    with pytest.raises(UserError, match=rf"table\.csv.*{said}"):
        ImageFolder(str(raw), str(table(line, columns=columns)))


def test_a_csv_of_one_class_is_not_enough(raw: Path) -> None:
    (raw / "one.csv").write_text("path,label\nred/0.png,r\nred/1.png,r\n")
    with pytest.raises(UserError, match=r"one\.csv: it names fewer than two classes"):
        ImageFolder(str(raw), str(raw / "one.csv"))


@pytest.mark.parametrize("content", [b"", b"path,label\nred/\xe4.png,r\n"], ids=["empty", "latin"])
def test_a_csv_that_is_none_is_named(content: bytes, raw: Path) -> None:
    (raw / "odd.csv").write_bytes(content)
    with pytest.raises(UserError, match=r"odd\.csv"):
        ImageFolder(str(raw), str(raw / "odd.csv"))
