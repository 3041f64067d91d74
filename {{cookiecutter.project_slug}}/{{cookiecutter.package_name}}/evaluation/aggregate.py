"""`aggregate`: finished runs → mean and standard deviation over seeds and folds."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from textwrap import wrap

import numpy as np
from matplotlib.figure import Figure
from omegaconf import DictConfig, ListConfig, OmegaConf
from rich.markup import escape
from rich.table import Table

from ..errors import UserError
from ..log import console, setup_logging
from ..paths import as_typed, from_here
from .groups import Run, finished_runs, grouped


@dataclass(frozen=True)
class Row:
    """A metric over the runs of a group.

    Attributes:
        metric: Its name.
        group: What the group is called.
        values: One a run.
        mean: Of the values.
        std: Standard deviation of a sample (n - 1); None for a single run, which has none.
    """

    metric: str
    group: str
    values: list[float]
    mean: float
    std: float | None

    def __str__(self) -> str:
        return f"{self.mean:.4f}" if self.std is None else f"{self.mean:.4f} ± {self.std:.4f}"


def run(config: DictConfig) -> None:
    """The `aggregate` stage.

    Raises:
        UserError: If a folder is not there, or no finished run lies below any.
    """
    setup_logging()
    folders = named_folders(config.runs)
    out = Path(config.out_dir).absolute() if config.out_dir else folders[0] / "aggregate"
    runs = finished_runs(folders)
    if not runs:
        raise UserError(f"runs={config.runs}: no finished run lies there.")
    rows = summed_up(grouped(runs))
    write(out, rows)
    show(rows)
    console.print(f"written to  {as_typed(out)}", highlight=False, markup=False)


def named_folders(runs: str | ListConfig) -> list[Path]:
    """The folders that `runs` names: one, or a list.

    Raises:
        UserError: If one is not there.
    """
    names = list(runs) if OmegaConf.is_list(runs) else [runs]
    folders = [from_here(str(name)) for name in names]
    for name, folder in zip(names, folders, strict=True):
        if not folder.is_dir():
            raise UserError(f"runs={name}: there is no such folder.")
    if not folders:
        raise UserError("runs=[]: name a folder that holds runs.")
    return folders


def summed_up(groups: Mapping[str, Sequence[Run]]) -> list[Row]:
    """A row for each metric and group, metrics in the order in which runs have them."""
    runs = [run for group in groups.values() for run in group]
    rows = []
    for metric in dict.fromkeys(name for run in runs for name in run.metrics):
        for name, group in groups.items():
            values = [run.metrics[metric] for run in group if metric in run.metrics]
            if values:
                std = float(np.std(values, ddof=1)) if len(values) > 1 else None
                rows.append(Row(metric, name, values, float(np.mean(values)), std))
    return rows


def write(folder: Path, rows: Sequence[Row]) -> None:
    """Write aggregate.csv, aggregate.md and aggregate.png."""
    shown = short_names(rows)
    lines = [f"- {line}" for line in legend(shown)]
    lines += ["", "| metric | group | mean ± standard deviation | n |", "|---|---|---|---|"]
    for row in rows:
        lines.append(f"| {row.metric} | {shown[row.group]} | {row} | {len(row.values)} |")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = "\n".join(lines).lstrip() + "\n"
        (folder / "aggregate.md").write_text(text, encoding="utf-8")
        with (folder / "aggregate.csv").open("w", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream)
            writer.writerow(["metric", "group", "n", "mean", "std"])
            for row in rows:
                writer.writerow([row.metric, row.group, len(row.values), row.mean, row.std])
        figure(rows).savefig(folder / "aggregate.png", dpi=120)
    except OSError as error:
        raise UserError(f"cannot write {folder} ({error.strerror}): set out_dir=….") from error


def short_names(rows: Sequence[Row]) -> dict[str, str]:
    """What the groups go by where room is short: their names, or numbers if one is long."""
    groups = list(dict.fromkeys(row.group for row in rows))
    short = max(map(len, groups)) <= 40
    return {group: group if short else str(n) for n, group in enumerate(groups, start=1)}


def legend(shown: Mapping[str, str]) -> list[str]:
    """A line for each group that goes by a number."""
    return [f"{short}: {group}" for group, short in shown.items() if short != group]


def show(rows: Sequence[Row]) -> None:
    """Print a table, metric by metric."""
    shown = short_names(rows)
    for line in legend(shown):
        console.print(line, highlight=False, markup=False)
    table = Table("metric", "group", "mean ± standard deviation", "n")
    for _, block in groupby(rows, key=lambda row: row.metric):
        for row in block:
            table.add_row(row.metric, escape(shown[row.group]), str(row), str(len(row.values)))
        if len(shown) > 1:
            table.add_section()
    console.print(table)


def figure(rows: Sequence[Row]) -> Figure:
    """Draw each metric's means with their deviations, and the single runs as points.

    A row of axes a split, a column a metric; groups lie below each other.
    """
    places = {row.metric: row.metric.rpartition("/")[::2] for row in rows}
    splits = list(dict.fromkeys(split for split, _ in places.values()))
    names = list(dict.fromkeys(name for _, name in places.values()))
    shown = short_names(rows)
    groups, ticks = list(shown), [name.replace(", ", "\n") for name in shown.values()]
    notes = [line for text in legend(shown) for line in wrap(text, 40 * len(names))]
    width, height = 1.5 + 3 * len(names), 0.8 + 0.4 * len(groups)
    drawn = Figure((width, height * len(splits) + 0.15 * len(notes)), layout="constrained")
    grid = drawn.subplots(len(splits), len(names), squeeze=False, sharey=True)
    for axes in grid.flat:
        axes.set_visible(False)
    for row in rows:
        split, name = places[row.metric]
        axes, place = grid[splits.index(split), names.index(name)], groups.index(row.group)
        axes.set_visible(True)
        axes.set_title(row.metric, fontsize=10)
        axes.locator_params(axis="x", nbins=5)
        # Beside each other, since equal values would hide each other.
        beside = place + np.linspace(-0.15, 0.15, len(row.values)) if row.std is not None else place
        axes.scatter(row.values, np.broadcast_to(beside, len(row.values)), s=12, color="0.6")
        axes.errorbar(row.mean, place, xerr=row.std, fmt="o", color="tab:blue", capsize=4)
        axes.grid(axis="x", color="0.9")
        axes.set_axisbelow(True)
    grid[0, 0].set_yticks(range(len(groups)), ticks)
    grid[0, 0].set_ylim(len(groups) - 0.5, -0.5)
    drawn.supxlabel("mean ± standard deviation; grey: single runs", fontsize=9, color="0.4")
    drawn.suptitle("\n".join(notes), x=0.01, ha="left", fontsize=8)
    return drawn
