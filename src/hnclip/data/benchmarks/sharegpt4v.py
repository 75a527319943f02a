"""ShareGPT4V: 1.2 million captions by a model, of which Long-CLIP keeps the first thousand for validation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from hnclip.core import Problem, Record
from hnclip.data.benchmarks.benchmark import Benchmark, Split, Way
from hnclip.data.benchmarks.folder import Folder, NeededFile
from hnclip.data.benchmarks.rows import checked_caption, make_records, picture_of
from hnclip.data.readers.cells import RowProblem

PAGE = "https://huggingface.co/datasets/Lin-Chen/ShareGPT4V"
CAPTIONS = NeededFile("share-captioner_coco_lcs_sam_1246k_1107.json", "all captions", PAGE)
VALIDATION = 1_000
CHUNK = 1 << 20  # characters read at once
LONGEST_ROW = 1 << 24  # a row that goes on beyond this many characters is damage


def read_captions(folder: Folder, split: str) -> Iterator[Record | Problem]:
    """The first thousand rows are for validation, the rest for training."""

    def make(row: object) -> Record:
        if not isinstance(row, dict):
            raise RowProblem("unreadable row", f"a {type(row).__name__}, not an object")
        name = picture_of(row, "image")
        turns = row.get("conversations")
        if not isinstance(turns, list) or len(turns) < 2 or not isinstance(turns[1], dict):
            raise RowProblem("no caption", "has no second turn in its conversations")
        caption = checked_caption(turns[1].get("value")).replace("\n", " ")
        return Record(name, folder.pictures.find(name), (caption,), split, short=caption.split(". ")[0])

    rows = stream_rows(folder.path(CAPTIONS))
    return make_records(islice(rows, VALIDATION) if split == "validation" else islice(rows, VALIDATION, None), make)


def stream_rows(file: Path) -> Iterator[tuple[str, object]]:
    """The rows of a JSON list one by one: more than a gigabyte is never in memory at once, and whoever wants the
    beginning reads the beginning."""
    decode = json.JSONDecoder().raw_decode
    gap = re.compile(r"[\s,]*")
    # Bytes that are not UTF-8 become surrogates, which no caption may hold.
    with file.open(encoding="utf-8-sig", errors="surrogateescape") as text:
        buffer = text.read(CHUNK)
        at = len(buffer) - len(buffer.lstrip())
        if not buffer.startswith("[", at):
            raise ValueError(f"{file} is not a JSON list")
        at += 1
        number = 0
        while True:
            at = gap.match(buffer, at).end()  # type: ignore[union-attr]  # it matches anywhere
            if buffer.startswith("]", at):
                return
            try:
                row, at = decode(buffer, at)
            except json.JSONDecodeError as error:
                more = text.read(CHUNK)
                if not more or len(buffer) - at > LONGEST_ROW:
                    raise ValueError(f"{file}:[{number}] is not valid JSON: {error.msg}") from error
                buffer, at = buffer[at:] + more, 0
                continue
            yield f"{file}:[{number}]", row
            number += 1


BENCHMARK = Benchmark(
    name="sharegpt4v",
    title="ShareGPT4V",
    licence="CC BY-NC 4.0, under OpenAI's terms of use; pictures as COCO, LAION-CC-SBU and SA-1B",
    page=PAGE,
    splits={
        "train": Split(1_245_901, (Way((CAPTIONS,), read_captions),)),
        "validation": Split(VALIDATION, (Way((CAPTIONS,), read_captions),)),
    },
    images=("data",),
    folders=("sharegpt4v", "ShareGPT4V"),
)
