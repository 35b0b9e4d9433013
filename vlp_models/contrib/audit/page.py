"""The page of `vlp audit`: pairs with thumbnails, most suspicious first, to accept or remove.

A decision changes what models are trained on, so the page is not for everyone who can reach the port:

- Its address has a token, without which every request is refused; so other users of the machine have no access.
- The header `Host` must be the server's own: another site's name that resolves to this machine is refused.
- A decision is a POST of JSON from this page's origin, of at most MAX_BODY bytes, on a caption of the report.
- An image is one of the report's, checked before it is decoded, and sent as a thumbnail.
"""

from __future__ import annotations

import io
import re
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel

from vlp_models.common.pages import page_environment
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.audit.decisions import DECISIONS, REPORT, Decision, append_decision, read_decisions, read_lines
from vlp_models.data.images import ImageError
from vlp_models.errors import ParamsError, explain_system_error
from vlp_models.serving.images import MAX_BYTES, decode_checked

ROWS = 50  # pairs on a page
THUMBNAIL = 260  # pixels of the longer side
MAX_BODY = 16 * 1024
TITLES = {
    "swapped": "Swapped",
    "empty": "No content",
    "copied": "Copied",
    "language": "Other language",
    "near_duplicate": "Near-duplicate",
}
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Decided(BaseModel):
    caption_id: str
    decision: Decision


class Desk:
    """The report, and the decisions on it. Safe for several threads."""

    def __init__(self, workspace: Workspace) -> None:
        self.rows = list(read_lines(workspace.root / REPORT))
        self._texts = {row["caption_id"]: row["text"] for row in self.rows}
        self._paths = {row["copy_of"]: workspace.root / row["copy_of_path"] for row in self.rows if row.get("copy_of")}
        self._paths |= {row["image_id"]: workspace.root / row["path"] for row in self.rows}
        self._file = workspace.root / DECISIONS
        self._lock = threading.Lock()
        self.decisions = read_decisions(self._file)

    def decide(self, decided: Decided) -> None:
        """Write a decision to disk.

        Raises:
            KeyError: no caption of the report.
        """
        text = self._texts[decided.caption_id]
        with self._lock:
            append_decision(self._file, decided.caption_id, decided.decision, text)
            self.decisions = {**self.decisions, decided.caption_id: decided.decision}

    def thumbnail(self, image_id: str) -> bytes | None:
        """Return a JPEG of an image of the report; None if it is not one, or cannot be read."""
        path = self._paths.get(image_id)
        try:
            if path is None or path.stat().st_size > MAX_BYTES:
                return None
            image = decode_checked(path.read_bytes())
        except (OSError, ImageError):
            return None
        image.thumbnail((THUMBNAIL, THUMBNAIL))
        output = io.BytesIO()
        image.save(output, "JPEG", quality=85)
        return output.getvalue()


def make_app(desk: Desk, token: str, host: str) -> FastAPI:
    """Return the application. host: the address that the server listens on."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    template = page_environment("vlp_models.contrib.audit").get_template("page.html.j2")
    # kind -> its rows, the highest score of the kind first; all rows come first
    rows_of: dict[str, list[dict[str, Any]]] = {"": desk.rows}
    for name in TITLES:
        scored = [(f["score"], row) for row in desk.rows for f in row["findings"] if f["kind"] == name]
        if scored:
            rows_of[name] = [row for _, row in sorted(scored, key=lambda pair: -pair[0])]

    @app.middleware("http")
    async def guard(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        status, problem = _refuse(request, token, host)
        response = JSONResponse({"problem": problem}, status) if problem else await call(request)
        response.headers.update(HEADERS)
        return response

    @app.get("/")
    def page(kind: str = "", page: str = "1") -> Response:
        rows = rows_of.get(kind, [])
        pages = max(1, -(-len(rows) // ROWS))
        number = min(max(int(page), 1), pages) if page.isdecimal() else 1
        nonce = secrets.token_urlsafe(16)
        html = template.render(
            rows=rows[(number - 1) * ROWS : number * ROWS],
            decisions=desk.decisions,
            counts=Counter(desk.decisions.values()),
            kinds={name: len(listed) for name, listed in rows_of.items()},
            kind=kind,
            TITLES=TITLES,
            number=number,
            pages=pages,
            token=token,
            nonce=nonce,
        )
        policy = (
            f"default-src 'none'; img-src 'self'; connect-src 'self'; style-src 'nonce-{nonce}'; "
            f"script-src 'nonce-{nonce}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        return HTMLResponse(html, headers={"Content-Security-Policy": policy})

    @app.get("/image")
    def image(id: str = "") -> Response:
        content = desk.thumbnail(id)
        return Response(content, 200 if content else 404, media_type="image/jpeg")

    @app.post("/decide")
    async def decide(request: Request) -> Response:
        try:
            desk.decide(Decided.model_validate_json(await request.body()))
        except (ValueError, KeyError):
            return JSONResponse({"problem": "expected a caption of the report, and accept or remove"}, 422)
        except OSError as error:
            return JSONResponse({"problem": explain_system_error(error)}, 500)
        return JSONResponse({})

    return app


def _refuse(request: Request, token: str, host: str) -> tuple[int, str]:
    """Return status and reason of a request that is refused before it is read; an empty reason for others."""
    headers, sent_host = request.headers, request.headers.get("host", "")
    # Only a name can be another site's: an address that a browser has connected to is this machine's.
    if not re.fullmatch(rf"(localhost|{re.escape(host)}|[\d.]+|\[[\da-f:.]+\])(:\d+)?", sent_host, re.IGNORECASE):
        return 421, "this server has another name"
    sent = request.query_params.get("token") or headers.get("x-token", "")
    if not secrets.compare_digest(sent.encode(), token.encode()):
        return 403, "open the address that `vlp audit` prints: it has a token"
    if request.method in ("GET", "HEAD"):
        return 200, ""
    if headers.get("origin", f"http://{sent_host}") != f"http://{sent_host}":
        return 403, "a decision comes from this page"
    if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        return 415, "a decision is JSON"
    length = headers.get("content-length", "")
    # Without a length, the body could be of any.
    if not length.isdecimal() or int(length) > MAX_BODY:
        return 413, f"a decision has at most {MAX_BODY:,} bytes"
    return 200, ""


@contextmanager
def serving(workspace: Workspace, *, host: str, port: int) -> Iterator[str]:
    """Serve the page while the block runs; yield its address.

    Raises:
        ParamsError: the port is in use, or the host is not an address of this machine.
        DataError: the report or the decisions are damaged.
    """
    token = secrets.token_urlsafe(24)
    app = make_app(Desk(workspace), token, host)
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]  # the address is in parentheses
        raise ParamsError(f"vlp audit: {host} port {port}: {reason}; choose others with --host and --port") from None
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", server_header=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{listener.getsockname()[1]}/?token={token}"
    finally:
        server.should_exit = True
        thread.join()
