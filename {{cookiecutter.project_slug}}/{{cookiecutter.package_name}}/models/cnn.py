"""A plain convolutional network."""

from collections.abc import Sequence

from torch import Tensor, nn

from .blocks import ConvNormAct, MLPHead, init_weights, stack


class CNN(nn.Module):
    """Two convolutions a stage; every stage but the first halves the image.

    Args:
        input_shape: Channels, height and width of an image.
        num_classes: Number of logits.
        widths: Channels of each stage.
        dropout: Before the last layer.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        widths: Sequence[int] = (32, 64, 128),
        dropout: float = 0.1,
    ) -> None:
        super().__init__()

        def stage(before: int, after: int) -> nn.Module:
            return nn.Sequential(ConvNormAct(before, after, stride=2), ConvNormAct(after, after))

        self.stem = ConvNormAct(input_shape[0], widths[0])
        self.stages = stack(stage, widths)
        self.head = MLPHead(widths[-1], num_classes, dropout)
        self.apply(init_weights)

    def shardable_blocks(self) -> list[nn.Module]:
        """The parts that FSDP gathers one at a time."""
        return list(self.stages)

    def forward(self, images: Tensor) -> Tensor:
        """Float [N, C, H, W] → logits [N, K]."""
        return self.head(self.stages(self.stem(images)).mean((2, 3)))
