"""The project of the year and what surrounds it: its disk, the package it runs on, git, DVC's remote, Prefect.

Layout of the work folder: `package-1`, `package-2` and the link `package` (the installed version), `disk/project`,
`origin.git`, `pool`, the services, `clock` (what makes time jump), `messages.jsonl` and the driver's records.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml
from planting import HUGE, PAIRS, PRIVATE, Pool, write_drop
from services import BIN, DATA_KEY, Bucket, Inbox, MlflowServer, Postgres, free_port, wait_until

ROOT = Path(__file__).parents[2]
WEEKLY = "/deployments/name/retrain/weekly"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")  # Prefect's words; plain-ok
DISK_MB = 3000
WEEK = 7 * 86400  # seconds
MONTH = 4  # weeks after which a submission that was ingested is deleted
MARK = "VLP_YEAR"  # in the environment of every process of the project
PARAMS: dict[str, Any] = {
    "generate": {
        "scenes": {"generator": "objects", "seed": 8, "train": 400, "val": 60, "test": 300, "side": 96}
        | {"questions_per_image": 1}
    },
    "detector": {"source": "none"},
    "features": {"source": "grid", "max_regions": 16},
    "tokenizer": {"vocab_size": 400, "min_answer_count": 1},
    "models": {
        "tden": {
            "config": {"hidden": 64, "heads": 2, "intermediate": 128}
            | dict.fromkeys(("object_layers", "sentence_layers", "encoder_layers", "decoder_layers"), 1)
        }
    },
    "pretrain": {"tden": None},
    # Two seeds: with one, the gate finds only gains of 20 points.
    "defaults": {"finetune": {"max_epochs": 8}},
    "finetune": {
        "tden-vqa": None,
        "tden-captioning": {"task": "captioning", "start": "initial/tden", "max_epochs": None},
        "tden-captioning-2": {
            "task": "captioning",
            "start": "initial/tden",
            "variant": "tden-captioning",
            "seed": 2,
        },
    },
    "evaluate": {"beam_size": 1, "bootstrap": 200},
    "ingest": {"settle_seconds": 0, "processes": 1},
    "drift": {"run": "tden-captioning"},
    # The gate compares recipes here, so a champion may be worse than the caption of a similar scene.
    "promotion": {"tasks": {"captioning": {"beat_baselines": False}}},
    "retention": {"versions": 6, "commits": 6},
    "flow": {"webhook": "env:VLP_WEBHOOK", "retry_delays": [2, 5], "commit": True},
}
# Each better recipe trains longer; each worse one is undone a week later.
BETTER = ("defaults.finetune.max_epochs=16", "defaults.finetune.max_epochs=24")
WORSE = (
    "defaults.finetune.max_epochs=1",
    "defaults.finetune.optimizer.lr=1.0e-5",
    "models.tden.config.feature_dropout=0.95",
)
CLOCK = '''"""The clock of the project's processes: `time.time` jumps as the file `jump` states."""

import time
from pathlib import Path

try:
    _at, _by = map(float, (Path(__file__).parent / "jump").read_text().split())
except OSError:
    pass
else:
    _time, _time_ns = time.time, time.time_ns
    time.time = lambda: _time() + (_by if _time() >= _at else 0)
    time.time_ns = lambda: _time_ns() + (int(_by) * 10**9 if _time() >= _at else 0)
