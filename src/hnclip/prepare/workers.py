"""Proposals for several pictures at once: felzenszwalb holds the interpreter while it works, so it gets processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock, Thread

from PIL import Image

from hnclip.prepare.proposal import Proposal, Proposer
from hnclip.prepare.proposers import Felzenszwalb, Together

Propose = Callable[[Image.Image], list[Proposal]]


@contextmanager
def proposing(proposer: Proposer, *, workers: int) -> Iterator[Propose]:
    """What asks a proposer for the regions of a picture, and may be called by `workers` threads at once.

    Felzenszwalb runs in as many processes. Any other proposer runs here, one picture at a time: grids cost nothing, and
    SAM keeps its device busy by itself.
    """
    parts = proposer.proposers if isinstance(proposer, Together) else (proposer,)
    if workers == 1 or not any(isinstance(part, Felzenszwalb) for part in parts):
        lock = Lock()

        def ask(image: Image.Image) -> list[Proposal]:
            with lock:
                return proposer(image)

        yield ask
        return

    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),  # a fork of a process with threads may hang
        initializer=_begin,
    )
    try:
        yield Together(tuple(_Elsewhere(part, pool) if isinstance(part, Felzenszwalb) else part for part in parts))
    finally:
        pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class _Elsewhere:
    """Felzenszwalb in another process, which is sent only the small picture that it looks at."""

    proposer: Felzenszwalb
    pool: ProcessPoolExecutor

    @property
    def name(self) -> str:
        return self.proposer.name

    @property
    def version(self) -> str:
        return self.proposer.version

    def __call__(self, image: Image.Image) -> list[Proposal]:
        try:
            return self.pool.submit(self.proposer.segments, self.proposer.small(image), image.size).result()
        except BrokenProcessPool as error:
            raise RuntimeError(
                "a process that looked for regions was ended; if memory is short, use fewer --workers. The same "
                "command continues where it was"
            ) from error


def _begin() -> None:
    """In a worker, before its first picture."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches it too, but its parent says what that means
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that is killed tells nobody, and its workers would wait for pictures forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
