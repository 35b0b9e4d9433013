"""Tell people how a run has ended, by what contrib adds (contrib/notify)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vlp_models.common.plugins import Table, import_target

NOTIFIERS = Table("notifiers", {})  # name -> `module:function`, called as `tell` is


def tell(
    root: Path, log: Callable[[str], None], *, flow: str, run: str, state: str, message: str, bad: bool, link: str = ""
) -> None:
    """
    Args:
        bad: a person should look at it.
        link: to the run, if a server shows it.
    """
    for target in NOTIFIERS.values():
        import_target(target)(root, log, flow=flow, run=run, state=state, message=message, bad=bad, link=link)
