"""Draw faults, inject them into a run, and check the result."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import subprocess
import time
from typing import Any

import psutil
from around import AROUND
from conditions import CONDITIONS, NAMES
from ground import CAPTIONING, DEPENDENTS, TRAININGS, UNEVEN, Command, Ground, end_all, ran
from moments import MOMENTS, STEP_FILES, Fault, Outcome, reach, start, until
from parts import PARTS
from unattended import UNATTENDED

# kind -> (role of the process, signal)
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
REGISTER_AGAIN = ("mlflow.db lost", "ledger damaged")  # lost curves are not sent again, lost versions are
DAMAGES = ("flipped byte in checkpoint", "checkpoint cut off")  # after a power cut during training
LOCKS = ("power cut", "power cut, rwlock empty", "power cut, dvc.lock cut off", "power cut, dvc.lock empty")
KINDS = (
    *(*SIGNALS, *DAMAGES, *LOCKS, "full disk", "MLflow away", "two at once"),
    *(*AROUND, *PARTS, *UNATTENDED, *CONDITIONS),
)
GROUPS = {  # of kinds, in the summary
    "kill -9": tuple(kind for kind in SIGNALS if kind.startswith("kill")),
    "SIGTERM, SIGINT": tuple(kind for kind in SIGNALS if kind.startswith("SIG")),
    "power cut, damaged checkpoint": (*LOCKS, *DAMAGES),
    "damaged output or ledger": ("flipped byte in output", "ledger damaged"),
    "full or small disk": ("full disk", "small disk"),
    "MLflow or its database away": ("MLflow away", "server away", "mlflow.db lost"),
    "params edited, clock jumps, two at once": ("params edited", "clock jumps", "two at once"),
    "dead part": tuple(PARTS),
    "unattended stack": tuple(UNATTENDED),
    "file system": ("no file locks", "no links", "cache linked", "odd folder name"),
    "machine": ("host name does not resolve", "small /dev/shm", "bad TMPDIR"),
}
INJECTORS = AROUND | PARTS | UNATTENDED | CONDITIONS
ON_TRAININGS = (
    *(*DAMAGES, "MLflow away", "server away", "loader process", "DVC after new params"),
    *("unattended: params edited", "small /dev/shm"),
)
ONLY_ON = {"torchrun": "pretrain@tden", "host name does not resolve": "pretrain@tden", "Java program": CAPTIONING}
TWO_PROCESSES = ("torchrun", "host name does not resolve")
# The rest of the pipeline is checked, too; DVC writes dvc.lock only after a stage, which has made a copy.
WHOLE = (
    *("params edited", *REGISTER_AGAIN, "power cut, dvc.lock cut off", "power cut, dvc.lock empty"),
    "flipped byte in output",  # a run of one stage reads no other outputs
)


def draw(seed: int, number: int, stages: list[str]) -> Fault:
    """Return the `number`-th fault of a campaign, a function of seed and number."""
    rng = random.Random(f"{seed}/{number}")
    kind = KINDS[number % len(KINDS)] if number < 2 * len(KINDS) else rng.choice(KINDS)  # each twice, then at random
    stage = _draw_stage(rng, kind, stages)
    moments = ["train"] if kind in DAMAGES else [m for m in MOMENTS if m != "train" or stage in TRAININGS]
    if kind.endswith("stage"):
        moments.remove("record")
    if kind == "unattended: params edited":
        moments = ["write", "record"]
    command = rng.choices(["vlp run", "dvc repro", "flow"], [6, 2, 2])[0]
    if kind == "kill -9 supervisor" and command == "dvc repro":
        command = "vlp run"
    if kind == "SIGINT command" and command == "dvc repro":
        command = "vlp run"  # a terminal sends it to the whole group
    if "supervisor" not in kind and command == "dvc repro" and kind.endswith("command"):
        kind = kind.replace("command", "dvc")
    if kind == "kill -9 flow":
        command = "flow"
    if (kind == "full disk" and command == "flow") or kind == "DVC after new params":
        command = "vlp run"  # a flow reads a stage's output from a file, which the limit would truncate as well
    if kind in UNATTENDED:
        command = "flow"
    elif (kind in (*PARTS, *TWO_PROCESSES) and command == "flow") or (
        kind in ("no file locks", "no links") and command == "dvc repro"
    ):
        command = "vlp run"  # without locks and links, DVC's own messages are its own
    # The weights of two processes are other weights: the stages below would train again.
    whole = kind not in TWO_PROCESSES and (command == "flow" or kind in WHOLE or rng.random() < 1 / 3)
    return Fault(number, kind, stage, rng.choice(moments), command, rng.random() < 0.5, rng.random(), whole)


def _draw_stage(rng: random.Random, kind: str, stages: list[str]) -> str:
    trains = kind in ON_TRAININGS or rng.random() < 0.5
    stage = rng.choice([s for s in stages if not trains or s in TRAININGS])
    if kind == "ledger damaged":  # the gate has every score it needs
        stage = rng.choice((*TRAININGS, "report"))
    return ONLY_ON.get(kind, stage) if kind != "pool process" else rng.choice(("shards", "features"))


def inflict(ground: Ground, fault: Fault) -> Outcome:
    """Run the pipeline from before `fault.stage`, inject the fault, rerun to the end and check the results."""
    outcome = Outcome(fault)
    began = time.monotonic()
    if fault.kind == "odd folder name":
        ground = ground.named(NAMES[int(fault.chance * len(NAMES))])
    ground.before(fault.stage)
    try:
        _inflict(ground, fault, outcome)
    except subprocess.TimeoutExpired as error:
        outcome.blame("endless", f"no end: {error}")
    finally:
        end_all(ground.descendants())
        outcome.clean_up()
        if fault.kind == "odd folder name":
            shutil.rmtree(ground.project, ignore_errors=True)
    outcome.seconds = round(time.monotonic() - began, 1)
    return outcome


def _inflict(ground: Ground, fault: Fault, outcome: Outcome) -> None:
    run = _inject(ground, fault, outcome)
    run.wait()
    if fault.kind in CONDITIONS and run.process.returncode == 0 and not fault.whole:
        outcome.blame("lost", *(f"still running: {line}" for line in ground.wait_for_quiet()))
        _compare(ground, fault, outcome)
        return
    outcome.output = outcome.output or run.output[-1500:]
    if outcome.hit and run.process.returncode == 0 and fault.kind in SIGNALS and fault.moment != "record":
        outcome.blame("silent", *([] if fault.stage in ground.recorded() else ["exit code 0, the stage not recorded"]))
    if not fault.at_once or fault.kind in PARTS or fault.kind in UNATTENDED:
        outcome.blame("lost", *(f"still running: {line}" for line in ground.wait_for_quiet()))
    recorded = ground.recorded()
    rerun = _run_to_the_end(ground, fault, outcome)
    uneven = not {fault.stage, *outcome.may_repeat}.isdisjoint(UNEVEN)
    allowed = outcome.may_repeat | (DEPENDENTS if uneven or fault.kind in REGISTER_AGAIN else set())
    repeated = ran(rerun.output) & recorded - allowed
    if repeated and "dvc.lock" not in fault.kind:
        outcome.blame("lost", f"repeated: {', '.join(sorted(repeated))}")
    if fault.kind in DAMAGES and outcome.hit and "damaged (its sha256 does not match)" not in rerun.output:
        outcome.blame("silent", "the message does not mention the damaged checkpoint")
    if outcome.restored and "restored the result of a finished run" not in rerun.output:
        outcome.blame("lost", "a finished training was not restored")
    outcome.blame("lost", *(f"still running: {line}" for line in ground.wait_for_quiet()))
    if not outcome.problems:
        _compare(ground, fault, outcome)
    if outcome.problems:
        outcome.output += "\n--- rerun\n" + rerun.output[-3000:]


def _compare(ground: Ground, fault: Fault, outcome: Outcome) -> None:
    """Compare the result with the undisturbed run's."""
    if outcome.reference:
        if ground.weights(fault.stage).read_bytes() != outcome.reference:
            outcome.blame("silent", "the weights differ from an undisturbed training with two processes")
        return
    # A stage that was recorded with an edit is trained twice: with the edit, and as it was.
    trained = 2 if "params edited" in fault.kind and fault.stage in outcome.may_repeat else 1
    content, history = ground.wrong("registry" if fault.kind in REGISTER_AGAIN else fault.stage, trained)
    outcome.blame("silent", *content)
    outcome.blame("lost", *history)


