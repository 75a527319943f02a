"""Files of the published benchmarks as rows of one form: GOAL's, with an id, and a short caption if there is one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hnclip.data.readers.columns import GOAL_CAPTION, GOAL_IMAGE, GOAL_REGIONS, Row
from hnclip.data.readers.rows import decode_text, read_rows
from hnclip.data.records import ReadLog

COLUMNS = ("id", GOAL_IMAGE, GOAL_CAPTION, GOAL_REGIONS, "short")


@dataclass(frozen=True)
class BenchmarkFile:
    """A file, or directory of files, that a benchmark is read from: where it comes from, and its path in the folder as
    published, followed by other names that it goes by."""

    origin: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.names[0]}, from {self.origin}"


# Reads the rows of a split from its files, given a ReadLog and their paths: the place of each, and its COLUMNS.
SplitReader = Callable[..., Iterable[tuple[str, Row]]]


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


def _first(row: Row, keys: Sequence[str]) -> Any:
    return next((row[key] for key in keys if row.get(key) is not None), None)


def list_rows(image: Sequence[str], caption: Sequence[str], parts: Sequence[str] = ()) -> SplitReader:
    """Reads a table with an image's name and a caption under the first of these keys that a row has, and perhaps GOAL's
    regions; with `parts` only rows of which `split` is one of these. Or a directory with a .txt for each .jpg, whose
    first line is the caption.

    The directories of a list are those of its author's machine, so that only the base name counts. Its stem is the id,
    after `prefix`.
    """

    def read(log: ReadLog, path: Path, prefix: str = "") -> Iterator[tuple[str, Row]]:
        for place, row in _text_rows(path) if path.is_dir() else read_rows(path, log):
            if parts and not isinstance(row.get("split"), str):
                log.problem("unreadable row", f"{path}:{place}", "has no split")
            elif not parts or row["split"] in parts:
                name = _first(row, image)
                stem = ""
                if isinstance(name, str):
                    name = re.split(r"[/\\]", name)[-1]
                    stem, dot, _ = name.rpartition(".")
                    stem, name = stem or name, name if dot or not name else f"{name}.jpg"  # IIW's have no suffix
                yield f"{path.name}:{place}", {
                    "id": prefix + stem,
                    GOAL_IMAGE: name,
                    GOAL_CAPTION: _first(row, caption),
                    GOAL_REGIONS: row.get(GOAL_REGIONS),
                }

    return read


def _text_rows(folder: Path) -> Iterator[tuple[str, Row]]:
    for text in sorted(folder.glob("*.txt"), key=lambda text: (len(text.stem), text.stem)):
        lines = decode_text(text.read_bytes())[0].splitlines()
        yield text.name, {"filename": f"{text.stem}.jpg", "caption": lines[0] if lines else ""}


# GOAL's lists, which others took over: `[{"filename", "caption"}]` for tests, and for training
# `[{"original_filename", "original_caption", "segment": […]}]`. `image` is another spelling of `filename`.
goal_rows = list_rows((GOAL_IMAGE, "filename", "image"), (GOAL_CAPTION, "caption"))


def long_dci_rows(log: ReadLog, train: Path, test: Path) -> Iterator[tuple[str, Row]]:
    """Both of GOAL's lists as one gallery: ids begin with the list that a record comes from. An image in both lists is
    one record of the training list, so it is not held out."""
    yield from goal_rows(log, train, "train/")
    yield from goal_rows(log, test, "test/")


def sharegpt4v_rows(start: int, stop: int | None) -> SplitReader:
    def read(log: ReadLog, path: Path) -> Iterator[tuple[str, Row]]:
        for place, row in islice(read_rows(path, log), start, stop):
            turns = row.get("conversations")
            answer = turns[1] if isinstance(turns, list) and len(turns) > 1 else None
            text = answer.get("value") if isinstance(answer, dict) else None
            caption = text.strip().replace("\n", " ") if isinstance(text, str) else text
            short = caption.split(". ")[0] if isinstance(caption, str) else None
            cells = {"id": row.get("image"), GOAL_IMAGE: row.get("image"), GOAL_CAPTION: caption, "short": short}
            yield f"{path.name}:{place}", cells

    return read


def vg_rows(log: ReadLog, captions: Path, ids: Path) -> Iterator[tuple[str, Row]]:
    """The paragraphs about the images of a split; an image may have several."""
    try:
        names = json.loads(ids.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{ids} is not valid JSON: {error}") from error
    if not isinstance(names, list):
        raise ValueError(f"{ids} holds {type(names).__name__}, not a list of image ids")
    missing = dict.fromkeys(map(str, names))
    wanted = set(missing)
    for place, row in read_rows(captions, log):
        name, url = row.get("image_id"), row.get("url")
        if not isinstance(name, int | str):
            log.problem("no image", f"{captions}:{place}", "has no image_id")
        elif str(name) in wanted:
            missing.pop(str(name), None)
            # `VG_100K/2356347.jpg`, the end of the URL: Visual Genome comes in two directories.
            image = "/".join(url.split("/")[-2:]) if isinstance(url, str) and url else f"{name}.jpg"
            yield f"{captions.name}:{place}", {"id": name, GOAL_IMAGE: image, GOAL_CAPTION: row.get("paragraph")}
    for name in missing:
        log.problem("no caption", str(ids), f"image {name} has no paragraph")
