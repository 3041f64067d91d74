"""The model as it is shipped: raw images in, logits out, rebuilt from a checkpoint alone."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..paths import find_checkpoint, is_sharded, sharded_error

PREFIX = "network."  # of the network's keys in a checkpoint of the LightningModule


class Network(nn.Module):
    """Scaling and normalisation, then a net; so raw images go in, wherever the model runs.

    Args:
        net: From normalised images, float [N, C, H, W], to logits [N, K].
        data: `classes`, `shape`, and the `mean` and `std` of each channel, as plain values.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, net: nn.Module, data: Mapping[str, Any]) -> None:
        super().__init__()
        self.net = net
        self.classes: list[str] = list(data["classes"])
        self.shape: list[int] = list(data["shape"])
        self.register_buffer("mean", torch.tensor(data["mean"]).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(data["std"]).view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Images [N, C, H, W], uint8 or float in [0, 1] → logits [N, K]."""
        scaled = images.to(self.mean.dtype)
        if images.dtype == torch.uint8:
            scaled = scaled / 255
        return self.net((scaled - self.mean) / self.std)


def build_network(
    net: Mapping[str, Any], data: Mapping[str, Any], trusted_modules: Sequence[str] = ()
) -> Network:
    """Build a network from plain values, as they stand in a config and in a checkpoint.

    Args:
        net: `_target_`, a class of this project's `models`, and its arguments.
        data: See `Network`.
        trusted_modules: Modules, beside `models`, whose classes may be built too.

    Raises:
        UserError: If `_target_` is of another module, is no network, or refuses its arguments.
    """
    arguments = dict(net)
    module, _, name = str(arguments.pop("_target_")).rpartition(".")
    allowed = (__package__ or "", *trusted_modules)
    if not any(module == one or module.startswith(f"{one}.") for one in allowed):
        raise UserError(f"{module}.{name} is not one of {', '.join(allowed)}: see trusted_modules.")
    try:
        kind = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"model: cannot find {module}.{name} ({error}).") from error
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise UserError(f"{module}.{name} is not an nn.Module.")
    shape, classes = data["shape"], len(data["classes"])
    try:
        return Network(kind(input_shape=shape, num_classes=classes, **arguments), data)
    except (TypeError, ValueError) as error:
        raise UserError(f"model: {name} cannot be built with {arguments}: {error}") from error


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint of this project onto the CPU; tensors and builtins only.

    Raises:
        UserError: If the file is no such checkpoint.
    """
    if is_sharded(path):
        raise UserError(sharded_error(path))
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the unpickler trips over in a file of another kind
        raise UserError(f"{path} is no checkpoint that can be read.") from error
    if not isinstance(content, dict) or not {"state_dict", "hyper_parameters"} <= content.keys():
        raise UserError(f"{path} is no checkpoint of this project: it lacks hyper_parameters.")
    return content


def load_model(run: str | Path, trusted_modules: Sequence[str] = ()) -> Network:
    """Load a trained model, ready for `model(images)`; neither Hydra nor data are needed.

    Args:
        run: A run folder or a .ckpt.
        trusted_modules: Modules, beside `models`, that the checkpoint may name.

    Returns:
        The network in evaluation mode on the CPU: images [N, C, H, W], uint8 or float in
        [0, 1] → logits [N, K]. Its `classes` and `shape` say what K and C, H, W are.

    Raises:
        UserError: If there is no checkpoint, or it does not fit the code.
    """
    path = find_checkpoint(run)
    return network_from(read_checkpoint(path), path, trusted_modules)


def network_from(
    checkpoint: Mapping[str, Any], path: Path, trusted_modules: Sequence[str] = ()
) -> Network:
    """Build the network of a checkpoint that was read from `path`."""
    known = checkpoint["hyper_parameters"]
    network = build_network(known["net"], known["data"], trusted_modules)
    try:
        network.load_state_dict(weights_in(checkpoint))
    except RuntimeError as error:
        raise UserError(f"{path} does not fit {known['net']['_target_']}: {error}") from error
    return network.eval()


def weights_in(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """The network's weights, by the names that they have in a `Network`."""
    saved = checkpoint["state_dict"].items()
    return {key.removeprefix(PREFIX): value for key, value in saved if key.startswith(PREFIX)}
