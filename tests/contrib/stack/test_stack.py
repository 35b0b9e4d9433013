"""`vlp up`, `vlp status` and `vlp down` with a real Prefect server, in a toy project where nothing is stale."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cloned_project import new_clone
from cloned_project import run as run_checked
from flow_project import break_stage, listening, make_project, set_flow
from prefect_server import free_port
from unattended_site import ROOT, TRAINER, documented_commands, wait_until

from vlp_models.contrib.stack.commands import NEEDED, describe, down, up
from vlp_models.contrib.stack.keep import notice_late_runs, notice_lost
from vlp_models.contrib.stack.processes import KEEPERS, Stack
from vlp_models.errors import DataError

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]
PAGE = "get-started/unattended.md"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")  # of the user's other setup: must not be used
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "other"))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("all_proxy", "socks://127.0.0.1:1")
    monkeypatch.setenv("VLP_WEBHOOK", "http://127.0.0.1:1/hook?token=hunter2hunter2")
    project = make_project(tmp_path, monkeypatch)
    (project / "flows").symlink_to(ROOT / "flows")
    shutil.copytree(ROOT / "deploy", project / "deploy")
    shutil.copy(ROOT / "prefect.yaml", project)
    (project / "prefect.toml").write_text("[worker]\nquery_seconds = 1\n")
    (project / ".env").write_text("PREFECT_SERVER_API_AUTH_STRING=login:of-another-server\n")
    (project / "reports" / "index.html").write_text("<html></html>")
    yield project
    vlp(project, "down")


def vlp(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vlp_models.cli.main", *arguments]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=400)


def run(project: Path, *command: str, **env: str) -> str:
    done = subprocess.run(command, cwd=project, env={**os.environ, **env}, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def prefect_processes(project: Path) -> dict[int, list[str]]:
    """Return pid -> command of every process that has this project's PREFECT_HOME."""
    processes = {}
    for process in psutil.process_iter(["cmdline"]):
        try:
            if process.environ().get("PREFECT_HOME") == f"{project}/.work/stack/prefect":
                processes[process.pid] = process.info["cmdline"]
        except psutil.Error:
            continue
    return processes


def add_late_run(stack: Stack) -> None:
    """Add a run to the server that no worker will start, as if it had been due for long."""
    flow = stack.call("/flows/", {"name": "overdue"})["id"]
    details = {"scheduled_time": "2026-01-05T03:00:00Z"}
    state = {"type": "SCHEDULED", "name": "Late", "state_details": details}
    stack.call("/flow_runs/", {"flow_id": flow, "name": "overdue", "state": state})


