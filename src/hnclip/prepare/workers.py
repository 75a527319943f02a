"""Proposals for several pictures at once: felzenszwalb holds the interpreter while it works, so it gets processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING

from PIL import Image

if TYPE_CHECKING:
    from hnclip.prepare.proposal import Proposal, Proposer

Propose = Callable[[Image.Image], "list[Proposal]"]

_own: Proposer | None = None  # the proposer of a worker process


@contextmanager
def proposing(proposer: Proposer, name: str, weights: Path | None, *, workers: int) -> Iterator[Propose]:
    """What asks a proposer for the regions of a picture, and may be called by `workers` threads at once.

    Felzenszwalb runs in as many processes. Any other proposer runs here, one picture at a time: grids cost nothing, and
    SAM keeps its device busy by itself.

    Args:
        name, weights: what makes the same proposer in another process.
    """
    if workers == 1 or "felzenszwalb" not in proposer.name:
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
        initargs=(name, weights),
    )

    def submit(image: Image.Image) -> list[Proposal]:
        try:
            return pool.submit(_propose, image).result()
        except BrokenProcessPool as error:
            raise RuntimeError(
                "a process that looked for regions was ended; if memory is short, use fewer --workers. The same "
                "command continues where it was"
            ) from error

    try:
        yield submit
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(name: str, weights: Path | None) -> None:
    """In a worker, before its first picture."""
    from hnclip.prepare.proposers import proposer

    global _own
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches it too, but its parent says what that means
    Thread(target=_end_with_parent, daemon=True).start()
    _own = proposer(name, weights=weights)


def _end_with_parent() -> None:
    """A parent that is killed tells nobody, and its workers would wait for pictures forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _propose(image: Image.Image) -> list[Proposal]:
    assert _own is not None
    return _own(image)
