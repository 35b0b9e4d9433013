"""Curves in Weights & Biases (offline) and Trackio (local), with the real packages; `make test-sinks` installs them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vlp_models.contrib.sinks.package_runs import WandbRun
from vlp_models.errors import MissingToolError
from vlp_models.params import TrackingParams
from vlp_models.registry import curve_loggers
from vlp_models.registry.curve_loggers import check_sinks, log_curves, open_sinks
from vlp_models.training.log import LOG

ROWS = [
    {"step": 10, "epoch": 0, "loss": 2.5, "lr": 1e-3, "time": 1.7e12, "seconds": 3.0},
    {"step": 20, "epoch": 0, "loss": 2.25, "val_loss": 2.0, "time": 1.7e12, "seconds": 3.0},
]
# Runs in a process of its own: both packages keep state, and threads, for as long as a process lives.
SCRIPT = """
import json, sys
from pathlib import Path
from vlp_models.params import TrackingParams
from vlp_models.registry.curve_loggers import log_curves, open_sinks
root, kind, rows = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
params = TrackingParams(uri="", artifacts="a", experiment="vlp", model_prefix="vlp", metric={}, sinks=[kind])
log = root / "log.jsonl"
run_params = {"seed": 1, "optimizer": {"lr": 0.001}}
sinks = open_sinks(params, root, root, title="pretrain/tden", run_params=run_params)
with log_curves(sinks, root) as tracker:
    for number in range(len(rows)):
        log.write_text("".join(json.dumps(row) + "\\n" for row in rows[: number + 1]))
        tracker.sync(log)
print(json.dumps([sink.failures for sink in sinks]), flush=True)
"""


def track(root: Path, kind: str, rows: list[dict[str, Any]]) -> str:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB_", "TRACKIO_"))}
    env |= {"HOME": str(root / "home"), "NO_PROXY": "*", "https_proxy": "http://127.0.0.1:9"}
    command = [sys.executable, "-c", SCRIPT, str(root), kind, json.dumps(rows)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == [0], done.stdout + done.stderr[-3000:]  # no greetings
    return done.stderr


def need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-sinks")


def read_leveldb_log(content: bytes) -> list[bytes]:
    """Return the records of an offline run's file: blocks of 32 KiB, and 7 bytes before each piece of a record."""
    place, found, held = 7, [], b""
    while place + 7 <= len(content):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        size, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        held += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            found.append(held)
            held = b""
    return found


@pytest.mark.slow
def test_wandb_gets_every_line_once_offline_and_a_resumed_training_continues(tmp_path: Path) -> None:
    need("wandb")
    track(tmp_path, "wandb", ROWS[:1])
    track(tmp_path, "wandb", ROWS)
    from wandb.proto.wandb_internal_pb2 import Record

    history, runs, config = [], set(), {}
    for file in sorted((tmp_path / ".work" / "wandb").rglob("*.wandb")):
        for content in read_leveldb_log(file.read_bytes()):
            record = Record.FromString(content)
            if record.HasField("run"):
                runs.add((record.run.run_id, record.run.project, record.run.display_name))
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.HasField("history"):
                items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
                history.append({key: json.loads(value) for key, value in items.items()})
    kept = [{key: value for key, value in row.items() if not key.startswith("_")} for row in history]
    assert kept == [{"epoch": 0, "loss": 2.5, "lr": 1e-3}, {"epoch": 0, "loss": 2.25, "val_loss": 2.0}]
    assert [row["_step"] for row in history] == [10, 20]
    ((run_id, project, name),) = runs
    assert (project, name) == ("vlp", "pretrain/tden")
    assert run_id == json.loads((tmp_path / "wandb.json").read_text())["id"]
    assert config["seed"] == "1" and config["optimizer.lr"] == "0.001"


@pytest.mark.slow
def test_trackio_gets_every_line_once_and_a_resumed_training_continues(tmp_path: Path) -> None:
    need("trackio")
    track(tmp_path, "trackio", ROWS[:1])
    track(tmp_path, "trackio", ROWS)
    import sqlite3

    (file,) = (tmp_path / ".work" / "trackio").rglob("vlp*.db")
    rows = sqlite3.connect(file).execute("select run_name, step, metrics from metrics order by step").fetchall()
    found = [(step, json.loads(metrics)) for _, step, metrics in rows]
    assert found == [(10, {"epoch": 0, "loss": 2.5, "lr": 1e-3}), (20, {"epoch": 0, "loss": 2.25, "val_loss": 2.0})]
    assert len({name for name, _, _ in rows}) == 1 and rows[0][0].startswith("pretrain-tden-")


class Broken:
    """A run whose third call fails."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def log(self, numbers: dict[str, float], step: int) -> None:
        if step == 20:
            raise ConnectionError("no route to wandb.example")
        self.steps.append(step)

    def finish(self, exit_code: int = 0) -> None:
        raise RuntimeError("cannot finish")


def tracking(*names: str) -> TrackingParams:
    plain = {"uri": "", "artifacts": "a", "experiment": "vlp", "model_prefix": "vlp", "metric": {}}
    return TrackingParams(**plain, sinks=list(names))  # type: ignore[arg-type]


def test_a_failing_sink_warns_once_is_counted_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(WandbRun, "_start", lambda self: Broken())
    monkeypatch.setattr(curve_loggers, "is_installed", lambda name: True)
    monkeypatch.setattr(curve_loggers, "PAUSE", 0.0)
    monkeypatch.setattr(curve_loggers.logger, "propagate", True)
    log = tmp_path / LOG
    (sink,) = open_sinks(tracking("wandb"), tmp_path, tmp_path, title="pretrain/tden", run_params={})
    with log_curves([sink], tmp_path) as tracker:
        for count in (1, 2, 2):
            log.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:count]))
            tracker.sync(log)
    assert sink.failures == 3  # two attempts, and one at the end
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == [
        "wandb: no route to wandb.example; training continues",
        "wandb: 3 attempts to send the curve of pretrain/tden failed",
    ]
    assert json.loads((tmp_path / "wandb.json").read_text())["step"] == 10


def test_a_sink_without_its_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve_loggers, "is_installed", lambda name: False)
    message = r"params.yaml: `tracking.sinks: trackio` needs the package trackio; run `(uv )?pip install trackio`, or"
    with pytest.raises(MissingToolError, match=message):
        check_sinks(tracking("trackio"))


def test_a_training_that_logs_nothing_starts_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve_loggers, "is_installed", lambda name: True)
    sinks = open_sinks(tracking("wandb", "trackio"), tmp_path, tmp_path, title="a", run_params={})
    with log_curves(sinks, tmp_path):
        pass
    assert [sink.failures for sink in sinks] == [0, 0] and not list(tmp_path.iterdir())
