"""`gate`: what `evaluate` measured, held against fixed limits and against the accepted model."""

import csv
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ..errors import UserError
from ..log import console, log, setup_logging
from ..paths import as_typed, from_here, from_root
from .gate_report import listed, markdown, show, shown
from .limits import TO_BASELINE, Figure, Limits, is_number, judged, read_limits


@dataclass(frozen=True)
class Measured:
    """A model's figures: those that were evaluated, or the accepted ones in baseline.json.

    Attributes:
        metrics: What metrics.json holds.
        classes: The row of per_class.csv for each class.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    classes: dict[str, dict[str, float]] = field(default_factory=dict)


def run(config: DictConfig) -> None:
    """The `gate` stage.

    Raises:
        UserError: If a file or a limit is not what it should be; and, once the report is written,
            if the model falls short.
    """
    setup_logging()
    model = read_evaluated(from_here(config.evaluated))
    metrics = read_limits(config.metrics, "metrics", model.metrics)
    columns = next(iter(model.classes.values()))
    classes = read_limits(config.classes, "classes", columns)
    never = falling_short(judge(metrics, classes, model, Measured()))  # whatever the baseline
    file = from_root(config.baseline)
    if config.accept:
        if never:
            raise UserError(
                f"not accepted: {listed(never)} would not pass with any baseline: change the "
                "limits in configs/gate.yaml first."
            )
        accept(model, file)
        return
    baseline = read_baseline(file)
    figures = judge(metrics, classes, model, baseline)
    notes = list(remarks(figures, model, baseline))
    failed = falling_short(figures)
    report = {"passed": not failed, "notes": notes, "figures": [asdict(one) for one in figures]}
    folder = from_root(config.out_dir)
    write(folder / "report.json", as_json(report))
    write(folder / "report.md", markdown(figures, notes))
    show(figures, notes)
    console.print(f"written to  {as_typed(folder)}", highlight=False, markup=False)
    if failed:
        way_out = "change the limits in configs/gate.yaml" if never else "make accept"
        raise UserError(
            f"the model falls short in {listed(failed)}. To take it all the same: {way_out}."
        )


def falling_short(figures: list[Figure]) -> list[str]:
    """What to name in an error."""
    return [figure.name for figure in figures if figure.broken]


def accept(model: Measured, file: Path) -> None:
    """Make a model's figures the baseline."""
    try:
        before = read_baseline(file)
    except UserError as error:
        log.warning("Written anew: %s", error)
        before = Measured()
    write(file, as_json(asdict(model)))
    for name, value in model.metrics.items():
        line = f"{name}  {shown(before.metrics.get(name))} → {shown(value)}"
        console.print(line, highlight=False, markup=False)
    console.print(f"accepted in {as_typed(file)}", highlight=False, markup=False)


def judge(
    metrics: dict[str, Limits], classes: dict[str, Limits], model: Measured, baseline: Measured
) -> list[Figure]:
    """Every figure that has limits; a class without an image in the split has no figures."""
    figures = [
        judged(name, None, limits, model.metrics[name], baseline.metrics.get(name))
        for name, limits in metrics.items()
    ]
    for label in dict.fromkeys((*model.classes, *baseline.classes)):
        row, accepted = model.classes.get(label, {}), baseline.classes.get(label, {})
        if row.get("count") != 0:
            figures += [
                judged(column, label, limits, row.get(column), accepted.get(column))
                for column, limits in classes.items()
            ]
    return figures


def remarks(figures: list[Figure], model: Measured, baseline: Measured) -> Iterator[str]:
    """What a reader of the verdict should know."""
    if empty := [label for label, row in model.classes.items() if row.get("count") == 0]:
        yield f"Not judged, since the split has no image of it: {listed(empty)}."
    if baseline == Measured():
        yield "No model is accepted yet, so only min and max hold: make accept takes this one."
        return
    changed = []
    for label in dict.fromkeys((*baseline.classes, *model.classes)):
        was, now = (side.classes.get(label, {}).get("count", 0) for side in (baseline, model))
        if was != now:
            changed.append(f"{label} {was} → {now}")
    if changed:
        yield (
            "The figures do not compare like for like, since the split has other images than for "
            f"the baseline: {listed(changed)}."
        )
    new = [one.name for one in figures if one.accepted is None and TO_BASELINE & one.limits.keys()]
    if new:
        yield f"Not in the baseline, so only min and max hold: {listed(new)}."


def read_evaluated(folder: Path) -> Measured:
    """What evaluate.py left in a folder."""
    try:
        metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
        with (folder / "per_class.csv").open(newline="", encoding="utf-8") as stream:
            rows = {row.pop("class"): row for row in csv.DictReader(stream, strict=True)}
        if not rows:
            raise ValueError("per_class.csv has no class")
        classes = {label: {k: number(v) for k, v in row.items()} for label, row in rows.items()}
        return measured(metrics, classes)
    except FileNotFoundError as error:
        raise UserError(
            f"evaluated={as_typed(folder)}: there is no {Path(error.filename).name}; dvc repro "
            "writes it in the pipeline, evaluate.py with out_dir=… elsewhere."
        ) from None
    except (OSError, ValueError, KeyError, AttributeError, csv.Error) as error:
        raise UserError(
            f"evaluated={as_typed(folder)} is not as evaluate.py leaves it ({error})."
        ) from None


def read_baseline(file: Path) -> Measured:
    """The accepted model's figures."""
    way_out = "git checkout brings back a committed one, make accept writes it anew."
    try:
        plain = json.loads(file.read_text(encoding="utf-8"))
        return measured(plain["metrics"], plain["classes"])
    except FileNotFoundError:
        raise UserError(f"baseline={as_typed(file)}: there is no such file; {way_out}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"baseline={as_typed(file)} is broken ({error}); {way_out}") from None


def measured(metrics: Any, classes: Any) -> Measured:
    """Figures that were read from a file, once they are seen to be names and numbers."""
    if not isinstance(classes, dict):
        raise ValueError(f"{classes!r} where classes should be")
    for row in (metrics, *classes.values()):
        if not isinstance(row, dict) or not all(map(is_number, row.values())):
            raise ValueError(f"{row!r} where names and numbers should be")
    return Measured(metrics, classes)


def number(text: str) -> float:
    """A number of a CSV; a whole one stays whole."""
    return int(text) if text.isdecimal() else float(text)


def as_json(plain: Any) -> str:
    """As people read it, and as git compares it."""
    return json.dumps(plain, indent=2, ensure_ascii=False) + "\n"


def write(file: Path, text: str) -> None:
    """Write a file whole, or not at all."""
    scratch = file.with_name(f".{file.name}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(file)
    except OSError as error:
        raise UserError(f"cannot write {as_typed(file)} ({error.strerror}).") from error
