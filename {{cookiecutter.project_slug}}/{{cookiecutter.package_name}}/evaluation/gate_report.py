"""What the gate found, for a terminal, and as Markdown that CI shows in its summary."""

import re
from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from ..log import console
from .limits import LIMITS, Figure

COLUMNS = ("figure", "value", "baseline", "change", "limits", "verdict")
NAMED = 3  # of what may be many, in a sentence


def show(figures: Sequence[Figure], notes: Sequence[str]) -> None:
    """Print the table, and what is to be known of it."""
    table = Table(*COLUMNS)
    for figure in in_full(figures):
        verdict = f"fails: {', '.join(figure.broken)}" if figure.broken else "ok"
        row = map(Text, (*cells(figure), verdict))  # a class may be named like rich's markup
        table.add_row(*row, style="red" if figure.broken else None)
    console.print(table)
    for line in (*summed_up(figures), *notes):
        console.print(line, highlight=False, markup=False)


def markdown(figures: Sequence[Figure], notes: Sequence[str]) -> str:
    """The verdict, the table, and what is to be known of it."""
    failed = sum(bool(figure.broken) for figure in figures)
    verdict = f"failed: {failed} of {len(figures)} figures fall short" if failed else "passed"
    lines = [f"## Quality gate {verdict}", ""]
    lines += [f"| {' | '.join(COLUMNS)} |", "|---|---:|---:|---:|---|---|"]
    for figure in in_full(figures):
        verdict = f"❌ **{', '.join(figure.broken)}**" if figure.broken else "ok"
        lines.append(f"| {' | '.join([*map(escaped, cells(figure)), verdict])} |")
    lines += [f"\n{escaped(line)}" for line in (*summed_up(figures), *notes)]
    return "\n".join(lines) + "\n"


def in_full(figures: Sequence[Figure]) -> list[Figure]:
    """The figures that are worth a row: of the classes, which may be many, those that fail."""
    return [figure for figure in figures if figure.label is None or figure.broken]


def summed_up(figures: Sequence[Figure]) -> Iterator[str]:
    """A sentence for each column of the classes that pass."""
    classes = {one.label for one in figures} - {None}
    passing: dict[str, list[tuple[float, str]]] = {}
    for one in figures:
        if one.label is not None and one.value is not None and not one.broken:
            passing.setdefault(one.metric, []).append((one.value, one.label))
    for metric, values in passing.items():
        (low, label), (high, _) = min(values), max(values)
        where = f"{len(values)} of {len(classes)} classes"
        yield f"{metric} is ok in {where}: {shown(low)} ({label}) to {shown(high)}."


def cells(figure: Figure) -> list[str]:
    """A row of the table, but for the verdict."""
    change = "–"
    if figure.value is not None and figure.accepted is not None:
        change = f"{figure.value - figure.accepted:+.4f}"
    limits = ", ".join(LIMITS[limit].format(number) for limit, number in figure.limits.items())
    return [figure.name, shown(figure.value), shown(figure.accepted), change, limits]


def shown(value: float | None) -> str:
    """A figure as it is read."""
    return "–" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def listed(names: Sequence[str]) -> str:
    """The first of what may be many, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def escaped(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*_<>\[\]|~])", r"\\\1", " ".join(text.split()))
