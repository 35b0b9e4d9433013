"""The report's training curves: one chart for each quantity of each training of params.yaml."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.report_pictures.charts import MAX_LINES, Point, line_chart
from vlp_models.evaluation.report.records import CURVES
from vlp_models.params import Params

NOT_LOSSES = ("step", "epoch", "lr", "learning_rate", "samples_per_s", "waiting_share", "seconds", "gradient_norm")


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One chart: one quantity of one training. legend: (name, number of its color); last: the end of the first line."""

    name: str
    quantity: str
    chart: Markup
    legend: list[tuple[str, int]]
    has_validation: bool
    last: str


def read_curves(params: Params, workspace: Workspace) -> list[Curve]:
    """Return the charts of every training of params.yaml: its losses, its accuracies, and any other quantity alone."""
    result, palette = [], dict[str, int]()
    for run in [f"{kind}/{name}" for kind in ("pretrain", "finetune") for name in getattr(params, kind)]:
        file = workspace.curve(run)
        if not file.exists():
            continue
        with file.open(encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream))
        kind, _, name = run.partition("/")
        settings = getattr(params, kind)[name]
        parts = [*settings.recipe.objectives] if kind == "pretrain" else [settings.task]
        columns: dict[str, list[Point]] = {}
        # Every row of a curve has the same columns.
        for column in rows[0] if rows else ():
            if column and column not in NOT_LOSSES:
                # Only some rows have a validation loss.
                points = [(float(row["step"]), float(row[column])) for row in rows if row["step"] and row[column]]
                if points:
                    columns[column] = points
        if len(parts) == 1 and columns.get(parts[0]) == columns.get("loss"):
            columns.pop(parts[0], None)  # the only part is the total
            columns.pop(f"val_{parts[0]}", None)
        # One chart for the losses, one for the accuracies, and one for each other quantity; the total is drawn first.
        quantities: dict[str, dict[str, list[Point]]] = {"Loss": {}, "Accuracy, %": {}}
        # Trainings before validations, because the second line of a color is dashed.
        for column in sorted(columns, key=lambda column: (column != "loss", column.startswith("val_"))):
            base = column.removeprefix("val_")
            if base == "loss" or base in parts:
                quantities["Loss"][column] = columns[column]
            elif base.endswith("_accuracy"):
                quantities["Accuracy, %"][column] = [(x, 100 * y) for x, y in columns[column]]
            else:
                quantities.setdefault(base.replace("_", " ").capitalize(), {})[column] = columns[column]
        result += [_curve(run, quantity, lines, palette) for quantity, lines in quantities.items() if lines]
    return result


def _curve(run: str, quantity: str, lines: Mapping[str, Sequence[Point]], palette: dict[str, int]) -> Curve:
    """Draw one quantity; the validation has the color of its training and is dashed.

    Args:
        palette: objective -> number of its color in the charts before; new ones are added.
    """
    # `loss` and `val_loss` are one name, and so one color.
    names = list(dict.fromkeys(column.removeprefix("val_") for column in lines))
    parts = [name.removesuffix("_accuracy") for name in names]
    numbers = dict(zip(names, _choose_colors(parts, palette), strict=True))
    labels = {name: CURVES.get(part, part.replace("_", " ")) for name, part in zip(names, parts, strict=True)}
    labeled, colors = {}, {}
    for column, points in lines.items():
        name = column.removeprefix("val_")
        label = labels[name] + (", validation" if column.startswith("val_") else "")
        labeled[label], colors[label] = points, numbers[name]
    # The last point of the first line, which is the total where there is one.
    step, value = next(iter(lines.values()))[-1]
    return Curve(
        name=run,
        quantity=quantity,
        chart=line_chart(labeled, f"{run}: {quantity} over steps", colors),
        # Lines without a color of the style sheet are not drawn, so they are not in the legend either.
        legend=[(labels[name], number) for name, number in numbers.items() if number < MAX_LINES],
        has_validation=any(column.startswith("val_") for column in lines),
        last=f"{value:,.2f} after {step:,.0f} steps",
    )


def _choose_colors(objectives: Sequence[str], palette: dict[str, int]) -> list[int]:
    """Return a color number for each line of a chart: the objective's own, unless another line of the chart has it."""
    numbers: list[int] = []
    for name in objectives:
        number = palette.get(name)
        if number is None or number in numbers:
            # Not a color of this chart; of the rest, the one that the fewest objectives of other charts have.
            # A color of the chart so far, or one that another objective of this chart has from earlier charts.
            taken = {*numbers, *(palette[other] for other in objectives if other in palette)}
            free = [color for color in range(MAX_LINES) if color not in taken]
            in_use = list(palette.values())
            # Among equally rare colors the first one, so that equal reports have equal colors.
            number = min(free, key=lambda color: (in_use.count(color), color), default=MAX_LINES)
        if number < MAX_LINES:
            palette.setdefault(name, number)
        numbers.append(number)
    return numbers
