"""HTTP as uvicorn speaks it, with an end to waiting: clients that never finish a request or never take an answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from hnclip.search.serve.guard import HEADERS, LINGER

CONNECTIONS = 256
HEAD = 10.0  # seconds in which the head of a request has to arrive
STALL = 20.0  # seconds in which some of an answer has to be taken


class Protocol(H11Protocol):
    """One connection. uvicorn alone waits for the rest of a head, and for a reader, as long as the client likes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._late: asyncio.TimerHandle | None = None  # runs while a head is awaited
        self._stalled: asyncio.TimerHandle | None = None  # runs while an answer is not taken
        self._turned_away = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS:
            self._turned_away = True
            self.connections.discard(self)
            self._say(503, "too many connections: try again soon", "retry-after: 1\r\n")
            self.loop.call_later(LINGER, transport.abort)
        else:
            self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._late, self._stalled):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        if not self._turned_away:
            super().data_received(data)
            self._expect()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:  # refused, and the client sends on
            self._close()
        self._expect()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._say(400, "this is no HTTP request")
            self._close()
        else:
            self.transport.abort()  # in the middle of an answer there is nothing else to say

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(STALL, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.loop.call_later(STALL, self.transport.abort)  # closing waits for a client that takes nothing

    def _expect(self) -> None:
        """Run the clock while there is no whole head, and only then; more bytes of it do not set it back."""
        if self.conn.their_state is not h11.IDLE:
            if self._late is not None:
                self._late.cancel()
            self._late = None
        elif self._late is None:
            self._late = self.loop.call_later(HEAD, self._too_late)

    def _too_late(self) -> None:
        if self.conn.trailing_data[0]:  # else it has only been kept open
            self._say(408, "the head of the request took too long to arrive")
        self._close()

    def _close(self) -> None:
        self.transport.close()
        self.loop.call_later(STALL, self.transport.abort)

    def _say(self, status: int, sentence: str, header: str = "") -> None:
        """An answer without a request."""
        body = json.dumps({"error": sentence})
        common = "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items())
        self.transport.write(
            f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"connection: close\r\n{header}{common}\r\n{body}".encode("latin-1")
        )
