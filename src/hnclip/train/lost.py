"""The end of a job that has lost a process: prompt, with one message that says where it stood and how to go on.

The processes of a job wait for each other in every step. When one is gone, the connections to it break, and the
launcher sends the others SIGTERM; when one hangs, the wait for it runs into the time-out. Whichever is noticed first
ends a process here, and the first of them to notice speaks for all.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from hnclip.train.distributed import GRACE, fail_together, is_distributed, rank, speaks_first

log = logging.getLogger(__name__)


class WorkerLost(RuntimeError):
    """A process of the job is gone or does not answer, or the launcher ends the job."""


class _Told(BaseException):
    """SIGTERM, on its way out of whatever the process was doing."""


@contextmanager
def ends_together(where: Callable[[], str]) -> Iterator[None]:
    """Turn the loss of another process inside the block into one message for all; alone, do nothing.

    Args:
        where: tells how far the run is and how to continue it.
    """
    if not is_distributed():
        yield
        return
    try:
        with _sigterm_raises(where):
            yield
    except KeyboardInterrupt:
        if rank() == 0:
            raise
        fail_together(None)
    except (_Told, RuntimeError) as error:
        told = isinstance(error, _Told)
        if not (told or is_loss(error)):
            raise
        reason = "it was told to end (SIGTERM)" if told else f"{str(error).splitlines()[0][:200]}"
        if speaks_first():
            raise WorkerLost(_message(where(), reason)) from error
        if told:
            raise SystemExit(1) from error
        fail_together(None)


def is_loss(error: BaseException) -> bool:
    """Whether an error comes from the connections between processes. gloo's have no class of their own."""
    return isinstance(error, dist.DistError) or re.search(r"\bgloo\b", str(error), re.IGNORECASE) is not None


def _message(where: str, reason: str) -> str:
    return (
        f"a process of the job was lost, does not answer, or the job was ended from outside; {where}. "
        f"Noticed by process {rank()}: {reason}"
    )


@contextmanager
def _sigterm_raises(where: Callable[[], str]) -> Iterator[None]:
    """SIGTERM raises `_Told`, or, if the interpreter is blocked in a library and cannot, ends the process itself."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return

    def raise_told(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        raise _Told

    def wait() -> None:
        while number := os.read(reading, 1):
            if number[0] == signal.SIGTERM:
                time.sleep(GRACE)  # a free interpreter has left the block by then
                if not over.is_set():
                    if speaks_first():
                        log.error(_message(where(), "it was told to end (SIGTERM) while it was blocked"))
                    os._exit(1)
        os.close(reading)

    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    over = threading.Event()
    before = signal.signal(signal.SIGTERM, raise_told)
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGTERM, before)
        os.close(writing)
