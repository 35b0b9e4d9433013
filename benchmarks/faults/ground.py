"""A finished tiny pipeline: made once, copied for each fault, and compared with the copy afterwards."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import resource
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
    *("pretrain@tden", "pretrain@tden-two-pass", "finetune@tden-vqa"),
    *("pretrain@unified-vlp", "finetune@unified-vlp-vqa"),
)
STEPS = 24
# These write seconds, which register and report read; so those may rightly run again.
UNEVEN = ("evaluate@tden-vqa", "evaluate@unified-vlp-vqa", "detector", *TRAININGS)
DEPENDENTS = {"register", "report"}
COMMANDS = {
    "vlp run": [str(BIN / "vlp"), "run"],
    "dvc repro": [sys.executable, "-m", "dvc", "repro"],
    "flow": [sys.executable, "-m", "flows.retrain"],
    "dvc checkout": [sys.executable, "-m", "dvc", "checkout", "--force"],
    "vlp promote": [str(BIN / "vlp"), "promote"],
    "vlp history": [str(BIN / "vlp"), "history"],
    "true": ["true"],
}


class Command:
    """One of the commands in its own process group; its output is read continuously."""

    def __init__(
        self,
        name: str,
        folder: Path,
        file_limit: int = 0,
        *,
        env: dict[str, str] | None = None,
        wrap: Sequence[str] = (),
        more: Sequence[str] = (),
    ) -> None:
        """wrap: command that runs the command. more: further arguments."""

        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))

        self.folder = folder
        self.process = subprocess.Popen(
            [*wrap, *COMMANDS[name], *more],
            cwd=folder,
            env=env or environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=limit if file_limit else None,
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

    def wait(self, seconds: float = 300) -> int:
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code


def environment(folder: Path) -> dict[str, str]:
    env = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(folder)}
    env |= {"DVC_SITE_CACHE_DIR": str(folder / ".dvc" / "site"), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    env |= {"PREFECT_HOME": str(folder.parent / "prefect"), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    env |= {"DVC_NO_ANALYTICS": "1", "GX_ANALYTICS_ENABLED": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    env |= {"PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120"}
    for name in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL", "PYTHONDONTWRITEBYTECODE"):
        env.pop(name, None)
    return env


class Ground:
    """`folder`/snapshot: the finished pipeline; `folder`/project: the copy that a fault hits.

    The path is always the same, because MLflow stores the location of its artifacts.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.snapshot, self.project = folder / "snapshot", folder / "project"
        self.code = ""  # hash of the code that made the snapshot

    def make(self, say: Callable[[str], None] = lambda line: None) -> None:
        """Run the pipeline undisturbed, unless the same code has done so before."""
        mark = self.folder / "code"
        code = self.code = _hash_code()
        if mark.exists() and mark.read_text() == code:
            return
        say("running the pipeline undisturbed, once")
        shutil.rmtree(self.folder, ignore_errors=True)
        _clone(self.project)
        (self.project / "params.yaml").write_text(yaml.safe_dump(_params(), sort_keys=False))
        self._call(sys.executable, "-c", _CONNECT)  # an empty MLflow database, made once
        shutil.copy(self.project / "mlflow.db", self.folder / "empty.db")
        self._call(*COMMANDS["vlp run"])
        shutil.rmtree(
            self.project / ".dvc" / "cache" / "runs", ignore_errors=True
        )  # or DVC would restore stages from it
        shutil.rmtree(self.project / ".work")
        self.project.rename(self.snapshot)
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
        subprocess.run(["cp", "-a", self.snapshot, self.project], check=True)
        text = (self.project / "dvc.lock").read_text()
        lock = yaml.safe_load(text)
        for out in lock["stages"].pop(stage)["outs"]:
            path = self.project / out["path"]
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        (self.project / "dvc.lock").write_text(yaml.safe_dump(lock, sort_keys=False))
        if stage == "register":
            shutil.copy(self.folder / "empty.db", self.project / "mlflow.db")
            shutil.rmtree(self.project / "mlartifacts", ignore_errors=True)
        elif stage in TRAININGS:
            self._forget_run(stage)

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
        return dict(yaml.safe_load((folder / "dvc.lock").read_text())["stages"])

    def processes(self) -> list[psutil.Process]:
        """Return the processes whose working directory is in `project`."""
        found = []
        for process in psutil.process_iter(["cwd"]):
            if process.info["cwd"] and Path(process.info["cwd"]).is_relative_to(self.project):
                found.append(process)
        return found

    def process(self, role: str) -> psutil.Process | None:
        """Return the process in the role `stage`, `dvc`, `supervisor` or `top` (which the user started)."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if role_of(process.cmdline()) == role:
                    return process
        return None

    def wait_for_quiet(self, seconds: float = 40) -> list[str]:
        """Wait for all processes to end; kill those that remain and return their command lines."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        lines = []
        for process in left:
            with contextlib.suppress(psutil.Error):
                lines.append(" ".join(process.cmdline()))
                process.kill()
        return lines

    def wrong(self, stage: str, trained: int = 1) -> list[str]:
        """Return the differences from the undisturbed run.

        Args:
            trained: how often the stage may have been trained, each time in its own MLflow run.
        """
        problems = [f"litter: {path.relative_to(self.project)}" for path in self.project.rglob("*.partial")]
        for before in [*self.snapshot.glob("checkpoints/*/*/*"), *self.snapshot.glob("reports/curves/*/*")]:
            after = self.project / before.relative_to(self.snapshot)
            if not after.exists() or after.read_bytes() != before.read_bytes():
                problems.append(f"differs: {before.relative_to(self.snapshot)}")
        status = self._call(sys.executable, "-m", "dvc", "status", "--json")
        if status.strip() != "{}":
            problems.append(f"dvc status: {status.strip()[:300]}")
        if stage in TRAININGS:
            problems += self._wrong_history(stage, trained)
        if stage == "register":
            problems += self._wrong_versions()
        if stage == "registry":
            problems += self._lost_versions()
        return problems

    def _wrong_history(self, stage: str, trained: int) -> list[str]:
        with _database(self.project) as db:
            runs = db.execute("select run_uuid, status from runs where name = ?", (stage,)).fetchall()
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
        if name and not name.startswith(("tests/", "benchmarks/")) and (ROOT / name).is_file()
    ]


def _hash_code() -> str:
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for name in _tracked():
        if not name.endswith(".md"):
            digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def _params() -> dict[str, Any]:
    """Return the preset tiny with more, smaller steps, two passes, a second model, and no captioning (slow)."""
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
    runs = {"tden-vqa": params["finetune"]["tden-vqa"], "unified-vlp-vqa": second["finetune"]["unified-vlp-vqa"]}
    params["finetune"] = {name: run | training for name, run in runs.items()}
    params["trainer"] |= {"checkpoint_every_steps": 4, "log_every_steps": 1, "accelerator": "cpu", "torch_threads": 1}
    return params
