"""What every request passes first and every answer last: host, token, size and time of the body, headers, failures."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import secrets
from collections.abc import Collection
from hashlib import sha256
from time import monotonic

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hnclip.search.options import ServeOptions
from hnclip.search.serve.failures import Refused, failure

UPLOAD = "/api/search/image"
SESSION = "/api/session"
OPEN = {"/", "/healthz", "/openapi.json", SESSION}  # what needs no token, beside the files of the page
JSON = "application/json"
TYPES = {  # of bodies
    UPLOAD: "image/",
    SESSION: JSON,
    "/api/search": JSON,
    "/api/explain": JSON,
    "/api/separate": JSON,
}
PIECE = 65536  # bytes of an answer that are sent at once: a slow client shall not have all of it waiting
LINGER = 2.0  # seconds in which a refused body is still read, so that its sender sees the answer
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src 'self' blob: data:; style-src 'self'; script-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}

log = logging.getLogger("hnclip.serve")


class Door:
    """Who may come in: whoever knows the token, or has a cookie for having known it."""

    def __init__(self, token: str | None) -> None:
        self._token = None if token is None else token.encode("utf-8", "surrogateescape")
        # Of this process alone, so a cookie says nothing about the token and ends with the server.
        self._session = hmac.new(secrets.token_bytes(32), self._token or b"", sha256).hexdigest()

    @property
    def locked(self) -> bool:
        return self._token is not None

    def knows(self, token: bytes) -> bool:
        return self._token is None or hmac.compare_digest(self._token, token)

    def admits(self, scope: Scope) -> bool:
        if self._token is None:
            return True
        headers = Headers(scope=scope)
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return self.knows(given.strip().encode("latin-1"))
        own = f"{_cookie(scope)}={self._session}".encode()
        # By hand: the standard library reads nothing behind a cookie of another site on this machine that it dislikes.
        given_cookies = ";".join(headers.getlist("cookie")).split(";")
        return any(hmac.compare_digest(one.strip().encode("utf-8", "replace"), own) for one in given_cookies)

    def cookie(self, scope: Scope) -> str:
        """The header that makes a browser remember; scripts cannot read it, other sites cannot use it."""
        return f"{_cookie(scope)}={self._session}; Path=/; HttpOnly; SameSite=Strict"


class Body:
    """The body of a request as it arrives: not more than so many bytes, not later than in so many seconds."""

    def __init__(self, scope: Scope, receive: Receive, limit: int, seconds: float) -> None:
        self._receive, self._limit, self._until = receive, limit, monotonic() + seconds
        self._size = 0
        headers = Headers(scope=scope)
        self.done = "content-length" not in headers and "transfer-encoding" not in headers

    async def receive(self) -> Message:
        if self.done:
            return await self._receive()  # waits until the client is gone
        try:
            message = await asyncio.wait_for(self._receive(), self._until - monotonic())
        except asyncio.TimeoutError:
            raise Refused(408) from None
        self.done = not message.get("more_body", False)  # also of a client that is gone
        self._size += len(message.get("body", b""))
        if self._size > self._limit:
            raise _too_large(self._limit)
        return message

    async def drain(self) -> None:
        """Read what nobody wants: who is still sending would not see the answer if the connection was cut."""

        async def read() -> None:
            while not self.done:
                self.done = not (await self._receive()).get("more_body", False)

        try:
            await asyncio.wait_for(read(), LINGER)
        except asyncio.TimeoutError:
            return


class Guard:
    """The outermost part of the application."""

    def __init__(
        self, app: ASGIApp, options: ServeOptions, door: Door, hosts: Collection[str] | None, page: Collection[str]
    ) -> None:
        """
        Args:
            hosts: names that the server answers to beside addresses; any when left out. A page of another site may have
                its own name lead to this machine, and browsers would let it read what it gets from there.
            page: paths of the page's files.
        """
        self._app, self._door, self._hosts, self._open = app, door, hosts, {*OPEN, *page}
        self._seconds = options.timeout
        # A character takes at most 12 bytes in JSON.
        self._limits = {UPLOAD: options.max_upload}
        self._limit = 12 * options.max_text + 10_000

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        limit = self._limits.get(scope["path"], self._limit)
        body = Body(scope, receive, limit, self._seconds)
        answer = _Answer(scope, body, send)
        try:
            self._check(scope, limit)
            # A browser that asks for the head alone gets what it would get before the body.
            inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await self._app(inner, body.receive, answer)
        except ClientDisconnect:
            return
        except Refused as refused:
            await self._fail(answer, scope, receive, failure(refused.status_code, refused.detail, refused.headers))
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            await self._fail(answer, scope, receive, failure(500))

    def _check(self, scope: Scope, limit: int) -> None:
        headers = Headers(scope=scope)
        if self._hosts is not None and not _own(host_name(headers.get("host", "")), self._hosts):
            raise Refused(421)
        if scope["path"] not in self._open and not self._door.admits(scope):
            raise Refused(401, headers={"WWW-Authenticate": 'Bearer realm="hnclip"'})
        if scope["method"] == "POST" and not _fits(headers.get("content-type", ""), TYPES.get(scope["path"], "")):
            raise Refused(415, f"the body must be {'a picture, image/…' if scope['path'] == UPLOAD else JSON}")
        length = headers.get("content-length", "0")
        if scope["method"] == "POST" and (not length.isdecimal() or int(length[:20]) > limit):
            raise _too_large(limit)  # other methods' bodies nobody reads

    async def _fail(self, answer: _Answer, scope: Scope, receive: Receive, response: ASGIApp) -> None:
        if answer.started:
            raise RuntimeError("an answer broke off after it had begun")
        await response(scope, receive, answer)


class _Answer:
    """Sends an answer with the headers that all have."""

    def __init__(self, scope: Scope, body: Body, send: Send) -> None:
        self._head, self._body, self._send = scope["method"] == "HEAD", body, send
        self.started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            headers = MutableHeaders(scope=message)
            for name, value in {**HEADERS, "Cache-Control": "no-store"}.items():
                headers.setdefault(name, value)
        elif message["type"] == "http.response.body":
            whole = memoryview(b"" if self._head else message.get("body", b""))
            last = max(0, len(whole) - 1) // PIECE * PIECE
            for start in range(0, last, PIECE):
                await self._part(bytes(whole[start : start + PIECE]))
            content = bytes(whole[last:])
            if not message.get("more_body", False) and not self._body.done:
                await self._part(content)
                await self._body.drain()
                content = b""
            message = {**message, "body": content}
        await self._send(message)

    async def _part(self, content: bytes) -> None:
        await self._send({"type": "http.response.body", "body": content, "more_body": True})


def host_name(host: str) -> str:
    """The name in a Host header, without the port: a tunnel or a container may lead another one here."""
    if host.startswith("["):
        return host[: host.find("]") + 1]
    return host.rpartition(":")[0].lower() if ":" in host else host.lower()


def _own(name: str, hosts: Collection[str]) -> bool:
    """Whether a name is one of these, or an address, which nobody else can have lead here."""
    if name in hosts:
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _fits(content_type: str, wanted: str) -> bool:
    """Whether a body has the type that is wanted, or begins as it where it ends with a slash."""
    given = content_type.partition(";")[0].strip().lower()
    return given == wanted or (wanted.endswith("/") and given.startswith(wanted)) or not wanted


def _cookie(scope: Scope) -> str:
    """Browsers do not tell the ports of a machine apart, and there may be a server on another one."""
    return f"hnclip-{(scope.get('server') or ('', 0))[1]}"


def _too_large(limit: int) -> Refused:
    return Refused(413, f"the body is larger than this server takes: {limit:,} bytes at most")
