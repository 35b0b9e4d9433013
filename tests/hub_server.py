"""A stand-in for the Hugging Face Hub on loopback: one repository, `owner/name`, that huggingface_hub writes and reads.

It answers what the library's client asks for: create, upload in one commit, list, download.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlparse

COMMIT = "a" * 40
REPOSITORY = "owner/name"


class HubServer(ThreadingHTTPServer):
    """files: the repository's. created: what the client asked for when it created the repository."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.created: list[dict[str, Any]] = []
        self.address = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def do_POST(self) -> None:
        body = self._body()
        if self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self._send({"url": f"{self.server.address}/{REPOSITORY}", "id": REPOSITORY})
        elif self.path == "/api/validate-yaml":
            self._send({"errors": [], "warnings": []})
        elif self.path.startswith(f"/api/models/{REPOSITORY}/preupload/"):
            names = [file["path"] for file in json.loads(body)["files"]]
            self._send({"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]})
        elif self.path.startswith(f"/api/models/{REPOSITORY}/commit/"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            commit = {"commitUrl": f"{self.server.address}/{REPOSITORY}/commit/{COMMIT}", "commitOid": COMMIT}
            self._send(commit | {"success": True})
        else:
            self._refuse("RepoNotFound")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, files = urlparse(self.path).path, self.server.files
        if path.startswith(f"/api/models/{REPOSITORY}/tree/"):
            self._send([{"type": "file", "path": n, "size": len(c), "oid": _oid(c)} for n, c in files.items()])
        elif path.startswith(f"/api/models/{REPOSITORY}/revision/"):
            siblings = [{"rfilename": name} for name in files]
            self._send(
                {"_id": "1", "id": REPOSITORY, "sha": COMMIT, "private": False, "siblings": siblings, "tags": []}
            )
        elif path.startswith(f"/{REPOSITORY}/resolve/"):
            name = path.split("/resolve/")[1].partition("/")[2]
            if name not in files:
                self._refuse("EntryNotFound")
            else:
                self._send(files[name], ETag=f'"{_oid(files[name])}"', X_Repo_Commit=COMMIT)
        else:
            self._refuse("RepoNotFound")

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _refuse(self, code: str) -> None:
        self._send({"error": code}, 404, X_Error_Code=code)

    def _send(self, answer: Any, status: int = 200, **headers: str) -> None:
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing."""


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def hub_server() -> Iterator[HubServer]:
    server = HubServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
