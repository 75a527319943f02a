"""What the tests of the server share: a small index, the application on it, and a server that really listens."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from small_index import bundled, small_index
from starlette.testclient import TestClient

from hnclip.core import Record
from hnclip.data.scenes import scene_records
from hnclip.models.dual_encoder import DualEncoder
from hnclip.search.index.reader import Index
from hnclip.search.options import ServeOptions
from hnclip.search.serve.app import make_app
from hnclip.search.serve.keeper import Keeper
from hnclip.search.serve.run import LOCAL, listen, make_server
from hnclip.search.serve.service import Service


def model() -> DualEncoder:
    return bundled()


@cache
def records() -> tuple[Record, ...]:
    return tuple(scene_records("park", "validation", families=4))


def make_index(directory: Path, count: int | None = None) -> Path:
    """An index of pictures that are files in directory/pictures."""
    path = directory / "park.hnc"
    small_index(path, model(), records()[:count], files=directory / "pictures")
    return path


@dataclass(frozen=True)
class Served:
    """An application in this process, and what it is made of."""

    app: FastAPI
    service: Service

    def client(self, **more: Any) -> TestClient:
        return TestClient(self.app, base_url="http://localhost:8765", raise_server_exceptions=False, **more)


@contextmanager
def served(path: Path, *, token: str | None = None, loaded: bool = True, **options: Any) -> Iterator[Served]:
    """The application on an index; unless it is `loaded` its model never is."""
    chosen = ServeOptions(index=path, **options)
    keeper = Keeper(chosen, Index(path))
    service = Service(keeper, chosen)
    try:
        if loaded:
            give_model(keeper)
        yield Served(make_app(service, chosen, token=token, hosts=LOCAL), service)
    finally:
        assert service.close(seconds=30)


class Live:
    """`hnclip serve` on a thread of this process; it can be stopped, and started again at the same address."""

    def __init__(self, index: Path, *, token: str | None = None, **options: Any) -> None:
        self.options = ServeOptions(index=index, **options)
        self.token, self.port = token, 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def start(self, *, load: bool = True, prepare: Callable[[Service], object] = lambda service: None) -> None:
        """Listen; the model is there as well unless that is to come later."""
        self.listener = listen("127.0.0.1", self.port)
        self.port = self.listener.getsockname()[1]
        self.service, self.server = make_server(self.options, Index(self.options.index), self.listener, self.token)
        prepare(self.service)
        if load:
            self.load()
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]})
        self.thread.start()
        until(lambda: self.server.started)

    def load(self) -> None:
        give_model(self.service.keeper)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(90)
        self.listener.close()
        assert self.service.close(seconds=30)
        assert not self.thread.is_alive()


@contextmanager
def live(index: Path, *, prepare: Callable[[Service], object] = lambda service: None, **options: Any) -> Iterator[Live]:
    server = Live(index, **options)
    server.start(prepare=prepare)
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def listening(path: Path, **options: Any) -> Iterator[tuple[int, Service]]:
    """A server on a port of this machine."""
    with live(path, **options) as server:
        yield server.port, server.service


def give_model(keeper: Keeper) -> None:
    """Make a keeper's index searchable, with the model that is loaded once for all tests."""
    keeper._model = (keeper._view.index.about.fingerprint, model())
    keeper.load()


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait for it, but not for ever."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:.0f} seconds"
        time.sleep(0.01)


def ask(port: int, path: str, asked: Any = None) -> tuple[int, Any]:
    """Status and JSON of an answer, over a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        if asked is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, json.dumps(asked), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def exchange(port: int, sent: bytes, seconds: float = 60.0) -> bytes:
    """What comes back, to the end of the connection, for bytes that are sent as they are."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        connection.sendall(sent)
        return received(connection)


def received(connection: socket.socket) -> bytes:
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def answer_of(raw: bytes) -> tuple[int, Any]:
    """Status and JSON of an answer as it came over the wire."""
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)
