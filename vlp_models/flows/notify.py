"""Report the end of a run to a webhook. A webhook that is slow, dead or misconfigured costs one log line."""

from __future__ import annotations

import html
import json
import os
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vlp_models.common.redaction import redact
from vlp_models.errors import ParamsError
from vlp_models.params import FlowParams
from vlp_models.params.load import read_plain

MAX_LENGTH = 2000  # characters of a message


def notify(
    params: FlowParams, *, flow: str, run: str, state: str, message: str, bad: bool, log: Callable[[str], None]
) -> None:
    """Post `{text, flow, run, state, message, time}` as JSON; `text` is what Slack and similar tools show. Never raise.

    In `text`, &, < and > are entities, as Slack requires: a file name in a message must not become a link or a mention.

    Args:
        bad: a person should look at it; with `notify: failures` nothing else is sent.
    """
    url = params.webhook
    if url.startswith("env:"):
        url = os.environ.get(url.removeprefix("env:"), "")
    if not url:
        if params.webhook:
            log(f"no notification: {params.webhook.removeprefix('env:')} is not set in the environment")
        return
    if params.notify == "failures" and not bad:
        return
    # The end of a message has the error; the beginning is the output before it.
    message = redact(message)[-MAX_LENGTH:]
    text = html.escape(f"{flow} {run}: {state}. {message}", quote=False)
    body = {"text": text, "flow": flow, "run": run, "state": state, "message": message}
    problem: list[str] = ["no response"]  # until the thread replaces it
    # The socket's timeout is per read; leaving the thread behind bounds the whole call.
    # The thread replaces the only entry when it has a result; an empty text is success.
    thread = threading.Thread(
        target=lambda: problem.__setitem__(0, _post(url, {**body, "time": time.time()}, params.webhook_timeout)),
        daemon=True,
    )
    thread.start()
    # After the timeout the thread is left behind: it is a daemon, so the process can end.
    thread.join(params.webhook_timeout)
    if problem[0]:
        log(f"the webhook was not notified ({state}): {problem[0]}")


def read_webhook(file: Path) -> FlowParams:
    """Return the webhook, with its timeout, of a params.yaml that may be invalid elsewhere; none if it is not YAML."""
    try:
        flow = read_plain(file.read_text(encoding="utf-8"), file)["flow"]
        # Only the webhook and its timeout, so errors of other keys do not matter.
        return FlowParams(webhook=str(flow["webhook"]), webhook_timeout=float(flow.get("webhook_timeout", 5)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ParamsError):
        return FlowParams()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: Any, **named: Any) -> None:
        """Follow no redirect: it would carry the message to a host that is not configured."""


def _post(url: str, body: dict[str, Any], timeout: float) -> str:
    """Post the body; return the problem without the URL (it may hold a token), or an empty string."""
    try:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            return "its URL is not http or https"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout):
            return ""
    except urllib.error.HTTPError as error:
        return f"HTTP status {error.code}"
    except urllib.error.URLError as error:
        # The system's words: refused, unknown host, a certificate that is not trusted
        return redact(str(getattr(error.reason, "strerror", None) or error.reason))
    except Exception as error:  # in a thread: an uncaught one would print the URL with its traceback
        return type(error).__name__
