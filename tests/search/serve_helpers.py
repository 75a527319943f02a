"""A small index of scenes, and its server: the application in the tests' process, and one that really listens."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from small_index import small_index
from starlette.testclient import TestClient

from hnclip.core import Record
from hnclip.data.scenes import scene_records
from hnclip.search.searcher import open_index
from hnclip.search.serve.app import make_app
from hnclip.search.serve.run import Settings, listen, make_server
from hnclip.search.serve.service import Service

PATIENCE = 60  # seconds: a busy machine is slow
PNG = {"Content-Type": "image/png"}


@cache
def scenes() -> tuple[Record, ...]:
    """In families of four near-duplicates."""
    return tuple(scene_records("park", "validation", families=8))


def scene_index(directory: Path, count: int = 16) -> Path:
    """An index of scenes that are files in directory/images."""
    path = directory / "park.hnc"
    small_index(path, scenes()[:count], files=directory / "images")
    return path


@contextmanager
def served(index: Path, *, token: str | None = None, **settings: Any) -> Iterator[TestClient]:
    """A client of the application."""
    chosen = Settings(**settings)
    app = make_app(Service(open_index(index), chosen), chosen, token=token, hosts=("localhost",))
    with TestClient(app, base_url="http://localhost:8765", raise_server_exceptions=False) as client:
        yield client


class Live:
    """`hnclip serve` on a thread; it can be stopped, and started again at the same address."""

    def __init__(self, index: Path, token: str | None, settings: Settings) -> None:
        self.index, self.token, self.port, self.settings = index, token, 0, settings

    def start(self) -> None:
        self.listener = listen("127.0.0.1", self.port)
        self.port = self.listener.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}/"
        self.server = make_server(open_index(self.index), self.listener, self.settings, self.token)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]})
        self.thread.start()
        until(lambda: self.server.started)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(PATIENCE)
        self.listener.close()
        assert not self.thread.is_alive()


@contextmanager
def live(index: Path, *, token: str | None = None, **settings: Any) -> Iterator[Live]:
    server = Live(index, token, Settings(port=0, **settings))
    server.start()
    try:
        yield server
    finally:
        server.stop()


def ask(port: int, path: str, body: Any = None, token: str = "") -> tuple[int, Any]:
    """Status and JSON of a response, over a connection of its own."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
        content = None if body is None else json.dumps(body)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
        connection.request("GET" if body is None else "POST", path, content, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"not within {PATIENCE} seconds"
        time.sleep(0.01)
