"""The searcher that is served: calls in threads with bounded concurrency, and newer states of the index."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import asynccontextmanager, suppress
from threading import BoundedSemaphore
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import HTTPException
from starlette.concurrency import run_in_threadpool

from hnclip.search.serve.run import Settings

if TYPE_CHECKING:
    from hnclip.search.searcher import Searcher

Result = TypeVar("Result")

INTERVAL = 2.0  # seconds between two checks whether the index has changed
COMPUTING = 2  # searches, and calls of the model, at once; each uses several CPU threads
READING = 4  # thumbnails and counts at once
CONVERTING = 2  # originals at once: decoded, they take much more memory than as files
WAITING = 1000  # requests for images

log = logging.getLogger(__name__)


class Pool:
    """Threads for calls of one kind, and room for a bounded number of calls that wait for a thread."""

    def __init__(self, threads: int, waiting: int) -> None:
        self.executor, self.room = ThreadPoolExecutor(threads), BoundedSemaphore(threads + waiting)


class Service:
    """Answers with the newest state of an index. Its methods are called in the event loop."""

    def __init__(self, searcher: Searcher, settings: Settings) -> None:
        self.searcher, self.settings = searcher, settings
        # Searches by text wait neither for the model, which is loaded for seconds, nor for the many images of a page.
        self.searching, self.modelling = Pool(COMPUTING, settings.waiting), Pool(COMPUTING, settings.waiting)
        self.reading, self.converting = Pool(READING, WAITING), Pool(CONVERTING, WAITING)
        self._calls: set[Future[Any]] = set()  # running and waiting
        self._stopping = asyncio.Event()

    async def run(self, pool: Pool, call: Callable[[Searcher], Result]) -> Result:
        """The result of a call in a thread. HTTPException if too many calls wait already, or it took too long."""
        if not pool.room.acquire(blocking=False):
            raise HTTPException(503, "the server is busy: try again soon", {"Retry-After": "1"})
        future = pool.executor.submit(call, self.searcher)
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        future.add_done_callback(lambda _: pool.room.release())
        try:  # a call that still waits is cancelled then; one that runs goes on and keeps its thread
            return await asyncio.wait_for(asyncio.wrap_future(future), self.settings.timeout)
        except asyncio.TimeoutError:
            raise HTTPException(504, "the request took too long and was given up") from None

    async def refresh(self) -> None:
        """Replace the searcher if the index has changed. Whatever is wrong with the new state is raised."""
        old = self.searcher
        if await run_in_threadpool(old.reader.changed):
            new = await run_in_threadpool(old.reopen)
            await run_in_threadpool(self._load, new)
            self.searcher, calls = new, list(self._calls)
            await run_in_threadpool(wait, calls)
            old.close()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Load the model and follow the index inside the block; at its end, wait for the calls that are running."""
        following = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            self._stopping.set()
            await following
            for pool in (self.searching, self.modelling, self.reading, self.converting):
                await run_in_threadpool(pool.executor.shutdown, cancel_futures=True)
            self.searcher.close()

    async def _follow(self) -> None:
        await run_in_threadpool(self._load, self.searcher)
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

    def _load(self, searcher: Searcher) -> None:
        """Load the model ahead of the first call that needs it; searches by text do not."""
        if self.settings.threads:
            import torch

            torch.set_num_threads(self.settings.threads)
        with suppress(HTTPException):
            check_model(searcher)


def check_model(searcher: Searcher) -> None:
    """Load the model unless it is loaded. HTTPException if that fails."""
    try:
        searcher.load_model()
    except Exception as error:
        log.warning(f"the model cannot be loaded, only searches by text are answered: {error}")
        raise HTTPException(422, "the model of this index cannot be loaded: the log of the server says why") from error
