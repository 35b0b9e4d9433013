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
import re
import secrets
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse
from pydantic import BaseModel, ConfigDict, StringConstraints

from vlp_models.common.io import atomic_write
from vlp_models.common.pages import page_environment
from vlp_models.contrib.label.desk import Desk, Shown
from vlp_models.contrib.label.listing import Label
from vlp_models.errors import ParamsError, VLPError, explain_system_error

MAX_REQUEST = 64 * 1024  # bytes
MAX_CAPTION, MAX_NAME = 2000, 80  # characters
ALL_ADDRESSES = ("0.0.0.0", "::")
CLOSED = "Open the address that `vlp label` prints: it contains the token of this page."
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}

Browser = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9-]{8,64}$")]  # a random name that each tab has
Text = Annotated[str, StringConstraints(max_length=MAX_CAPTION)]
Name = Annotated[str, StringConstraints(max_length=MAX_NAME)]
PhotoName = Annotated[str, StringConstraints(max_length=4096)]


class Message(BaseModel):
    """A request of a tab; unknown keys and other types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    browser: Browser


class PhotoMessage(Message):
    image: PhotoName


class Answer(PhotoMessage):
    caption: Text
    by: Name
    draft: Text = ""
    origin: Text = ""


class Undo(PhotoMessage):
    caption: Text
    by: Name
    at: Name
    draft: Text = ""


def make_app(desk: Desk, *, token: str, host: str, user: str, title: str, cookie: str) -> FastAPI:
    """Return the application.

    Args:
        host: the address that the server listens on.
        user: the name that is proposed for those who label.
    """
    app = FastAPI(title="vlp label", openapi_url=None, docs_url=None, redoc_url=None)
    template = page_environment("vlp_models.contrib.label").get_template("page.html.j2")

    hosts = host_pattern(host)

    @app.middleware("http")
    async def guard(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        status, problem = _refuse(request, token, hosts, cookie)
        response = JSONResponse({"problem": problem}, status) if problem else await call(request)
        response.headers.update(HEADERS)
        return response

    @app.exception_handler(VLPError)
    async def refused(_: Request, error: VLPError) -> Response:
        return JSONResponse({"problem": str(error)}, 422)

    # Starlette raises what is not an OSError again after this response, so that the terminal has its traceback.
    @app.exception_handler(OSError)
    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        return JSONResponse({"problem": f"The server failed: {explain_system_error(error)}."}, 500)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return JSONResponse({"problem": f"{'.'.join(map(str, first['loc'][1:]))}: {first['msg']}."}, 422)

    def respond(shown: Shown | None, **more: Any) -> Any:
        return {"shown": shown, "progress": desk.progress(), **more}

    @app.get("/")
    def page(request: Request) -> Response:
        if "token" in request.query_params:  # `guard` has compared it
            response = RedirectResponse("/", 303)
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
        desk.require(image)
        return Response(desk.photos.jpeg(image), media_type="image/jpeg")

    @app.get("/progress")
    def progress(image: PhotoName = "") -> Any:
        return respond(desk.show(image) if image else None)

    @app.post("/next")
    def next_photo(body: Message) -> Any:
        return respond(desk.next(body.browser))

    @app.post("/answer")
    def answer(body: Answer) -> Any:
        values = body.model_dump(exclude={"browser"})
        label = desk.answer(**values | {"by": body.by or user})
        return respond(desk.next(body.browser), label=label)

    @app.post("/skip")
    def skip(body: PhotoMessage) -> Any:
        desk.skip(body.image)
        return respond(desk.next(body.browser))

    @app.post("/undo")
    def undo(body: Undo) -> Any:
        return respond(desk.undo(body.browser, Label(**body.model_dump(exclude={"browser"}))))

    return app


def _refuse(request: Request, token: str, hosts: re.Pattern[str], cookie: str) -> tuple[int, str]:
    """Return status and reason of a request that is refused before it is read; an empty reason for others."""
    headers, host = request.headers, request.headers.get("host", "")
    if not hosts.fullmatch(host):
        return 421, "This server has another name."
    sent = request.query_params.get("token", "") if request.url.path == "/" else ""
    if not secrets.compare_digest((sent or request.cookies.get(cookie, "")).encode(), token.encode()):
        return 403, CLOSED
    if request.method in ("GET", "HEAD"):
        return 200, ""
    origin = headers.get("origin", "")
    if origin and origin.lower() != f"http://{host.lower()}":
        return 403, "This request comes from another site."
    if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        return 415, "Requests are JSON."
    length = headers.get("content-length", "")
    # Without a length, the body could be of any.
    if not length.isdecimal() or int(length) > MAX_REQUEST:
        return 413, f"Requests have at most {MAX_REQUEST:,} bytes."
    return 200, ""


def host_pattern(host: str) -> re.Pattern[str]:
    """Return what browsers may send as `Host` to a server that listens on this address.

    Only a name can be another site's: an address that a browser has connected to is this machine's.
    """
    machine = (socket.gethostname(), socket.getfqdn()) if host in ALL_ADDRESSES else ()
    names = "|".join(map(re.escape, ("localhost", host, *machine)))
    return re.compile(rf"({names}|[\d.]+|\[[\da-f:.]+\])(:\d+)?", re.IGNORECASE)


def read_token(file: Path) -> str:
    """Return the project's token, which is made once: a page that is open survives a restart of the server."""
    token = file.read_text(encoding="utf-8").strip() if file.exists() else ""
    if len(token) < 32:  # missing or damaged
        token = secrets.token_urlsafe(32)
        with atomic_write(file) as temporary:
            temporary.chmod(0o600)  # only the user may read it
            temporary.write_text(token, encoding="utf-8")
    return token


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        ParamsError: the port is in use, or the host is not an address of this machine.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]  # the address is in parentheses
        raise ParamsError(f"vlp label: {host} port {port}: {reason}; choose others with --host and --port") from None
