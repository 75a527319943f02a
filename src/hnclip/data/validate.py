"""The kinds of problems of data; invalid records are skipped and listed, and their share is limited."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from hnclip.core import Problem, Record
from hnclip.data.image_cache import load_images
from hnclip.data.images import ImageTransform
from hnclip.data.records import DataSet
from hnclip.data.texts import TextTransform, unreadable
from hnclip.util.console import Iterate
from hnclip.util.files import replace_file

SHOWN = 5  # problems that an error message shows

# The record is invalid: it is skipped and listed, and `hnclip data check` fails.
ERRORS = {
    "unreadable row": "not valid in its format → correct the rows, or export the table again",
    "no image": "a row without an image → add the images' paths, or remove the rows",
    "no caption": "an image without a caption → write captions, or remove the images",
    "empty caption": "a caption without a word → write captions, or remove the rows",
    "bad text": "not UTF-8, or half of a surrogate pair → save the files as UTF-8",
    "missing image": "→ name the images' directory (--read.images), or search by file name (--read.match name)",
    "corrupt image": "damaged, or no format that Pillow reads → copy the files again, or remove the records",
    "truncated image": "the file ends before the image does → copy or download the files again",
    "oversized image": "more pixels than are decoded → resize the images, or remove the records",
    "unusual image": "no standard conversion to 8 bits → convert the images to 8-bit RGB or greyscale",
    "repeated id": "two records with the same id → give each record a unique id",
    "shared image": "one image in two splits → keep it in one: no model may be tested on its training images",
}

# Worth knowing before training; nothing is skipped.
WARNINGS = {
    "matched by name": "found by file name, because the path does not exist → make sure that these are meant",
    "other encoding": "read in another encoding than UTF-8 → check accents and quotes, or save the files as UTF-8",
    "other count": "not the number of records of the benchmark's paper → compare your files (hnclip docs benchmarks)",
    "unread table": "a table in a folder of images with .txt captions → name the table itself to read it",
    "shared caption": "the same caption in two splits → keep the images in one split if they show the same",
    "same caption": "no model can distinguish their images by them → write captions that do, or keep one",
    "similar caption": "nearly the same words → describe what differs, or declare a group (--read.group-column)",
    "same image": "one image under several names in one split → keep one, with all the captions",
    "similar image": "they look nearly the same → keep one, or declare a group, which stays in one split",
    "garbled caption": "lost (U+FFFD) or wrongly decoded (â€™ for ’) letters → export the table again, in UTF-8",
    "cut caption": "longer than the model's context → use a longer one (hnclip docs models), or put details first",
    "small image": "smaller than the model's input → use larger images if there are any",
}
ADVICE = {**ERRORS, **WARNINGS}


class ValidRecords(NamedTuple):
    """Records whose images decode and whose captions hold words, and the problems of the others and their captions."""

    records: tuple[Record, ...]
    problems: tuple[Problem, ...]


def drop_invalid(
    records: Sequence[Record],
    text_transform: TextTransform,
    image_transform: ImageTransform,
    *,
    cache: Path | None,
    progress: Iterate = iter,
) -> ValidRecords:
    """Skip captions without a word, and records without a caption or whose image cannot be decoded. The images are in
    the cache afterwards."""
    readable, problems = drop_unreadable(records, text_transform)
    loaded = load_images([record.image for record in readable], image_transform, cache=cache, progress=progress)
    problems += [replace(problem, where=readable[index].id) for index, problem in loaded.problems.items()]
    return ValidRecords(tuple(readable[index] for index in loaded.kept), tuple(problems))


def drop_unreadable(records: Sequence[Record], text_transform: TextTransform) -> tuple[list[Record], list[Problem]]:
    """Records with those of their captions that hold a word; a record without any is skipped."""
    readable, problems = readable_captions(records, text_transform)
    found = []
    for record, kept in zip(records, readable, strict=True):
        if len(kept) < len(record.captions):
            captions = tuple(record.captions[number] for number in kept)
            filtered = tuple(record.filtered[number] for number in kept) if record.filtered else ()
            record = replace(record, captions=captions, filtered=filtered)
        found += [record] if kept else []
    return found, problems


def readable_captions(
    records: Sequence[Record], text_transform: TextTransform | None
) -> tuple[list[list[int]], list[Problem]]:
    """For each record the numbers of the captions that the model can read, or that hold any text if there is no model;
    and the problems of the others."""
    captions = [caption for record in records for caption in record.captions]
    reasons = iter(map(unreadable, captions) if text_transform is None else text_transform.validate(captions))
    readable: list[list[int]] = []
    problems: list[Problem] = []
    for record in records:
        own = list(islice(reasons, len(record.captions)))
        readable.append([number for number, reason in enumerate(own) if reason is None])
        for caption, reason in zip(record.captions, own):
            if reason is not None:
                kind = "bad text" if "surrogate" in reason else "empty caption"
                problems.append(Problem(kind, record.id, f"the caption is {caption!r}: {reason}"))
        if not own:
            problems.append(Problem("no caption", record.id, "the record has no caption"))
    return readable, problems


def check_share(lost: int, total: int, problems: Sequence[Problem], *, what: str, largest: float, name: str) -> None:
    """Raise ValueError if more than the share `largest` of the data is invalid: `lost` of `total`."""
    if lost <= largest * total:
        return
    limit = f"more than {largest:.1%} (--read.max-bad)" if largest else "and none may be skipped"
    lines = [f"{lost} of {total} {what} of {name} are invalid, {limit}:", *list_problems(problems)]
    kinds = dict.fromkeys(problem.kind for problem in problems[:SHOWN])
    lines += [f"{kind}: {ADVICE[kind]}" for kind in kinds if kind in ADVICE]
    raise ValueError("\n".join([*lines, f"List all of them with: hnclip data check {name}"]))


def list_problems(problems: Sequence[Problem]) -> list[str]:
    """Lines of text with the first problems."""
    lines = [f"  {problem.kind}: {problem.where}: {problem.detail}" for problem in problems[:SHOWN]]
    return [*lines, *[f"  and {len(problems) - SHOWN:,} more"] * (len(problems) > SHOWN)]


def check_rows(data: DataSet, *, largest: float) -> None:
    """`check_share` for the rows of all splits that could not be read."""
    total = len(data.records) + len(data.problems)
    check_share(len(data.problems), total, data.problems, what="rows", largest=largest, name=data.name)


def write_problems(path: Path, problems: Sequence[Problem]) -> None:
    """One JSON object per line."""
    with replace_file(path) as partial, partial.open("w", encoding="utf-8") as file:
        for problem in problems:
            file.write(json.dumps(asdict(problem)) + "\n")
