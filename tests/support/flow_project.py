"""A toy DVC project with the real stage names and instant commands, and a listener for webhooks."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cloned_project import init_dvc

ROOT = Path(__file__).parents[2]
REGISTERED = {
    task: [{"name": f"vlp-{task}", "version": 1, "run": f"tden-{task}", "model": "tden", "challenger": True}]
    for task in ("captioning", "vqa")
}
TWO_PASS = {
    "model": "tden",
    "start": "pretrain/tden",
    "recipe": {"objectives": {"mlm": 1.0, "msg": 1.0}},
    "scheduled_sampling": {"scheme": "c"},
}
# A fake `vlp`: records its arguments; its exit code and output are read from a file.
VLP = f"""#!{sys.executable}
import pathlib, sys
name = "-".join(sys.argv[1:])
with open("asked.txt", "a") as record:
    record.write(name + "\\n")
answer = pathlib.Path("answer-" + name)
code, _, text = (answer.read_text() if answer.exists() else "0").partition(" ")
print(text or name + " done")
sys.exit(int(code))
"""


def make_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the stages of dvc.yaml from `validate` on; each writes one small file that depends on the one before."""
    folder, programs = tmp_path / "project", tmp_path / "bin"
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path / "site"))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{folder}")  # trainer.py, which a test may write there
    monkeypatch.setenv("PATH", os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]))
    programs.mkdir()
    (programs / "vlp").write_text(VLP)
    (programs / "vlp").chmod(0o755)
    (folder / "reports").mkdir(parents=True)
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    raw["flow"] |= {"retry_delays": [1], "wait_minutes": 0}
    raw.pop("ingest", None)
    raw["pretrain"]["tden-two-pass"] = TWO_PASS
    (folder / "params.yaml").write_text(yaml.safe_dump(raw, sort_keys=False))
    runs = list(raw["finetune"])
    names = ["validate", "tokenizer", "shards"]
    stages: dict[str, object] = {}
    for before, name in zip([None, *names], names, strict=False):
        stages[name] = stage(name, [before] if before else ["seed"])
    groups = (
        ("pretrain", list(raw["pretrain"]), "shards"),
        ("finetune", runs, "pretrain-tden"),
        ("evaluate", runs, "finetune-${item}"),
    )
    for group, entries, dep in groups:
        cmd = f"{sys.executable} -c \"import sys; open('{group}-${{item}}','w').write('x')\""
        stages[group] = {"foreach": entries, "do": {"cmd": cmd, "deps": [dep], "outs": [f"{group}-${{item}}"]}}
    write = f"cp registered.json reports/registered.json && {stage('register', [])['cmd']}"
    stages["register"] = {**stage("register", [f"evaluate-{run}" for run in runs]), "cmd": write}
    stages["training_stats"] = stage("training_stats", [f"pretrain-{next(iter(raw['pretrain']))}"])
    stages["report"] = stage("report", [f"evaluate-{run}" for run in runs])
    (folder / "seed").write_text("1")
    (folder / "registered.json").write_text(json.dumps(REGISTERED))
    (folder / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}))
    init_dvc(folder)
    return folder


def stage(name: str, deps: list[str]) -> dict[str, object]:
    code = f"open('{name}','w').write('x')"
    return {"cmd": f'{sys.executable} -c "import sys; {code}"', "deps": deps, "outs": [name]}


def set_flow(project: Path, **values: object) -> None:
    """Change the `flow` section of the project's params.yaml."""
    raw = yaml.safe_load((project / "params.yaml").read_text())
    raw["flow"] |= values
    (project / "params.yaml").write_text(yaml.safe_dump(raw, sort_keys=False))


def break_stage(project: Path, name: str, code: str) -> None:
    """Make a stage run `code` (with `sys` imported) before it writes its output."""
    text, write = (project / "dvc.yaml").read_text(), f"open('{name}"
    assert text.count(write) == 1
    (project / "dvc.yaml").write_text(text.replace(write, f"{code}; {write}"))


class Listener(http.server.ThreadingHTTPServer):
    """A webhook's receiver on loopback: `bodies` are the messages, `answer` is its HTTP status, `slow` delays it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.answer, self.delay = 200, threading.Event()
        self.slow = False
        self.url = f"http://127.0.0.1:{self.server_port}/hook?token=secret"


@contextlib.contextmanager
def listening() -> Iterator[Listener]:
    """Run a receiver during the block."""
    server = Listener()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.delay.set()
        server.shutdown()
        server.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    server: Listener

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.slow:
            self.server.delay.wait(30)
        self.server.bodies.append(json.loads(body))
        self.send_response(self.server.answer)
        if self.server.answer == 302:
            self.send_header("Location", f"http://127.0.0.1:{self.server.server_port}/elsewhere")
        self.end_headers()

    def do_GET(self) -> None:
        self.server.bodies.append({"redirected": True})
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass
