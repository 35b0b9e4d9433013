"""Notifications against a real listener: their content, that each event is sent once, and that none disturbs a run."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from flow_project import Listener, break_stage, listening, make_project, set_flow

from vlp_models.contrib.notify import events
from vlp_models.contrib.notify.events import describe_forecast, forecast
from vlp_models.contrib.notify.webhook import notify
from vlp_models.errors import ParamsError
from vlp_models.flows.parts import retrain_parts
from vlp_models.flows.pipeline import run_without_server
from vlp_models.flows.process import StageFailed
from vlp_models.params import FlowParams
from vlp_models.registry.promotion.ledger import Ledger

DEFAULTS = Path(__file__).parents[3] / "params.yaml"
DAY = 86400


@pytest.fixture
def listener() -> Iterator[Listener]:
    with listening() as server:
        yield server


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shutil.copy(DEFAULTS, tmp_path / "params.yaml")
    (tmp_path / "promotions").mkdir()
    return tmp_path


def send(root: Path, bad: bool = True, message: str = "disk full", link: str = "", **flow: Any) -> list[str]:
    set_flow(root, **flow)
    lines: list[str] = []
    notify(root, lines.append, flow="retrain", run="monday", state="Failed", message=message, bad=bad, link=link)
    return lines


def decide(
    root: Path, action: str, outcome: str, reasons: Sequence[str] = ("gain 0.2 (-0.4 to 0.8)",), **numbers: float
) -> None:
    """Append a decision to the ledger."""
    decision = {"action": action, "outcome": outcome, "task": "vqa", "version": 4, "champion": 3, "numbers": numbers}
    ledger = Ledger(root / "promotions" / "ledger.jsonl")
    with ledger.locked():
        entry = {"action": action, "task": "vqa", "model": "vlp-vqa", "version": 4, "content": "c", "from_content": "f"}
        ledger.append({**entry, "decision": {**decision, "reasons": list(reasons)}})


def test_message_is_json_and_a_name_in_it_is_no_markup_in_slack(root: Path, listener: Listener) -> None:
    message = "data/inbox/<!channel> & <https://evil.example|sign in>: unreadable"
    assert send(root, webhook=listener.url, message=message, link="http://127.0.0.1:4200/runs/1") == []
    body = listener.bodies[0]
    assert body.pop("time") == pytest.approx(time.time(), abs=30)
    escaped = "data/inbox/&lt;!channel&gt; &amp; &lt;https://evil.example|sign in&gt;: unreadable"
    text = f"retrain monday: Failed. {escaped}\nhttp://127.0.0.1:4200/runs/1"
    expected = {"text": text, "subject": "retrain: Failed", "flow": "retrain", "run": "monday", "state": "Failed"}
    assert body == {**expected, "message": message, "link": "http://127.0.0.1:4200/runs/1", "events": []}


def test_a_secret_in_a_message_or_in_an_event_is_not_sent(root: Path, listener: Listener) -> None:
    raw = yaml.safe_load((root / "params.yaml").read_text())
    raw["tracking"]["uri"] = "https://ann:hunter22@host/x"
    (root / "params.yaml").write_text(yaml.safe_dump(raw))
    decide(root, "promoted", "promote")
    send(root, webhook=listener.url, message="at https://ann:hunter22@host/x")
    assert listener.bodies[0]["events"][0]["see"].endswith("@host/x/#/models/vlp-vqa/versions/4")
    assert "host" in json.dumps(listener.bodies) and "hunter22" not in json.dumps(listener.bodies)


def test_decisions_are_sent_once_and_wait_for_a_webhook_that_is_away(root: Path, listener: Listener) -> None:
    listener.answer = 500
    send(root, webhook=listener.url)
    decide(root, "refused", "inconclusive")
    decide(root, "refused", "keep")
    listener.answer = 200
    send(root, bad=False, webhook=listener.url, notify="failures")
    received = listener.bodies[1]["events"]
    assert [event["event"] for event in received] == ["inconclusive", "refused"]
    assert received[0]["text"] == (
        "vqa: refused: version 4 (inconclusive); champion: version 3. gain 0.2 (-0.4 to 0.8)"
    )
    assert received[0]["text"] in listener.bodies[1]["text"].splitlines(), "the event is named once"
    assert received[0]["see"] == "vlp history vqa"
    assert listener.bodies[1]["subject"] == "retrain: Failed; vqa inconclusive; vqa refused"
    send(root, webhook=listener.url)
    assert listener.bodies[2]["events"] == []
    send(root, bad=False, webhook=listener.url, notify="failures")
    decide(root, "promoted", "promote")
    send(root, bad=False, webhook=listener.url, notify="failures")
    assert len(listener.bodies) == 3, "with `failures`, neither a completed run nor a promotion is sent"


def test_a_promotion_without_reasons_and_a_run_named_after_its_flow_read_well(root: Path, listener: Listener) -> None:
    decide(root, "promoted", "promote", reasons=[])
    set_flow(root, webhook=listener.url)
    notify(root, print, flow="retrain", run="retrain 2026-11-30", state="Completed", message="ran report", bad=False)
    first, promoted = listener.bodies[0]["text"].splitlines()
    assert first == "retrain 2026-11-30: Completed. ran report"
    assert promoted == listener.bodies[0]["events"][0]["text"] == "vqa: promoted: version 4"


def test_a_forgotten_image_is_an_event_with_what_was_trained_on_it(root: Path, listener: Listener) -> None:
    ledger = Ledger(root / "promotions" / "ledger.jsonl")
    entry = {"action": "forgotten", "task": "", "model": "", "version": None, "by": "ada", "images": ["ab" * 32]}
    with ledger.locked():
        ledger.append({**entry, "checkpoints": {"finetune/tden-vqa": "exposed"}, "versions": {}})
    send(root, webhook=listener.url)
    assert listener.bodies[0]["subject"] == "retrain: Failed; 1 image forgotten"
    assert listener.bodies[0]["events"][0]["text"] == "1 image forgotten, by ada; exposed: finetune/tden-vqa"


def test_what_a_first_notification_leaves_out(root: Path, listener: Listener, monkeypatch: Any) -> None:
    decide(root, "promoted", "promote")
    monkeypatch.setattr(events, "FIRST_SECONDS", -1.0)
    send(root, webhook=listener.url)
    assert listener.bodies[0]["events"] == []


def test_a_low_error_budget_is_sent_when_it_gets_low(root: Path, listener: Listener) -> None:
    for left, expected in ((0.5, 0), (0.24, 1), (0.22, 0)):
        decide(root, "refused", "keep", budget_left=left)
        send(root, webhook=listener.url)
        low = [event for event in listener.bodies[-1]["events"] if event["event"] == "budget_low"]
        assert len(low) == expected
    assert "24% of the error budget" in json.dumps(listener.bodies[1])


def test_a_disk_that_fills_up_is_forecast_and_sent_once(root: Path, listener: Listener) -> None:
    free = shutil.disk_usage(root).free
    weekly = free / 3  # bytes a week: full in three weeks
    now = time.time()
    measured = [[now - 7 * DAY * week, free + week * weekly] for week in (4, 3, 2, 1)]
    (root / ".work").mkdir()
    (root / ".work" / "disk.json").write_text(json.dumps(measured[:2]))
    assert forecast(root) is None, "two measurements"
    (root / ".work" / "disk.json").write_text(json.dumps(measured))
    assert forecast(root) == pytest.approx(21, rel=0.01)
    assert describe_forecast(root) == ["full in about 21 days, as it filled up lately"]
    for expected in (1, 0):
        send(root, webhook=listener.url)
        assert [event["event"] for event in listener.bodies[-1]["events"]] == ["disk_full_soon"] * expected
    assert len(json.loads((root / ".work" / "disk.json").read_text())) == 5, "the runs of a day measure once"
    (root / ".work" / "disk.json").write_text('[[1], "damaged"]')
    assert describe_forecast(root) == []
    rising = [[now - 7 * DAY * week, free - week] for week in (4, 3, 2, 1)]
    (root / ".work" / "disk.json").write_text(json.dumps(rising))
    assert forecast(root) is None


def test_url_may_come_from_the_environment(root: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "VLP_TEST_HOOK is not set" in send(root, webhook="env:VLP_TEST_HOOK")[0]
    monkeypatch.setenv("VLP_TEST_HOOK", listener.url)
    assert send(root, webhook="env:VLP_TEST_HOOK") == []
    assert len(listener.bodies) == 1


def test_a_damaged_ledger_and_a_full_disk_do_not_silence_the_message(root: Path, listener: Listener) -> None:
    (root / "promotions" / "ledger.jsonl").write_text("no ledger\n")
    (root / ".work").write_text("a file where the folder should be")
    lines = send(root, webhook=listener.url)
    assert len(lines) == 1 and "not valid JSON" in lines[0] and listener.bodies[0]["events"] == []


def test_problem_is_one_line_without_the_url(root: Path, listener: Listener) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{probe.getsockname()[1]}/hook?token=secret"
    listener.answer = 500
    for url in (dead, listener.url, "http://[::1/hook?token=secret", "http://no port:x/hook?token=secret"):
        lines = send(root, webhook=url)
        assert len(lines) == 1 and "was not notified" in lines[0]
        assert "secret" not in lines[0] and ("Connection refused" in lines[0]) == (url == dead)


def test_redirect_is_not_followed(root: Path, listener: Listener) -> None:
    listener.answer = 302
    assert "HTTP status 302" in send(root, webhook=listener.url)[0]
    assert {"redirected": True} not in listener.bodies


def test_slow_webhook_costs_no_more_than_its_timeout(root: Path, listener: Listener) -> None:
    listener.slow = True
    began = time.monotonic()
    assert "was not notified" in send(root, webhook=listener.url, webhook_timeout=1.0)[0]
    assert time.monotonic() - began < 5


def test_other_schemes_are_rejected() -> None:
    with pytest.raises(ValueError, match="`webhook` must be env:NAME"):
        FlowParams(webhook="file:///etc/passwd")


def retrain(project: Path) -> None:
    run_without_server(project, retrain_parts, name="retrain", log=print)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_project(tmp_path, monkeypatch)


@pytest.mark.pipeline
def test_the_end_of_a_run_is_sent(project: Path, listener: Listener) -> None:
    set_flow(project, webhook=listener.url)
    (project / "answer-promote-vqa").write_text("3 refused: gain 0.2 is below 0.5")
    retrain(project)
    assert listener.bodies[0]["state"] == "Completed" and "promote vqa: refused: " in listener.bodies[0]["message"]
    break_stage(project, "pretrain", "sys.exit('disk on fire')")
    with pytest.raises(StageFailed):
        retrain(project)
    assert listener.bodies[1]["state"] == "Failed" and "\ndisk on fire\n" in listener.bodies[1]["message"]


def test_an_invalid_key_is_sent(project: Path, listener: Listener) -> None:
    set_flow(project, webhook=listener.url)
    (project / "params.yaml").write_text((project / "params.yaml").read_text() + "\npromotoin: {}\n")
    with pytest.raises(ParamsError, match="promotoin"):
        retrain(project)
    (received,) = listener.bodies
    assert received["state"] == "Failed" and "did you mean `promotion`" in received["message"]
    (project / "params.yaml").write_text("flow: [")
    with pytest.raises(ParamsError, match="not valid YAML"):
        retrain(project)
    assert len(listener.bodies) == 1
