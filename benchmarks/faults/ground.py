"""A finished tiny pipeline: made once, copied for each fault, and compared with the copy afterwards.

Each lane has a copy of its own, so that several faults are injected at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from vlp_models.params import merged

ROOT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent
TRAININGS = (
    *("pretrain@tden", "pretrain@tden-two-pass", "finetune@tden-vqa", "finetune@tden-captioning"),
    *("pretrain@unified-vlp", "finetune@unified-vlp-vqa"),
)
STEPS, EVERY = 12, 2  # of a training; between its checkpoints
IDLE = 150  # seconds without work after which a command counts as endless
CAPTIONING = "evaluate@tden-captioning"
# These write seconds, which register and report read; so those may rightly run again.
UNEVEN = ("evaluate@tden-vqa", "evaluate@unified-vlp-vqa", CAPTIONING, "detector", *TRAININGS)
DEPENDENTS = {"register", "report"}
TIMED = ("reports/training/", "reports/eval/", "reports/detector.json")
MARK = "VLP_FAULT_LANE"  # environment variable of every process of a lane
_MEASURED = re.compile(r'"(seconds|peak_memory_mb)": [0-9.e-]+')
COMMANDS = {
    "vlp run": [str(BIN / "vlp"), "run"],
    "dvc repro": [sys.executable, "-m", "dvc", "repro"],
    "flow": [sys.executable, "-m", "flows.retrain"],
    "dvc checkout": [sys.executable, "-m", "dvc", "checkout", "--force"],
    "vlp up": [str(BIN / "vlp"), "up"],
    "vlp down": [str(BIN / "vlp"), "down"],
    "vlp promote": [str(BIN / "vlp"), "promote"],
    "vlp history": [str(BIN / "vlp"), "history"],
    "true": ["true"],
}


def patience(seconds: float) -> float:
    """Return a time limit that is longer on a machine with more work than cores."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def processes_in(folder: Path) -> list[int]:
    """Return the processes whose working directory is in a folder."""
    inside = []
    for process in Path("/proc").glob("[0-9]*"):
        # A link is read in microseconds; psutil's own list of processes would take a tenth of a core here.
        with contextlib.suppress(OSError):
            if f"{(process / 'cwd').readlink()}/".startswith(f"{folder}/"):
                inside.append(int(process.name))
    return inside


def _cpu_seconds(folder: Path) -> float:
    total = 0.0
    for pid in processes_in(folder):
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


