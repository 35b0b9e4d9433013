"""How a run ends in MLflow, also while that is away: its numbers then wait under .work/mlflow/ until it answers."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vlp_models.common.lock import file_lock
from vlp_models.errors import DataError
from vlp_models.params import TrackingParams
from vlp_models.registry.logger import MLflowRun
from vlp_models.training.log import LOG

RUN = "run.json"


def spool(root: Path) -> Path:
    return root / ".work" / "mlflow"


@contextmanager
def tracked(run: MLflowRun | None, work: Path) -> Iterator[MLflowRun | None]:
    """Ends the run with the status that fits how the block ends."""
    log = work / LOG
    try:
        yield run
    except BaseException as error:
        if run is not None:
            stopped = isinstance(error, (SystemExit, KeyboardInterrupt))
            run.close(log, "KILLED" if stopped else "FAILED")  # if that fails: its state stays in `work`
        raise
    if run is not None:
        close_or_keep(run, log)


def close_or_keep(run: MLflowRun, log: Path) -> None:
    """Ends a finished run. If MLflow does not answer, keeps all it needs; if it does, sends what others have left."""
    place = spool(run.root) / run.key
    partial = place.with_name(f".{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    ended = int(time.time() * 1000)
    if run.close(log, "FINISHED", ended):
        shutil.rmtree(place, ignore_errors=True)
        replay(run.params, run.root)
        return
    try:
        partial.mkdir(parents=True)
        shutil.copy(log, partial / LOG)
        (partial / RUN).write_text(json.dumps({**run.record, "ended": ended}), encoding="utf-8")
        shutil.rmtree(place, ignore_errors=True)
        partial.rename(place)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    print(
        f"MLflow at {run.uri}: the run's numbers wait in {place}; the next training, `vlp run` or "
        "`vlp stage register` sends them",
        file=sys.stderr,
    )


def waiting(root: Path) -> list[Path]:
    """The runs that wait, in the order they ended."""
    return sorted(spool(root).glob(f"[!.]*/{RUN}"), key=lambda path: path.stat().st_mtime)


def replay(params: TrackingParams, root: Path) -> int:
    """Sends what waits for this MLflow; returns how many runs still wait. Never raises for MLflow's sake."""
    if not params.uri or not waiting(root):
        return 0
    try:
        with file_lock(root / ".work" / "mlflow.lock", "sending of metrics"):
            for path in waiting(root):
                place = path.parent
                try:
                    record = json.loads(path.read_text(encoding="utf-8"))
                    run = MLflowRun.from_record(params, root, place, record)
                    there = record["state"]["uri"]
                except (ValueError, KeyError, TypeError, AttributeError) as error:  # after a power cut
                    aside = place.rename(place.with_name(f".damaged-{place.name}"))
                    print(f"{path}: damaged ({error!r}), so its numbers can't be sent; now in {aside}", file=sys.stderr)
                    continue
                if there != run.uri:
                    continue
                if not run.close(place / LOG, "FINISHED", record["ended"]):
                    break
                shutil.rmtree(place)
                print(f"MLflow at {run.uri}: {record['name']}'s numbers, which waited, are there", file=sys.stderr)
    except DataError:  # another process is sending them
        pass
    return len(waiting(root))