'''


class Stack:
    def __init__(self, work: Path) -> None:
        work.mkdir(parents=True, exist_ok=True)
        work.chmod(0o755)  # PostgreSQL runs as another user
        self.work = work
        self.disk, self.project, self.origin = work / "disk", work / "disk" / "project", work / "origin.git"
        self.package, self.clock, self.pool = work / "package", work / "clock", work / "pool"
        self.database = Postgres(work)
        self.bucket = Bucket(work)
        self.mlflow = MlflowServer(work, self.database, self.bucket)
        ports = work / "ports.json"
        if not ports.exists():
            ports.write_text(json.dumps({"prefect": free_port(), "webhook": free_port()}))
        self.ports: dict[str, int] = json.loads(ports.read_text())
        self.webhook = Inbox(work / "messages.jsonl", self.ports["webhook"])

    # -- set up ------------------------------------------------------------------------------------------------------

    def make(self) -> None:
        """Make the package, the disk, the images and the project, unless an earlier call has done so."""
        if not (self.work / "package-2").exists():
            self._make_packages()
        self.clock.mkdir(exist_ok=True)
        (self.clock / "sitecustomize.py").write_text(CLOCK)
        self.mount()
        if not (self.pool / "captions.done").exists():
            self._make_pool()
        self.start_services()
        if not (self.work / "made").exists():
            shutil.rmtree(self.project, ignore_errors=True)
            shutil.rmtree(self.origin, ignore_errors=True)
            self._make_project()
            (self.work / "made").touch()

    def _make_packages(self) -> None:
        """Copy this package, and once more as the next version, with one module changed."""
        for number in (1, 2):
            folder = self.work / f"package-{number}"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(ROOT / "vlp_models", folder / "vlp_models", ignore=shutil.ignore_patterns("__pycache__"))
        module = self.work / "package-2" / "vlp_models" / "metrics" / "__init__.py"
        module.write_text(f"{module.read_text()}\nNEXT_VERSION = True\n")
        template = self.work / "package-2" / "vlp_models" / "template" / "prefect.yaml"
        template.write_text(f"{template.read_text()}# changed by the next version\n")
        self.use_package(1)

    def use_package(self, number: int) -> None:
        self.package.unlink(missing_ok=True)
        self.package.symlink_to(f"package-{number}")

    def mount(self) -> None:
        """Give the project a disk of its own that a week can fill; without root it is a plain folder."""
        self.disk.mkdir(exist_ok=True)
        if os.path.ismount(self.disk) or os.geteuid() != 0:
            return
        image = self.work / "disk.img"
        if not image.exists():
            with image.open("wb") as file:
                file.truncate(DISK_MB << 20)
            subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
        subprocess.run(["mount", "-o", "loop", image, self.disk], check=True)

    @property
    def has_disk(self) -> bool:
        return os.path.ismount(self.disk)

    def _make_pool(self) -> None:
        """Draw the images of all drops, in a project that is thrown away."""
        shutil.rmtree(self.pool, ignore_errors=True)
        scratch = self.work / "scratch"
        shutil.rmtree(scratch, ignore_errors=True)
        self.run("vlp", "init", str(scratch), cwd=self.work)
        count = 53 * PAIRS + PRIVATE + HUGE
        settings = f"generate.pool={{generator: objects, seed: 99, train: {count}, val: 0, test: 0, side: 96}}"
        self.run("vlp", "use", "--set", settings, cwd=scratch)
        self.run("vlp", "stage", "generate", "pool", cwd=scratch)
        (scratch / "data" / "raw" / "pool").rename(self.pool)
        shutil.rmtree(scratch)
        (self.pool / "captions.done").touch()

    def _make_project(self) -> None:
        """Make the project as a person would: `vlp init`, a remote for git and one for DVC, the settings."""
        self.run("vlp", "init", str(self.project), cwd=self.work)
        self.git("config", "user.name", "a person")
        self.git("config", "user.email", "person@example.org")
        subprocess.run(["git", "init", "--quiet", "--bare", "-b", "main", self.origin], check=True)
        self.git("branch", "-M", "main")
        self.git("remote", "add", "origin", str(self.origin))
        self.run("dvc", "remote", "add", "--default", "store", "s3://data/cache")
        self.run("dvc", "remote", "modify", "store", "endpointurl", self.bucket.endpoint)
        self.use_data_key(self.project, *DATA_KEY)
        preset = self.project / "year.yaml"
        settings = PARAMS | {"tracking": {"uri": self.mlflow.uri}}
        preset.write_text(yaml.safe_dump(settings, sort_keys=False))
        self.run("vlp", "use", str(preset))
        preset.unlink()
        # docs/get-started/unattended.md, "Before you start"
        self.run("vlp", "run")
        self.run("vlp", "promote", "captioning", "--by", "a person")
        write_drop(Pool(self.pool).pairs(52 * PAIRS, PAIRS), "before", self.project / "data" / "inbox")
        self.run("vlp", "ingest")
        self.run("vlp", "use", "ingest")
        self.git("add", "--all")
        self.git("commit", "--quiet", "-m", "the project")
        self.git("push", "--quiet", "-u", "origin", "main")

    def use_data_key(self, project: Path, key: str, secret: str) -> None:
        """Write the key of DVC's remote to .dvc/config.local, which git ignores."""
        self.run("dvc", "remote", "modify", "--local", "store", "access_key_id", key, cwd=project)
        self.run("dvc", "remote", "modify", "--local", "store", "secret_access_key", secret, cwd=project)

    # -- commands ----------------------------------------------------------------------------------------------------

    def environment(self) -> dict[str, str]:
        env = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        for name in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL", "PYTHONDONTWRITEBYTECODE"):
            env.pop(name, None)
        env |= {"PYTHONPATH": f"{self.clock}{os.pathsep}{self.package}", MARK: str(self.work)}
        env |= {"DVC_SITE_CACHE_DIR": str(self.work / "dvc-site"), "VLP_WEBHOOK": self.webhook.url}
        env |= {"DVC_NO_ANALYTICS": "1", "GX_ANALYTICS_ENABLED": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        return env

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """Run a command of a person; return its output."""
        done = subprocess.run(
            command, cwd=cwd or self.project, env=self.environment(), capture_output=True, text=True, timeout=900
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.returncode}: {done.stderr[-800:]}{done.stdout[-400:]}")
        return done.stdout

    def git(self, *arguments: str) -> str:
        return self.run("git", *arguments)

    # -- services and Prefect ----------------------------------------------------------------------------------------

    def start_services(self) -> None:
        """Start what does not run."""
        for service in (self.database, self.bucket, self.mlflow):
            if service.process is None:
                service.start()

    def up(self) -> None:
        more = [] if (self.project / ".work" / "stack" / "record.json").exists() else ["--port", str(self.prefect_port)]
        self.run("vlp", "up", *more)

    @property
    def prefect_port(self) -> int:
        return self.ports["prefect"]

    def stop(self) -> None:
        """Stop everything, also after an error."""
        with suppress(Exception):
            self.run("vlp", "down")
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        for service in (self.mlflow, self.bucket, self.database):
            service.stop()
        if self.has_disk:
            subprocess.run(["umount", "-l", self.disk])

    def processes(self) -> Iterator[psutil.Process]:
        """Yield every process that a command of the project has started."""
        mark = f"{MARK}={self.work}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, psutil.Error):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    yield psutil.Process(int(folder.name))

    def part(self, name: str) -> psutil.Process | None:
        """Return the server, the worker or a keeper, as `vlp up` has recorded it."""
        record = json.loads((self.project / ".work" / "stack" / "record.json").read_text())
        with suppress(psutil.Error, KeyError):
            return psutil.Process(record[name]["pid"])
        return None

    def stage(self) -> str:
        """Return the stage that runs, such as `finetune tden-captioning`; empty: none."""
        for process in self.processes():
            with suppress(psutil.Error):
                words = process.cmdline()
                if "stage" in words and any(Path(word).name == "vlp" for word in words[:3]):
                    return " ".join(words[words.index("stage") + 1 :])
        return ""

    def call(self, path: str, body: Any = None) -> Any:
        """Call Prefect's server; a person would press a button of its page."""
        data, headers = None if body is None else json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.prefect_port}/api{path}", data, headers)
        deadline = time.monotonic() + 300
        while True:
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return json.loads(answer.read() or "null")
            except (urllib.error.URLError, OSError, ValueError) as error:
                code = error.code if isinstance(error, urllib.error.HTTPError) else 503
                if code < 500 or time.monotonic() > deadline:
                    raise
                time.sleep(2)

    def start_flow(self) -> str:
        return str(self.call(f"/deployments/{self.call(WEEKLY)['id']}/create_flow_run", {})["id"])

    def state(self, flow: str) -> str:
        return str(self.call(f"/flow_runs/{flow}")["state_type"])

    def wait_for_flow(self, flow: str, seconds: float = 1200) -> str:
        """Return the state in which a flow ended; one that crashed is resumed by the stack, within a minute."""
        wait_until(lambda: self.state(flow) in ENDED, seconds, f"flow {flow}")
        deadline = time.monotonic() + 90
        while self.state(flow) == "CRASHED" and time.monotonic() < deadline:
            time.sleep(1)
        if self.state(flow) not in ENDED:
            return self.wait_for_flow(flow, seconds)
        return self.state(flow)

    def kill_everything(self) -> None:
        """Kill all processes of the project and the services, as a power cut does."""
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        for service in (self.mlflow, self.bucket, self.database):
            service.stop(signal.SIGKILL)

    # -- time --------------------------------------------------------------------------------------------------------

    def age(self, week: int) -> None:
        """Let a week pass: date the stages' work, the measurements of the disk and the keepers' notices back.

        `retention.days` depends on the kernel's times, which nobody can set, so old submissions are deleted here.
        """
        seen = set()  # inodes: a file may have several links
        for stage in (self.project / ".work").iterdir():
            for file in stage.rglob("*") if stage.name != "stack" else ():
                status = file.lstat()
                if status.st_ino not in seen:
                    seen.add(status.st_ino)
                    os.utime(file, (status.st_atime - WEEK, status.st_mtime - WEEK), follow_symlinks=False)
        done = self.project / "data" / "inbox" / "done"
        for folder in done.iterdir() if done.exists() else ():
            number = folder.name.removeprefix("week-")
            if number.isdigit() and int(number) <= week - MONTH:
                shutil.rmtree(folder)
        file = self.project / ".work" / "disk.json"
        if file.exists():
            entries = [[moment - WEEK, free] for moment, free in json.loads(file.read_text())]
            file.write_text(json.dumps(entries))
        file = self.project / ".work" / "stack" / "noticed.json"
        if file.exists():
            noticed = json.loads(file.read_text())
            moved = {name: moment - WEEK for name, moment in noticed.items() if isinstance(moment, float)}
            file.write_text(json.dumps(noticed | moved))
