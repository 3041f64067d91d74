"""A network over many images: the loop that evaluation and prediction share."""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from rich.progress import track
from torch import Tensor

from ..errors import UserError
from ..log import console
from ..models.network import Network


def pick_device(name: str) -> torch.device:
    """`auto` is the accelerator where there is one, else the CPU.

    Raises:
        UserError: If the device is not there.
    """
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device={name}: not available here ({error}).") from error


def batch_slices(count: int, batch_size: int) -> list[slice]:
    """Cut `count` rows into batches."""
    return [slice(start, start + batch_size) for start in range(0, count, batch_size)]


@torch.inference_mode()
def predict_batches(
    network: Network, batches: Iterable[np.ndarray], total: int, device: torch.device
) -> Iterator[Tensor]:
    """Logits of each batch, float [B, K] on the CPU, with a progress bar.

    Args:
        network: In evaluation mode.
        batches: uint8 [B, C, H, W] each.
        total: How many batches there are.
        device: Where the network runs.
    """
    network = network.to(device)
    for images in track(batches, "Predicting", total=total, console=console, transient=True):
        yield network(torch.from_numpy(images).to(device)).float().cpu()
