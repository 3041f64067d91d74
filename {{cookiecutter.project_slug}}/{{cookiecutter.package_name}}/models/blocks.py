"""Blocks that compose into networks, how to stack them, and how they start out."""

from collections.abc import Callable, Iterable
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


def stack(block: Callable[[int, int], nn.Module], widths: Iterable[int]) -> nn.Sequential:
    """Chain `block(w0, w1)`, `block(w1, w2)`, … over successive widths."""
    return nn.Sequential(*(block(before, after) for before, after in pairwise(widths)))


def init_weights(module: nn.Module) -> None:
    """Initialise one layer; use as `net.apply(init_weights)`.

    Convolutions by He et al. (2015, arXiv:1502.01852), linear layers by a normal distribution cut
    off at two standard deviations of 0.02 (as ViT, arXiv:2010.11929), biases zero.
    """
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    elif isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02, a=-0.04, b=0.04)
    if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class ConvNormAct(nn.Sequential):
    """Convolution, batch normalisation, ReLU: [N, in, H, W] → [N, out, H/stride, W/stride]."""

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1, act: bool = True):
        super().__init__(
            nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True) if act else nn.Identity(),
        )


class Residual(nn.Module):
    """Two convolutions beside a shortcut (He et al., 2016, arXiv:1512.03385, the basic block)."""

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1):
        super().__init__()
        self.body = nn.Sequential(
            ConvNormAct(in_channels, out_channels, stride),
            ConvNormAct(out_channels, out_channels, act=False),
        )
        same = in_channels == out_channels and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(in_channels, out_channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """[N, in, H, W] → [N, out, H/stride, W/stride]."""
        return F.relu(self.body(x) + self.shortcut(x))


class MLPHead(nn.Sequential):
    """Dropout and a linear layer: [N, in] → [N, out]."""

    def __init__(self, in_features: int, out_features: int, dropout: float = 0.0):
        super().__init__(nn.Dropout(dropout), nn.Linear(in_features, out_features))


class Attention(nn.Module):
    """Multi-head self-attention by torch's fused kernel: [N, T, D] → [N, T, D]."""

    def __init__(self, dim: int, heads: int, dropout: float = 0.0):
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim={dim} is not a multiple of heads={heads}.")
        self.width, self.dropout = dim // heads, dropout
        self.qkv = nn.Linear(dim, 3 * dim)  # a head's queries, keys, values; then the next head's
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Attend over T tokens."""
        # Tensor parallel ranks hold some of the heads each.
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.width)).permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout * self.training)
        return self.out(y.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Attention and an MLP, each normalised before (Xiong et al., 2020, arXiv:2002.04745)."""

    def __init__(self, dim: int, heads: int, mlp_ratio: float = 4, dropout: float = 0.0):
        super().__init__()
        hidden = int(dim * mlp_ratio)
        self.attention = nn.Sequential(nn.LayerNorm(dim), Attention(dim, heads, dropout))
        self.mlp = nn.Sequential(
            nn.LayerNorm(dim),
            nn.Linear(dim, hidden),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, dim),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, D] → [N, T, D]."""
        x = x + self.attention(x)
        return x + self.mlp(x)
