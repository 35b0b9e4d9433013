"""Notify people of the end of a run, by what contrib adds (contrib/notify)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vlp_models.common.plugins import Table, import_target
from vlp_models.errors import first_line

NOTIFIERS = Table("notifiers", {})  # name -> `module:function`, called as `notify` is


def notify(
    root: Path, log: Callable[[str], None], *, flow: str, run: str, state: str, message: str, bad: bool, link: str = ""
) -> None:
    """Pass the end of a run on. Never raises.

    Args:
        bad: a person should look at it.
        link: to the run, if a server shows it.
    """
    for name, target in NOTIFIERS.items():
        try:
            import_target(target)(root, log, flow=flow, run=run, state=state, message=message, bad=bad, link=link)
        except Exception as error:  # a notification must not end the flow or a keeper
            log(f"{name}: no notification: {first_line(error)}")
