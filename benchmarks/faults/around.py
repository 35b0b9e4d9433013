"""Faults of a run's environment: disk, clock, server, params, registry, ledger, data."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from ground import BIN, TRAININGS, Command, Ground, environment
from moments import Fault, Outcome, reach, start, until

ROTS = (".safetensors", ".tar", ".parquet", ".txt", ".json")
IMPOSSIBLE = "not possible on this machine"
REFUSED = 3  # exit code of `vlp promote`: an answer, not a failure
FULL = ("make room", "free some space", "disk is full", "no space left")


def small_disk(ground: Ground, fault: Fault, outcome: Outcome) -> Command:
    """Mount a file system of 16 KB to 2 MB at `.work`: a genuine ENOSPC for checkpoints and logs."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        outcome.hit, outcome.output = False, f"{IMPOSSIBLE}: no user name spaces for a small file system"
        return _nothing(ground)
    kilobytes = int(16 * 128**fault.chance)
    after = ground.folder / "work-after"
    shutil.rmtree(after, ignore_errors=True)
    wrap = ["unshare", "-rm", "--", sys.executable, "-c", _ON_A_SMALL_DISK, str(kilobytes), str(after)]
    run = start(ground, fault, wrap=wrap)
    outcome.exit_code = run.wait()
    outcome.hit = outcome.exit_code != 0
    shutil.rmtree(ground.project / ".work", ignore_errors=True)
    if after.exists():
        after.rename(ground.project / ".work")
    if outcome.hit and not any(words in run.output.lower() for words in FULL):
        outcome.blame("silent", "the message does not mention the full disk")
    return run


def clock_jumps(ground: Ground, fault: Fault, outcome: Outcome) -> Command:
    """Shift `time.time` of every process some seconds into the run: by a day or an hour back, an hour or a year ahead.

    The kernel's clock, which dates files, stays: only an administrator can set it.
    """
    by = (-86_400, -3_600, 3_600, 31_536_000)[int(fault.chance * 4)]
    folder = ground.folder / "clock"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(_CLOCK)
    env = environment(ground.project)
    env["PYTHONPATH"] = f"{folder}{os.pathsep}{env['PYTHONPATH']}"
    env["VLP_FAULT_CLOCK"] = f"{time.time() + 3 + 12 * (fault.chance * 4 % 1)} {by}"
    run = start(ground, fault, env=env)
    outcome.exit_code = run.wait()
    if outcome.exit_code:
        outcome.blame("lost", f"ended with {outcome.exit_code} when the clock jumped by {by} s")
    return run


def edited_params(ground: Ground, fault: Fault, outcome: Outcome) -> Command:
    """Edit params.yaml while the stage runs, and restore it afterwards; often it is the stage's own params."""
    file = ground.project / "params.yaml"
    before = file.read_bytes()
    run = start(ground, fault)
    outcome.hit = reach(ground, fault, run)
    own = fault.chance < 0.7 and fault.stage in TRAININGS
    if outcome.hit:
        params = yaml.safe_load(before)
        kind, _, name = fault.stage.partition("@")
        if own:
            params[kind][name]["seed"] = 99
        else:
            params["evaluate"]["gallery"] = 3
        file.write_text(yaml.safe_dump(params, sort_keys=False))
    outcome.exit_code = run.wait()
    file.write_bytes(before)
    outcome.may_repeat |= _stale_after_restore(ground, yaml.safe_load(before))
    if not outcome.hit or not own:
        return run
    recorded = ground.lock(ground.project).get(fault.stage)
    if recorded is not None and _seed_recorded(recorded, fault.stage) != _seed_trained_with(ground, fault.stage):
        outcome.blame("lost", "it was recorded with params that it did not use")
    # At "begin" it has not read params.yaml yet; at "write" and "record" it may have checked it for the last time.
    if fault.moment not in ("begin", "write", "record"):
        if not outcome.exit_code:
            outcome.blame("lost", "a stage whose params were edited while it ran was recorded")
        elif "was edited while" not in run.output:
            outcome.blame("silent", "the message does not mention the edit")
    return run


def lost_registry(ground: Ground, fault: Fault, outcome: Outcome) -> Command:
    """Delete mlflow.db while the stage runs."""
    run = start(ground, fault)
    outcome.hit = reach(ground, fault, run)
    if outcome.hit:
        for path in ground.project.glob("mlflow.db*"):
            path.unlink()
    outcome.exit_code = run.wait()
    return run


