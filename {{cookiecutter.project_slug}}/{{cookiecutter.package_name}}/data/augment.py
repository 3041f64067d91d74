"""Augmentation of whole batches, on the device they are on (kornia)."""

from typing import Any

import torch
from kornia.augmentation import (
    AugmentationSequential,
    RandomAffine,
    RandomErasing,
    RandomHorizontalFlip,
)
from torch import Tensor, nn


class Augment(nn.Module):
    """Random changes, drawn anew for each image of a batch; 0 or False leaves one out.

    Args:
        shift: Largest shift, as a share of the width and height.
        rotation: Largest rotation to either side, in degrees.
        flip: Flip half of the images left to right.
        erasing: Probability that a rectangle is blanked (Zhong et al., 2017, arXiv:1708.04896).
    """

    def __init__(
        self, shift: float = 0, rotation: float = 0, flip: bool = False, erasing: float = 0
    ) -> None:
        super().__init__()
        steps: list[Any] = []
        if shift or rotation:
            steps.append(RandomAffine(rotation, translate=(shift, shift) if shift else None, p=1.0))
        if flip:
            steps.append(RandomHorizontalFlip())
        if erasing:
            steps.append(RandomErasing(p=erasing))
        self.steps = AugmentationSequential(*steps, data_keys=["input"]) if steps else None

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """uint8 [N, C, H, W] → float in [0, 1], or unchanged where every step is off."""
        if self.steps is None:
            return images
        return self.steps(images.float() / 255)
