"""Who may use the server, under which host names, what limits bodies have, and the headers of all responses."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import secrets
from collections.abc import Collection

from fastapi import HTTPException, Request, Response
from fastapi.security import HTTPBearer
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hnclip.search.serve.run import Settings

UPLOAD = "/api/search/image"
MAX_ESCAPE = 12  # bytes of a character in JSON
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src 'self' blob: data:; style-src 'self'; script-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "private, no-cache",  # browsers ask each time whether what they have is still the same
}


class HostCheck:
    """Accepts requests that address the server by an IP address or one of its names. Without this check, a page of
    another site could let its own name point to this machine, and browsers would let it read the responses.

    starlette's TrustedHostMiddleware would need a list of all addresses, those of tunnels and containers too.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    async def __call__(self, request: Request) -> None:
        host = request.headers.get("host", "")
        name = host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0].lower()
        if name not in self._names and not _is_address(name.strip("[]")):
            raise HTTPException(421, "this server answers to IP addresses and its own names only, not to this host")


class Auth(HTTPBearer):
    """Accepts requests with the token, or with the cookie that a browser gets for it: an <img> cannot send a header."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token.encode("utf-8", "surrogateescape")
        self._session = secrets.token_urlsafe(32)  # reveals nothing about the token and ends with this process

    async def __call__(self, request: Request) -> None:  # type: ignore[override]
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            self._compare(self._token, token.strip().encode("latin-1"))
        else:
            self._compare(self._session.encode(), request.cookies.get(_cookie(request), "").encode("utf-8", "replace"))

    def start_session(self, request: Request, response: Response, token: str) -> None:
        """Set the cookie, in exchange for the token."""
        self._compare(self._token, token.encode("utf-8", "replace"))
        response.set_cookie(_cookie(request), self._session, httponly=True, samesite="strict")

    def _compare(self, expected: bytes, given: bytes) -> None:
        if not hmac.compare_digest(expected, given):
            message = "a token is needed: Authorization: Bearer TOKEN, or the cookie of POST /api/session"
            raise HTTPException(401, message, {"WWW-Authenticate": 'Bearer realm="hnclip"'})


class BodyLimit:
    """Refuses bodies that are too large, before they are in memory, or take too long. Those of uploads may be larger
    than others, which starlette's RequestBodyLimitMiddleware cannot express."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        loop, timeout, end, size = asyncio.get_running_loop(), self._settings.timeout, 0.0, 0
        limit = self._settings.max_upload if scope["path"] == UPLOAD else MAX_ESCAPE * self._settings.max_text + 10_000

        async def limited_receive() -> Message:
            nonlocal end, size
            end = end or loop.time() + timeout
            try:
                message = await asyncio.wait_for(receive(), end - loop.time())
            except asyncio.TimeoutError:
                raise HTTPException(408, f"the body took longer than {timeout:g} seconds") from None
            size += len(message.get("body", b""))
            if size > limit:
                raise HTTPException(413, f"the body is too large: at most {limit:,} bytes are accepted")
            return message

        await self._app(scope, limited_receive, send)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _cookie(request: Request) -> str:
    """The name of the cookie: browsers send cookies to all ports of a machine, and another may have a server too."""
    return f"hnclip-{(request.scope.get('server') or ('', 0))[1]}"
