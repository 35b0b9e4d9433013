"""A stand-in for the Hugging Face Hub on loopback: one repository, `owner/name`, that huggingface_hub writes and reads.

It answers what the library's client asks for: create, upload in one commit, list, download. The repository is a model
and a dataset at once.
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
from urllib.parse import unquote, urlparse

COMMIT = "a" * 40
REPOSITORY = "owner/name"


class HubServer(ThreadingHTTPServer):
    """A server of one repository.

    Attributes:
        files: the repository's.
        created: what the client asked for when it created the repository.
        revisions: branch or tag -> commit.
        damaged: content that is sent in place of a file's own.
        token: that downloads need; empty: none.
        downloaded: names of the files that were sent.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.created: list[dict[str, Any]] = []
        self.revisions = {"main": COMMIT}
        self.damaged: dict[str, bytes] = {}
        self.token = ""
        self.downloaded: list[str] = []
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
        server, files = self.server, self.server.files
        path = unquote(urlparse(self.path).path).replace("/api/datasets/", "/api/models/").removeprefix("/datasets")
        kind, _, revision = path.removeprefix(f"/api/models/{REPOSITORY}/").partition("/")
        if path.startswith(f"/{REPOSITORY}/resolve/"):
            commit, _, name = path.split("/resolve/")[1].partition("/")
            commit = server.revisions.get(commit, commit)
            if name not in files:
                self._refuse("EntryNotFound")
            elif server.token and self.headers.get("Authorization") != f"Bearer {server.token}":
                self._refuse("GatedRepo", 403)
            else:
                if self.command == "GET":
                    server.downloaded.append(name)
                content = server.damaged.get(name, files[name])
                self._send(content, ETag=f'"{_listed(name, files[name])["etag"]}"', X_Repo_Commit=commit)
        elif path == f"/api/models/{REPOSITORY}" or kind in ("tree", "revision"):
            revision = revision if kind in ("tree", "revision") else "main"
            commit = server.revisions.get(revision, revision)
            if commit not in server.revisions.values():
                self._refuse("RevisionNotFound")
            elif kind == "tree":
                self._send([_listed(name, content) for name, content in files.items()])
            else:
                siblings = [{"rfilename": name} for name in files]
                found = {"_id": "1", "id": REPOSITORY, "sha": commit, "private": False}
                self._send(found | {"siblings": siblings, "tags": [], "author": "owner", "downloads": 0})
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

    def _refuse(self, code: str, status: int = 404) -> None:
        self._send({"error": code}, status, X_Error_Code=code)

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


def _listed(name: str, content: bytes) -> dict[str, Any]:
    """Return the entry of a file in the list of files; data files are in Git LFS, so their tag is a sha256."""
    oid = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
    entry = {"type": "file", "path": name, "size": len(content), "oid": oid, "etag": oid}
    if not name.endswith((".parquet", ".tar")):
        return entry
    digest = hashlib.sha256(content).hexdigest()
    return entry | {"lfs": {"oid": digest, "size": len(content), "pointerSize": 130}, "etag": digest}


@contextmanager
def hub_server() -> Iterator[HubServer]:
    server = HubServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
