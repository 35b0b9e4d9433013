"""The web page of `vlp label`: what a browser may ask, and how strangers are kept out.

Labels become training data, so the page is not for everyone who can reach the port:

- Every request needs the token of the address that the command prints, or the cookie that this address sets. So other
  users of the machine, and other sites in the same browser, have no access.
- The `Host` must be the server's own: a name of another site that resolves to this machine (DNS rebinding) is refused.
- A request that changes something must be JSON, and its `Origin`, if the browser sends one, the page's own.
- Requests are at most `MAX_REQUEST` long. Photos are looked up by name among those that were found at the start, and
  are sent as JPEG made from their pixels.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse
from pydantic import BaseModel, ConfigDict, StringConstraints

from vlp_models.common.pages import page_environment
from vlp_models.contrib.label.desk import Desk, as_json
from vlp_models.contrib.label.listing import Label, LabelError
from vlp_models.errors import ParamsError, VLPError

MAX_REQUEST = 64 * 1024  # bytes
MAX_CAPTION, MAX_NAME = 2000, 80  # characters

ALL_ADDRESSES = ("0.0.0.0", "::")
CLOSED = "Open the address that `vlp label` prints: it contains the token of this page."


class Message(BaseModel):
    """A request; unknown keys and other types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


Browser = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9-]{8,64}$")]  # a random name that each tab has
Text = Annotated[str, StringConstraints(max_length=MAX_CAPTION)]
Name = Annotated[str, StringConstraints(max_length=MAX_NAME)]
PhotoName = Annotated[str, StringConstraints(max_length=4096)]


class NextRequest(Message):
    browser: Browser


class AnswerRequest(Message):
    browser: Browser
    image: PhotoName
    caption: Text
    by: Name
    draft: Text = ""
    origin: Text = ""


class SkipRequest(Message):
    browser: Browser
    image: PhotoName


class UndoRequest(Message):
    browser: Browser
    image: PhotoName
    caption: Text
    by: Name
    at: Name
    draft: Text = ""


