"""Files of the published benchmarks as rows with the same columns."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from hnclip.data.readers.columns import GOAL_CAPTION, GOAL_IMAGE, GOAL_REGIONS, Columns, Row
from hnclip.data.readers.rows import decode_text, read_rows
from hnclip.data.records import ReadLog

COLUMNS = Columns(("caption",), "image", id="id", short="short", regions="regions")
# Of GOAL's lists, which others took over, for training and for tests, of DOCCI, and of IIW: image and caption.
_KEYS = (GOAL_IMAGE, "filename", "image_file", "image/key", "image"), (GOAL_CAPTION, "caption", "description", "IIW")


# Reads the rows of a split from its files, given a ReadLog and their paths: the place of each, and its COLUMNS.
SplitReader = Callable[..., Iterator[tuple[str, Row]]]


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


def list_rows(log: ReadLog, path: Path, parts: Sequence[str] = (), prefix: str = "") -> Iterator[tuple[str, Row]]:
    """The rows of a list of images and captions; of rows with a `split` only those in `parts`. A directory has a .txt
    for each .jpg, whose first line is the caption.

    The directories of a list are those of its author's machine, so that only the base name of an image counts. Its stem
    is the id, after `prefix`.
    """
    for place, row in _text_rows(path) if path.is_dir() else read_rows(path, log):
        if parts and row.get("split", parts[0]) not in parts:
            continue
        name, caption = (next((row[key] for key in keys if row.get(key) is not None), None) for keys in _KEYS)
        stem = ""
        if isinstance(name, str):
            name = re.split(r"[/\\]", name)[-1]
            stem, dot, _ = name.rpartition(".")
            stem, name = stem or name, name if dot or not name else f"{name}.jpg"  # IIW's have no suffix
        cells = {"id": prefix + stem, "image": name, "caption": caption, "regions": row.get(GOAL_REGIONS)}
        yield f"{path.name}:{place}", cells


def _text_rows(folder: Path) -> Iterator[tuple[str, Row]]:
    for text in sorted(folder.glob("*.txt"), key=lambda text: (len(text.stem), text.stem)):
        lines = decode_text(text.read_bytes())[0].splitlines()
        yield text.name, {"filename": f"{text.stem}.jpg", "caption": lines[0] if lines else ""}


def long_dci_rows(log: ReadLog, train: Path, test: Path) -> Iterator[tuple[str, Row]]:
    """Both of GOAL's lists as one gallery: ids begin with the list that a record comes from. An image in both lists is
    one record of the training list, so it is not held out."""
    yield from list_rows(log, train, prefix="train/")
    yield from list_rows(log, test, prefix="test/")


def sharegpt4v_rows(log: ReadLog, path: Path, start: int, stop: int | None) -> Iterator[tuple[str, Row]]:
    """The rows from `start` to `stop` of a list of conversations. The second turn is the caption, and its first
    sentence the short one."""
    for place, row in islice(read_rows(path, log), start, stop):
        name, turns = row.get("image"), row.get("conversations")
        answer = turns[1] if isinstance(turns, list) and len(turns) > 1 else None
        caption = answer.get("value") if isinstance(answer, dict) else None
        cells = {"id": name, "image": name, "caption": caption}
        if isinstance(caption, str):
            caption = caption.strip().replace("\n", " ")
            cells |= {"caption": caption, "short": caption.split(". ")[0]}
        yield f"{path.name}:{place}", cells


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
            yield f"{captions.name}:{place}", {"id": name, "image": image, "caption": row.get("paragraph")}
    for name in missing:
        log.problem("no caption", str(ids), f"image {name} has no paragraph")
