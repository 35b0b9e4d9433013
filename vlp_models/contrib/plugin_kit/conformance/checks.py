"""Results of checks: a function that returns a detail to print, and raises a `Problem` with a sentence."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vlp_models.errors import VLPError, first_line, shorten_list

LIBRARIES = ("torch", "torchvision", "timm", "numpy", "pyarrow")


class Problem(VLPError):
    """A check failed; the message is the sentence to print."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one check. problem: empty if it passed."""

    check: str
    detail: str = ""
    problem: str = ""
    seconds: float = 0.0


def run_check(name: str, check: Callable[[], str | None]) -> Result:
    """Run one check; whatever it raises is its problem, with the file and line if it is not a `VLPError`."""
    start = time.perf_counter()
    detail = problem = ""
    try:
        detail = check() or ""
    except VLPError as error:
        problem = str(error)
    except Exception as error:  # a plugin's code may raise anything
        problem = f"{_location(error)}{type(error).__name__}: {first_line(error)}"
    return Result(check=name, detail=detail, problem=problem, seconds=time.perf_counter() - start)


def _location(error: Exception) -> str:
    """Return `file:line: ` of the innermost frame that is not in a library of arrays."""
    # From the innermost frame outward, without `run_check` itself.
    for frame in reversed(traceback.extract_tb(error.__traceback__)[1:]):
        if not any(f"site-packages/{library}/" in frame.filename for library in LIBRARIES):
            return f"{frame.filename}:{frame.lineno}: "
    return ""


def shorten_names(names: Iterable[object]) -> str:
    """Return the first names, and how many more there are."""
    return shorten_list([str(name) for name in names], 4)
