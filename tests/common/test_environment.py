"""What shells, hooks, jobs and desktops leave in the environment does not reach a library that fails on it."""

from __future__ import annotations

import ast
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from vlp_models.common.environment import command_environment, program_environment, settle_environment

PACKAGE = Path(__file__).parents[2] / "vlp_models"
DEAD = "http://user:hunter2@127.0.0.1:9"  # nothing listens there


@pytest.fixture
def server() -> Iterator[str]:
    """A server on this machine, as Prefect's and MLflow's are."""
    handler = type("Handler", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}/"
        running.shutdown()


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        del os.environ[name]


@pytest.mark.parametrize(
    "variables",
    [
        {"http_proxy": DEAD},
        {"HTTP_PROXY": "127.0.0.1:9", "NO_PROXY": "intranet"},
        {"http_proxy": DEAD, "no_proxy": "[::1]"},
        {"http_proxy": DEAD, "no_proxy": "intranet fe80::/10; *.corp"},
        {"ALL_PROXY": "socks://127.0.0.1:9/"},
        {"all_proxy": "socks5h://user:hunter2@127.0.0.1:9"},
        {"all_proxy": "socks4://127.0.0.1:9"},
        {"https_proxy": "http://user:hunter2@proxy:port"},
        {"http_proxy": DEAD, "SSL_CERT_FILE": "/no/such/file.pem", "REQUESTS_CA_BUNDLE": "/no/such/file.pem"},
    ],
    ids=lambda variables: ",".join(f"{name}={value}" for name, value in variables.items()),
)
def test_this_machine_is_reached_whatever_the_proxy(
    variables: dict[str, str], server: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As HTTPX (Prefect) and requests (MLflow) read the environment; a variable is left out by name alone."""
    script = "import sys, httpx, requests; httpx.get(sys.argv[1]); requests.get(sys.argv[1])"
    os.environ.update(variables)
    subprocess.run([sys.executable, "-c", script, server], env=program_environment(), check=True, timeout=60)
    assert "hunter2" not in caplog.text
    exceptions = os.environ["no_proxy"].split(",")
    assert {"localhost", "127.0.0.1", "::1"} <= set(exceptions)
    assert ("intranet" in exceptions) == ("intranet" in str(variables)), "the user's exceptions stay"


def test_a_proxy_that_no_client_can_use_is_named(caplog: pytest.LogCaptureFixture) -> None:
    os.environ.update({"https_proxy": "http://user:hunter2@proxy:port", "OMP_NUM_THREADS": "all"})
    settle_environment()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "OMP_NUM_THREADS=all",
        "https_proxy",
    ]
    assert "hunter2" not in caplog.text and "https_proxy" not in os.environ


def test_a_stage_is_no_rank_of_an_earlier_job() -> None:
    """A leftover WORLD_SIZE would let it wait for processes that never start; a service's shell runs nothing."""
    leftover = {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "node17",
        "DVC_STAGE": "mine",
        "SHELL": "/usr/sbin/nologin",
    }
    os.environ.update(leftover)
    env = command_environment()
    assert leftover.keys() & env.keys() == {"SHELL"}
    subprocess.run([env["SHELL"], "-c", "exit 0"], env=env, check=True)


@pytest.mark.parametrize(
    "variables",
    [
        {"PYTHONOPTIMIZE": "2"},
        {"PYTHONWARNINGS": "error"},
        {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
    ],
    ids=lambda variables: next(iter(variables)),
)
def test_python_keeps_docstrings_goes_on_after_warnings_and_writes_utf8(variables: dict[str, str]) -> None:
    """Great Expectations reads docstrings, libraries warn, captions have letters; `vlp` starts itself again for it."""
    work = """
import sys, warnings
def is_documented(): "yes"
warnings.warn("old")
print(is_documented.__doc__, open(sys.executable).encoding.lower(), chr(252))
"""
    restarted = f"from vlp_models.common.environment import restart_plainly; restart_plainly()\n{work}"
    os.environ.update(variables)
    for script, env in ((restarted, os.environ | {"PYTHONPATH": str(PACKAGE.parent)}), (work, program_environment())):
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, check=True)
        assert done.stdout.decode().split() == ["yes", "utf-8", "ü"]


def test_a_file_of_the_project_does_not_replace_a_module_of_python(tmp_path: Path) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('the project has a queue of its own')", encoding="utf-8")
    subprocess.run(
        [sys.executable, "-m", "multiprocessing.managers"], cwd=tmp_path, env=program_environment(), check=True
    )


def test_every_program_is_started_with_this_environment() -> None:
    """A start that inherits the environment as it is meets proxies, hooks' repositories and languages again."""
    missing = []
    for file in sorted(PACKAGE.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text if "subprocess" in text else "")):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("subprocess.run", "subprocess.Popen"):
                names = {keyword.arg for keyword in node.keywords}
                if not names & {"env", None}:  # None: **options
                    missing.append(f"{file.relative_to(PACKAGE)}:{node.lineno}")
    # The supervisor was itself started with it.
    assert [entry.partition(":")[0] for entry in missing] == ["common/supervise.py"]
