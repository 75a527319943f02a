"""Messages and progress on standard error, through the standard `logging` module.

Every module logs with `logging.getLogger(__name__)`. The command line calls `configure_logging` once. A program that
uses hnclip as a library configures `logging` itself; it sees messages and progress if INFO is enabled for `hnclip`.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

from hnclip.util.text import duration

INTERVAL = 30.0  # seconds between plain lines of progress
_root = logging.getLogger("hnclip")
_progress = logging.getLogger("hnclip.progress")
_handlers: list[logging.Handler] = []


def configure_logging(*, quiet: bool = False, log_file: Path | None = None) -> None:
    """Send messages to standard error, and with `log_file` all of them, with their time and level, to that file too.

    Args:
        quiet: only warnings and errors on standard error, and no progress.
        log_file: appended to.
    """
    while _handlers:
        handler = _handlers.pop()
        _root.removeHandler(handler)
        handler.close()
    first = os.environ.get("RANK", "0") == "0"  # of the processes of torchrun, one reports
    console = _StderrHandler(logging.ERROR if not first else logging.WARNING if quiet else logging.INFO)
    console.setFormatter(_ConsoleFormatter())
    _handlers.append(console)
    if log_file is not None and first:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(log_file, encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        _handlers.append(file)
    for handler in _handlers:
        _root.addHandler(handler)
    _root.setLevel(min(handler.level or logging.DEBUG for handler in _handlers))


class _StderrHandler(logging.Handler):
    """Prints to the current `sys.stderr`, which a progress bar redirects to print above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != _progress.name or not sys.stderr.isatty():  # a terminal shows the bar instead
            with suppress(OSError, ValueError):  # standard error is closed
                print(self.format(record), file=sys.stderr, flush=True)


class _ConsoleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return f"warning: {text}" if record.levelno == logging.WARNING else text


Item = TypeVar("Item")
Iterate = Callable[[range], Iterator[int]]
"""Goes through a range and reports its progress: `Progress.iterate`, or `iter` for none."""


class Progress:
    """Progress of one task: a bar on a terminal, a line in the log every half minute."""

    def __init__(self, title: str, total: int, done: int, bar: Any = None) -> None:
        self._title, self._total, self._done, self._first = title, total, done, done
        self._start = self._reported = time.monotonic()
        self._bar = bar
        self._task = None if bar is None else bar.add_task(title, total=total, completed=done, text="")

    def advance(self, done: int = 1, text: str = "") -> None:
        """Count `done` more items; `text` is shown behind the numbers, for example the loss."""
        self._done += done
        now = time.monotonic()
        rate = (self._done - self._first) / max(now - self._start, 1e-9)
        text = f"{rate:.3g}/s" + (f", {text}" if text else "")
        if self._bar is not None:
            self._bar.update(self._task, total=self._total, completed=self._done, text=text)
        if now - self._reported >= INTERVAL:
            self._reported = now
            of = f" of {self._total:,}" if self._total else ""
            left = f", {duration((self._total - self._done) / rate)} left" if rate and self._total else ""
            _progress.info(f"{self._title}: {self._done:,}{of}{left}, {text}")

    def iterate(self, items: Collection[Item]) -> Iterator[Item]:
        """Yield the items and count each when it is done. The total grows by their number."""
        self._total += len(items)
        for item in items:
            yield item
            self.advance()


@contextmanager
def progress(title: str, total: int = 0, done: int = 0) -> Iterator[Progress]:
    """Report the progress of a block on standard error, if INFO messages are enabled."""
    shown = _progress.isEnabledFor(logging.INFO) and all(handler.level <= logging.INFO for handler in _handlers[:1])
    with _progress_bar() if shown and sys.stderr.isatty() else nullcontext() as bar:
        yield Progress(title, total, done, bar)


def _progress_bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
    )
    return Bar(*columns, console=Console(file=sys.stderr), transient=True)
