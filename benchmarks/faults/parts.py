"""Parts of a run that die alone: loader processes, pool processes, Java programs, torchrun's node, DVC at the end.

Within a minute the command must have ended with a message that names the part, or go on with the right result. The next
run then completes with the undisturbed run's weights.
"""

from __future__ import annotations

import fcntl
import random
import shutil
import signal
import time
from collections.abc import Callable

import psutil
import yaml
from ground import Command, Ground, patience
from moments import Fault, Outcome, expect_message, set_params, start, until

NOTICE = 60  # seconds after the death of a part in which the command ends
TORCHRUN = {"trainer.launcher": "torchrun", "trainer.devices": 2}
MODEL = "model.safetensors"


def loader_process(ground: Ground, fault: Fault, outcome: Outcome) -> Command:
    """Kill or stop a loader process, or one of the two processes that a training on CPUs forks."""
    restore = set_params(ground, {"trainer.num_workers": 2})
    run = _strike(ground, fault, outcome, ground.loader_workers, "loader", "num_workers", "process of this")
    restore()
    return run


def pool_process(ground: Ground, fault: Fault, outcome: Outcome) -> Command:
    """Kill one of the two processes that compute the chunks of shards or features."""
    restore = set_params(ground, {"cluster.workers": 2})
    run = _strike(ground, fault, outcome, lambda: _named(ground, "spawn_main"), "process", "chunk")
    restore()
    return run


def java_program(ground: Ground, fault: Fault, outcome: Outcome) -> Command:
    """Kill or stop the tokenizer or METEOR while captions are scored."""
    return _strike(ground, fault, outcome, lambda: _named(ground, "java"), "meteor", "java", "tokenizer")


def torchrun_part(ground: Ground, fault: Fault, outcome: Outcome) -> Command:
    """Kill torchrun's node, its agent, or one of its two processes."""
    outcome.reference = train_with_two(ground, fault)
    set_params(ground, TORCHRUN)  # also for the next run: the same processes compute the same numbers
    outcome.note = random.Random(fault.chance).choice(("node", "agent", "process"))

    def find() -> list[psutil.Process]:
        agents = _named(ground, "torch.distributed.run")
        if outcome.note == "agent":
            return agents
        if outcome.note == "node":
            return _named(ground, "launchers.node")
        # The agent's command line names what it starts.
        return [process for process in _named(ground, "launchers.worker") if process not in agents]

    return _strike(ground, fault, outcome, find, "torchrun", "process", "node")


def dvc_at_the_end(ground: Ground, fault: Fault, outcome: Outcome) -> Command:
    """Kill DVC between the end of a first training with other params and its record: an older entry is in dvc.lock."""
    kind, _, name = fault.stage.partition("@")
    entry = ground.lock(ground.snapshot)[fault.stage]
    entry["params"]["params.yaml"][f"{kind}.{name}"] = {
        **(entry["params"]["params.yaml"].get(f"{kind}.{name}") or {}),
        "seed": 98,
    }
    lock = yaml.safe_load((ground.project / "dvc.lock").read_text())
    lock["stages"][fault.stage] = entry
    (ground.project / "dvc.lock").write_text(yaml.safe_dump(lock, sort_keys=False))
    for out in entry["outs"]:
        source, target = ground.snapshot / out["path"], ground.project / out["path"]
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy2(source, target)
    work = ground.project / ".work" / fault.stage.replace("@", "-")
    run = start(ground, fault)
    outcome.hit = until(lambda: list(work.glob("*/finished")), run)
    if outcome.hit:
        time.sleep(fault.chance)
        process = ground.process("dvc")
        outcome.hit = process is not None
        if process is not None:
            process.kill()
    outcome.exit_code = run.wait()
    outcome.may_repeat.add(fault.stage)  # it is in dvc.lock, with the older params
    outcome.restored = outcome.hit and _seed(ground, fault.stage) == 98
    return run


PARTS: dict[str, Callable[[Ground, Fault, Outcome], Command]] = {
    "loader process": loader_process,
    "pool process": pool_process,
    "Java program": java_program,
    "torchrun": torchrun_part,
    "DVC after new params": dvc_at_the_end,
}


def _strike(
    ground: Ground, fault: Fault, outcome: Outcome, find: Callable[[], list[psutil.Process]], *causes: str
) -> Command:
    """Run, kill or stop one of the processes at a random moment, and check how the command ends."""
    chance = random.Random(fault.chance)
    run = start(ground, fault)
    outcome.hit = until(find, run, pause=0.1)
    if outcome.hit:
        time.sleep(2.5 * chance.random() ** 2)  # more often early: a tiny training is short
        victims = find()
        outcome.hit = bool(victims)
    if not outcome.hit:
        outcome.exit_code = run.wait()
        return run
    victim, number = chance.choice(victims), chance.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))
    if fault.kind in ("torchrun", "pool process"):
        number = signal.SIGKILL
    if fault.kind == "Java program":
        outcome.note = "METEOR" if victim in _named(ground, "meteor") else "tokenizer"
    outcome.note = " ".join(filter(None, (outcome.note, number.name)))
    try:
        victim.send_signal(number)
    except psutil.Error:
        outcome.hit = False
    since, limit = time.monotonic(), patience(NOTICE)
    outcome.exit_code = run.wait()
    outcome.noticed = round(time.monotonic() - since, 1)
    if outcome.exit_code and outcome.noticed > limit:
        outcome.blame("endless", f"it ended {outcome.noticed} s after the death")
    expect_message(outcome, run, *causes)
    if not outcome.exit_code and fault.kind == "Java program" and (lines := ground.other_scores()):
        outcome.blame("silent", f"it ended with 0 and other scores: {' '.join(lines)[:300]}")
    return run


def _named(ground: Ground, word: str) -> list[psutil.Process]:
    """Return the lane's processes in whose command line a word is."""
    named = []
    for process in ground.descendants():
        try:
            if any(word in part for part in process.cmdline()):
                named.append(process)
        except psutil.Error:
            continue
    return named


def train_with_two(ground: Ground, fault: Fault) -> bytes:
    """Return the weights of an undisturbed training with two processes; it is run once for all lanes."""
    file = ground.top / f"two-processes-{fault.stage}.safetensors"
    with (ground.top / "two-processes.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            set_params(ground, TORCHRUN)
            run = Command("vlp run", ground.project, more=[fault.stage])
            if run.wait():
                raise RuntimeError(f"the training with two processes fails: {run.output[-2000:]}")
            shutil.copy(ground.weights(fault.stage), file)
            ground.before(fault.stage)
    return file.read_bytes()


def _seed(ground: Ground, stage: str) -> int | None:
    kind, _, name = stage.partition("@")
    entry = ground.lock(ground.project).get(stage)
    if entry is None:
        return 98
    return (entry["params"]["params.yaml"].get(f"{kind}.{name}") or {}).get("seed")
