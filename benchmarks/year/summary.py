"""The year in numbers and in one drawing, from the records of its weeks.

python benchmarks/year/summary.py FOLDER     writes benchmarks/results/year.json and docs/pictures/year.svg
"""

from __future__ import annotations

import collections
import html
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MONTH = 4  # weeks
# What retention is to bound. The archive (DVC's remote) keeps all weeks, so that any can be pulled; the images of the
# drops are data, which is never deleted. The features and shards of the kept weeks grow with the number of images, so
# the sum is also given per 1,000 images.
BOUNDED = ("cache", "prefect", "work", "artifacts", "database")
WIDTH, LEFT, RIGHT = 900, 60, 60
ROW, DISK = 85, 480  # height of a row of what was planted; top of the last curve


def summarize(weeks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the totals of a year, and a row for each week."""
    checks: dict[str, list[bool]] = collections.defaultdict(list)
    planted: dict[str, list[bool]] = collections.defaultdict(list)
    for week in weeks:
        ok = all(check["ok"] for check in week["checks"])
        for check in week["checks"]:
            checks[check["check"]].append(check["ok"])
        for plant in (week["drop"], week["act"], week["fault"]):
            if plant and plant != "calm":
                planted[plant].append(ok)
    decisions = [decision for week in weeks for decision in week.get("decisions", ())]
    promoted = [decision for decision in decisions if decision["action"] == "promoted" and "gain" in decision]
    return {
        "weeks": len(weeks),
        "right_weeks": sum(all(check["ok"] for check in week["checks"]) for week in weeks),
        "minutes": sum(week["seconds"] + week["judge_seconds"] for week in weeks) / 60,
        "week_seconds": statistics.median(week["seconds"] for week in weeks),
        "judge_seconds": statistics.median(week["judge_seconds"] for week in weeks),
        "checks": [{"check": name, "right": sum(oks), "weeks": len(oks)} for name, oks in checks.items()],
        "planted": [{"planted": name, "times": len(oks), "right": sum(oks)} for name, oks in sorted(planted.items())],
        "decisions": collections.Counter(decision["outcome"] or decision["action"] for decision in decisions),
        "promoted": promoted,
        "false_promotions": sum(decision["gain"] <= 0 for decision in promoted),
        "taken_for_withdrawn": max((week.get("taken for withdrawn", 0) for week in weeks), default=0),
        "pulled_weeks": sum("pulled_week" in week for week in weeks),
        "disk": growth(weeks, "disk"),
        "memory": growth(weeks, "memory"),
        "by_week": [describe_week(week) for week in weeks],
    }


def describe_week(week: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the judge's table."""
    wrong = [f"{check['check']}: {check['detail']}" for check in week["checks"] if not check["ok"]]
    moved = [f"{d['action']} {d['version']}" for d in week.get("decisions", ()) if d["action"] != "refused"]
    row = {key: week[key] for key in ("number", "drop", "act", "fault", "seconds")}
    return row | {"flows": len(week["flows"]), "moved": moved, "truth": week.get("truth"), "wrong": wrong}


def growth(weeks: Sequence[Mapping[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return of each part its MB after the first month and at the end, and the slope since, in percent of the first.

    The line is fitted to the weeks after the first month.
    """
    parts = sorted({part for week in weeks for part in week.get(kind, {})})
    groups: list[tuple[str, tuple[str, ...]]] = [(part, (part,)) for part in parts]
    groups.append(("all", tuple(parts)))
    if kind == "disk":
        groups.append(("bounded", BOUNDED))
    measured = [week for week in weeks if kind in week]
    rows = []
    for name, members in groups:
        values = [sum(week[kind].get(part, 0) for part in members) / 1e6 for week in measured]
        rows.append(fit_line(name, values))
        if name == "bounded":
            relative = [1000 * value / week["images"] for value, week in zip(values, measured, strict=True)]
            rows.append(fit_line("bounded, per 1,000 images", relative))
    return rows


def fit_line(name: str, values: Sequence[float]) -> dict[str, Any]:
    row: dict[str, Any] = {"part": name, "month": values[min(MONTH, len(values)) - 1], "end": values[-1]}
    later = values[MONTH - 1 :]
    if len(later) > MONTH and row["month"]:
        slope = statistics.linear_regression(range(len(later)), later).slope
        row |= {"slope": slope, "percent": 100 * slope / row["month"]}
    return row


def draw(weeks: Sequence[Mapping[str, Any]]) -> str:
    """Return an SVG of the year: the champion's score, what was planted, decisions, disk."""
    parts: list[str] = []
    step = (WIDTH - LEFT - RIGHT) / max(1, len(weeks))

    def x(number: float) -> float:
        return LEFT + step * (number - 0.5)

    def text(at: float, y: float, words: str, more: str = "") -> None:
        parts.append(f'<text x="{at:.1f}" y="{y:.1f}" {more}>{html.escape(words)}</text>')

    def curve(values: Sequence[float | None], top: float, height: float, title: str, unit: str) -> None:
        present = [value for value in values if value is not None]
        low, high = min(0.0, *present), max(present) or 1.0
        text(LEFT, top - 8, title, 'class="title"')
        points = [
            (x(number), top + height * (1 - (value - low) / (high - low)))
            for number, value in enumerate(values, 1)
            if value is not None
        ]
        for value in (low, high):
            y = top + height * (1 - (value - low) / (high - low))
            parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
            text(LEFT - 6, y + 4, f"{value:.0f}{unit}", 'text-anchor="end"')
        parts.append(f'<polyline points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in points)}" class="curve"/>')
        for week, (a, b) in zip(weeks, points, strict=False):
            if any(decision["action"] == "promoted" for decision in week.get("decisions", ())):
                parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" class="promoted"/>')

    curve(
        [week.get("truth") for week in weeks], 40, 120, "Champion's CIDEr on the judge's images; dots: promotions", ""
    )
    rows = [("drop", "drops"), ("act", "changes"), ("fault", "faults")]
    for line, (key, title) in enumerate(rows):
        y = 265 + ROW * line  # with room above for the names
        text(LEFT - 6, y + 4, title, 'text-anchor="end"')
        for week in weeks:
            planted = week[key] if week[key] != "calm" else ""
            ok = all(check["ok"] for check in week["checks"])
            kind = ("planted" if ok else "wrong") if planted else "calm"
            label = html.escape(f"week {week['number']}: {planted or 'nothing'}")
            at = x(week["number"])
            radius = 5 if planted else 2
            parts.append(f'<circle cx="{at:.1f}" cy="{y}" r="{radius}" class="{kind}"><title>{label}</title></circle>')
            if planted:
                text(at + 2, y - 9, planted, f'class="name" transform="rotate(-35 {at + 2:.1f} {y - 9})"')
    disk = [sum(week["disk"].get(part, 0) for part in BOUNDED) / 1e6 if "disk" in week else None for week in weeks]
    curve(disk, DISK, 90, "Disk of what retention bounds: cache, registry, Prefect, logs", " MB")
    for number in range(1, len(weeks) + 1):
        if number == 1 or number % 4 == 0:
            text(x(number), DISK + 113, str(number), 'text-anchor="middle"')
    text(WIDTH - RIGHT, DISK + 130, "week", 'text-anchor="end"')
    style = (
        "text{font:12px system-ui,sans-serif;fill:#555}.title{font-weight:600}.grid{stroke:#8885;stroke-width:1}"
        ".curve{fill:none;stroke:#2a6fb0;stroke-width:2}.promoted{fill:#1a8a4a}.planted{fill:#c9822b}.wrong{fill:#c0272d}"
        ".calm{fill:#8886}.name{font-size:10px}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {DISK + 140}" role="img">'
        f"<title>A year of weekly drops</title><style>{style}</style>{''.join(parts)}</svg>\n"
    )


def read_weeks(work: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (work / "weeks.jsonl").read_text().splitlines()]


def write(work: Path) -> dict[str, Any]:
    """Write the results of a whole year where the docs read them."""
    weeks = read_weeks(work)
    summary = summarize(weeks)
    (ROOT / "benchmarks" / "results" / "year.json").write_text(json.dumps(summary, indent=1) + "\n")
    (ROOT / "docs" / "pictures" / "year.svg").write_text(draw(weeks))
    return summary


if __name__ == "__main__":
    print(json.dumps(write(Path(sys.argv[1])), indent=1))
