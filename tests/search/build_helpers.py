"""Folders of small pictures, and calls of `build_index` with a small model."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from encode_helpers import save_picture
from hnclip.config import Opening, ReadConfig
from hnclip.data.image_sources import FileImage
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load
from hnclip.search.build import build_index
from hnclip.search.index.catalogue import State, content_hash
from hnclip.search.index.layout import About
from hnclip.search.index.reader import Index
from hnclip.search.index.vectors import from_bf16, to_bf16
from hnclip.search.index.writer import IndexWriter
from hnclip.search.indexing import run as run_code
from hnclip.search.indexing.built import Built
from hnclip.search.options import IndexOptions


def options(data: Path | str, model: Path, out: Path, **changed: Any) -> IndexOptions:
    given = {"batch": 4, "workers": 2, "threads": 1, "device": "cpu", "read": ReadConfig(), **changed}
    return IndexOptions(data=str(data), out=out, opening=Opening(), model=str(model), **given)


def make_folder(folder: Path, count: int = 11) -> Path:
    """Pictures in two directories; every third has a caption beside it."""
    for number in range(count):
        picture = folder / f"{'ab'[number % 2]}/{number:02}.png"
        save_picture(picture, number)
        if number % 3 == 0:
            picture.with_suffix(".txt").write_text(f"a red house, number {number}, under the cloudy sky\n")
    return folder


def check_built(out: Path, folder: Path, model: DualEncoder, captions: dict[str, tuple[str, ...]]) -> None:
    """The literal twin of an index: every picture below the folder that can be decoded, encoded alone."""
    expected = {}
    for file in sorted(folder.rglob("*.png")):
        image = FileImage(file)
        try:
            expected[file.relative_to(folder).as_posix()] = image.load()
        except ValueError:
            continue
    with Index(out) as index, torch.no_grad():
        items = {item.name: item for item in index.all_items()}
        assert items.keys() == expected.keys()
        assert {name: item.captions for name, item in items.items() if item.captions} == captions
        for name, picture in expected.items():
            item = items[name]
            vector = model.encode_images(model.preprocess_images([picture])).vectors[0].numpy()
            assert close(index.vectors("images").rows(np.array([item.row]))[0], vector)
            assert item.shape == picture.size
            assert index.content(item) == (folder / name).read_bytes()
            assert index.thumbnail(item.row)[:3] == b"\xff\xd8\xff"
        living = sorted(set(range(len(index.vectors("captions")))) - set(index.dead("captions").tolist()))
        said = index.captions(living)
        assert {caption.text for caption in said.values()} == {text for some in captions.values() for text in some}
        for row, caption in said.items():
            vector = model.encode_texts(model.tokenize([caption.text])).vectors[0].numpy()
            assert close(index.vectors("captions").rows(np.array([row]))[0], vector)


def close(stored: np.ndarray, vector: np.ndarray) -> bool:
    """The same but for the rounding of bf16, and for what a batch changes in the last digits."""
    return bool(np.abs(stored - from_bf16(to_bf16(vector))).max() < 2e-3)


def about_of(out: Path) -> tuple[About, State]:
    with Index(out) as index:
        return index.about, index.state


def names_of(out: Path) -> dict[str, bytes]:
    """Names in an index, and the content that each shows."""
    with Index(out) as index:
        contents = dict(index._ask("SELECT row, content FROM pictures"))
        return {item.name: contents[item.row] for item in index.all_items()}


def contents_of(folder: Path) -> dict[str, bytes]:
    return {
        file.relative_to(folder).as_posix(): content_hash(file.read_bytes()) for file in sorted(folder.rglob("*.png"))
    }


def later(file: Path) -> None:
    """Another time of change, the same content."""
    stamp = file.stat().st_mtime_ns + 10**9
    os.utime(file, ns=(stamp, stamp))


def stop_after(given: IndexOptions, commits: int, sign: Path) -> None:
    """Index, but stop for ever when so many commits of 4 pictures are done."""
    run_code.TOGETHER = 4
    commit, done = IndexWriter.commit, 0

    def counted(writer: IndexWriter, change: Any) -> None:
        nonlocal done
        if done == commits:
            sign.touch()
            time.sleep(600)
        commit(writer, change)
        done += 1

    IndexWriter.commit = counted  # type: ignore[method-assign]
    build_index(given)


def opened(model: Path) -> DualEncoder:
    return load(str(model)).eval()


def counts(built: Built) -> dict[str, int]:
    """Those that are not 0, without what was encoded."""
    names = ("new", "changed", "moved", "gone", "unchanged", "bad")
    return {name: found for name in names if (found := getattr(built.counts, name))}
