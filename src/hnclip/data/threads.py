"""Threads that decode pictures side by side: Pillow and torch leave the interpreter free while they work."""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
from PIL import Image

MOST = 16  # beyond it threads mostly wait for the interpreter, and each may hold a large picture

Item = TypeVar("Item")
Made = TypeVar("Made")


def processors() -> int:
    """Those that this process may use, but no more than decoding makes use of."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST, found)


def in_order(
    pool: ThreadPoolExecutor, work: Callable[[Item], Made], items: Iterable[Item], most: int
) -> Iterator[Made]:
    """`map(work, items)` by threads that run at most so many items ahead: they stay busy while results are used."""
    waiting: deque[Future[Made]] = deque()
    for item in items:
        if len(waiting) == most:
            yield waiting.popleft().result()
        waiting.append(pool.submit(work, item))
    while waiting:
        yield waiting.popleft().result()


@contextmanager
def decoding_threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that may decode pictures side by side; what has not begun when the block ends is not done."""
    Image.init()  # Pillow loads its decoders when they are needed, and threads that need one at once may miss it
    torch_threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(count, initializer=_one_torch_thread)
    with warnings.catch_warnings():
        # Threads that each silence this warning for a moment would undo it for each other.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(torch_threads)  # threads that are new from now on inherit it


def _one_torch_thread() -> None:
    """In a worker torch must not start workers of its own: there would be the square of the processors of them."""
    if torch.backends.openmp.is_available():  # else all threads share one pool
        torch.set_num_threads(1)
