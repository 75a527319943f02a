"""A server that really listens, on a thread of the tests' process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hnclip.search.searcher import open_index
from hnclip.search.serve.run import listen, make_server
from hnclip.search.serve.schema import Settings

PATIENCE = 60  # seconds: a busy machine is slow


class Live:
    """`hnclip serve` on a thread; it can be stopped, and started again at the same address."""

    def __init__(self, index: Path, *, token: str | None = None, **settings: Any) -> None:
        self.index, self.token, self.port = index, token, 0
        self.settings = Settings(port=0, **settings)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        self.listener = listen("127.0.0.1", self.port)
        self.port = self.listener.getsockname()[1]
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
    server = Live(index, token=token, **settings)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"not within {PATIENCE} seconds"
        time.sleep(0.01)
