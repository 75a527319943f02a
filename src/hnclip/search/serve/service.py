"""The searcher that is served: calls in threads with bounded concurrency, and newer states of the index."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import HTTPException, Request
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from hnclip.search.serve.run import Settings

if TYPE_CHECKING:
    from hnclip.search.searcher import Searcher

Result = TypeVar("Result")

INTERVAL = 2.0  # seconds between two checks whether the index has changed
COMPUTING = 2  # searches and explanations at once; each uses several CPU threads
READING = 4  # thumbnails and counts at once
CONVERTING = 2  # originals at once: decoded, they take much more memory than as files
WAITING = 1000  # requests for images

log = logging.getLogger(__name__)


class State:
    """A searcher on one state of the index. It is closed when it was replaced and no call uses it any more."""

    def __init__(self, searcher: Searcher) -> None:
        self.searcher = searcher
        self.loaded = asyncio.Event()  # set when the model can be used, or when `failed` says that it cannot
        self.failed = False
        self._users = 1  # the service

    @contextmanager
    def use(self) -> Iterator[Searcher]:
        self._users += 1
        try:
            yield self.searcher
        finally:
            self.release()

    def release(self) -> None:
        self._users -= 1
        if not self._users:
            self.searcher.close()

    def load(self, threads: int) -> None:
        """Load the model, which takes seconds the first time."""
        try:
            if threads:
                import torch

                torch.set_num_threads(threads)
            self.searcher.load_model()
        except Exception as error:  # text queries do not need it
            self.failed = True
            log.warning(f"the model cannot be loaded, only searches by text are answered: {error}")


class Queue:
    """Calls of one kind: so many run at once, and a bounded number waits."""

    def __init__(self, slots: int, waiting: int) -> None:
        self.slots, self.limit, self.pending = asyncio.Semaphore(slots), slots + waiting, 0


class Service:
    """Answers with the current state of an index. All methods are called in the event loop."""

    def __init__(self, searcher: Searcher, settings: Settings) -> None:
        self.settings = settings
        self._state = State(searcher)
        self.computing = Queue(COMPUTING, settings.waiting)
        # A page requests many images at once. They wait elsewhere, so that searches are not refused because of them.
        self.reading, self.converting = Queue(READING, WAITING), Queue(CONVERTING, WAITING)
        self._calls: set[asyncio.Task[Any]] = set()
        self._stopping = asyncio.Event()

    async def run(
        self, queue: Queue, request: Request, call: Callable[[Searcher], Result], *, model: bool = False
    ) -> Result:
        """The result of a call in a thread; `model` if it needs the model.

        Raises:
            HTTPException: too many calls wait already, or it took too long.
            ClientDisconnect: the client is gone.
        """
        if model:
            await self._wait_for_model()
        if queue.pending >= queue.limit:
            raise HTTPException(503, "the server is busy: try again soon", {"Retry-After": "1"})
        queue.pending += 1
        task = asyncio.create_task(self._in_turn(queue, request, call))
        self._calls.add(task)
        task.add_done_callback(self._ended)
        # A thread cannot be ended from outside: it goes on after the timeout, and keeps its slot.
        await asyncio.wait({task}, timeout=self.settings.timeout)
        if not task.done():
            raise _given_up()
        return task.result()

    async def refresh(self) -> None:
        """Replace the searcher if the index has changed. Whatever is wrong with the new state is raised."""
        old = self._state
        if await run_in_threadpool(old.searcher.reader.changed):
            new = State(await run_in_threadpool(old.searcher.reopen))
            await self._load(new)
            self._state = new
            old.release()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Load the model and follow the index inside the block; at its end, wait for the calls that are running."""
        maintenance = asyncio.create_task(self._maintain())
        try:
            yield
        finally:
            self._stopping.set()
            await asyncio.gather(maintenance, *self._calls, return_exceptions=True)
            self._state.release()

    async def _maintain(self) -> None:
        await self._load(self._state)
        warned = False
        while not self._stopping.is_set():
            try:
                await self.refresh()
                warned = False
            except Exception as error:  # the next state of the index may be better
                if not warned:
                    log.warning(f"the new state of the index cannot be opened, the old one is served on: {error}")
                warned = True
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), INTERVAL)

    async def _load(self, state: State) -> None:
        await run_in_threadpool(state.load, self.settings.threads)
        state.loaded.set()

    async def _wait_for_model(self) -> None:
        state = self._state
        try:
            await asyncio.wait_for(state.loaded.wait(), self.settings.timeout)
        except asyncio.TimeoutError:
            raise HTTPException(503, "the model is still being loaded: try again soon", {"Retry-After": "5"}) from None
        if state.failed:
            raise HTTPException(422, "the model of this index cannot be loaded: the log of the server says why")

    async def _in_turn(self, queue: Queue, request: Request, call: Callable[[Searcher], Result]) -> Result:
        loop = asyncio.get_running_loop()
        end = loop.time() + self.settings.timeout
        try:
            async with queue.slots:
                if loop.time() >= end or self._stopping.is_set():
                    raise _given_up()
                if await request.is_disconnected():
                    raise ClientDisconnect
                with self._state.use() as searcher:
                    return await run_in_threadpool(call, searcher)
        finally:
            queue.pending -= 1

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._calls.discard(task)
        if not task.cancelled():
            task.exception()  # otherwise asyncio logs that of a call that was given up


def _given_up() -> HTTPException:
    return HTTPException(504, "the request took too long and was given up")