def away_server(ground: Ground, fault: Fault, outcome: Outcome) -> Command:
    """Kill an MLflow server on the project's database while the stage runs; start it again later, or after the run."""
    with mlflow_server(ground) as server:
        run = start(ground, fault, env=environment(ground.project) | server.variables)
        outcome.hit = reach(ground, fault, run)
        if outcome.hit:
            server.kill()
            if fault.chance < 0.5:
                until(lambda: False, run, seconds=4 + 20 * fault.chance)
                server.start()
        outcome.exit_code = run.wait()
        if outcome.exit_code and fault.stage in TRAININGS and fault.stage not in ground.recorded():
            outcome.blame("lost", f"a training without its server ended with {outcome.exit_code}")
        if outcome.exit_code and "MLflow" not in run.output:
            outcome.blame("silent", "the message does not mention MLflow")
        server.kill()
        server.start()  # unsent metrics wait for this very server
        back = start(ground, fault, "vlp run", env=environment(ground.project) | server.variables)
        if back.wait():
            outcome.blame("lost", f"with the server back: {back.process.returncode}, {back.output[-400:]}")
    return run


def rotten_output(ground: Ground, fault: Fault, outcome: Outcome) -> Command:
    """Flip one bit of a finished output before the run.

    Its time stamp is new, as after a write by a program; or, for checkpoints and the detector, which have checksums,
    size, time and mode stay the same, as after a disk error.
    """
    chance, lock = random.Random(fault.chance), ground.lock(ground.project)
    silent = chance.random() < 0.4
    outs = {out["path"]: stage for stage, entry in lock.items() for out in entry.get("outs", ())}
    parts = ("checkpoints/", "data/detector") if silent else ("checkpoints/", "data/")
    found = [
        (path, out)
        for out in outs
        if out.startswith(parts) and not out.startswith("data/raw")
        for path in sorted((ground.project / out).rglob("*"))
        if path.is_file() and path.stat().st_size and path.suffix in ROTS
    ]
    path, out = chance.choice(found)
    status, content = path.stat(), bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.chmod(0o644)
    path.write_bytes(content)
    if silent:
        path.chmod(status.st_mode)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    outcome.note = f"{path.relative_to(ground.project)}{', time stamp kept' if silent else ''}"
    # Equal files are hard links to one.
    for other in (other for other in outs if any(file.samefile(path) for file in _files(ground.project / other))):
        outcome.may_repeat |= {outs[other], *_below(lock, other)}
    run = start(ground, fault)
    outcome.exit_code = run.wait()
    if outcome.exit_code and ("Traceback" in run.output or path.name not in run.output):
        outcome.blame("silent", "the damaged file is not named")
    if outcome.exit_code or silent:  # as the message advises
        shutil.rmtree(ground.project / out) if (ground.project / out).is_dir() else (ground.project / out).unlink()
        checkout = Command("dvc checkout", ground.project, more=[out])
        if checkout.wait():
            outcome.blame("lost", f"dvc checkout {out}: {checkout.output[-300:]}")
    return run


def damaged_ledger(ground: Ground, fault: Fault, outcome: Outcome) -> Command:
    """Truncate, empty or delete the ledger after a promotion, or flip one of its bits.

    Whatever happens to the run and to the next `vlp promote`, the champion stays, and with a copy of the ledger its
    history is complete.
    """
    first = Command("vlp promote", ground.project, more=["vqa", "--force", "to damage its line"])
    ledger = ground.project / "promotions" / "ledger.jsonl"
    if first.wait() or not ledger.exists():
        outcome.blame("lost", f"no champion: {first.output[-300:]}")
        return first
    whole, champion, chance = ledger.read_bytes(), ground.champion(), random.Random(fault.chance)
    outcome.note = chance.choice(("cut off", "emptied", "deleted", "flipped"))
    content, place = bytearray(whole), chance.randrange(len(whole))
    content[place] ^= 1 << chance.randrange(8)
    ledger.write_bytes({"cut off": whole[:place], "flipped": bytes(content)}.get(outcome.note, b""))
    if outcome.note == "deleted":
        ledger.unlink()
    run = start(ground, fault)
    outcome.exit_code = run.wait()
    promote = Command("vlp promote", ground.project, more=["vqa"])
    code = promote.wait()
    for output, ended in ((run.output, outcome.exit_code), (promote.output, code)):
        if ended not in (0, REFUSED) and ("Traceback" in output or "ledger" not in output):
            outcome.blame("silent", f"ended with {ended} without naming the ledger: {output[-400:]}")
    if ground.champion() != champion:
        outcome.blame("lost", f"the champion was {champion}, is {ground.champion()}")
    if code not in (0, REFUSED):  # as the message advises: restore a copy
        ledger.parent.mkdir(exist_ok=True)
        ledger.write_bytes(whole)
    history = Command("vlp history", ground.project, more=["vqa"])
    if history.wait():
        outcome.blame("lost", f"vlp history, afterwards: {history.output[-300:]}")
    return run


