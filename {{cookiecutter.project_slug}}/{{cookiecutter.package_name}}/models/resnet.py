"""A residual network."""

from collections.abc import Sequence

from torch import Tensor, nn

from .blocks import ConvNormAct, MLPHead, Residual, init_weights


class ResNet(nn.Module):
    """Residual blocks (He et al., 2016, arXiv:1512.03385), with a stem for small images.

    Args:
        input_shape: Channels, height and width of an image.
        num_classes: Number of logits.
        widths: Channels of each stage; every stage but the first halves the image.
        depths: Residual blocks of each stage.
        dropout: Before the last layer.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        widths: Sequence[int] = (32, 64, 128),
        depths: Sequence[int] = (1, 1, 1),
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.stem = ConvNormAct(input_shape[0], widths[0])
        blocks: list[nn.Module] = []
        before = widths[0]
        for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            for index in range(depth):
                blocks.append(Residual(before, width, stride=2 if stage and not index else 1))
                before = width
        self.blocks = nn.Sequential(*blocks)
        self.head = MLPHead(before, num_classes, dropout)
        self.apply(init_weights)

    def shardable_blocks(self) -> list[nn.Module]:
        """The parts that FSDP gathers one at a time."""
        return list(self.blocks)

    def forward(self, images: Tensor) -> Tensor:
        """Float [N, C, H, W] → logits [N, K]."""
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))
