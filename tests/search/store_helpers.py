"""Random states of an index, and a process that writes them: `python store_helpers.py`."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hnclip.search import writer as writer_module
from hnclip.search.database import About, Kind, content_hash, text_hash
from hnclip.search.reader import IndexedImage, IndexReader
from hnclip.search.writer import Change, IndexWriter, NewFile, NewImage, open_writer

WIDTH = 24
State = dict[str, tuple[int, tuple[str, ...]]]
"""By the name of a file the number of its image, and its captions."""


def about(**changed: Any) -> About:
    given = {"model": "m", "source": "a model", "fingerprint": "f", "opening": {}, "width": WIDTH, "data": "d"}
    return About(**{**given, "root": None, "command": "hnclip index d --model m", **changed})


@contextmanager
def continue_index(path: Path) -> Iterator[IndexWriter]:
    """A writer of an index that exists."""
    with IndexReader(path) as reader:
        about = reader.about
    with open_writer(path, about) as writer:
        yield writer


def unit_vector(name: object) -> np.ndarray:
    seed = int.from_bytes(text_hash(str(name))[:4], "big")
    vector = np.random.default_rng(seed).standard_normal(WIDTH).astype(np.float32)
    return vector / np.linalg.norm(vector)


def image_hash(number: int) -> bytes:
    return content_hash(b"image %d" % number)


def commit_state(writer: IndexWriter, state: State) -> None:
    """Insert what an index needs to show a state, in one commit."""
    images, texts = writer.hashes("images"), writer.hashes("captions")
    change = Change(
        images=[
            NewImage(image_hash(number), unit_vector(number), (number + 1, 7), b"thumbnail %d" % number)
            for number in sorted({number for number, _ in state.values()})
            if image_hash(number) not in images
        ],
        captions={
            text: unit_vector(text) for _, some in state.values() for text in some if text_hash(text) not in texts
        },
        files=[NewFile(name, image_hash(n), "{}", f"stamp {n}", texts) for name, (n, texts) in state.items()],
    )
    writer.commit(change)


def show_state(writer: IndexWriter, state: State) -> None:
    """Make an index show exactly this state."""
    commit_state(writer, state)
    writer.finish(writer.known().keys() - state.keys(), {})


def all_files(reader: IndexReader) -> list[IndexedImage]:
    """The files of an index in the order of their ids."""
    files = reader.files_of(reader.ids["images"].tolist()).values()
    return sorted((file for some in files for file in some), key=lambda file: file.id)


def vectors_of(reader: IndexReader, kind: Kind) -> dict[int, np.ndarray]:
    """The vectors [D] of images or captions by id."""
    return dict(zip(reader.ids[kind].tolist(), reader.vectors[kind]))


def check_state(reader: IndexReader, state: State) -> None:
    """The index holds exactly this state, and each vector is that of its image or caption."""
    files = {file.name: file for file in all_files(reader)}
    assert reader.count("images") == len(files)
    assert {name: (file.hash, file.width, file.captions) for name, file in files.items()} == {
        name: (image_hash(number), number + 1, texts) for name, (number, texts) in state.items()
    }
    vectors = vectors_of(reader, "images")
    for name, (number, _) in state.items():
        assert reader.thumbnail(files[name].image) == b"thumbnail %d" % number
        assert np.array_equal(vectors[files[name].image], unit_vector(number).astype(np.float16))
    found, vectors = reader.captions(reader.ids["captions"].tolist()), vectors_of(reader, "captions")
    owners = {caption.text: {file.name for file in caption.files} for caption in found.values()}
    texts = {text for _, some in state.values() for text in some}
    assert owners == {text: {name for name, (_, some) in state.items() if text in some} for text in texts}
    for number, caption in found.items():
        assert np.array_equal(vectors[number], unit_vector(caption.text).astype(np.float16))


def random_state(random: np.random.Generator) -> State:
    """Some of 40 files, of which some share images and captions."""
    names = random.choice(40, size=int(random.integers(0, 30)), replace=False)
    return {
        f"{name}.jpg": (int(random.integers(25)), tuple(f"caption {n}" for n in random.integers(12, size=name % 3)))
        for name in map(int, names)
    }


def write_states(path: Path, log: Path, seed: int, turns: int) -> None:
    """Commit random states, compact, and replace the index; a log lists what has begun and what is done."""
    random = np.random.default_rng(seed)

    def note(what: str, state: State) -> None:
        with log.open("a") as file:
            file.write(json.dumps([what, state]) + "\n")

    def step(writer: IndexWriter, done: Callable[[], object] = lambda: None) -> None:
        note("begun", state := random_state(random))
        show_state(writer, state)
        done()
        note("done", state)

    for turn in range(turns):
        with open_writer(path, about()) as writer:
            writer.verify()
            for _ in range(4):
                step(writer)
            writer.compact(least=3)
            writer.publish()
        with open_writer(path, about(fingerprint=f"another {turn}"), replace=True) as writer:
            step(writer, writer.publish)


def kill_before(number: int) -> None:
    """Count what changes the disk, and send SIGKILL to this process before the n-th time."""
    left = iter(range(number - 1))

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*given, **named)

        return call

    class Counted(sqlite3.Connection):
        execute = counted(sqlite3.Connection.execute)  # type: ignore[assignment]
        executemany = counted(sqlite3.Connection.executemany)  # type: ignore[assignment]

    sqlite3.connect = partial(sqlite3.connect, factory=Counted)  # type: ignore[assignment]
    for place, name in ((writer_module, "append_bytes"), (os, "fsync"), (os, "replace"), (Path, "unlink")):
        setattr(place, name, counted(getattr(place, name)))


if __name__ == "__main__":
    # Without a moment it writes until it is killed.
    seed, moment = int(sys.argv[3]), int(sys.argv[4])
    if moment:
        kill_before(moment)
    write_states(Path(sys.argv[1]), Path(sys.argv[2]), seed, turns=2 if moment else 10**9)
