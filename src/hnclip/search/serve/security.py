"""Who may use the server, under which host names, and the headers and errors that all responses share."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import secrets
from collections.abc import Collection, Mapping

from fastapi import HTTPException, Response
from fastapi.responses import JSONResponse
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hnclip.search.serve.run import Settings

UPLOAD = "/api/search/image"
PUBLIC = {"/", "/healthz", "/openapi.json", "/api/session"}  # need no token, like the files of the page
MAX_ESCAPE = 12  # bytes of a character in JSON
LONGEST = 500  # characters of an error: some contain names that the client sent
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src 'self' blob: data:; style-src 'self'; script-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}

log = logging.getLogger(__name__)


def unauthorized(message: str) -> HTTPException:
    return HTTPException(401, message, {"WWW-Authenticate": 'Bearer realm="hnclip"'})


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    text = message if len(message) <= LONGEST else f"{message[: LONGEST - 1]}…"
    encodable = text.encode("utf-8", "backslashreplace").decode()  # JSON may contain half a surrogate pair
    return JSONResponse({"error": encodable}, status, headers)


class Auth:
    """Checks the token of a request, or the cookie that a browser got for it: its images cannot send a header."""

    def __init__(self, token: str | None) -> None:
        self.token = None if token is None else token.encode("utf-8", "surrogateescape")
        self._session = secrets.token_urlsafe(32)  # reveals nothing about the token and ends with this process

    def accepts(self, token: bytes) -> bool:
        return self.token is None or hmac.compare_digest(self.token, token)

    def allows(self, request: HTTPConnection) -> bool:
        if self.token is None:
            return True
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self.accepts(token.strip().encode("latin-1"))
        session = request.cookies.get(_cookie(request), "")
        return hmac.compare_digest(session.encode("utf-8", "replace"), self._session.encode())

    def set_cookie(self, request: HTTPConnection, response: Response) -> None:
        response.set_cookie(_cookie(request), self._session, httponly=True, samesite="strict")


class SecurityMiddleware:
    """Checks host, token and size of every request, and sets the headers of every response."""

    def __init__(self, app: ASGIApp, auth: Auth, hosts: Collection[str] | None, settings: Settings) -> None:
        """
        Args:
            hosts: names that the server answers to besides IP addresses; None for any. Without this check, a page of
                another site could let its own name point to this machine, and browsers would let it read the responses.
        """
        self._app, self._auth, self._hosts, self._settings = app, auth, hosts, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, started, size = HTTPConnection(scope), False, 0
        limit = self._settings.max_upload if scope["path"] == UPLOAD else MAX_ESCAPE * self._settings.max_text + 10_000
        declared = int(request.headers.get("content-length", 0))

        async def limited_receive() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if message["type"] == "http.request" and max(size, declared) > limit:
                raise HTTPException(413, f"the body is too large: at most {limit:,} bytes are accepted")
            return message

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started, headers = True, MutableHeaders(scope=message)
                # What has a tag may be kept, if the browser asks each time whether it is still the same.
                caching = "private, no-cache" if "etag" in headers else "no-store"
                for name, value in {**HEADERS, "Cache-Control": caching}.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            self._check(request)
            await self._app(scope, limited_receive, send_with_headers)
        except ClientDisconnect:
            return
        except HTTPException as error:
            await error_response(error.status_code, error.detail, error.headers)(scope, receive, send_with_headers)
        except Exception:
            log.exception("%s %r failed", scope["method"], scope["path"])
            if started:
                raise
            await error_response(500, "the server failed: its log says why")(scope, receive, send_with_headers)

    def _check(self, request: HTTPConnection) -> None:
        if self._hosts is not None and not _is_own(request.headers.get("host", ""), self._hosts):
            raise HTTPException(421, "this server answers to IP addresses and its own names only, not to this host")
        path = request.scope["path"]
        if path not in PUBLIC and not path.startswith("/page/") and not self._auth.allows(request):
            raise unauthorized("a token is needed: Authorization: Bearer TOKEN, or the cookie of POST /api/session")


def _is_own(host: str, names: Collection[str]) -> bool:
    """Whether a Host header contains one of these names or an IP address; the port does not matter, because a tunnel or
    a container may map it."""
    name = host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0].lower()
    if name in names:
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _cookie(request: HTTPConnection) -> str:
    """The name of the cookie: browsers send cookies to all ports of a machine, and another may have a server too."""
    return f"hnclip-{(request.scope.get('server') or ('', 0))[1]}"
