"""`vlp bisect`."""

from __future__ import annotations

import json
import re
import shlex
import time
from typing import Annotated

import typer

from vlp_models.errors import DataError, ParamsError


class NoAnswerError(DataError):
    """The two points cannot be compared. Not a failure of the unattended flow, which goes on."""

    exit_code = 3


UNITS = {"h": 3600, "m": 60, "s": 1}


def bisect(
    good: Annotated[str, typer.Argument(help="The better one: a version (vlp-vqa/3), a commit, a run bundle.")],
    bad: Annotated[str, typer.Argument(help="The worse one.")],
    run: Annotated[str, typer.Option(help="The fine-tuning run; default: the version's, or the only one.")] = "",
    seeds: Annotated[int, typer.Option(min=2, help="Seeds of a trial at most.")] = 5,
    budget: Annotated[str, typer.Option(help="Stop after this time with the best answer: 2h, 90m.")] = "",
    only_list: Annotated[bool, typer.Option("--list", help="Only list what differs; train nothing.")] = False,
    attempt: Annotated[
        list[str] | None,
        typer.Option(
            "--try", help="Try this change alone, such as 'params finetune.vqa.max_steps'; repeat for several."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Find which change of data, params or code between two points lowered the score, by retraining.

    The same command continues after Ctrl-C. Exit code 3: no answer.

    Example: `vlp bisect vlp-vqa/3 vlp-vqa/4 --budget 2h`
    """
    from vlp_models.common.lock import file_lock
    from vlp_models.common.workspace import Workspace
    from vlp_models.contrib.bisect.answers import write_answer
    from vlp_models.contrib.bisect.bisect import open_bisection
    from vlp_models.contrib.bisect.page import format_result
    from vlp_models.params import load_params
    from vlp_models.pipeline.guard import stopped_by_signals

    params, workspace = load_params(), Workspace()
    deadline = time.monotonic() + parse_budget(budget) if budget else float("inf")
    lock = file_lock(workspace.root / ".work" / "locks" / "bisect.lock", "`vlp bisect`")
    try:
        bisection = open_bisection(workspace.root, params, (good, bad), run=run, seeds=seeds, deadline=deadline)
        if unknown := set(attempt or []) - {change.id for change in bisection.changes.tried}:
            raise DataError(f"{sorted(unknown)[0]}: no such change; `vlp bisect {good} {bad} --list` lists them")
        if only_list:
            answer = bisection.list_changes()
        else:
            with lock, stopped_by_signals("bisect"):
                answer = bisection.try_changes(attempt) if attempt else bisection.answer()
    except DataError as error:
        raise NoAnswerError(str(error)) from None
    result = bisection.result(answer)
    causes = [word for cause in answer.causes[:1] for name in cause for word in ("--try", name)]
    result["command"] = shlex.join(
        ["vlp", "bisect", *bisection.names, *(["--run", run] if run else []), *causes],
    )
    page = None if only_list or attempt else write_answer(params, workspace, result)
    if as_json:
        print(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        print("\n".join(format_result(result)))
        if page:
            print(f"page      {page}")
    if answer.kind in ("inconclusive", "out of time"):
        raise typer.Exit(NoAnswerError.exit_code)


def parse_budget(text: str) -> float:
    """Return the seconds of `2h`, `90m` or `1h30m`.

    Raises:
        ParamsError: it is not a time.
    """
    parts = re.findall(r"(\d+(?:\.\d+)?)([hms])", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ParamsError(f"--budget {text}: not a time; write 2h, 90m or 1h30m")
    seconds = sum(float(number) * UNITS[unit] for number, unit in parts)
    if not seconds:
        raise ParamsError(f"--budget {text}: nothing can be trained in no time")
    return seconds


COMMANDS = {"Registry and promotion": {"bisect": bisect}}
WORK: dict[str, str] = {}
