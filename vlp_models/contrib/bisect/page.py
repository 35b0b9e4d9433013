"""A bisection's result as lines for the terminal and as one HTML page without scripts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlp_models.common.io import write_text
from vlp_models.common.pages import page_environment
from vlp_models.common.progress import clock
from vlp_models.errors import shorten_list

COLUMNS = ("trial", "seeds", "score", "gain", "interval", "decision", "time", "restored", "run")


def format_result(result: Mapping[str, Any]) -> list[str]:
    """Return the answer, what was tried, and the table of trials."""
    answer = result["answer"]
    lines = [f"seen      {result['metric']} {-result['seen']:+z.2f}, {result['bad']} against {result['good']}"]
    lines += [f"changed   {text}" for text in result["changes"]]
    lines += [f"not tried {name}: {reason}" for name, reason in result["untried"].items()]
    if result["unread"]:
        lines.append(f"unread    {shorten_list(result['unread'], 8)}  (no stage of this run reads them: no cause)")
    lines += [f"note      {note}" for note in [*result["notes"], *answer["notes"]]]
    if result["trials"]:
        table = [list(COLUMNS), *map(cells, result["trials"])]
        widths = [max(len(row[i]) for row in table) for i in range(len(COLUMNS))]
        lines += ["", *("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in table), ""]
    lines.append(f"answer    {answer['sentence']}")
    lines.append(f"reproduce {result['command']}")
    return lines


def cells(trial: Mapping[str, Any]) -> list[str]:
    """Return the cells of a trial's row."""
    gain = trial["gain"]
    return [
        trial["name"],
        str(trial["seeds"]),
        "" if trial["score"] is None else f"{trial['score']:.2f}",
        "" if gain is None else f"{gain:+.2f}",
        "" if gain is None else f"{trial['low']:+.2f} to {trial['high']:+.2f}",
        trial["decision"],
        clock(trial["seconds"]),
        str(trial["restored"]),
        str(trial["ran"]),
    ]


def write_page(result: Mapping[str, Any], path: Path) -> None:
    """Write the page; never half of it."""
    made = time.strftime("%-d %B %Y, %H:%M UTC", time.gmtime())
    template = page_environment(__package__).get_template("page.html.j2")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, template.render(result=result, columns=COLUMNS, cells=cells, made=made))
