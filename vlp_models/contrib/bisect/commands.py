"""`vlp bisect`."""

from __future__ import annotations

import json
import re
import shlex
import time
from typing import Annotated

import typer

from vlp_models.errors import DataError, ParamsError

UNITS = {"h": 3600, "m": 60, "s": 1}


def bisect(
    good: Annotated[str, typer.Argument(help="The better one: a version (vlp-vqa/3, vqa@previous) or a git commit.")],
    bad: Annotated[str, typer.Argument(help="The worse one.")],
    run: Annotated[str, typer.Option(help="The fine-tuning run; default: the version's, or the only one.")] = "",
    seeds: Annotated[int, typer.Option(min=2, help="Seeds of a trial at most.")] = 5,
    budget: Annotated[str, typer.Option(help="Stop after this time with the best answer: 2h, 90m.")] = "",
    only_list: Annotated[bool, typer.Option("--list", help="Only list what differs; train nothing.")] = False,
    attempt: Annotated[
        list[str] | None, typer.Option("--try", help="Try this change alone, as listed; repeat for several.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Find which change of data, params or code between two points lowered the score, by retraining.

    The same command continues after Ctrl-C. Example: `vlp bisect vlp-vqa/3 vlp-vqa/4 --budget 2h`
    """
    from vlp_models.common.io import write_json
    from vlp_models.common.lock import file_lock
    from vlp_models.common.workspace import Workspace
    from vlp_models.contrib.bisect.answers import keep_answer
    from vlp_models.contrib.bisect.bisect import open_bisection
    from vlp_models.contrib.bisect.page import format_result, write_page
    from vlp_models.params import load_params
    from vlp_models.pipeline.guard import stopped_by_signals

    params, workspace = load_params(), Workspace()
    deadline = time.monotonic() + parse_budget(budget) if budget else float("inf")
    lock = file_lock(workspace.root / ".work" / "locks" / "bisect.lock", "`vlp bisect`")
    with lock, stopped_by_signals("bisect"):
        bisection = open_bisection(workspace.root, params, (good, bad), run=run, seeds=seeds, deadline=deadline)
        if unknown := set(attempt or []) - {change.id for change in bisection.changes.tried}:
            raise DataError(f"{sorted(unknown)[0]}: no such change; `vlp bisect {good} {bad} --list` lists them")
        command = ["vlp", "bisect", *bisection.names, *(["--run", run] if run else [])]
        if only_list:
            result = bisection.result(bisection.list_changes())
        else:
            result = bisection.result(bisection.try_changes(attempt) if attempt else bisection.answer())
        causes = [word for cause in result["answer"]["causes"][:1] for name in cause for word in ("--try", name)]
        result["command"] = shlex.join([*command, *causes])
        page = workspace.reports / "bisect.html"
        if not only_list:
            write_page(result, page)
            write_json(workspace.reports / "bisect.json", result)
            if not attempt:
                keep_answer(params, workspace.root, result)
    if as_json:
        print(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        print("\n".join(format_result(result)))
        if not only_list:
            print(f"page      {page}")
    if result["answer"]["kind"] in ("inconclusive", "out of time"):
        raise typer.Exit(3)


def parse_budget(text: str) -> float:
    """Return the seconds of `2h`, `90m` or `1h30m`.

    Raises:
        ParamsError: it is not a time.
    """
    parts = re.findall(r"(\d+(?:\.\d+)?)([hms])", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ParamsError(f"--budget {text}: not a time; write 2h, 90m or 1h30m")
    return sum(float(number) * UNITS[unit] for number, unit in parts)


COMMANDS = {"Registry and promotion": {"bisect": bisect}}
WORK: dict[str, str] = {}
