"""Problems of data: their kinds, invalid records skipped and listed, and limits on their share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hnclip.core import Problem, Record
from hnclip.data.image_cache import load_images
from hnclip.data.images import ImageTransform
from hnclip.data.records import DataSet
from hnclip.data.texts import TextTransform
from hnclip.util.console import Iterate
from hnclip.util.files import replace_file

SHOWN = 5  # problems that an error message shows


@dataclass(frozen=True)
class ValidRecords:
    """Records whose images decode and whose captions hold words, and the problems of all others and of skipped
    captions."""

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
    """Skip records whose image cannot be decoded or that have no caption with a word.

    A record keeps its other captions when one is invalid. The images are in the cache afterwards.
    """
    readable, problems = drop_unreadable(records, text_transform)
    if not readable:
        return ValidRecords((), tuple(problems))
    loaded = load_images([record.image for record in readable], image_transform, cache=cache, progress=progress)
    problems += [replace(problem, where=readable[index].id) for index, problem in loaded.problems.items()]
    return ValidRecords(tuple(readable[index] for index in loaded.kept), tuple(problems))


def drop_unreadable(records: Sequence[Record], text_transform: TextTransform) -> tuple[list[Record], list[Problem]]:
    """Records with those of their captions that hold a word; a record without any is skipped."""
    readable: list[Record] = []
    problems: list[Problem] = []
    for record in records:
        reasons = text_transform.validate(record.captions)
        for caption, reason in zip(record.captions, reasons, strict=True):
            if reason:
                kind = "bad text" if "surrogate" in reason else "empty caption"
                problems.append(Problem(kind, record.id, f"the caption is {caption!r}: {reason}"))
        if not any(reasons) and record.captions:
            readable.append(record)
            continue
        kept = [index for index, reason in enumerate(reasons) if reason is None]
        if kept:
            captions = tuple(record.captions[index] for index in kept)
            filtered = tuple(record.filtered[index] for index in kept) if record.filtered else ()
            readable.append(replace(record, captions=captions, filtered=filtered))
        elif not reasons:
            problems.append(Problem("no caption", record.id, "the record has no caption"))
    return readable, problems


def check_share(lost: int, total: int, problems: Sequence[Problem], *, what: str, largest: float, name: str) -> None:
    """Raise ValueError if more than the share `largest` of the data is invalid: `lost` of `total`."""
    if lost <= largest * total:
        return
    limit = f"more than {largest:.1%} (--read.max-bad)" if largest else "and none may be skipped"
    lines = [f"{lost} of {total} {what} of {name} are invalid, {limit}:"]
    lines += [f"  {problem.kind}: {problem.where}: {problem.detail}" for problem in problems[:SHOWN]]
    lines += [f"  and {len(problems) - SHOWN} more"] * (len(problems) > SHOWN)
    raise ValueError("\n".join([*lines, f"List all of them with: hnclip data check {name}"]))


def check_rows(data: DataSet, *, largest: float) -> None:
    """`check_share` for the rows of all splits that could not be read."""
    total = len(data.records) + len(data.problems)
    check_share(len(data.problems), total, data.problems, what="rows", largest=largest, name=data.name)


def write_problems(path: Path, problems: Sequence[Problem]) -> None:
    """One JSON object per line."""
    with replace_file(path) as partial, partial.open("w", encoding="utf-8") as file:
        for problem in problems:
            file.write(json.dumps(asdict(problem)) + "\n")
