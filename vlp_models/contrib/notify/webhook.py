"""Post what happened to `flow.webhook`. A webhook that is slow, dead or misconfigured costs one log line.

A run posts once, at its end, with the events since the last post that arrived (events.py). So each is sent once, none
is lost while the webhook is away, and an outage ends with one message. The keepers of `vlp up` post what no run can: a
process that died, a run that did not start (contrib/stack/keep.py).
"""

from __future__ import annotations

import contextlib
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
from vlp_models.contrib.notify.events import Events, measure_disk
from vlp_models.errors import ParamsError
from vlp_models.params import FlowParams, Params, load_params
from vlp_models.params.load import read_plain

MAX_LENGTH = 2000  # characters of a message


def notify(
    root: Path, log: Callable[[str], None], *, flow: str, run: str, state: str, message: str, bad: bool, link: str = ""
) -> None:
    """Post the end of a run and the events since the last post as JSON; `text` is what Slack and similar tools show.

    The keys are text, subject, flow, run, state, message, link, events and time; `subject` and `message` make a mail.
    In `text`, &, < and > are entities, as Slack requires: a file name in a message must not become a link or a mention.
    Never raises.

    Args:
        bad: a person should look at it; with `notify: failures` nothing else is sent, unless an event is bad.
        link: to the run in Prefect's UI.
    """
    with contextlib.suppress(OSError):  # a full disk is what the message is about, then
        measure_disk(root)
    file, params = root / "params.yaml", None
    try:
        params = load_params(file)
        settings = params.flow
    except ParamsError as error:
        # An invalid params.yaml must not silence the notification of the failure that it caused.
        settings = read_webhook(file)
        if not settings.webhook:
            log(f"no notification: {error}")
    url = settings.webhook
    if url.startswith("env:"):
        url = os.environ.get(url.removeprefix("env:"), "")
    if not url:
        if settings.webhook:
            log(f"no notification: {settings.webhook.removeprefix('env:')} is not set in the environment")
        return
    events = None if params is None else _find_events(params, root, log)
    new_events = [] if events is None else events.events
    if settings.notify == "failures" and not bad and not new_events:
        return
    # The end of a message has the error; the beginning is the output before it.
    message = redact(message)[-MAX_LENGTH:]
    title = run if run.startswith(flow) else f"{flow} {run}"
    lines = [f"{title}: {state}. {message}", *(event["text"] for event in new_events)]
    text = html.escape("\n".join([*lines, link] if link else lines), quote=False)
    subject = "; ".join([f"{flow}: {state}", *(event["subject"] for event in new_events)])
    body = {"text": text, "subject": subject, "flow": flow, "run": run, "state": state, "message": message}
    problem = _post_in_time(
        url, {**body, "link": link, "events": new_events, "time": time.time()}, settings.webhook_timeout
    )
    if problem:
        log(f"the webhook was not notified ({state}): {problem}")
    elif events is not None:
        with contextlib.suppress(OSError):  # sent again then
            events.mark_sent()


def _find_events(params: Params, root: Path, log: Callable[[str], None]) -> Events | None:
    try:
        return Events(params, root)
    except Exception as error:  # a damaged ledger, for example, which `vlp promote` reports
        log(f"no events in the notification: {redact(str(error))}")
        return None


def read_webhook(file: Path) -> FlowParams:
    """Return the webhook, with its timeout, of a params.yaml that may be invalid elsewhere; none if it is not YAML."""
    try:
        flow = read_plain(file.read_text(encoding="utf-8"), file)["flow"]
        # Only the webhook and its timeout, so errors of other keys do not matter.
        return FlowParams(webhook=str(flow["webhook"]), webhook_timeout=float(flow.get("webhook_timeout", 5)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ParamsError):
        return FlowParams()


def _post_in_time(url: str, body: dict[str, Any], timeout: float) -> str:
    """Post the body; return the problem, or an empty string. The call ends after `timeout` seconds, whatever happens.

    The socket's timeout is per read, so a thread posts, and is left behind when its time is over: it is a daemon.
    """
    problem = ["no response"]  # until the thread replaces it
    thread = threading.Thread(target=lambda: problem.__setitem__(0, _post(url, body, timeout)), daemon=True)
    thread.start()
    thread.join(timeout)
    return problem[0]


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