class Command:
    """One of the commands in its own process group; its output is read continuously."""

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        env: dict[str, str] | None = None,
        wrap: Sequence[str] = (),
        more: Sequence[str] = (),
    ) -> None:
        """wrap: command that runs the command. more: further arguments."""
        self.folder = folder
        self.process = subprocess.Popen(
            [*wrap, *COMMANDS[name], *more],
            cwd=folder,
            env=env or environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._chunks: list[bytes] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        # `os.read` returns what is there, so that a kill loses nothing that was printed.
        while chunk := os.read(self.process.stdout.fileno(), 65536):
            self._chunks.append(chunk)

    @property
    def output(self) -> str:
        return b"".join(self._chunks).decode(errors="replace")

    def wait(self, seconds: float = 400) -> int:
        """Wait for the end, and raise `subprocess.TimeoutExpired` if it does not come, or nothing happens for long."""
        deadline, worked, since = time.monotonic() + patience(seconds), -1.0, time.monotonic()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self.process.wait(1)
                self._reader.join(5)
                return code
            if (now := _cpu_seconds(self.folder)) > worked + 0.5:
                worked, since = now, time.monotonic()
            if time.monotonic() > deadline or time.monotonic() > since + IDLE:
                raise subprocess.TimeoutExpired(self.process.args, round(time.monotonic() - since))


def environment(folder: Path) -> dict[str, str]:
    lane = next((parent for parent in folder.parents if parent.name.startswith("lane-")), folder.parent)
    env = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(folder)}
    env |= {"DVC_SITE_CACHE_DIR": str(folder / ".dvc" / "site"), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    env |= {"PREFECT_HOME": str(lane / "prefect"), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    env |= {"DVC_NO_ANALYTICS": "1", "GX_ANALYTICS_ENABLED": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    env |= {MARK: str(lane)}
    env |= {"PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120"}
    for name in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL", "PYTHONDONTWRITEBYTECODE"):
        env.pop(name, None)
    return env


class Ground:
    """`folder`/snapshot: the finished pipeline, shared; `folder`/lane-N/project: the copy that a fault hits.

    MLflow stores where its artifacts are, so each lane has a database of its own.
    """

    def __init__(self, folder: Path, lane: int = 0, name: str = "project") -> None:
        """name: of the folder that a fault hits."""
        self.top, self.lane = folder, lane
        self.snapshot, self.folder = folder / "snapshot", folder / f"lane-{lane}"
        self.project = self.folder / name
        self.code = ""  # hash of the code that made the snapshot

    def named(self, name: str) -> Ground:
        """Return the same ground, whose project has another name."""
        ground = Ground(self.top, self.lane, name)
        ground.code = self.code
        return ground

    def make(self, say: Callable[[str], None] = lambda line: None) -> None:
        """Run the pipeline undisturbed, unless the same code has done so before."""
        mark = self.top / "code"
        code = self.code = _hash_code()
        if mark.exists() and mark.read_text() == code:
            return
        say("running the pipeline undisturbed, once")
        shutil.rmtree(self.top, ignore_errors=True)
        _clone(self.project)
        (self.project / "params.yaml").write_text(yaml.safe_dump(_params(), sort_keys=False))
        self._call(sys.executable, "-c", _CONNECT)  # an empty MLflow database, made once
        shutil.copy(self.project / "mlflow.db", self.top / "empty.db")
        self._call(*COMMANDS["vlp run"])
        shutil.rmtree(
            self.project / ".dvc" / "cache" / "runs", ignore_errors=True
        )  # or DVC would restore stages from it
        shutil.rmtree(self.project / ".work")
        self.project.rename(self.snapshot)
        (self.top / "location").write_text(str(self.project))
        mark.write_text(code)

    def _call(self, *command: str) -> str:
        done = subprocess.run(command, cwd=self.project, env=environment(self.project), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    @property
    def stages(self) -> list[str]:
        return sorted(self.lock(self.snapshot))  # DVC writes them in the order they ended

    def before(self, stage: str) -> None:
        """Make `project` a copy of the finished pipeline without `stage`."""
        shutil.rmtree(self.project, ignore_errors=True)
        self.project.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-a", self.snapshot, self.project], check=True)
        text = (self.project / "dvc.lock").read_text()
        lock = yaml.safe_load(text)
        for out in lock["stages"].pop(stage)["outs"]:
            path = self.project / out["path"]
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        (self.project / "dvc.lock").write_text(yaml.safe_dump(lock, sort_keys=False))
        if stage == "register":
            shutil.copy(self.top / "empty.db", self.project / "mlflow.db")
            shutil.rmtree(self.project / "mlartifacts", ignore_errors=True)
        self._move_database()
        if stage in TRAININGS:
            self._forget_run(_run_name(stage))

    def _move_database(self) -> None:
        """Write the project's folder wherever mlflow.db names the folder in which the snapshot was made."""
        before = Path((self.top / "location").read_text())
        if before == self.project:
            return
        with _database(self.project) as db:
            for (table,) in db.execute("select name from sqlite_master where type = 'table'").fetchall():
                for _, column, kind, *_ in db.execute(f"pragma table_info({table})").fetchall():
                    if "CHAR" in kind.upper() or "TEXT" in kind.upper():
                        for old, new in ((before.as_uri(), self.project.as_uri()), (str(before), str(self.project))):
                            db.execute(
                                f"update {table} set {column} = replace({column}, ?, ?) where instr({column}, ?)",
                                (old, new, old),
                            )
            db.commit()

    def _forget_run(self, name: str) -> None:
        with _database(self.project) as db:
            runs = [row[0] for row in db.execute("select run_uuid from runs where name = ?", (name,))]
            for table in ("metrics", "latest_metrics", "params", "tags", "runs"):
                db.executemany(f"delete from {table} where run_uuid = ?", [(run,) for run in runs])
            db.commit()

    def recorded(self) -> set[str]:
        try:
            return set(self.lock(self.project))
        except (yaml.YAMLError, TypeError, KeyError):
            return set()

    @staticmethod
    def lock(folder: Path) -> dict[str, Any]:
        # The loader in C is ten times faster.
        return dict(yaml.load((folder / "dvc.lock").read_text(), yaml.CSafeLoader)["stages"])

    def processes(self) -> list[psutil.Process]:
        """Return the processes whose working directory is in `project`."""
        inside = []
        for pid in processes_in(self.project):
            with contextlib.suppress(psutil.Error):
                inside.append(psutil.Process(pid))
        return inside

    def descendants(self) -> list[psutil.Process]:
        """Return every process that a command of this lane started, also an orphan or one that works elsewhere."""
        mark, marked = f"{MARK}={self.folder}".encode(), []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, psutil.Error):
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    marked.append(psutil.Process(int(process.name)))
        return marked

    def process(self, role: str) -> psutil.Process | None:
        """Return the process in the role `stage`, `dvc`, `supervisor` or `top` (which the user started)."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                # A loader process, which is a fork, has its parent's command line.
                if role_of(process.cmdline()) == role and role_of(psutil.Process(process.ppid()).cmdline()) != role:
                    return process
        return None

    def loader_workers(self) -> list[psutil.Process]:
        """Return the processes that the running training has forked."""
        forks = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if role_of(process.cmdline()) == role_of(psutil.Process(process.ppid()).cmdline()) == "stage":
                    forks.append(process)
        return forks

    def wait_for_quiet(self, seconds: float = 40) -> list[str]:
        """Wait for all processes to end; kill those that remain and return their command lines."""
        deadline = time.monotonic() + patience(seconds)
        while (left := self.descendants()) and time.monotonic() < deadline:
            time.sleep(0.2)
        lines = []
        for process in left:
            with contextlib.suppress(psutil.Error):
                lines.append(" ".join(process.cmdline()))
                process.kill()
        return lines

    def wrong(self, stage: str, trained: int = 1) -> tuple[list[str], list[str]]:
        """Return the differences from the undisturbed run: of content, and of what was done or left behind.

        Args:
            trained: how often the stage may have been trained, each time in its own MLflow run.
        """
        content, history = [], [f"litter: {path.relative_to(self.project)}" for path in self.project.rglob("*.partial")]
        results = ("checkpoints/*/*/*", "reports/curves/*/*", "reports/eval/*/[!ms]*")  # not manifest.json, scores.json
        for before in itertools.chain.from_iterable(map(self.snapshot.glob, results)):
            after = self.project / before.relative_to(self.snapshot)
            if not after.exists() or after.read_bytes() != before.read_bytes():
                content.append(f"differs: {before.relative_to(self.snapshot)}")
        content += self._wrong_records()
        if stage != "registry":
            history += self._open_runs()
        if stage in TRAININGS:
            history += self._wrong_history(stage, trained)
        if stage == "register":
            history += self._wrong_versions()
        if stage == "registry":
            history += self._lost_versions()
        return content, history

    def weights(self, stage: str) -> Path:
        return self.project / "checkpoints" / stage.replace("@", "/") / "model.safetensors"

    def other_scores(self) -> list[str]:
        """Return the lines of scores that differ from the undisturbed run, without seconds and memory."""
        lines = []
        for before in self.snapshot.glob("reports/eval/*/scores.json"):
            after = self.project / before.relative_to(self.snapshot)
            then, now = (set(_MEASURED.sub("", file.read_text()).splitlines()) for file in (before, after))
            lines += sorted(now - then)
        return lines

    def _wrong_records(self) -> list[str]:
        """Compare dvc.lock with the undisturbed run's, and the outputs with dvc.lock: stricter than `dvc status`."""
        then, now = self.lock(self.snapshot), self.lock(self.project)
        if then.keys() != now.keys():
            return [f"dvc.lock has {sorted(now)}"]
        differences = []
        for stage, entry in now.items():
            for out in entry.get("outs", ()):
                if hash_as_dvc(self.project / out["path"]) != out["md5"]:
                    differences.append(f"{out['path']} is not what dvc.lock records")
            # What contains seconds differs in every run.
            if stage not in DEPENDENTS and _without_times(entry) != _without_times(then[stage]):
                differences.append(f"dvc.lock records another {stage}")
        return differences

    def _open_runs(self) -> list[str]:
        with _database(self.project) as db:
            return [f"MLflow: {name} runs" for (name,) in db.execute("select name from runs where status = 'RUNNING'")]

    def _wrong_history(self, stage: str, trained: int) -> list[str]:
        with _database(self.project) as db:
            query = "select run_uuid, status from runs where name = ?"
            runs = db.execute(query, (_run_name(stage),)).fetchall()
            if not 1 <= len(runs) <= trained or any(status != "FINISHED" for _, status in runs):
                return [f"MLflow: {len(runs)} runs of {stage}: {[status for _, status in runs]}"]
            query = "select step from metrics where run_uuid = ? and key = 'loss' order by rowid"
            logged = [[row[0] for row in db.execute(query, (run,))] for run, _ in runs]
        whole = list(range(1, STEPS + 1))
        return [f"MLflow: the loss of {stage} is logged for steps {steps}" for steps in logged if steps != whole]

    def _wrong_versions(self) -> list[str]:
        """Check that each run is one version, registered once."""
        models = "select name, version, run_id is null from model_versions order by 1, 2"
        found = []
        for what, query in (
            ("versions", models),
            ("registrations", "select name, status from runs where name like 'register %' order by 1"),
        ):
            with _database(self.project) as after, _database(self.snapshot) as before:
                now, then = (db.execute(query).fetchall() for db in (after, before))
            found += [] if now == then else [f"MLflow: {what} {now}, undisturbed {then}"]
        return found

    def _lost_versions(self) -> list[str]:
        """Check that the registry has every version of reports/registered.json."""
        with _database(self.project) as db:
            held = {(name, int(version)) for name, version in db.execute("select name, version from model_versions")}
        receipts_of = json.loads((self.project / "reports" / "registered.json").read_text())
        named = {(r["name"], int(r["version"])) for receipts in receipts_of.values() for r in receipts}
        return [f"MLflow lacks {sorted(named - held)}"] if named - held or not named else []

    def champion(self) -> str:
        """Return the registry's champion version; empty: none."""
        with contextlib.suppress(sqlite3.Error), _database(self.project) as db:
            for (version,) in db.execute("select version from registered_model_aliases where alias = 'champion'"):
                return str(version)
        return ""


def hash_as_dvc(path: Path) -> str:
    """Return the md5 that DVC records for a file or folder; empty: it is missing."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        listed = [{"md5": hash_as_dvc(file), "relpath": file.relative_to(path).as_posix()} for file in files]
        listed.sort(key=lambda item: item["relpath"])
        return hashlib.md5(json.dumps(listed, sort_keys=True).encode()).hexdigest() + ".dir"
    return hashlib.md5(path.read_bytes()).hexdigest() if path.exists() else ""


def _run_name(stage: str) -> str:
    """Return the name of a training's run in MLflow, as registry/mlflow_run.py gives it."""
    return stage.removeprefix("finetune@")


def _without_times(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of dvc.lock without the hashes of files in which seconds are recorded."""
    fixed = {key: entry.get(key) for key in ("cmd", "params")}
    for key in ("deps", "outs"):
        items = [item for item in entry.get(key, ()) if not item["path"].startswith(TIMED)]
        fixed[key] = sorted((item["path"], item["md5"]) for item in items)
    return fixed


def role_of(command: list[str]) -> str:
    words = [Path(word).name for word in command[:4]]
    if "vlp" in words and "stage" in words:
        return "stage"
    if "vlp_models.pipeline.dvc.repro" in words or ("dvc" in words and "repro" in words):
        return "dvc"
    if "vlp_models.common.supervise" in words:
        return "supervisor"
    return "top" if ("vlp" in words and "run" in words) or "flows.retrain" in words else ""


def ran(output: str) -> set[str]:
    return set(re.findall(r"Running stage '([^']+)'", output))


def end_all(processes: list[psutil.Process]) -> None:
    """Kill all processes at once, as a power cut does."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGSTOP)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


@contextlib.contextmanager
def _database(folder: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(folder / "mlflow.db")
    try:
        yield connection
    finally:
        connection.close()


_CONNECT = """
from pathlib import Path
from vlp_models.params import load_params
from vlp_models.registry.client import connect
connect(load_params().tracking, Path.cwd()).search_registered_models()
"""


def _clone(folder: Path) -> None:
    """Copy the tracked files without the tests into a git project."""
    for path in _tracked():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / path)
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "clone"]):
        subprocess.run(["git", *command], cwd=folder, check=True)


def _tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return [
        name
        for name in listed.split("\0")
        if name and not name.startswith(("tests/", "benchmarks/", "docs/", "examples/")) and (ROOT / name).is_file()
    ]


def _hash_code() -> str:
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for name in _tracked():
        if not name.endswith(".md"):
            digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def _params() -> dict[str, Any]:
    """Return the preset tiny with more, smaller steps, two passes and a second model."""
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    tiny, two_pass, second = (
        yaml.safe_load((ROOT / "vlp_models" / "presets" / f"{name}.yaml").read_text())
        for name in ("tiny", "tden-two-pass", "unified-vlp")
    )
    for section in ("generate", "detector", "tokenizer", "models", "evaluate"):
        params[section] = merged(params[section], tiny[section])
    training = {"batch_size": 4, "max_epochs": 9, "max_steps": STEPS}
    small = {"hidden": 16, "heads": 2, "intermediate": 32, "layers": 1}
    params["models"] |= {"unified-vlp": merged(second["models"]["unified-vlp"], {"config": small})}
    params["pretrain"] |= {**two_pass["pretrain"], "unified-vlp": second["pretrain"]["unified-vlp"]}
    params["pretrain"] = {name: {**run, **training} for name, run in params["pretrain"].items()}
    runs = {name: params["finetune"][name] for name in ("tden-vqa", "tden-captioning")}
    runs["unified-vlp-vqa"] = second["finetune"]["unified-vlp-vqa"]
    params["finetune"] = {name: run | training for name, run in runs.items()}
    params["evaluate"]["beam_size"] = 1
    params["trainer"] |= {
        "checkpoint_every_steps": EVERY,
        "log_every_steps": 1,
        "accelerator": "cpu",
        "torch_threads": 1,
    }
    params["trainer"]["parallel_finetune"] = 1  # the lanes keep the cores busy
    params["flow"]["retry_delays"] = [2, 5, 10]  # seconds
    return params
