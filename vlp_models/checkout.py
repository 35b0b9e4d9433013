"""Whose code runs: that of the folder whose params.yaml is used, or none.

An environment that several checkouts share has one of them installed. DVC hashes the code of the folder that it works
in, so that must be the code that runs. A folder without a `vlp_models` of its own (a workspace of data and results)
runs what is installed.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from vlp_models.errors import ParamsError

PACKAGE = Path(__file__).parent
_TRIED = "VLP_CODE_OF"  # which process has gone over to which folder's code


def other_code(folder: Path) -> Path | None:
    """The package of `folder`, where it has one and that is not the one that runs."""
    theirs = folder.absolute() / PACKAGE.name
    return theirs if (theirs / "cli.py").is_file() and not PACKAGE.samefile(theirs) else None


def run_the_code_of(folder: Path) -> None:
    """Begins `vlp` again with the code of `folder`, if that is another; does not return then.

    Raises:
        ParamsError: it was begun again, and another's code runs still.
    """
    theirs = other_code(folder)
    if theirs is None:
        return
    attempt = f"{os.getpid()} {theirs}"  # `exec` keeps the process's number
    if os.environ.get(_TRIED) == attempt:
        raise ParamsError(_refusal(theirs))
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{theirs.parent}{os.pathsep}{known}" if known else str(theirs.parent)
    os.environ[_TRIED] = attempt
    os.execv(sys.executable, [sys.executable, "-m", f"{PACKAGE.name}.cli", *sys.argv[1:]])


def refuse_other_code(folder: Path) -> None:
    """
    Raises:
        ParamsError: `folder` has code of its own, and another's runs.
    """
    theirs = other_code(folder)
    if theirs is not None:
        raise ParamsError(_refusal(theirs))


def installed_from() -> Path | None:
    """The checkout that the environment has installed (`pip install --editable`), if it has one."""
    from importlib.metadata import PackageNotFoundError, distribution

    with suppress(PackageNotFoundError, ValueError, KeyError, TypeError):
        origin = json.loads(distribution("vlp-flows").read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            return Path(unquote(urlsplit(origin["url"]).path))
    return None


def _refusal(theirs: Path) -> str:
    return (
        f"{theirs.parent / 'params.yaml'}: its folder has code of its own ({theirs}), but the code of "
        f"{PACKAGE} runs; begin with `vlp`, from that folder, or set PYTHONPATH={theirs.parent}"
    )
