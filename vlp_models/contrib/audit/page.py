"""The page of `vlp audit`: pairs with thumbnails, most suspicious first, to accept or remove.

A decision changes what models are trained on, so the page is not for everyone who can reach the port:

- Its address has a token, without which every request is refused; so other users of the machine have no access.
- The header `Host` must be the server's own: another site's name that resolves to this machine is refused.
- A decision is a POST of JSON from this page's origin, of at most MAX_BODY bytes, on a caption of the report.
- An image is one of the report's, checked before it is decoded, and sent as a thumbnail.
"""

from __future__ import annotations

import io
import ipaddress
import json
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from vlp_models.common.pages import page_environment
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.audit.decisions import DECISIONS, REPORT, append_decision, read_decisions, read_report
from vlp_models.data.images import ImageError
from vlp_models.errors import ParamsError, Terminated
from vlp_models.serving.images import MAX_BYTES, decode_checked

ROWS = 50  # pairs on a page
THUMBNAIL = 260  # pixels of the longer side
MAX_BODY = 16 * 1024
SECONDS = 30  # that a connection may be silent
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Desk:
    """The report, and the decisions on it. Safe for several threads."""

    def __init__(self, workspace: Workspace) -> None:
        self.rows = list(read_report(workspace.root / REPORT))
        self._by_caption = {row["caption_id"]: row for row in self.rows}
        self._paths = {row["image_id"]: workspace.root / row["path"] for row in self.rows}
        self._file = workspace.root / DECISIONS
        self._lock = threading.Lock()
        self.decisions = read_decisions(self._file)

    def decide(self, caption_id: str, decision: str) -> None:
        """Write a decision to disk.

        Raises:
            ValueError: no caption of the report, or no decision.
        """
        row = self._by_caption.get(caption_id)
        if row is None or decision not in ("accept", "remove"):
            raise ValueError("expected a caption of the report, and accept or remove")
        with self._lock:
            append_decision(self._file, caption_id, decision, row["text"])  # type: ignore[arg-type]
            self.decisions[caption_id] = decision  # type: ignore[assignment]

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


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], desk: Desk) -> None:
        super().__init__(address, _Handler)
        self.desk = desk
        self.token = secrets.token_urlsafe(24)
        self.template = page_environment("vlp_models.contrib.audit").get_template("page.html.j2")


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = SECONDS
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if not self._admit():
            return
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        if url.path == "/":
            self._send(200, self._page(query), "text/html; charset=utf-8")
        elif url.path == "/image":
            content = self.server.desk.thumbnail(query.get("id", ""))
            self._send(200 if content else 404, content or b"", "image/jpeg")
        else:
            self._send(404, b"", "text/plain")

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY:
            self.close_connection = True  # the body is not read
            self._refuse(413, f"a decision has at most {MAX_BODY:,} bytes")
            return
        body = self.rfile.read(int(length))
        if not self._admit():
            return
        origin = self.headers.get("Origin")
        if origin is not None and origin != f"http://{self.headers.get('Host')}":
            self._refuse(403, "a decision comes from this page")
        elif self.headers.get("Content-Type", "").partition(";")[0].strip() != "application/json":
            self._refuse(415, "a decision is JSON")
        else:
            self._decide(body)

    def _decide(self, body: bytes) -> None:
        try:
            value = json.loads(body)
            self.server.desk.decide(str(value["caption_id"]), str(value["decision"]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self._refuse(422, f"not a decision: {error}")
        except OSError as error:
            self._refuse(500, f"not saved: {error.strerror}")
        else:
            self._send(200, b"{}", "application/json")

    def _admit(self) -> bool:
        """Check name and token; send the refusal otherwise."""
        host, _, port = self.headers.get("Host", "").rpartition(":")
        names = {"localhost", "127.0.0.1", "[::1]", str(self.server.server_address[0])}
        if port != str(self.server.server_address[1]) or not (host in names or self._is_address(host)):
            self._refuse(421, "this server has another name")
            return False
        query = parse_qs(urlsplit(self.path).query)
        token = query.get("token", [""])[-1] or self.headers.get("X-Token", "")
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self._refuse(403, "open the address that `vlp audit` prints: it has a token")
            return False
        return True

    def _is_address(self, host: str) -> bool:
        """Whether a server of all addresses was asked for by one of them: only a name may be another site's."""
        try:
            ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            return False
        return self.server.server_address[0] in ("0.0.0.0", "::")

    def _page(self, query: dict[str, str]) -> bytes:
        desk = self.server.desk
        kinds = sorted({finding["kind"] for row in desk.rows for finding in row["findings"]})
        kind = query.get("kind", "")
        rows = [row for row in desk.rows if not kind or any(f["kind"] == kind for f in row["findings"])]
        pages = max(1, -(-len(rows) // ROWS))
        text = query.get("page", "1")
        number = min(max(int(text), 1), pages) if text.isdecimal() and len(text) < 9 else 1
        nonce = secrets.token_urlsafe(16)
        self._policy = (
            f"default-src 'none'; img-src 'self'; connect-src 'self'; style-src 'nonce-{nonce}'; "
            f"script-src 'nonce-{nonce}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        return self.server.template.render(
            rows=rows[(number - 1) * ROWS : number * ROWS],
            decisions=dict(desk.decisions),
            counts={value: list(desk.decisions.values()).count(value) for value in ("accept", "remove")},
            total=len(rows),
            kinds=kinds,
            kind=kind,
            number=number,
            pages=pages,
            token=self.server.token,
            nonce=nonce,
        ).encode()

    def _refuse(self, status: int, problem: str) -> None:
        self._send(status, json.dumps({"problem": problem}).encode(), "application/json")

    def _send(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        headers = {**HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}
        if kind.startswith("text/html"):
            headers["Content-Security-Policy"] = self._policy
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def version_string(self) -> str:
        return "vlp"

    def log_message(self, *_: Any) -> None:
        """Log nothing: an address has the token."""


@contextmanager
def serving(workspace: Workspace, *, host: str, port: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Serve the page while the block runs; yield its address, and a function that waits for SIGINT or SIGTERM.

    Raises:
        ParamsError: the port is in use, or the host is not an address of this machine.
        DataError: the report or the decisions are damaged.
    """
    desk = Desk(workspace)
    try:
        server = _Server((host, port), desk)
    except OSError as error:
        raise ParamsError(
            f"vlp audit: {host} port {port}: {error.strerror}; choose others with --host and --port"
        ) from None
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()

    def wait() -> None:
        signal.signal(signal.SIGTERM, _terminate)
        threading.Event().wait()

    try:
        yield f"http://{host}:{server.server_address[1]}/?token={server.token}", wait
    finally:
        server.shutdown()
        server.server_close()


def _terminate(received: int, frame: Any) -> None:
    raise Terminated()