def _run_to_the_end(ground: Ground, fault: Fault, outcome: Outcome, tries: int = 8) -> Command:
    """Run `vlp run`, again while processes of the first run block it."""
    while True:
        rerun = start(ground, fault, "vlp run")
        code = rerun.wait()
        outcome.reruns += 1
        busy = any(text in rerun.output for text in ("is busy", "is using this workspace", "Unable to acquire lock"))
        if code == 0 or not busy or outcome.reruns == tries:
            if code:
                outcome.blame("lost", f"the rerun ended with {code}")
            return rerun
        time.sleep(4)


def _inject(ground: Ground, fault: Fault, outcome: Outcome) -> Command:
    if fault.kind in INJECTORS:
        return INJECTORS[fault.kind](ground, fault, outcome)
    if fault.kind == "full disk":
        return _full_disk(ground, fault, outcome)
    if fault.kind == "MLflow away":
        return _without_mlflow(ground, fault, outcome)
    run = start(ground, fault)
    outcome.hit = reach(ground, fault, run)
    if fault.kind == "two at once":
        bare = fault.chance < 0.3
        second = start(ground, fault, "dvc repro" if bare else "vlp run")
        code = second.wait()
        # A bare DVC may find that the first one has ended with everything recorded, and has nothing to do; or it runs
        # between two parts of a flow, when no DVC is at work.
        alone = bare and (fault.command == "flow" or not ran(second.output))
        overlap = outcome.hit and run.process.poll() is None and not alone
        if code == 0 and overlap:
            outcome.blame("lost", f"a second run ended with 0 during the first: {second.output[-500:]}")
        if code and "is using" not in second.output and "busy" not in second.output and "lock" not in second.output:
            outcome.blame("silent", f"the second run does not explain its failure: {second.output[-500:]}")
    elif outcome.hit:
        _strike(ground, fault, run, outcome)
    outcome.exit_code = run.wait()
    if fault.kind == "two at once" and outcome.exit_code:
        outcome.blame("lost", f"the first of two runs ended with {outcome.exit_code}")
    return run


