"""An index is opened to be written: made, gone on with, mended or replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hnclip.search.index.generations import (
    begin_generation,
    check_place,
    clear_away,
    generations,
    has_lost_header,
    next_generation,
    room,
)
from hnclip.search.index.layout import HEADER, LOCK, About, damaged, read_header, write_header
from hnclip.search.index.writer import IndexWriter
from hnclip.util.files import exclusive_lock


@contextmanager
def open_writer(
    path: Path, about: About, *, check: Callable[[IndexWriter], str] = lambda writer: "", replace: bool = False
) -> Iterator[IndexWriter]:
    """The index of this path, to be written by this process alone; made if there is none.

    What a killed writer left behind is cleared away, and rows that a file cut short no longer holds are forgotten, so
    that their pictures are indexed again.

    Args:
        about: what a new index is about; an existing one keeps its own.
        check: why an existing one cannot be gone on with; nothing if it can.
        replace: then, and where one is damaged, write a new generation beside it that counts from `publish` on. One
            that was begun for the same and not finished is gone on with.

    Raises:
        ValueError: another process is writing, or what lies there is no index, or one that cannot be gone on with.
    """
    check_place(path)
    with room(path):
        path.mkdir(parents=True, exist_ok=True)
    busy = f"another process is writing {path}: wait until it is done"
    with exclusive_lock(path / LOCK, busy), room(path):
        lost = has_lost_header(path)
        if not lost and not (path / HEADER).exists():
            begin_generation(path, 1, about).close()
            write_header(path, 1)
        try:
            if lost:
                raise ValueError(damaged(path, f"{HEADER} is missing"))
            writer = _checked(path, read_header(path), check)
        except ValueError:
            if not replace:
                raise
            writer = _replacement(path, about, check)
        else:
            clear_away(path, [writer.generation])
        with closing(writer):
            yield writer


def _checked(path: Path, generation: int, check: Callable[[IndexWriter], str], *, counts: bool = True) -> IndexWriter:
    writer = IndexWriter(path, generation, counts=counts)
    try:
        if why := check(writer):
            raise ValueError(why)
        writer.forget_missing()
    except BaseException:
        writer.close()
        raise
    return writer


def _replacement(path: Path, about: About, check: Callable[[IndexWriter], str]) -> IndexWriter:
    """The last generation, if it does not count and was begun for the same; else an empty one behind it, which is to be
    searched by the same engine as the one that it replaces."""
    try:
        counting = [read_header(path)]
    except ValueError:
        counting = []
    last = max([0, *generations(path)])
    if last not in [0, *counting]:
        try:
            return _checked(path, last, check, counts=False)
        except ValueError:
            pass  # of something else, or damaged too
    engine = _engine_of(path, [*counting, last])
    number = next_generation(path)  # one that is cleared away now does not give its number to another
    clear_away(path, counting)
    begin_generation(path, number, replace(about, **engine)).close()
    return IndexWriter(path, number, counts=False)


def _engine_of(path: Path, candidates: Sequence[int]) -> dict[str, Any]:
    """The engine and its URI that the first generation of these that can be read has; nothing if none can."""
    for number in candidates:
        try:
            with closing(IndexWriter(path, number)) as found:
                return {"engine": found.about.engine, "uri": found.about.uri}
        except ValueError:
            pass
    return {}
