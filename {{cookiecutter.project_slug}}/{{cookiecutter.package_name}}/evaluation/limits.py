"""Limits of figures: read from a config, and held against what was measured."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from ..errors import UserError, nearest

LIMITS = {"min": "≥ {:g}", "max": "≤ {:g}", "max_drop": "drop ≤ {:g}", "max_rise": "rise ≤ {:g}"}
TO_BASELINE = {"max_drop", "max_rise"}
AT_LEAST = {"min", "max_drop"}
ROUNDING = 1e-9  # 0.97 - 0.96 is a little more than 0.01

Limits = dict[str, float]


@dataclass(frozen=True)
class Figure:
    """A measured figure and what became of it.

    Attributes:
        metric: A name in metrics.json, or a column of per_class.csv.
        label: The class; None for a metric of the whole split.
        value: None where there is no finite one.
        accepted: The baseline's; None where it has none.
        limits: By their names.
        broken: What is wrong with it; empty for one that passes.
    """

    metric: str
    label: str | None
    value: float | None
    accepted: float | None
    limits: Limits
    broken: list[str]

    @property
    def name(self) -> str:
        """What to call it in a sentence."""
        return self.metric if self.label is None else f"{self.metric} of {self.label}"


def judged(
    metric: str, label: str | None, limits: Limits, value: float | None, accepted: float | None
) -> Figure:
    """Hold a figure against its limits; a value of None is that of a class that is gone."""
    if accepted is not None and not math.isfinite(accepted):
        accepted = None
    if value is None:
        broken = ["is gone"]
    elif not math.isfinite(value):
        value, broken = None, [f"is {value}"]
    else:
        broken = [
            LIMITS[limit].format(number)
            for limit, number in limits.items()
            if not holds(limit, number, value, accepted)
        ]
    return Figure(metric, label, value, accepted, limits, broken)


def holds(limit: str, number: float, value: float, accepted: float | None) -> bool:
    """Whether a value keeps a limit; what is relative to a baseline does where there is none."""
    if limit in TO_BASELINE:
        if accepted is None:
            return True
        number = accepted - number if limit in AT_LEAST else accepted + number
    short = number - value if limit in AT_LEAST else value - number
    return short <= ROUNDING


def read_limits(config: Any, key: str, known: Iterable[str]) -> dict[str, Limits]:
    """The limits below a config key, by what they hold for: those at `test: acc:` for test/acc.

    Args:
        config: What the config has there.
        key: The key, for errors.
        known: The names of what was measured.

    Raises:
        UserError: If there is no such limit or nothing of that name was measured, or if a limit
            is no number.
    """
    found: dict[str, Limits] = {}

    def visit(node: Any, *names: str) -> None:
        where, name = ".".join((key, *names)), "/".join(names)
        if node is None or node == {}:
            return
        if not isinstance(node, dict):
            example = ".".join((key, *next(iter(known), "acc").split("/"), "min=0.9"))
            raise UserError(f"{where}={node} is no limit: write one as in {example}.")
        if not names or any(isinstance(value, dict) for value in node.values()):
            for child, value in node.items():
                visit(value, *names, str(child))
            return
        limits = {str(limit): value for limit, value in node.items() if value is not None}
        for limit, value in limits.items():
            if limit not in LIMITS:
                hint = nearest(limit, LIMITS)
                raise UserError(f"{where}.{limit}: no such limit.{hint} ({', '.join(LIMITS)})")
            if not is_number(value) or not math.isfinite(value):
                raise UserError(f"{where}.{limit}={value}: a limit is a number, or null for none.")
        if name not in known:
            raise UserError(f"{where}: evaluate measured no {name}.{nearest(name, known)}")
        found[name] = limits

    visit(OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config)
    return found


def is_number(value: Any) -> bool:
    """Whether this is an int or a float."""
    return isinstance(value, int | float) and not isinstance(value, bool)