AROUND: dict[str, Callable[[Ground, Fault, Outcome], Command]] = {
    "small disk": small_disk,
    "clock jumps": clock_jumps,
    "params edited": edited_params,
    "mlflow.db lost": lost_registry,
    "server away": away_server,
    "flipped byte in output": rotten_output,
    "ledger damaged": damaged_ledger,
}


class _Server:
    """`mlflow server` on the project's database; artifacts are written directly to its experiment's folder."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = int(probe.getsockname()[1])
        self._process: subprocess.Popen[bytes] | None = None
        self.variables = {"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{self._port}"}

    def start(self) -> None:
        command = ["server", "--backend-store-uri", f"sqlite:///{self._ground.project / 'mlflow.db'}", "--workers", "1"]
        command += ["--host", "127.0.0.1", "--port", str(self._port), "--no-serve-artifacts"]
        command += ["--default-artifact-root", (self._ground.project / "mlartifacts").as_uri()]
        self._process = subprocess.Popen(
            [str(BIN / "mlflow"), *command],
            cwd=self._ground.folder,
            env=environment(self._ground.project),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + 300
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("mlflow server does not start")
            time.sleep(0.3)

    def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False


@contextlib.contextmanager
def mlflow_server(ground: Ground) -> Iterator[_Server]:
    server = _Server(ground)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def _value_at(params: dict[str, Any], dotted: str) -> Any:
    """Return the value of a key such as `pretrain.steps`; None if it is missing."""
    value: Any = params
    for name in dotted.split("."):
        value = (value or {}).get(name)
    return value


def _stale_after_restore(ground: Ground, params: dict[str, Any]) -> set[str]:
    """Return the stages that are recorded with other params than these, and everything that depends on them."""
    lock = ground.lock(ground.project)
    stale = {
        stage
        for stage, entry in lock.items()
        for key, value in entry.get("params", {}).get("params.yaml", {}).items()
        if _value_at(params, key) != value
    }
    while True:
        below = {one for stage in stale for out in lock[stage].get("outs", ()) for one in _below(lock, out["path"])}
        if below <= stale:
            return stale
        stale |= below


def _seed_recorded(entry: dict[str, Any], stage: str) -> int:
    kind, _, name = stage.partition("@")
    locked = entry["params"]["params.yaml"]
    return int(locked[f"{kind}.{name}"].get("seed", locked[f"defaults.{kind}"]["seed"]))


def _seed_trained_with(ground: Ground, stage: str) -> int:
    kind, _, name = stage.partition("@")
    manifest = ground.project / "checkpoints" / kind / name / "manifest.json"
    return int(json.loads(manifest.read_text())["params"][kind][name]["seed"])


def _files(out: Path) -> list[Path]:
    return [path for path in (out, *out.rglob("*")) if path.is_file()]


def _below(lock: dict[str, object], out: str) -> set[str]:
    """Return the stages that directly depend on an output."""
    return {
        stage
        for stage, entry in lock.items()
        for dep in entry.get("deps", ())  # type: ignore[attr-defined]
        if dep["path"] == out or dep["path"].startswith(f"{out}/") or out.startswith(f"{dep['path']}/")
    }


def _nothing(ground: Ground) -> Command:
    run = Command("true", ground.project)
    run.wait()
    return run


_CLOCK = '''"""The clock of a process; it jumps at the same moment in all processes."""

import os
import time

_at, _by = map(float, os.environ["VLP_FAULT_CLOCK"].split())
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + (_by if _time() >= _at else 0)
time.time_ns = lambda: _time_ns() + (int(_by) * 10**9 if _time() >= _at else 0)
'''

_ON_A_SMALL_DISK = """
import os, shutil, signal, subprocess, sys
kilobytes, after, command = sys.argv[1], sys.argv[2], sys.argv[3:]
os.makedirs('.work', exist_ok=True)
subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={kilobytes}k', 'tmpfs', '.work'], check=True)
code = subprocess.run(command).returncode
shutil.copytree('.work', after, symlinks=True)
sys.exit(code if code >= 0 else 128 - code)
"""
