"""Rows of the published benchmarks into records."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

from hnclip.core import ImageSource, Record
from hnclip.data.readers.collect import goal_regions
from hnclip.data.readers.columns import GOAL_CAPTION, GOAL_IMAGE, GOAL_REGIONS, Row, invalid_text
from hnclip.data.readers.locate import ImageFinder
from hnclip.data.readers.rows import decode_text, read_rows
from hnclip.data.records import ReadLog, RowError


@dataclass(frozen=True)
class BenchmarkFile:
    """A file, or directory of files, that a benchmark is read from: where it comes from, and its path in the folder as
    published, followed by other names that it goes by."""

    origin: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.names[0]}, from {self.origin}"


@dataclass(frozen=True)
class BenchmarkFolder:
    """A benchmark's folder, its images, and what its readers have to report."""

    root: Path
    images: ImageFinder
    log: ReadLog

    def find(self, file: BenchmarkFile) -> Path | None:
        """The file under any of its names, in the folder or one level below it; None if there is none."""
        return find_below(self.root, file.names)

    def path(self, file: BenchmarkFile) -> Path:
        return self.find(file) or self.root / file.names[0]

    def rows(self, file: BenchmarkFile) -> Iterator[tuple[str, Row]]:
        """The rows of a table, or of a directory with a .txt for each .jpg, whose first line is the caption."""
        path = self.path(file)
        if path.is_dir():
            for text in sorted(path.glob("*.txt"), key=lambda text: (len(text.stem), text.stem)):
                lines = decode_text(text.read_bytes())[0].splitlines()
                yield str(text), {"filename": f"{text.stem}.jpg", "caption": lines[0] if lines else ""}
        else:
            yield from ((f"{path}:{place}", row) for place, row in read_rows(path, self.log))

    def image(self, written: str) -> ImageSource:
        """The image that a published list names. Its directories are those of its author's machine: the base name
        decides, and where several images have it, the longest common ending."""
        base = _base_name(written)
        return self.images.find(base) or self.images.find_by_name(written) or self.images.at(base)

    def records(self, rows: Iterable[tuple[str, Row]], make: RowReader, split: str) -> Iterator[Record]:
        """The records of rows; those that `make` raises RowError for become problems, None is skipped."""
        for where, row in rows:
            try:
                record = make(self, row)
            except RowError as error:
                self.log.problem(error.kind, where, str(error))
            else:
                if record is not None:
                    yield replace(record, split=split)


# Makes a record, without its split, of a row.
RowReader = Callable[[BenchmarkFolder, Row], Record | None]
# Reads a split from its files, given the folder and the name of the split.
SplitReader = Callable[..., Iterable[Record]]


def find_below(root: Path, names: Iterable[str]) -> Path | None:
    """The first of these names that exists in the folder or one level below it."""
    folders = sorted(Path(entry.path) for entry in os.scandir(root) if entry.is_dir() and entry.name[0] != ".")
    for name in names:
        if (root / name).exists():
            return root / name
        below = [folder / name for folder in folders if (folder / name).exists()]
        if len(below) > 1:
            raise ValueError(f"{name} is in {root} more than once: {below[0]} and {below[1]}; keep one of them")
        if below:
            return below[0]
    return None


def _base_name(path: str) -> str:
    return re.split(r"[/\\]", path)[-1]


def _text(row: Row, kind: str, *keys: str) -> str:
    """The text under the first of these keys that the row has; without any, `kind` is the problem."""
    key = next((key for key in keys if row.get(key) is not None), None)
    if key is None:
        raise RowError(kind, f"has no {' or '.join(keys)}")
    text = row[key]
    if not isinstance(text, str):
        raise RowError("unreadable row", f"{key} is {type(text).__name__}, not text")
    if invalid := invalid_text(text):
        raise RowError("bad text", f"{key} cannot be used: {invalid}")
    if not text.strip():
        raise RowError("empty caption" if kind == "no caption" else kind, f"{key} has no text")
    return text.strip()


def _image_name(row: Row, *keys: str) -> str:
    name = _text(row, "no image", *keys)
    if not _base_name(name) or "\0" in name:
        raise RowError("no image", f"names its image {name!r}")
    return name


