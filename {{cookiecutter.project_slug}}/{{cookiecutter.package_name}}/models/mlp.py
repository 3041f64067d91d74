"""A multi-layer perceptron over flattened pixels."""

from collections.abc import Sequence
from math import prod

from torch import Tensor, nn

from .blocks import MLPHead, init_weights, stack


class MLP(nn.Module):
    """Linear layers with batch normalisation.

    Args:
        input_shape: Channels, height and width of an image.
        num_classes: Number of logits.
        widths: Features of each hidden layer.
        dropout: Before the last layer.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        widths: Sequence[int] = (256, 128),
        dropout: float = 0.1,
    ) -> None:
        super().__init__()

        def layer(before: int, after: int) -> nn.Module:
            return nn.Sequential(nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU())

        self.layers = stack(layer, [prod(input_shape), *widths])
        self.head = MLPHead(widths[-1], num_classes, dropout)
        self.apply(init_weights)

    def shardable_blocks(self) -> list[nn.Module]:
        """The parts that FSDP gathers one at a time."""
        return list(self.layers)

    def forward(self, images: Tensor) -> Tensor:
        """Float [N, C, H, W] → logits [N, K]."""
        return self.head(self.layers(images.flatten(1)))
