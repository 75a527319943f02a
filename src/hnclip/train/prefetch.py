"""The next batch while the model works on the present one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


def ahead(make: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[Made]:
    """`map(make, items)`, always one ahead, in a thread of its own: reading pictures and tensor work leave the
    interpreter free for the step that goes on meanwhile. An error of `make` is raised where its result was due."""
    with ThreadPoolExecutor(1) as thread:
        upcoming = None
        for item in items:
            present, upcoming = upcoming, thread.submit(make, item)
            if present is not None:
                yield present.result()
        if upcoming is not None:
            yield upcoming.result()