def make_app(desk: Desk, *, token: str, hosts: set[str], user: str, title: str, cookie: str) -> FastAPI:
    """Return the application.

    Args:
        hosts: values of the header `Host` that are the server's own, such as `127.0.0.1:7861`.
        user: the name that is proposed for those who label.
    """
    app = FastAPI(title="vlp label", openapi_url=None, docs_url=None, redoc_url=None)
    template = page_environment("vlp_models.contrib.label").get_template("page.html.j2")

    @app.middleware("http")
    async def guard(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        response = _refuse(request, token, hosts, cookie) or await call(request)
        response.headers.update(
            {
                "X-Content-Type-Options": "nosniff",
                "Referrer-Policy": "no-referrer",
                "Cross-Origin-Resource-Policy": "same-origin",
                "X-Frame-Options": "DENY",
                "Cache-Control": "no-store",
            }
        )
        return response

    @app.exception_handler(LabelError)
    async def refused(_: Request, error: LabelError) -> Response:
        return JSONResponse({"problem": str(error)}, 422)

    @app.exception_handler(VLPError)
    async def failed(_: Request, error: VLPError) -> Response:
        return JSONResponse({"problem": str(error)}, 500)

    @app.exception_handler(OSError)
    async def not_written(_: Request, error: OSError) -> Response:
        return JSONResponse({"problem": f"Not saved: {error.strerror or error}."}, 500)

    @app.exception_handler(Exception)
    async def crashed(_: Request, error: Exception) -> Response:
        # Starlette raises it again after this response, so that the terminal has its traceback.
        return JSONResponse(
            {"problem": f"The server failed ({type(error).__name__}); its terminal has the reason."}, 500
        )

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return JSONResponse({"problem": f"{'.'.join(map(str, first['loc'][1:]))}: {first['msg']}."}, 422)

    @app.get("/")
    def page(request: Request) -> Response:
        if "token" in request.query_params:  # `guard` has compared it
            response: Response = RedirectResponse("/", 303)
            response.set_cookie(cookie, token, httponly=True, samesite="strict", max_age=30 * 24 * 3600)
            return response
        nonce = secrets.token_urlsafe(16)
        # What a tab keeps belongs to this project, also if another one is served at this address later.
        project = hashlib.sha256(f"{token} {title}".encode()).hexdigest()[:16]
        limits = {"max_caption": MAX_CAPTION, "max_name": MAX_NAME}
        html = template.render(title=title, user=user, nonce=nonce, project=project, **limits)
        policy = (
            f"default-src 'none'; img-src 'self' data:; connect-src 'self'; style-src 'nonce-{nonce}'; "
            f"script-src 'nonce-{nonce}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        return HTMLResponse(html, headers={"Content-Security-Policy": policy})

    @app.get("/photo")
    def photo(image: PhotoName) -> Response:
        return Response(desk.photo(image), media_type="image/jpeg")

    @app.get("/draft")
    def draft(image: PhotoName) -> Any:
        return {"shown": as_json(desk.show(desk.require(image))), "progress": desk.progress()}

    @app.get("/progress")
    def progress() -> Any:
        return {"progress": desk.progress()}

    @app.post("/next")
    def next_photo(body: NextRequest) -> Any:
        return {"shown": as_json(desk.next(body.browser)), "progress": desk.progress()}

    @app.post("/answer")
    def answer(body: AnswerRequest) -> Any:
        label = desk.answer(
            image=body.image, caption=body.caption, by=body.by or user, draft=body.draft, origin=body.origin
        )
        return {"label": vars(label), "shown": as_json(desk.next(body.browser)), "progress": desk.progress()}

    @app.post("/skip")
    def skip(body: SkipRequest) -> Any:
        desk.skip(body.image)
        return {"shown": as_json(desk.next(body.browser)), "progress": desk.progress()}

    @app.post("/undo")
    def undo(body: UndoRequest) -> Any:
        label = Label(image=body.image, caption=body.caption, by=body.by, at=body.at, draft=body.draft)
        return {"shown": as_json(desk.undo(body.browser, label)), "progress": desk.progress()}

    return app


def _refuse(request: Request, token: str, hosts: set[str], cookie: str) -> Response | None:
    """Return the response to a request that is refused before it is read, else None."""
    host = request.headers.get("host", "").lower()
    if host not in hosts:
        return JSONResponse({"problem": "This server has another name."}, 421)
    sent = request.query_params.get("token", "") if request.url.path == "/" else ""
    if not secrets.compare_digest((sent or request.cookies.get(cookie, "")).encode(), token.encode()):
        return JSONResponse({"problem": CLOSED}, 403)
    if request.method not in ("GET", "HEAD"):
        origin = request.headers.get("origin", "")
        if origin and origin.lower() != f"http://{host}":
            return JSONResponse({"problem": "This request comes from another site."}, 403)
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return JSONResponse({"problem": "Requests are JSON."}, 415)
        length = request.headers.get("content-length", "")
        # Without a length, the body could be of any.
        if not length.isdecimal() or int(length) > MAX_REQUEST:
            return JSONResponse({"problem": f"Requests have at most {MAX_REQUEST:,} bytes."}, 413)
    return None


def read_token(file: Path) -> str:
    """Return the project's token, which is made once: a page that is open survives a restart of the server."""
    try:
        token = file.read_text(encoding="utf-8").strip()
        if len(token) >= 32:
            return token
    except (OSError, UnicodeDecodeError):
        pass
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    # Only the user may read it.
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(token := secrets.token_urlsafe(32))
    return token


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        ParamsError: the port is in use, or the host is not an address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        raise ParamsError(
            f"vlp label: {host} port {port}: {error.strerror}; choose others with --host and --port"
        ) from None
    return listener


def own_hosts(host: str, port: int) -> set[str]:
    """Return the values of `Host` that are this server's: the address it listens on, and the names of loopback."""
    names = {host.lower(), "localhost", "127.0.0.1", "[::1]"}
    if host in ALL_ADDRESSES:
        names |= {socket.gethostname().lower(), socket.getfqdn().lower(), *_addresses()}
    if ":" in host:
        names.add(f"[{host.lower()}]")
    return {f"{name}:{port}" for name in names} | (names if port == 80 else set())


def _addresses() -> set[str]:
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    addresses = [a for entries in psutil.net_if_addrs().values() for a in entries if a.family in families]
    return {a.address if a.family == socket.AF_INET else f"[{a.address.partition('%')[0]}]" for a in addresses}


def serve(app: FastAPI, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM."""
    import uvicorn

    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", server_header=False, timeout_graceful_shutdown=3
    )
    uvicorn.Server(config).run(sockets=[listener])