def _stem(path: str) -> str:
    """The base name without its suffix, which benchmarks use as the image's name."""
    name = _base_name(path)
    return name.rpartition(".")[0] or name


def list_row(image: tuple[str, ...], caption: tuple[str, ...], parts: Collection[str] = ()) -> RowReader:
    """Rows with an image's name, a caption, and perhaps GOAL's regions under these keys; with `parts` only those of
    which `split` is one of these."""

    def make(folder: BenchmarkFolder, row: Row) -> Record | None:
        if parts and _text(row, "unreadable row", "split") not in parts:
            return None
        name = _image_name(row, *image)
        file = name if "." in _base_name(name) else f"{name}.jpg"  # IIW names DOCCI's images without their suffix
        text, regions = _text(row, "no caption", *caption), goal_regions(row.get(GOAL_REGIONS))
        return Record(_stem(name), folder.image(file), (text,), None, regions=regions)

    return make


# GOAL's lists, which others took over: `[{"filename", "caption"}]` for tests, and for training
# `[{"original_filename", "original_caption", "segment": […]}]`. `image` is another spelling of `filename`.
goal_row = list_row((GOAL_IMAGE, "filename", "image"), (GOAL_CAPTION, "caption"))


def sharegpt4v_row(folder: BenchmarkFolder, row: Row) -> Record:
    name, turns = _image_name(row, "image"), row.get("conversations")
    if not isinstance(turns, list) or len(turns) < 2 or not isinstance(turns[1], dict):
        raise RowError("no caption", "has no second turn in its conversations")
    caption = _text(turns[1], "no caption", "value").replace("\n", " ")
    image = (folder.images.find(name) if folder.images.tar else None) or folder.images.at(folder.images.relative(name))
    return Record(name, image, (caption,), None, short=caption.split(". ")[0])


def reads(make: RowReader, start: int = 0, stop: int | None = None) -> SplitReader:
    """Reads a table, or its rows from `start` to `stop`."""
    return lambda folder, split, file: folder.records(islice(folder.rows(file), start, stop), make, split)


def read_long_dci(folder: BenchmarkFolder, split: str, train: BenchmarkFile, test: BenchmarkFile) -> Iterator[Record]:
    """Both of GOAL's lists as one gallery: ids begin with the list that a record comes from. An image in both lists is
    not held out."""
    trained = set()
    for record in folder.records(folder.rows(train), goal_row, split):
        trained.add(record.id)
        yield replace(record, id=f"train/{record.id}")
    for record in folder.records(folder.rows(test), goal_row, split):
        if record.id in trained:
            folder.log.problem("repeated id", record.id, "is in both of GOAL's lists")
        else:
            yield replace(record, id=f"test/{record.id}")


def _vg_row(wanted: Collection[str], folder: BenchmarkFolder, row: Row) -> Record | None:
    if not isinstance(row.get("image_id"), int | str):
        raise RowError("no image", "has no image_id")
    name, url = str(row["image_id"]), row.get("url")
    if name not in wanted:
        return None
    # `VG_100K/2356347.jpg`, the end of the URL: Visual Genome comes in two directories.
    image = "/".join(url.split("/")[-2:]) if isinstance(url, str) and url else f"{name}.jpg"
    found = folder.images.find(image) or folder.image(image)
    return Record(name, found, (_text(row, "no caption", "paragraph"),), None)


def read_vg(folder: BenchmarkFolder, split: str, captions: BenchmarkFile, ids: BenchmarkFile) -> Iterator[Record]:
    """One record per image of the split, in the order of its list, with all paragraphs about it as captions."""
    file = folder.path(ids)
    try:
        names = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(names, list):
        raise ValueError(f"{file} holds {type(names).__name__}, not a list of image ids")
    records: dict[str, Record | None] = dict.fromkeys(map(str, names))
    for record in folder.records(folder.rows(captions), partial(_vg_row, records), split):
        earlier = records[record.id]
        texts = (*(earlier.captions if earlier else ()), *record.captions)
        records[record.id] = replace(record, captions=tuple(dict.fromkeys(texts)))
    for name in (name for name, found in records.items() if found is None):
        folder.log.problem("no caption", str(file), f"image {name} has no paragraph")
    yield from filter(None, records.values())
