"""A process that writes or reads an index until it is killed: `python index_writing.py WAY ARGUMENTS`, as JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from index_helpers import Content, about, change_to, check_index, content_of, random_content

from hnclip.search.index import compact, vectors
from hnclip.search.index import writer as writer_code
from hnclip.search.index.layout import write_header
from hnclip.search.index.opening import open_writer
from hnclip.search.index.reader import Index

FOREVER = 600.0  # seconds


def write_on(path: Path, log: Path, before: Content, seed: int) -> None:
    """Change an index again and again, compacting it now and then, and log every state."""
    random = np.random.default_rng(seed)
    with open_writer(path, about()) as writer, log.open("a", buffering=1) as said:
        while True:
            after = random_content(random, before)
            said.write(json.dumps(["begun", after]) + "\n")
            writer.commit(change_to(writer, before, after))
            said.write(json.dumps(["done", after]) + "\n")
            before = after
            if random.random() < 0.3:
                compact.compact(writer)
                said.write(json.dumps(["done", after]) + "\n")


def stop_at(path: Path, sign: Path, before: Content, after: Content, moment: str) -> None:
    """Do a change or a compaction, but stop for ever at a moment of it."""

    def forever(*_: object) -> None:
        sign.write_text("here")
        time.sleep(FOREVER)

    with open_writer(path, about()) as writer:
        if "transaction" in moment:  # pages go to the file before the commit, as they do in the middle of it
            writer._database.execute("PRAGMA cache_spill = ON")
            writer._database.execute("PRAGMA cache_size = 1")
        change = change_to(writer, before, after)
        places: dict[str, tuple[Any, str]] = {
            "vectors are written": (vectors.os, "fsync"),
            "a transaction is half done": (writer_code, "bury_rows"),
            "a transaction is all but committed": (writer_code, "write_state"),
            "rows are copied": (compact, "_copy_thumbnails"),
            "the new catalogue is half full": (compact, "write_state"),
            "the header is about to change": (writer_code, "write_header"),
            "the header has changed": (writer_code, "write_header"),
        }
        module, name = places[moment]

        def afterwards(path: Path, generation: int) -> None:
            write_header(path, generation)
            forever()

        setattr(module, name, afterwards if moment == "the header has changed" else forever)
        if module is compact or "header" in moment:
            compact.compact(writer)
        else:
            writer.commit(change)


def read_on(path: Path, log: Path, sign: Path) -> None:
    """Open an index again and again; each version must stay what it was."""
    with log.open("a", buffering=1) as said:
        while not sign.exists():
            with Index(path) as index:
                expected = shown_by(index)
                while not index.stale() and not sign.exists():
                    time.sleep(0.002)
                check_index(index, expected)
            said.write("kept\n")


def shown_by(index: Index) -> Content:
    numbers = {content_of(number): number for number in range(60)}
    contents = dict(index._ask("SELECT row, content FROM pictures"))
    return {item.name: (numbers[contents[item.row]], item.captions) for item in index.all_items()}


def as_content(found: dict[str, Any]) -> Content:
    """What JSON made of it."""
    return {name: (number, tuple(captions)) for name, (number, captions) in found.items()}


if __name__ == "__main__":
    way, given = sys.argv[1], json.loads(sys.argv[2])
    ways = {"write_on": write_on, "stop_at": stop_at, "read_on": read_on}
    arguments = [as_content(value) if isinstance(value, dict) else value for value in given]
    paths = {"write_on": 2, "stop_at": 2, "read_on": 3}[way]
    ways[way](*map(Path, arguments[:paths]), *arguments[paths:])  # type: ignore[operator]
