"""`dvc repro` with a short log, for `vlp run` and the flows:  python -m vlp_models.pipeline.dvc.repro [ARGUMENT...]

DVC's arguments, exit codes and errors stay. Left out of its log: the command of each stage, dvc.lock's updates, stages
that didn't change, and hints, which would come once for each call.

Added to DVC is a check of the params that it is about to record (pipeline/dvc/consistency.py).
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any, TextIO

from vlp_models.common.log import steady_output
from vlp_models.pipeline.dvc.lock_file import REPRO_MODULE

REPRO = [sys.executable, "-m", REPRO_MODULE]  # as a command
PARTIAL = "VLP_PARTIAL_REPRO"  # environment variable of a call that others of the same run follow
UP_TO_DATE = "Data and pipelines are up to date."
# Empty lines, commands (`> ...`), unchanged stages, and hints on git, autostage and pushing.
LEFT_OUT = re.compile(
    r"\s*$|> |(Stage )?'.*' didn't change, skipping$|(Generating|Updating) lock file '|"
    r"To track the changes with git, run:|\tgit add |To enable auto staging, run:|\tdvc config core\.autostage true|"
    r"Use `dvc push` "
)


class ShortLog:
    """A stdout that leaves out lines of DVC's log."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._unfinished = ""  # a line that has not ended yet
        self._is_partial = PARTIAL in os.environ

    def write(self, text: str) -> int:
        # A line may arrive in pieces: what follows the last line break waits for its rest.
        *lines, self._unfinished = (self._unfinished + text).split("\n")
        for line in lines:
            if not LEFT_OUT.match(line) and not (self._is_partial and line == UP_TO_DATE):
                self._stream.write(f"{line}\n")
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def main() -> int:
    steady_output()
    sys.stdout = ShortLog(sys.stdout)  # type: ignore[assignment]  # before DVC is imported: its logger keeps the stream
    # Calls at the same time take turns at DVC's lock, for which it otherwise waits three seconds.
    wait = ["--wait-for-lock"] if PARTIAL in os.environ else []
    sys.argv[:1] = ["dvc", *wait, "repro"]
    from dvc.cli import main as run_dvc

    _check_params_on_save()
    return int(run_dvc(sys.argv[1:]))


def _check_params_on_save() -> None:
    """Make DVC fail a stage that has ended, before it records anything, if params.yaml was edited meanwhile."""
    from dvc.dependency.param import ParamsDependency

    # DVC has no hook for this moment: the method is replaced.
    save = ParamsDependency.save

    def save_checked(dependency: ParamsDependency) -> None:
        from vlp_models.pipeline.dvc.consistency import PARAMS, check_recorded_params  # a second, if nothing is stale

        save(dependency)  # reads the file
        if dependency.def_path == PARAMS:
            check_recorded_params(Path(dependency.repo.root_dir), dependency.stage.name, dependency.hash_info.value)

    ParamsDependency.save = save_checked


if __name__ == "__main__":
    sys.exit(main())
