"""A vision transformer."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .blocks import MLPHead, TransformerBlock, init_weights


class ViT(nn.Module):
    """Patches as tokens, averaged at the end (Beyer et al., 2022, arXiv:2205.01580).

    Args:
        input_shape: Channels, height and width of an image.
        num_classes: Number of logits.
        patch_size: Side of a patch in pixels; it divides height and width. None takes the
            largest that leaves at least 4×4 patches.
        dim: Features of a token.
        depth: Number of blocks.
        heads: Attention heads.
        mlp_ratio: Hidden features of a block's MLP, as a multiple of `dim`.
        dropout: In attention and MLP.

    Raises:
        ValueError: If `patch_size` does not divide the image, or `heads` not `dim`.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        patch_size: int | None = None,
        dim: int = 96,
        depth: int = 4,
        heads: int = 4,
        mlp_ratio: float = 2,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        channels, height, width = input_shape
        side = patch_size or largest_patch(height, width)
        if height % side or width % side:
            raise ValueError(f"patch_size={side} does not divide {height}×{width} images.")
        self.patches = nn.Conv2d(channels, dim, side, side)
        self.position = nn.Parameter(torch.zeros(1, (height // side) * (width // side), dim))
        nn.init.trunc_normal_(self.position, std=0.02)
        self.blocks = nn.Sequential(
            *(TransformerBlock(dim, heads, mlp_ratio, dropout) for _ in range(depth))
        )
        self.heads, self.hidden = heads, int(dim * mlp_ratio)
        self.norm = nn.LayerNorm(dim)
        self.head = MLPHead(dim, num_classes)
        self.apply(init_weights)

    def shardable_blocks(self) -> list[nn.Module]:
        """The parts that FSDP gathers one at a time."""
        return list(self.blocks)

    def parallel_plan(self, ranks: int) -> dict[str, str]:
        """The layers that tensor parallel ranks share, by heads and by hidden features.

        The outputs of one layer are split over ranks (`columns`), and so the inputs of the next
        (`rows`).

        Raises:
            ValueError: If their number does not divide both.
        """
        if self.heads % ranks or self.hidden % ranks:
            raise ValueError(
                f"{ranks} ranks cannot share model.heads={self.heads} and the MLP's {self.hidden} "
                "features (dim × mlp_ratio): it must divide both."
            )
        return {
            "blocks.*.attention.1.qkv": "columns",
            "blocks.*.attention.1.out": "rows",
            "blocks.*.mlp.1": "columns",
            "blocks.*.mlp.4": "rows",
        }

    def forward(self, images: Tensor) -> Tensor:
        """Float [N, C, H, W] → logits [N, K]."""
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(tokens)).mean(1))


def largest_patch(height: int, width: int) -> int:
    """The largest divisor of both sides that leaves at least 4×4 patches (1 at least)."""
    sides = range(1, max(1, min(height, width) // 4) + 1)
    return max(side for side in sides if height % side == 0 and width % side == 0)
