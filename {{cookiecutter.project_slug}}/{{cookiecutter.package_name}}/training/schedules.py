"""Learning-rate schedules that torch does not have in one piece."""

from math import cos, pi

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def cosine_warmup(
    optimizer: Optimizer, total_steps: int, warmup: float = 0.1, final: float = 0.01
) -> LambdaLR:
    """Climb linearly, then fall along a cosine (Loshchilov and Hutter, 2017, arXiv:1608.03983).

    Args:
        optimizer: Its learning rates are the peaks.
        total_steps: Optimizer steps of the whole run.
        warmup: Share of the steps that climbs.
        final: Last learning rate, as a share of the peak.
    """
    climb = max(1, round(total_steps * warmup))
    fall = max(1, total_steps - climb)

    def factor(step: int) -> float:
        if step < climb:
            return (step + 1) / climb
        done = min(1.0, (step - climb) / fall)
        return final + (1 - final) * (1 + cos(pi * done)) / 2

    return LambdaLR(optimizer, factor)
