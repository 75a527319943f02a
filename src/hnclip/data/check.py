"""`hnclip data check`: everything that can be known to be wrong with data before training."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from hnclip.core import InvalidImage, Problem
from hnclip.data.decoding import decode_all
from hnclip.data.duplicates import THUMBNAIL, DuplicateGroup, find_duplicates, image_fingerprint
from hnclip.data.images import ImageTransform
from hnclip.data.records import DataSet
from hnclip.data.texts import TextTransform
from hnclip.data.validate import ADVICE, ERRORS, readable_captions
from hnclip.util.console import progress

STATISTICS = ("mean", "least", "5 %", "50 %", "95 %", "most")
_ORDER = {kind: place for place, kind in enumerate(ADVICE)}


@dataclass(frozen=True)
class CheckResult:
    """What `hnclip data check` found.

    Args:
        splits: numbers of records by declared split.
        total: numbers of records, valid captions and images; with a model, of captions longer than its context and of
            images smaller than its input.
        lengths: statistics of the captions' words and, with a model, tokens, and of the valid images, each once.
        errors, warnings: by kind in the order of `ADVICE`, then in the order of the data.
        groups: duplicates and near-duplicates; each group is also one of the problems.
        unfinished: kinds of which there may be more, because there is too much to compare.
        left_out: records that training skips; `unread` rows of the source are in no record.
    """

    name: str
    splits: Mapping[str, int]
    total: Mapping[str, int]
    lengths: Mapping[str, Mapping[str, float]]
    errors: Mapping[str, Sequence[Problem]]
    warnings: Mapping[str, Sequence[Problem]]
    groups: Sequence[DuplicateGroup]
    unfinished: Sequence[str]
    left_out: int
    unread: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with complete lists."""
        return asdict(self)


def check_data(
    data: DataSet,
    *,
    text_transform: TextTransform | None = None,
    image_transform: ImageTransform | None = None,
    images: bool = True,
) -> CheckResult:
    """Read every caption, decode every image, and compare all with each other.

    Args:
        text_transform, image_transform: of the model that is to be trained: what it cuts, or finds too small.
        images: decode the images; otherwise only captions and the names of images are checked.
    """
    records = data.records
    context = None if text_transform is None else text_transform.context
    side = None if image_transform is None else image_transform.shortest or image_transform.size
    readable, problems = readable_captions(records, text_transform)
    captions = [(row, number, records[row].captions[number]) for row, kept in enumerate(readable) for number in kept]
    texts = [text for *_, text in captions]
    words = np.array([len(text.split()) for text in texts])  # [T]
    # Without a model no caption is cut.
    tokens = words * 0 if text_transform is None else replace(text_transform, context=sys.maxsize)(texts).lengths
    for (row, number, text), length in zip(captions, tokens.tolist()):
        which = f"caption {number + 1}: " if len(records[row].captions) > 1 else ""
        if (place := _garbled(text)) is not None:
            detail = f"{which}… {text[max(0, place - 20) : place + 20]} …"
            problems.append(Problem("garbled caption", records[row].id, detail))
        if context is not None and length > context:
            detail = f"{which}{length} tokens; the model reads {context}"
            problems.append(Problem("cut caption", records[row].id, detail))

    keys = [record.image.key for record in records]
    sources = {key: record.image for key, record in zip(keys, records)}
    shapes, contents = dict[str, tuple[int, int]](), dict[str, bytes]()  # of valid images
    fingerprints, invalid = dict[bytes, bytes | None](), dict[str, Problem]()
    with progress("reading images") as bar:
        for key, result in decode_all(sources if images else {}, THUMBNAIL, progress=bar.iterate):
            if isinstance(result, Problem):
                invalid[key] = result
                continue
            try:
                if image_transform is not None:
                    image_transform.resized(*result.size)  # it may refuse an image that is valid otherwise
            except InvalidImage as error:
                invalid[key] = Problem(error.kind, key, str(error))
                continue
            shapes[key], contents[key] = result.size, result.content
            fingerprints[result.content] = image_fingerprint(result.pixels)
    for record, key in zip(records, keys):
        if key in invalid:
            problems.append(replace(invalid[key], where=record.id))
        elif side is not None and min(shapes.get(key, (side,))) < side:
            detail = "{} × {} pixels, the model takes {}".format(*shapes[key], side)
            problems.append(Problem("small image", record.id, detail))
    ids = Counter(record.id for record in records)
    problems += [Problem("repeated id", id, f"{count} records have this id") for id, count in ids.items() if count > 1]
    groups, unfinished = find_duplicates(
        records,
        contents,
        {content: found for content, found in fingerprints.items() if found is not None},
        [(row, text) for row, _, text in captions],
    )
    problems += [group.to_problem() for group in groups]
    problems = sorted([*data.problems, *problems], key=lambda problem: _ORDER[problem.kind])
    levels: tuple[dict[str, list[Problem]], dict[str, list[Problem]]] = ({}, {})
    for problem in problems:
        levels[problem.kind not in ERRORS].setdefault(problem.kind, []).append(problem)
    total = {"records": len(records), "captions": len(texts), "images": len(sources)}
    sizes = np.array(list(shapes.values())).reshape(-1, 2)  # [K, 2]
    measures = {"words": words, "width": sizes[:, 0], "height": sizes[:, 1], "megapixels": sizes.prod(1) / 1e6}
    if context is not None:
        total["cut"] = int((tokens > context).sum())
        measures = {"words": words, "tokens": tokens, **measures}
    if side is not None and images:
        total["small"] = int((sizes.min(1) < side).sum())
    return CheckResult(
        name=data.name,
        splits=data.splits(),
        total=total,
        lengths={name: _statistics(values) for name, values in measures.items() if len(values)},
        errors=levels[0],
        warnings=levels[1],
        groups=sorted(groups, key=lambda group: _ORDER[group.kind]),
        unfinished=unfinished,
        left_out=sum(not kept or key in invalid for kept, key in zip(readable, keys)),
        unread=sum(problem.kind in ERRORS for problem in data.problems),
    )


def _garbled(text: str) -> int | None:
    """Where letters were lost or decoded in the wrong encoding."""
    if text.isascii():
        return None
    from ftfy.badness import is_bad

    found = re.search("\ufffd", text) or (re.search(r"[^\x00-\x7f]", text) if is_bad(text) else None)
    return found and found.start()


def _statistics(values: np.ndarray) -> dict[str, float]:
    return dict(zip(STATISTICS, [float(np.mean(values)), *np.quantile(values, [0, 0.05, 0.5, 0.95, 1]).tolist()]))
