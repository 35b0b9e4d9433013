"""Tells a webhook how a run ended. A webhook that is slow, dead or wrong is a line in the log and nothing else."""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any

from vlp_models.common.redaction import redact
from vlp_models.params import FlowParams

LONGEST = 2000  # characters of a message


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: Any, **named: Any) -> None:
        """A redirect would carry the message to a host that nobody named."""


def webhook_url(params: FlowParams) -> str:
    """The URL, from the environment where params say `env:NAME`; empty: none is set."""
    if params.webhook.startswith("env:"):
        return os.environ.get(params.webhook.removeprefix("env:"), "")
    return params.webhook


def notify(
    params: FlowParams, *, flow: str, run: str, state: str, message: str, bad: bool, log: Callable[[str], None]
) -> None:
    """Posts `{text, flow, run, state, message, time}` as JSON; `text` is what Slack and its kin show. Never raises.

    Args:
        bad: something a person should look at; with `notify: failures` nothing else is sent.
    """
    url = webhook_url(params)
    if not url:
        if params.webhook:
            log(f"no notification: {params.webhook.removeprefix('env:')} is not set in the environment")
        return
    if params.notify == "failures" and not bad:
        return
    message = redact(message)[-LONGEST:]
    body = {"text": f"{flow} {run}: {state}. {message}", "flow": flow, "run": run, "state": state, "message": message}
    problem: list[str] = ["no answer"]
    # The socket's timeout is for each read; a thread that is left behind is for the whole call.
    thread = threading.Thread(
        target=lambda: problem.__setitem__(0, _post(url, {**body, "time": time.time()}, params.webhook_timeout)),
        daemon=True,
    )
    thread.start()
    thread.join(params.webhook_timeout)
    if problem[0]:
        log(f"the webhook was not told ({state}): {problem[0]}")


def _post(url: str, body: dict[str, Any], timeout: float) -> str:
    """What went wrong, in words without the URL (it may hold a token); empty: nothing."""
    try:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            return "its URL is not http or https"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout):
            return ""
    except urllib.error.HTTPError as error:
        return f"it answered {error.code}"
    except urllib.error.URLError as error:
        return f"{type(error.reason).__name__}"
    except Exception as error:  # in a thread: an escaping one would print the URL with its traceback
        return type(error).__name__
