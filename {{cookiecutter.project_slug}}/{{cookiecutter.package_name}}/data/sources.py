"""Raw data: where images and labels come from. One class a kind of source."""

import csv
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image, ImageOps

from ..errors import UserError
from ..paths import from_root

EXTENSIONS = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"}


class Source(Protocol):
    """What `prepare` needs of a source.

    Attributes:
        classes: Class names; a label is an index into them.
        labels: One label an image, int64 [N].
        shape: Channels, height and width of every image.
    """

    classes: list[str]
    labels: np.ndarray
    shape: tuple[int, int, int]

    def signature(self) -> str:
        """Hash of the raw data."""

    def images(self) -> Iterator[np.ndarray | None]:
        """Images in the order of `labels`, uint8 [C, H, W]; None for one that is skipped."""


class Digits:
    """Handwritten digits bundled with scikit-learn: 1,797 images of 8×8, from the UCI archive."""

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        raw = load_digits()
        self.classes = [str(name) for name in raw.target_names]
        self.labels = raw.target.astype(np.int64)
        self.shape = (1, 8, 8)
        # 17 grey levels, 0 to 16, spread over the whole of uint8
        self._images = np.rint(raw.images * (255 / 16)).astype(np.uint8)[:, None]

    def signature(self) -> str:
        """Hash of images and labels."""
        return sha256(self._images.tobytes() + self.labels.tobytes()).hexdigest()

    def images(self) -> Iterator[np.ndarray]:
        """Images one by one, uint8 [1, 8, 8]."""
        return iter(self._images)


class ImageFolder:
    """Images below `raw_dir`: a folder a class, or a CSV with the columns path and label.

    Args:
        raw_dir: `raw_dir/<class>/*.png`; where a CSV is given, its paths start here.
        csv: A CSV file instead of class folders.
        size: Height and width after resizing, in pixels.
        channels: 3 for RGB, 1 for grey.
        on_unreadable: `error`, or `skip` to go on without the image and say how many.

    Raises:
        UserError: If a folder, file or column is missing, a class is empty or there is but one.
    """

    def __init__(
        self,
        raw_dir: str,
        csv: str | None = None,
        size: tuple[int, int] = (32, 32),
        channels: int = 3,
        on_unreadable: str = "error",
    ) -> None:
        if channels not in (1, 3):
            raise UserError(f"data.source.channels={channels}: take 3 (RGB) or 1 (grey).")
        if on_unreadable not in ("error", "skip"):
            raise UserError(f"data.source.on_unreadable={on_unreadable}: take error or skip.")
        if isinstance(size, int) or len(size) != 2 or min(size) < 1:
            raise UserError(f"data.source.size={size}: take [height, width], in pixels.")
        self.root = from_root(raw_dir)
        if not self.root.is_dir():
            raise UserError(f"data.source.raw_dir={raw_dir}: there is no such folder.")
        found = _from_folders(self.root) if csv is None else _from_csv(self.root, from_root(csv))
        self.files = [path for path, _ in found]
        names = [name for _, name in found]
        self.classes = sorted(set(names))
        index = {name: label for label, name in enumerate(self.classes)}
        self.labels = np.array([index[name] for name in names], dtype=np.int64)
        self.shape = (channels, int(size[0]), int(size[1]))
        self.skip = on_unreadable == "skip"

    def signature(self) -> str:
        """Hash of names, labels and contents of the files; when they were touched plays no part."""
        digest = sha256()
        with ThreadPoolExecutor() as pool:
            contents = pool.map(lambda path: sha256(path.read_bytes()).hexdigest(), self.files)
            for path, label, content in zip(self.files, self.labels, contents, strict=True):
                line = f"{os.path.relpath(path, self.root)}\0{self.classes[label]}\0{content}\n"
                digest.update(line.encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def images(self) -> Iterator[np.ndarray | None]:
        """Decode in threads (Pillow releases the GIL), in order."""
        decode = partial(read_image, shape=self.shape, skip=self.skip)
        with ThreadPoolExecutor() as pool:
            # In groups, so that a large folder is never decoded ahead of the writer.
            for start in range(0, len(self.files), 256):
                yield from pool.map(decode, self.files[start : start + 256])


def read_image(path: Path, shape: tuple[int, int, int], skip: bool = False) -> np.ndarray | None:
    """Decode and resize one image.

    Args:
        path: An image file that Pillow can read.
        shape: Channels (1 grey, 3 RGB), height and width of the result.
        skip: Return None for an unreadable file instead of raising.

    Returns:
        uint8 [C, H, W].
    """
    channels, height, width = shape
    try:
        with Image.open(path) as file:
            # Both sides at least, since the camera may have turned the image.
            file.draft("RGB" if channels == 3 else "L", (max(width, height),) * 2)
            image: Image.Image = ImageOps.exif_transpose(file)
            if image.mode.startswith("I;16"):  # Pillow would cut off all above 255
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            image = image.convert("RGB" if channels == 3 else "L")
            if image.size != (width, height):
                image = image.resize((width, height), Image.Resampling.BILINEAR, reducing_gap=2.0)
            pixels = np.asarray(image, dtype=np.uint8)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        if skip:
            return None
        raise UserError(f"{path}: not a readable image ({error}).") from error
    return pixels.transpose(2, 0, 1) if channels == 3 else pixels[None]


def list_images(folder: Path) -> list[Path]:
    """Image files below `folder`, sorted, hidden ones left out."""
    files = (path for path in folder.rglob("*") if path.suffix.lower() in EXTENSIONS)
    parts = [(path, path.relative_to(folder).parts) for path in files if path.is_file()]
    return sorted(path for path, names in parts if not any(n.startswith(".") for n in names))


def _from_folders(root: Path) -> list[tuple[Path, str]]:
    folders = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    if len(folders) < 2:
        held = f"only the class folder {folders[0].name}" if folders else "no class folders"
        raise UserError(f"{root}: it holds {held}; a classifier needs two or more.")
    found: list[tuple[Path, str]] = []
    for folder in folders:
        files = list_images(folder)
        if not files:
            raise UserError(f"{folder}: this class folder holds no image.")
        found += [(path, folder.name) for path in files]
    return found


def _from_csv(root: Path, file: Path) -> list[tuple[Path, str]]:
    if not file.is_file():
        raise UserError(f"data.source.csv={file}: there is no such file.")
    try:
        rows = csv.DictReader(file.read_text(encoding="utf-8-sig").splitlines())
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: this is no UTF-8 ({error.reason}).") from error
    if not {"path", "label"} <= set(rows.fieldnames or ()):
        raise UserError(f"{file}: its first line must name the columns path and label.")
    found = [(root / (row["path"] or ""), row["label"] or "") for row in rows]
    for line, (path, label) in enumerate(found, start=2):
        if not label or not path.is_file():
            what = f"{path} does not exist" if label else "the label is empty"
            raise UserError(f"{file}, line {line}: {what}.")
    if len({label for _, label in found}) < 2:
        raise UserError(f"{file}: it names fewer than two classes.")
    return found
