"""The server on the wire: what is no HTTP, what never ends, what comes too often, and who goes away."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from serve_helpers import answer_of, ask, exchange, listening, make_index, received, until

from hnclip.search.serve import guard, protocol
from hnclip.search.serve.failures import Refused
from hnclip.search.serve.pictures import tagged
from hnclip.search.serve.service import Service

TEXT = {"text": "a small red tent", "k": 2}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_index(tmp_path_factory.mktemp("sockets"), 4)


@pytest.fixture(scope="module")
def impatient(path: Path) -> Iterator[int]:
    """The port of a server that does not wait long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocol, "HEAD", 1.5)
        patch.setattr(protocol, "STALL", 2.0)
        patch.setattr(protocol, "LINGER", 0.3)
        patch.setattr(guard, "LINGER", 0.3)
        with listening(path, timeout=0.6, max_upload=1_000_000) as (found, _):
            yield found


@pytest.fixture
def port(impatient: int) -> Iterator[int]:
    yield impatient
    assert ask(impatient, "/healthz") == (200, {"ready": True})  # whatever the test did to it


class Stalled:
    """A worker that has begun and does not end before the test says so."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.asked: list[Any] = []

    def put_in(self, service: Service) -> None:
        line, real = service.searches, service._search

        def slow(searches: Any) -> Any:
            self.asked += searches
            self.begun.set()
            assert self.go.wait(60)
            return real(searches)

        line._answer = slow


def request(path: str, body: bytes = b"", head: str = "") -> bytes:
    method = "POST" if body or head else "GET"
    length = f"content-length: {len(body)}\r\n" if body else ""
    return f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{length}{head}\r\n".encode() + body


def closing(sent: bytes) -> bytes:
    """A request after whose answer the connection ends."""
    return sent.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")


SEARCH = request("/api/search", json.dumps(TEXT).encode(), "content-type: application/json\r\n")


@pytest.mark.parametrize(
    "sent",
    [
        b"garbage\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET / HTTP/1.1\r\n\r\n",  # no host
        b"GET / HTTP/1.1\r\nhost: localhost\r\nno colon\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"POST /api/search HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
        b"POST /api/search HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST /api/search HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\nnonsense\r\n",
    ],
)
def test_what_is_no_http_is_told_so_as_json(port: int, sent: bytes) -> None:
    status, said = answer_of(exchange(port, sent))
    assert (status, list(said)) == (400, ["error"])


def test_a_head_that_never_ends_is_given_up(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection, ThreadPoolExecutor(1) as pool:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n")
        answer = pool.submit(received, connection)
        with suppress(OSError):
            for _ in range(400):  # every byte is a sign of life, and does not help
                time.sleep(0.05)
                connection.sendall(b"x")
        assert answer_of(answer.result(20))[0] == 408
    assert exchange(port, b"") == b""  # nothing at all is closed without a word


def test_the_second_head_of_a_connection_is_given_up_too(port: int) -> None:
    raw = exchange(port, request("/healthz") + b"GET / HTTP/1.1\r\nho")
    assert raw.startswith(b"HTTP/1.1 200")
    assert b"HTTP/1.1 408" in raw


def test_a_body_that_never_comes_is_given_up(port: int) -> None:
    for head in ("content-length: 100\r\n", "transfer-encoding: chunked\r\n"):
        sent = request("/api/search", head=f"content-type: application/json\r\n{head}") + b"5\r\n{"
        status, said = answer_of(exchange(port, sent))
        assert (status, list(said)) == (408, ["error"])


def test_who_sends_too_much_is_told_while_sending(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "LINGER", 10.0)  # sending may take a while
    body = b"x" * 20_000_000
    for head, content in (
        (f"content-length: {len(body)}\r\n", body),
        ("transfer-encoding: chunked\r\n", b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"),
    ):
        sent = request("/api/search/image", head=f"content-type: image/png\r\n{head}") + content
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(sent)  # a client that reads only once it has sent all of it
            head_of_answer = connection.recv(65536)
        assert head_of_answer.startswith(b"HTTP/1.1 413")


def test_who_sends_on_after_a_refusal_is_cut_off(port: int) -> None:
    def send_on(connection: socket.socket) -> None:
        for _ in range(400):
            connection.sendall(b"x")
            time.sleep(0.05)

    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(request("/nothing", head="content-length: 10000\r\n"))
        with pytest.raises(OSError):
            send_on(connection)


def test_several_requests_of_one_connection_are_answered_in_order(path: Path) -> None:
    with listening(path) as (port, _):
        raw = exchange(port, request("/healthz") + SEARCH + closing(request("/nothing")))
    assert [int(part[:3]) for part in raw.split(b"HTTP/1.1 ")[1:]] == [200, 200, 404]


def test_who_does_not_take_the_answer_is_cut_off(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "STALL", 2.0)
    monkeypatch.setattr("hnclip.search.serve.app.ORIGINALS", 1)
    big, taken = b"x" * 20_000_000, threading.Event()

    def original(*given: Any) -> Any:
        taken.set()
        return tagged(big, "image/png")

    monkeypatch.setattr("hnclip.search.serve.app.original", original)
    with listening(path, timeout=60) as (port, _), socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(request("/api/pictures/1"))
        assert taken.wait(30)
        # The one place for pictures is free again when the first client was cut off.
        assert exchange(port, closing(request("/api/pictures/2"))).endswith(big)


def test_large_pictures_have_one_place(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hnclip.search.serve.app.LARGE", 10)
    begun, go = threading.Event(), threading.Event()

    def original(index: Any, number: int) -> Any:
        if number == 1:
            begun.set()
            assert go.wait(60)
        return tagged(b"a picture", "image/png")

    monkeypatch.setattr("hnclip.search.serve.app.original", original)
    with listening(path, timeout=0.5) as (port, _), ThreadPoolExecutor(1) as pool:
        first = pool.submit(exchange, port, closing(request("/api/pictures/1")))
        assert begun.wait(30)
        assert answer_of(exchange(port, closing(request("/api/pictures/2"))))[0] == 503
        go.set()
        assert first.result(30).endswith(b"a picture")
        assert exchange(port, closing(request("/api/pictures/2"))).endswith(b"a picture")


def test_decoding_that_does_not_end_keeps_its_place_and_nobody_waiting(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hnclip.search.serve.app.UPLOADS", 2)
    monkeypatch.setattr("hnclip.search.serve.decoding.DECODING", 1)
    monkeypatch.setattr("hnclip.search.serve.app.converted", lambda *given: tagged(b"converted", "image/jpeg"))
    monkeypatch.setattr("hnclip.search.serve.app.original", lambda *given: tagged(b"a rare one", ""))
    begun, go = threading.Event(), threading.Event()

    def stuck(content: bytes, most: int) -> Any:
        begun.set()
        assert go.wait(60)
        raise Refused(422)

    monkeypatch.setattr("hnclip.search.serve.app.decode_upload", stuck)
    upload = request("/api/search/image", b"1234567890", "content-type: image/png\r\nconnection: close\r\n")
    with listening(path, timeout=0.5) as (port, _):
        assert answer_of(exchange(port, upload))[0] == 504
        assert begun.is_set()
        # Its place is taken: there is none for another upload, nor for a picture that would have to be converted.
        assert answer_of(exchange(port, closing(request("/api/pictures/1"))))[0] == 503
        status, said = answer_of(exchange(port, upload))
        assert (status, "decoded" in said["error"]) == (503, True)
        go.set()
        until(lambda: answer_of(exchange(port, upload))[0] == 422)
        assert exchange(port, closing(request("/api/pictures/1"))).endswith(b"converted")


def test_too_many_connections_are_turned_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "CONNECTIONS", 3)
    monkeypatch.setattr(protocol, "LINGER", 1.0)

    def status(port: int) -> int:
        code, said = answer_of(exchange(port, closing(request("/healthz"))))
        assert code == 200 or list(said) == ["error"]
        return code

    with listening(path) as (port, _):
        held = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(3)]
        until(lambda: status(port) == 503)
        held.pop().close()
        until(lambda: status(port) == 200)
        for connection in held:
            connection.close()


def test_a_full_line_is_told_at_once_and_nothing_else_is_blocked(path: Path) -> None:
    stalled = Stalled()
    with (
        listening(path, prepare=stalled.put_in, waiting=2, timeout=60) as (port, service),
        ThreadPoolExecutor(8) as pool,
    ):
        first = pool.submit(ask, port, "/api/search", TEXT)
        assert stalled.begun.wait(30)
        waiting = [pool.submit(ask, port, "/api/search", TEXT) for _ in range(2)]
        until(lambda: len(service.searches._questions) == 2)
        start = time.monotonic()
        raw = exchange(port, closing(SEARCH))
        assert answer_of(raw)[0] == 503
        assert b"retry-after: 1" in raw.lower()
        assert ask(port, "/api/index")[0] == 200
        assert exchange(port, closing(request("/api/pictures/1/thumbnail")))
        assert ask(port, "/api/explain", {"text": "a tent", "id": 1})[0] == 200  # has a line of its own
        assert time.monotonic() - start < 15
        stalled.go.set()
        assert [future.result(20)[0] for future in (first, *waiting)] == [200] * 3


def test_who_waits_too_long_is_told_and_not_computed_for(path: Path) -> None:
    stalled = Stalled()
    with listening(path, prepare=stalled.put_in, timeout=1.0) as (port, service), ThreadPoolExecutor(8) as pool:
        first = pool.submit(ask, port, "/api/search", TEXT)
        assert stalled.begun.wait(30)
        late = [pool.submit(ask, port, "/api/search", {"text": "too late"}) for _ in range(2)]
        for status, said in (future.result(30) for future in (first, *late)):
            assert (status, list(said)) == (504, ["error"])
        until(lambda: all(future.cancelled() for _, future in list(service.searches._questions)))
        stalled.go.set()
        until(lambda: ask(port, "/api/search", {"text": "in time"})[0] == 200)
    assert {search.text for search in stalled.asked} == {TEXT["text"], "in time"}


def test_who_goes_away_is_not_computed_for(path: Path) -> None:
    stalled = Stalled()
    with listening(path, prepare=stalled.put_in, timeout=60) as (port, service), ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, port, "/api/search", TEXT)
        assert stalled.begun.wait(30)
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(SEARCH)
            until(lambda: service.searches._questions)
        until(lambda: all(future.cancelled() for _, future in list(service.searches._questions)))
        stalled.go.set()
        assert first.result(30)[0] == 200
    assert len(stalled.asked) == 1


def test_a_worker_that_fails_works_on(path: Path) -> None:
    def break_once(service: Service) -> None:
        line, real = service.searches, service._search

        def fail(searches: Any) -> Any:
            line._answer = real
            raise MemoryError

        line._answer = fail

    with listening(path, prepare=break_once) as (port, _):
        assert ask(port, "/api/search", TEXT) == (500, {"error": "the server failed; its log says how"})
        assert ask(port, "/api/search", TEXT)[0] == 200


def test_uploads_are_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hnclip.search.serve.app.UPLOADS", 1)
    with listening(path) as (port, _), socket.create_connection(("127.0.0.1", port)) as slow:
        head = "content-type: image/png\r\ncontent-length: 10\r\n"
        slow.sendall(request("/api/search/image", head=head) + b"12345")
        second = request("/api/search/image", b"1234567890", "content-type: image/png\r\nconnection: close\r\n")
        until(lambda: answer_of(exchange(port, second))[0] == 503)
        slow.sendall(b"67890")
        assert slow.recv(100).startswith(b"HTTP/1.1 422")


def test_what_has_begun_is_answered_before_the_server_stops(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hnclip.search.serve.run.GRACE", 60)
    stalled = Stalled()
    with ThreadPoolExecutor(2) as pool:
        with listening(path, prepare=stalled.put_in) as (port, _):
            first = pool.submit(ask, port, "/api/search", TEXT)
            assert stalled.begun.wait(30)
            threading.Timer(0.5, stalled.go.set).start()
        assert first.result(30)[0] == 200


def test_stopping_lets_nobody_wait(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept-open connections and those in the middle of a head do not keep the server alive."""
    monkeypatch.setattr("hnclip.search.serve.run.GRACE", 60)
    with listening(path) as (port, _):
        idle = socket.create_connection(("127.0.0.1", port))
        half = socket.create_connection(("127.0.0.1", port))
        half.sendall(b"GET / HTT")
        kept = socket.create_connection(("127.0.0.1", port))
        kept.sendall(request("/healthz"))
        assert kept.recv(1000)
        start = time.monotonic()
    assert time.monotonic() - start < 30
    for connection in (idle, half, kept):
        connection.close()