def _full_disk(ground: Ground, fault: Fault, outcome: Outcome) -> Command:
    """Limit the size of the files of the stage, or of every process: EFBIG instead of a full disk's ENOSPC.

    Unlike a small file system this needs no privilege. With a limit for every process, DVC's databases fail first.
    """
    most = int(100 * 3000 ** (4 * fault.chance % 1))
    if fault.chance > 0.75:
        run = start(ground, fault, wrap=["prlimit", f"--fsize={most}", "--"])
    else:
        run = start(ground, fault)
        if reach(ground, fault, run) and (process := ground.process("stage")):
            with contextlib.suppress(psutil.Error):
                process.rlimit(psutil.RLIMIT_FSIZE, (most, most))
    outcome.exit_code = run.wait()
    outcome.hit = outcome.exit_code != 0
    words = ("disk",) if fault.chance > 0.75 else ("make room", "free some space")
    if outcome.hit and not any(text in run.output for text in words):
        outcome.blame("silent", "the message does not mention the full disk")
    return run


def _strike(ground: Ground, fault: Fault, run: Command, outcome: Outcome) -> None:
    if fault.kind in SIGNALS:
        role, number = SIGNALS[fault.kind]
        outcome.hit = False
        with contextlib.suppress(psutil.Error):  # the process has just ended
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
    """Make the database unreadable from the start or later, until the end or for a while."""
    database, away = ground.project / "mlflow.db", ground.project / "away.db"
    late, back = fault.chance < 0.5, fault.chance % 0.5 < 0.25

    def remove() -> None:
        database.rename(away)
        database.mkdir()

    if not late:
        remove()
    run = start(ground, fault)
    if late:
        outcome.hit = reach(ground, fault, run)
    if late and outcome.hit:
        with contextlib.suppress(FileNotFoundError):
            remove()
    if back and outcome.hit:
        until(lambda: bool(list(ground.project.glob(f".work/*/*/{STEP_FILES}"))), run)
        time.sleep(fault.chance)
        _restore(database, away)
    outcome.exit_code = run.wait()
    _restore(database, away)
    if outcome.exit_code and ground.recorded() != set(ground.stages):
        outcome.blame("lost", f"training without MLflow ended with {outcome.exit_code}")
    return run


def _restore(database: Any, away: Any) -> None:
    if away.exists():
        if database.is_dir():
            database.rmdir()
        for leftover in database.parent.glob("mlflow.db-*"):
            leftover.unlink()
        away.rename(database)
