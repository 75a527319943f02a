"""The records that can be used, and a list of those that cannot: nothing is replaced, nothing is dropped unsaid."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hnclip.core import Problem, Record
from hnclip.data.cache import Progress, load_pictures
from hnclip.data.images import ImageTransform
from hnclip.data.readers.columns import invalid_text
from hnclip.data.records import DataSet
from hnclip.data.texts import TextTransform
from hnclip.util.files import replace_file

SHOWN = 5  # problems that an error message shows


@dataclass(frozen=True)
class Sound:
    """Records whose pictures decode and whose captions hold words; `problems` are those of all others, and of single
    captions that other records had to do without."""

    records: tuple[Record, ...]
    problems: tuple[Problem, ...]


def sound_records(
    records: Sequence[Record],
    text_transform: TextTransform,
    image_transform: ImageTransform,
    *,
    cache: Path | None,
    progress: Progress = iter,
) -> Sound:
    """Leave out records whose picture cannot be decoded or that have no caption a model could read.

    A record keeps its other captions when one is bad. The pictures are in the cache afterwards, so `prepare` finds them
    there.
    """
    readable, problems = readable_records(records, text_transform)
    if not readable:
        return Sound((), tuple(problems))
    loaded = load_pictures([record.image for record in readable], image_transform, cache=cache, progress=progress)
    problems += [replace(problem, where=readable[index].id) for index, problem in loaded.problems.items()]
    return Sound(tuple(readable[index] for index in loaded.kept), tuple(problems))


def readable_records(records: Sequence[Record], text_transform: TextTransform) -> tuple[list[Record], list[Problem]]:
    """Records with those of their captions that a model can read something in; without any, a record is left out."""
    readable: list[Record] = []
    problems: list[Problem] = []
    for record, bad in zip(records, _unreadable(records, text_transform)):
        problems += [Problem(_kind(record.captions[index]), record.id, why) for index, why in bad.items()]
        captions = tuple(text for index, text in enumerate(record.captions) if index not in bad)
        if captions:
            filtered = tuple(text for index, text in enumerate(record.filtered) if index not in bad)
            readable.append(replace(record, captions=captions, filtered=filtered))
        elif not bad:
            problems.append(Problem("no caption", record.id, "the record has no caption"))
    return readable, problems


def check_share(lost: int, total: int, problems: Sequence[Problem], *, what: str, largest: float, name: str) -> None:
    """Refuse data of which a larger share than `largest` cannot be used: `lost` of `total`, because of `problems`."""
    if lost <= largest * total:
        return
    shown = "\n".join(f"  {problem.kind}: {problem.where}: {problem.detail}" for problem in problems[:SHOWN])
    more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    limit = (
        f"more than the {largest:.1%} that may be left out (--read.max-bad)" if largest else "and none may be left out"
    )
    raise ValueError(
        f"{lost} of {total} {what} of {name} cannot be used, {limit}:\n{shown}{more}\n"
        f"See all of them with: hnclip data check {name}"
    )


def check_rows(data: DataSet, *, largest: float) -> None:
    """The same of the rows that its reader could make no record of, in whichever split they are."""
    total = len(data.records) + len(data.problems)
    check_share(len(data.problems), total, data.problems, what="rows", largest=largest, name=data.name)


def write_problems(path: Path, problems: Sequence[Problem]) -> None:
    """One JSON object per line."""
    with replace_file(path) as partial, partial.open("w", encoding="utf-8") as file:
        for problem in problems:
            file.write(json.dumps(asdict(problem)) + "\n")


def _unreadable(records: Sequence[Record], text_transform: TextTransform) -> list[dict[int, str]]:
    """For each record its captions in which there is nothing to read, by index, and why."""
    try:
        text_transform([caption for record in records for caption in record.captions])
    except ValueError:
        return [
            {index: why for index, caption in enumerate(record.captions) if (why := _why(caption, text_transform))}
            for record in records
        ]
    return [{} for _ in records]


def _why(caption: str, text_transform: TextTransform) -> str:
    try:
        text_transform([caption])
    except ValueError as error:
        return str(error).replace("texts[0]", "the caption")
    return ""


def _kind(caption: str) -> str:
    return "bad text" if invalid_text(caption) else "empty caption"
