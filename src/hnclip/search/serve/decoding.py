"""Threads that decode pictures: a few at once, and nobody waits for them without an end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool

from hnclip.search.serve.failures import Refused, busy

Result = TypeVar("Result")

DECODING = 2  # pictures at once: decoded they take much more than as files


class Decoders:
    """Decoding cannot be ended from outside: what takes too long goes on, and keeps its place until it has ended."""

    def __init__(self, seconds: float) -> None:
        """
        Args:
            seconds: that a request waits for a place, and then for the result.
        """
        self._places, self._seconds = asyncio.Semaphore(DECODING), seconds

    async def start(self, action: Callable[..., Result], *given: Any) -> asyncio.Future[Result]:
        """The work of a thread that has begun.

        Raises:
            Refused: no place was free in time.
        """
        try:
            await asyncio.wait_for(self._places.acquire(), self._seconds)
        except asyncio.TimeoutError:
            raise busy("others' pictures are being decoded: try again soon") from None
        work = asyncio.ensure_future(run_in_threadpool(action, *given))
        work.add_done_callback(self._ended)
        return work

    async def result(self, work: asyncio.Future[Result]) -> Result:
        """
        Raises:
            Refused: it takes too long.
        """
        await asyncio.wait({work}, timeout=self._seconds)
        if not work.done():
            raise Refused(504)
        return work.result()

    def _ended(self, work: asyncio.Future[Any]) -> None:
        self._places.release()
        if not work.cancelled():
            work.exception()  # if it was given up nobody else looks at it


def when_ended(work: asyncio.Future[Any] | None, release: Callable[[], object]) -> None:
    """Give a place free as soon as this work, if there is any, needs it no more."""
    if work is None or work.done():
        release()
    else:
        work.add_done_callback(lambda _: release())
