"""`predict`: a checkpoint and images → a CSV of classes and probabilities."""

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from omegaconf import DictConfig

from ..data.sources import list_images, read_image
from ..errors import UserError
from ..log import console, log, setup_logging
from ..models.network import load_model
from ..paths import as_typed, from_here
from .inference import batch_slices, pick_device, predict_batches


def run(config: DictConfig) -> None:
    """The `predict` stage.

    Raises:
        UserError: If the input is missing, empty, or not what the model takes.
    """
    setup_logging()
    source = from_here(config.input)
    if not source.exists():
        raise UserError(f"input={config.input}: there is no such file or folder.")
    network = load_model(config.run, config.trusted_modules)
    if source.suffix == ".npy":
        names, batches = from_array(source, network.shape, config.batch_size)
    else:
        skip = config.on_unreadable == "skip"
        names, batches = from_images(source, network.shape, config.batch_size, skip)
    output = Path(config.output).expanduser().absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    total = len(batch_slices(len(names), config.batch_size))
    scratch = output.with_name(f".{output.name}.part")
    with scratch.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["input", "class", "probability", *(f"p({c})" for c in network.classes)])
        done = 0
        for logits in predict_batches(network, batches, total, pick_device(config.device)):
            for shares in logits.softmax(-1).tolist():
                best = max(shares)
                chosen = network.classes[shares.index(best)]
                writer.writerow([names[done], chosen, *(f"{p:.6f}" for p in (best, *shares))])
                done += 1
    scratch.replace(output)
    console.print(f"{done} predictions  {as_typed(output)}", highlight=False, markup=False)


def from_array(
    file: Path, shape: list[int], batch_size: int
) -> tuple[list[str], Iterator[np.ndarray]]:
    """Row numbers, and batches, of an .npy: uint8 [N, C, H, W], or [N, H, W] for one channel."""
    try:
        images = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError) as error:
        raise UserError(f"{file} is no .npy array of numbers ({error}).") from error
    if images.ndim == 3:
        images = images[:, None]
    if images.dtype != np.uint8 or list(images.shape[1:]) != shape:
        raise UserError(
            f"{file} holds {images.dtype} {list(images.shape)}; the model takes uint8 "
            f"[N, {', '.join(map(str, shape))}]."
        )
    parts = batch_slices(len(images), batch_size)
    return [str(row) for row in range(len(images))], (np.array(images[part]) for part in parts)


def from_images(
    source: Path, shape: list[int], batch_size: int, skip: bool
) -> tuple[list[str], Iterator[np.ndarray]]:
    """Names, and batches, of an image or of all images below a folder; unreadable ones left out."""
    files = list_images(source) if source.is_dir() else [source]
    if not files:
        raise UserError(f"input={source}: this folder holds no image.")
    names: list[str] = []

    def batches() -> Iterator[np.ndarray]:
        channels, height, width = shape
        for part in batch_slices(len(files), batch_size):
            pairs = [(f, read_image(f, (channels, height, width), skip)) for f in files[part]]
            kept = [(f, image) for f, image in pairs if image is not None]
            names.extend(str(f.relative_to(source)) if f != source else f.name for f, _ in kept)
            if len(kept) < len(pairs):
                log.warning("%d unreadable images were skipped.", len(pairs) - len(kept))
            if kept:
                yield np.stack([image for _, image in kept])

    return names, batches()
