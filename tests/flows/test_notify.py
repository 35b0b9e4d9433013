"""Notifications against a real listener: the message, and that no webhook can disturb a run."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

from vlp_models.flows.notify import notify
from vlp_models.params import FlowParams


def send(bad: bool = True, message: str = "disk full", **params: Any) -> list[str]:
    lines: list[str] = []
    flow = FlowParams(webhook_timeout=params.pop("timeout", 5.0), **params)
    notify(flow, flow="retrain", run="monday", state="Failed", message=message, bad=bad, log=lines.append)
    return lines


def test_message_is_json_and_a_name_in_it_is_no_markup_in_slack(listener: Any) -> None:
    message = "data/inbox/<!channel> & <https://evil.example|sign in>: unreadable"
    assert send(webhook=listener.url, message=message) == []
    body = listener.bodies[0]
    assert body.pop("time") == pytest.approx(time.time(), abs=30)
    escaped = "data/inbox/&lt;!channel&gt; &amp; &lt;https://evil.example|sign in&gt;: unreadable"
    text = f"retrain monday: Failed. {escaped}"
    assert body == {"text": text, "flow": "retrain", "run": "monday", "state": "Failed", "message": message}


def test_url_may_come_from_the_environment(listener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "VLP_TEST_HOOK is not set" in send(webhook="env:VLP_TEST_HOOK")[0]
    monkeypatch.setenv("VLP_TEST_HOOK", listener.url)
    assert send(webhook="env:VLP_TEST_HOOK") == []
    assert len(listener.bodies) == 1


def test_failures_only_sends_nothing_else(listener: Any) -> None:
    send(webhook=listener.url, notify="failures", bad=False)
    assert listener.bodies == []
    send(webhook=listener.url, notify="failures", bad=True)
    assert len(listener.bodies) == 1


def test_problem_is_one_line_without_the_url(listener: Any) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{probe.getsockname()[1]}/hook?token=secret"
    listener.answer = 500
    for url in (dead, listener.url, "http://[::1/hook?token=secret", "http://no port:x/hook?token=secret"):
        lines = send(webhook=url)
        assert len(lines) == 1 and "was not notified" in lines[0]
        assert "secret" not in lines[0] and ("Connection refused" in lines[0]) == (url == dead)


def test_redirect_is_not_followed(listener: Any) -> None:
    listener.answer = 302
    assert "HTTP status 302" in send(webhook=listener.url)[0]
    assert {"redirected": True} not in listener.bodies


def test_slow_webhook_costs_no_more_than_its_timeout(listener: Any) -> None:
    listener.slow = True
    began = time.monotonic()
    assert "was not notified" in send(webhook=listener.url, timeout=1.0)[0]
    assert time.monotonic() - began < 5


def test_other_schemes_are_rejected() -> None:
    with pytest.raises(ValueError, match="`webhook` must be env:NAME"):
        FlowParams(webhook="file:///etc/passwd")
