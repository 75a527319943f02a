"""A small index of scenes, and its server: the application in the tests' process, and one that really listens."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
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
    app = make_app(Service(open_index(index), Settings(**settings)), token=token, hosts=("localhost",))
    with TestClient(app, base_url="http://localhost:8765", raise_server_exceptions=False) as client:
        yield client


@dataclass(frozen=True)
class Live:
    """A server that listens at a port of this machine."""

    index: Path
    port: int

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/"


@contextmanager
def live(index: Path, *, token: str | None = None, **settings: Any) -> Iterator[Live]:
    """`hnclip serve` on a thread."""
    with listen("127.0.0.1", 0) as listener:
        server = make_server(open_index(index), listener, Settings(port=0, **settings), token)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            until(lambda: server.started)
            yield Live(index, listener.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
    assert not thread.is_alive()


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