def test_up_twice_run_status_and_down(project: Path) -> None:
    run(project, sys.executable, "-m", "flows.retrain")  # nothing is stale afterwards
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = vlp(project, "up", "--port", str(port))
        assert refused.returncode == 2 and refused.stdout == ""
        assert refused.stderr == f"vlp: port {port} is in use by another program; run `vlp up --port {port + 1}`\n"
        assert prefect_processes(project) == {}

    assert "vlp up" in documented_commands(PAGE)
    port = free_port()
    up = vlp(project, "up", "--port", str(port))
    assert up.returncode == 0, up.stderr
    pids = [int(pid) for pid in re.findall(r"started \(pid (\d+)\)", up.stdout)]
    assert {psutil.Process(pid).ppid() for pid in pids}.isdisjoint({os.getpid()}), "they outlive `vlp up`"
    assert all(os.getsid(pid) == pid for pid in pids) and len(pids) == 2
    connections = psutil.Process(pids[0]).net_connections("inet")
    assert {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
    url = f"http://127.0.0.1:{port}"
    assert f"UI at {url}\n" in up.stdout and f"export PREFECT_API_URL={url}/api" in up.stdout

    # The printed commands work in the shell of a user whose other Prefect setup stays untouched.
    resume = next(line for line in up.stdout.splitlines() if "schedule resume" in line)
    prefect = [sys.executable, "-m", "prefect"]
    api = {"PREFECT_API_URL": f"{url}/api", "no_proxy": "localhost,127.0.0.1,::1", "all_proxy": ""}
    assert f"export no_proxy={api['no_proxy']} all_proxy=   #" in up.stdout
    assert "prefect deployment run retrain/weekly " in up.stdout and "flow.commit=true" in up.stdout
    watched = run(project, *prefect, "deployment", "run", "retrain/weekly", "--watch", **api)
    assert "Completed" in watched, watched
    assert "nothing was stale; nothing ran" in (project / ".work" / "stack" / "worker.log").read_text()
    run(project, *prefect, *resume.partition("#")[0].split()[1:], **api)

    # A second call starts and changes nothing, also not the schedule when an edited prefect.yaml is registered again.
    before = prefect_processes(project)
    again = vlp(project, "up")
    assert again.stdout.count("running since") == 2 and "deployments  prefect.yaml, unchanged" in again.stdout
    assert "schedule resume" not in again.stdout
    (project / "prefect.yaml").write_text((ROOT / "prefect.yaml").read_text().replace('"0 3 * * 1"', '"0 4 * * 2"'))
    edited = vlp(project, "up")
    assert "deployments  prefect.yaml, registered" in edited.stdout and "schedule resume" not in edited.stdout
    assert prefect_processes(project).keys() == before.keys()
    for kind, expected in (("automations", 3), ("deployments", 6)):
        request = urllib.request.Request(f"{url}/api/{kind}/filter", b"{}", {"Content-Type": "application/json"})
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
            assert len(json.loads(answer.read())) == expected, "each exists once"
    moved = vlp(project, "up", "--port", str(free_port()))
    assert moved.returncode == 2 and f"already runs on port {port}; run `vlp down` first" in moved.stderr

    wait_until(lambda: re.search(r"next run: 20\d\d-\d\d-\d\d", "\n".join(describe(project))) is not None, 120)
    shown = vlp(project, "status").stdout
    assert all(text in shown for text in (f"(pid {pids[0]})", f"(pid {pids[1]})", f"UI: {url}\n", "next run: 20"))

    with listening() as webhook:
        set_flow(project, webhook=webhook.url)
        add_late_run(Stack(project))
        wait_until(lambda: bool(webhook.bodies), 60)  # by a keeper
        assert notice_late_runs(Stack(project)) == [], "once"
        (body,) = webhook.bodies
        assert body["state"] == "Late" and "overdue (due 2026-01-05T03:00)" in body["message"]
        assert [len(notice_lost(Stack(project), "worker")) for _ in range(2)] == [1, 0], "once an hour"

    logs = "".join(path.read_text() for path in (project / ".work" / "stack").glob("*.log"))
    assert "hunter2" not in logs
    down = vlp(project, "down")
    assert down.returncode == 0, down.stderr
    assert down.stdout.splitlines() == [
        f"worker       stopped (pid {pids[1]})",
        f"server       stopped (pid {pids[0]})",
    ]
    assert prefect_processes(project) == {}
    assert not (Path(os.environ["PREFECT_HOME"])).exists() or not list(Path(os.environ["PREFECT_HOME"]).glob("*.db"))
    assert describe(project) == []


def test_a_failed_up_leaves_nothing_running(project: Path) -> None:
    whole = (project / "prefect.yaml").read_text()
    (project / "prefect.yaml").write_text(whole.replace("flows/retrain.py", "flows/missing.py"))
    failed = vlp(project, "up", "--port", str(free_port()))
    assert failed.returncode == 2 and "flows/missing.py" in failed.stderr, failed.stderr
    assert re.search(r"server +stopped \(pid \d+\)\n", failed.stdout)
    assert prefect_processes(project) == {} and describe(project) == []


@pytest.mark.parametrize("content", ["", "[]"])
def test_a_damaged_record_is_an_error_with_a_way_out(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*NEEDED, ".work/stack/record.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / ".work" / "stack" / "record.json").write_text(content)
    monkeypatch.chdir(tmp_path)
    for command in (up, down):
        with pytest.raises(DataError, match=r"record\.json: damaged: .* `kill -INT PID`, delete the file"):
            command()


@pytest.mark.parametrize("worker_killed", [False, True], ids=["", "its worker was killed"])
def test_down_lets_a_training_save_and_leaves_reused_pids_alone(project: Path, worker_killed: bool) -> None:
    (project / "trainer.py").write_text(TRAINER)
    break_stage(project, "pretrain", "import trainer")
    assert vlp(project, "up", "--port", str(free_port())).returncode == 0
    record = json.loads((project / ".work" / "stack" / "record.json").read_text())
    api = {"PREFECT_API_URL": f"http://127.0.0.1:{record['port']}/api", "no_proxy": "127.0.0.1", "all_proxy": ""}
    run(project, sys.executable, "-m", "prefect", "deployment", "run", "retrain/weekly", **api)
    wait_until(lambda: (project / "started").exists(), 120)
    if worker_killed:
        for name in (*KEEPERS, "worker"):
            os.kill(record[name]["pid"], signal.SIGKILL)
        wait_until(lambda: "worker: ended; `vlp up` starts it again" in describe(project))
    down = vlp(project, "down")
    interrupted = "1 without a worker interrupted" if worker_killed else "1 interrupted"
    assert "stopped" in down.stdout and f"{interrupted}, the next run continues there" in down.stdout, down.stderr
    assert (project / "saved").exists()
    assert prefect_processes(project) == {}

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        stale = {"pid": other.pid, "started": record["server"]["started"]}
        (project / ".work" / "stack" / "record.json").write_text(json.dumps(record | {"server": stale}))
        assert describe(project)[0] == "server: ended; `vlp up` starts it again"
        assert "server       is not running" in vlp(project, "down").stdout
        assert other.poll() is None
        other.communicate(b"\n")


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_real_retraining_registers_its_models_without_its_worker(tmp_path: Path) -> None:
    project = new_clone(tmp_path / "project")
    run_checked(project, "vlp", "use", "tiny", "--set", "trainer.checkpoint_every_steps=1")
    try:
        run_checked(project, "vlp", "up", "--port", str(free_port()))
        stack = Stack(project)
        deployment = stack.call("/deployments/name/retrain/weekly")["id"]
        flow_run = stack.call(f"/deployments/{deployment}/create_flow_run", {})["id"]
        wait_until(lambda: any(project.glob(".work/pretrain-tden/*/step-*.ckpt")), 1200)
        os.kill(stack.record["worker"]["pid"], signal.SIGKILL)
        run_checked(project, "vlp", "up")  # starts another worker

        def state() -> str:
            return str(stack.call(f"/flow_runs/{flow_run}")["state"]["type"])

        wait_until(lambda: state() != "RUNNING", 1500)
        assert state() == "COMPLETED"
        assert stack.call("/flow_runs/filter", {"flow_runs": {"state": {"type": {"any_": ["RUNNING"]}}}}) == []
        assert all(json.loads((project / "reports" / "registered.json").read_text()).values())
        with contextlib.closing(sqlite3.connect(project / "mlflow.db")) as database:
            trainings = database.execute("select status from runs where name = 'pretrain@tden'").fetchall()
        assert trainings == [("FINISHED",)]
    finally:
        run_checked(project, "vlp", "down", check=False)
    assert [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(project)] == []
