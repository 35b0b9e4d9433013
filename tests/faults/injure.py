"""The faults: what is done to a run, and when."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import time
from typing import Any

import psutil
from around import AROUND
from ground import DEPENDENTS, TRAININGS, UNEVEN, Command, Ground, end_all, ran
from moments import MOMENTS, STEP_FILES, Fault, Outcome, reach, until

# kind -> (the role that is hit, by what)
SIGNALS = {
    "kill -9 stage": ("stage", signal.SIGKILL),
    "kill -9 dvc": ("dvc", signal.SIGKILL),
    "kill -9 supervisor": ("supervisor", signal.SIGKILL),
    "kill -9 command": ("top", signal.SIGKILL),
    "SIGTERM stage": ("stage", signal.SIGTERM),
    "SIGTERM dvc": ("dvc", signal.SIGTERM),
    "SIGTERM command": ("top", signal.SIGTERM),
    "SIGINT command": ("top", signal.SIGINT),
    "kill -9 flow": ("top", signal.SIGKILL),
}
REGISTER_AGAIN = ("mlflow.db lost", "ledger damaged")  # curves that MLflow has lost are not sent again; versions are
DAMAGES = ("flipped byte in checkpoint", "checkpoint cut off")  # after a power cut in mid-training
LOCKS = ("power cut", "power cut, rwlock empty", "power cut, dvc.lock cut off", "power cut, dvc.lock empty")
KINDS = (*SIGNALS, *DAMAGES, *LOCKS, "full disk", "MLflow away", "two at once", *AROUND)


def draw(seed: int, number: int, stages: list[str]) -> Fault:
    """The `number`-th fault of a campaign: a function of seed and number alone."""
    rng = random.Random(f"{seed}/{number}")
    kind = KINDS[number % len(KINDS)] if number < 2 * len(KINDS) else rng.choice(KINDS)  # each twice, then at random
    trains = kind in (*DAMAGES, "MLflow away", "server away") or rng.random() < 0.5
    stage = rng.choice([s for s in stages if not trains or s in TRAININGS])
    if kind == "ledger damaged":  # every score that the gate asks for is there
        stage = rng.choice((*TRAININGS, "report"))
    moments = ["train"] if kind in DAMAGES else [m for m in MOMENTS if m != "train" or stage in TRAININGS]
    if kind.endswith("stage"):
        moments.remove("record")
    command = rng.choices(["vlp run", "dvc repro", "flow"], [6, 2, 2])[0]
    if kind == "kill -9 supervisor" and command == "dvc repro":
        command = "vlp run"
    if kind == "SIGINT command" and command == "dvc repro":
        command = "vlp run"  # a terminal would send it to the whole group
    if "supervisor" not in kind and command == "dvc repro" and kind.endswith("command"):
        kind = kind.replace("command", "dvc")
    if kind == "kill -9 flow":
        command = "flow"
    if kind == "full disk" and command == "flow":
        command = "vlp run"  # a flow reads a stage's words from a file, which the limit would cut off as well
    return Fault(number, kind, stage, rng.choice(moments), command, rng.random() < 0.5, rng.random())


def inflict(ground: Ground, fault: Fault) -> Outcome:
    """Runs the pipeline without `fault.stage`, hurts it, runs it again to the end and looks at what is there."""
    outcome = Outcome(fault)
    began = time.monotonic()
    ground.before(fault.stage)
    try:
        hurt = _hurt(ground, fault, outcome)
    except subprocess.TimeoutExpired as error:
        end_all(ground.processes())
        outcome.problems.append(f"it does not end: {error}")
        return outcome
    outcome.said = hurt.output[-1500:]
    if outcome.hit and hurt.process.returncode == 0 and fault.kind in SIGNALS and fault.moment != "record":
        outcome.problems += [] if fault.stage in ground.recorded() else ["exit code 0, and the stage not recorded"]
    if not fault.at_once:
        outcome.problems += [f"orphan: {line}" for line in ground.wait_for_quiet()]
    recorded = ground.recorded()
    rerun = _run_to_the_end(ground, outcome)
    allowed = outcome.may_repeat | (DEPENDENTS if fault.stage in UNEVEN or fault.kind in REGISTER_AGAIN else set())
    repeated = ran(rerun.output) & recorded - allowed
    if repeated and "dvc.lock" not in fault.kind:
        outcome.problems.append(f"repeated: {', '.join(sorted(repeated))}")
    if fault.kind in DAMAGES and outcome.hit and "set aside" not in rerun.output:
        outcome.problems.append("the damaged checkpoint is not spoken of")
    outcome.problems += [f"orphan: {line}" for line in ground.wait_for_quiet()]
    if not outcome.problems:
        # of a stage that was recorded with an edit, each training is one: as it was edited, and as it is
        trained = 2 if fault.kind == "params edited" and fault.stage in outcome.may_repeat else 1
        outcome.problems += ground.wrong("registry" if fault.kind in REGISTER_AGAIN else fault.stage, trained)
    if outcome.problems:
        outcome.said += "\n--- rerun\n" + rerun.output[-3000:]
    outcome.seconds = round(time.monotonic() - began, 1)
    return outcome


def _run_to_the_end(ground: Ground, outcome: Outcome, tries: int = 8) -> Command:
    """`vlp run`, as often as what is left of the first run keeps it from starting."""
    while True:
        rerun = Command("vlp run", ground.project)
        code = rerun.wait(400)
        outcome.reruns += 1
        busy = any(text in rerun.output for text in ("is busy", "at work in this workspace", "Unable to acquire lock"))
        if code == 0 or not busy or outcome.reruns == tries:
            if code:
                outcome.problems.append(f"the rerun ended with {code}")
            return rerun
        time.sleep(4)


def _hurt(ground: Ground, fault: Fault, outcome: Outcome) -> Command:
    if fault.kind in AROUND:
        return AROUND[fault.kind](ground, fault, outcome)
    if fault.kind == "full disk":
        return _full_disk(ground, fault, outcome)
    if fault.kind == "MLflow away":
        return _without_mlflow(ground, fault, outcome)
    run = Command(fault.command, ground.project)
    outcome.hit = reach(ground, fault, run)
    if fault.kind == "two at once":
        bare = fault.chance < 0.3
        second = Command("dvc repro" if bare else "vlp run", ground.project)
        code = second.wait()
        # A bare DVC may find that the first one's has ended, and everything recorded: it then has nothing to do.
        beside = outcome.hit and run.process.poll() is None and not (bare and not ran(second.output))
        if code == 0 and beside:
            outcome.problems.append(f"a second run ended with 0 beside the first: {second.output[-500:]}")
        if code and "at work" not in second.output and "busy" not in second.output and "lock" not in second.output:
            outcome.problems.append(f"the second run does not say why: {second.output[-500:]}")
    elif outcome.hit:
        _strike(ground, fault, run, outcome)
    outcome.exit_code = run.wait()
    if fault.kind == "two at once" and outcome.exit_code:
        outcome.problems.append(f"the first of two runs ended with {outcome.exit_code}")
    return run


def _full_disk(ground: Ground, fault: Fault, outcome: Outcome) -> Command:
    """No file of the stage, or of anything, may grow beyond so many bytes: EFBIG where a full disk gives ENOSPC.

    Needs no privilege, unlike a small file system. DVC's own databases are the first to suffer where all is limited.
    """
    most = int(100 * 3000 ** (4 * fault.chance % 1))
    if fault.chance > 0.75:
        run = Command(fault.command, ground.project, file_limit=most)
    else:
        run = Command(fault.command, ground.project)
        if reach(ground, fault, run) and (process := ground.process("stage")):
            with contextlib.suppress(psutil.Error):
                process.rlimit(psutil.RLIMIT_FSIZE, (most, most))
    outcome.exit_code = run.wait()
    outcome.hit = outcome.exit_code != 0
    words = ("disk",) if fault.chance > 0.75 else ("make room", "room on its disk")
    if outcome.hit and not any(text in run.output for text in words):
        outcome.problems.append("the full disk is not spoken of")
    return run


def _strike(ground: Ground, fault: Fault, run: Command, outcome: Outcome) -> None:
    if fault.kind in SIGNALS:
        role, number = SIGNALS[fault.kind]
        outcome.hit = False
        with contextlib.suppress(psutil.Error):  # it has just ended
            if target := psutil.Process(run.process.pid) if role == "top" else ground.process(role):
                target.send_signal(number)
                outcome.hit = True
        return
    end_all(ground.processes())
    run.wait()
    if fault.kind in DAMAGES:
        files = sorted(ground.project.glob(f".work/*/*/{STEP_FILES}"))
        content = bytearray(files[-1].read_bytes())
        place = int(fault.chance * len(content))
        content[place] ^= 1 << (fault.number % 8)
        files[-1].write_bytes(content if fault.kind.startswith("flipped") else content[:place])
    if fault.kind.endswith("rwlock empty"):
        (ground.project / ".dvc" / "tmp" / "rwlock").write_text("")
    if "dvc.lock" in fault.kind:
        file = ground.project / "dvc.lock"
        text = file.read_text()
        file.write_text("" if fault.kind.endswith("empty") else text[: int(fault.chance * (len(text) - 2)) + 1])


def _without_mlflow(ground: Ground, fault: Fault, outcome: Outcome) -> Command:
    """The database can't be opened: from the beginning, or from the middle on; till the end, or for a while."""
    database, away = ground.project / "mlflow.db", ground.project / "away.db"
    late, back = fault.chance < 0.5, fault.chance % 0.5 < 0.25

    def leave() -> None:
        database.rename(away)
        database.mkdir()

    if not late:
        leave()
    run = Command(fault.command, ground.project)
    if late:
        outcome.hit = reach(ground, fault, run)
    if late and outcome.hit:
        with contextlib.suppress(FileNotFoundError):
            leave()
    if back and outcome.hit:
        until(lambda: bool(list(ground.project.glob(f".work/*/*/{STEP_FILES}"))), run)
        time.sleep(fault.chance)
        _come_back(database, away)
    outcome.exit_code = run.wait()
    _come_back(database, away)
    if outcome.exit_code and ground.recorded() != set(ground.stages):
        outcome.problems.append(f"training without MLflow ended with {outcome.exit_code}")
    return run


def _come_back(database: Any, away: Any) -> None:
    if away.exists():
        if database.is_dir():
            database.rmdir()
        for leftover in database.parent.glob("mlflow.db-*"):
            leftover.unlink()
        away.rename(database)
