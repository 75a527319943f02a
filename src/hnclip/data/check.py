"""`hnclip data check`: everything that can be known to be wrong with data before training."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np

from hnclip.core import ImageSource, InvalidImage, Problem, orientation, upright_shape
from hnclip.data.decoding import cpu_count, decoding_threads, in_order
from hnclip.data.duplicates import THUMBNAIL, DuplicateGroup, find_duplicates, image_fingerprint
from hnclip.data.images import ImageTransform, preprocess_image
from hnclip.data.problems import ADVICE, ERRORS, WARNINGS
from hnclip.data.records import DataSet
from hnclip.data.texts import TextTransform
from hnclip.data.validate import readable_captions
from hnclip.util.console import progress
from hnclip.util.tables import text_table
from hnclip.util.text import counted

WIDTH = 110  # columns of the text; longer lines are cut
AHEAD = 128  # images that are decoded ahead; no pixels are kept
MEASURES = {"width": ",.0f", "height": ",.0f", "megapixels": ".2f"}
STATISTICS = ("mean", "least", "5 %", "50 %", "95 %", "most")
_ORDER = {kind: place for place, kind in enumerate(ADVICE)}


@dataclass(frozen=True)
class CheckResult:
    """What `hnclip data check` found.

    Args:
        total, splits: numbers of records, images and valid captions, statistics of their words and, with a model, of
            its tokens, and captions that it cuts; of everything, and by declared split.
        sizes: of the valid images, each once: statistics of width, height and megapixels, formats, modes, how many are
            rotated by EXIF, and with a model how many are smaller than its input. None if they were not decoded.
        problems: by kind in the order of data/problems.py, then in the order of the data.
        groups: duplicates and near-duplicates; each group is also one of the problems.
        unfinished: kinds of which there may be more, because there is too much to compare.
        left_out: records that training skips.
        unread: rows of the source that are in no record.
        context, side: longest text in tokens and shortest side in pixels that the model takes, if one was given.
    """

    name: str
    total: Mapping[str, Any]
    splits: Mapping[str, Mapping[str, Any]]
    sizes: Mapping[str, Any] | None
    problems: Sequence[Problem]
    groups: Sequence[DuplicateGroup]
    unfinished: Sequence[str]
    left_out: int
    unread: int
    context: int | None
    side: int | None

    @property
    def errors(self) -> dict[str, list[Problem]]:
        return self._by_kind(ERRORS)

    @property
    def warnings(self) -> dict[str, list[Problem]]:
        return self._by_kind(WARNINGS)

    def _by_kind(self, kinds: Mapping[str, str]) -> dict[str, list[Problem]]:
        found: dict[str, list[Problem]] = {}
        for problem in self.problems:
            if problem.kind in kinds:
                found.setdefault(problem.kind, []).append(problem)
        return found

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with complete lists."""
        levels = {
            level: {
                kind: [{"where": problem.where, "detail": problem.detail} for problem in problems]
                for kind, problems in found.items()
            }
            for level, found in (("errors", self.errors), ("warnings", self.warnings))
        }
        others = {name: value for name, value in vars(self).items() if name != "problems"}
        return {**others, **levels, "groups": [asdict(group) for group in self.groups]}

    def to_text(self, listed: int = 5) -> str:
        """For a terminal, with the first `listed` problems of each kind."""
        counts = ", ".join(counted(self.total[f"{noun}s"], noun) for noun in ("record", "caption", "image"))
        splits = "".join(f"; {name} {counts['records']:,}" for name, counts in self.splits.items())
        paragraphs = [
            _printable(f"{self.name}: {counts}{splits}"),
            *(self._kind_text("ERROR", kind, found, listed) for kind, found in self.errors.items()),
            *(self._kind_text("warning", kind, found, listed) for kind, found in self.warnings.items()),
            *(f"There may be more of {kind!r}: there is too much to compare." for kind in self.unfinished),
        ]
        return "\n\n".join([*paragraphs, self._caption_table(), self._image_table(), self._verdict()])

    def _kind_text(self, level: str, kind: str, problems: Sequence[Problem], listed: int) -> str:
        sizes = [len(group.ids) for group in self.groups if group.kind == kind]
        extent = f"{sum(sizes):,} records in {counted(len(sizes), 'group')}" if sizes else f"{len(problems):,}"
        lines = [f"{level}  {kind}: {extent}"]
        lines.append(f"  {ADVICE[kind]}")
        for problem in problems[:listed]:
            line = _printable(f"    {problem.where}: {problem.detail}")
            lines.append(line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…")
        return "\n".join([*lines, *[f"    and {len(problems) - listed:,} more"] * (len(problems) > listed)])

    def _caption_table(self) -> str:
        parts = {**(self.splits if len(self.splits) > 1 else {}), "all": self.total}
        rows = [
            [f"{unit}, {_printable(name)}", f"{counts['captions']:,}", *_cells(counts[unit])]
            for unit in ("words", "tokens")[: 1 if self.context is None else 2]
            for name, counts in parts.items()
        ]
        table = text_table(["captions", "number", *STATISTICS], rows)
        if self.context is None:
            return table
        cut, captions = self.total["cut"], max(1, self.total["captions"])
        return f"{table}\n{cut:,} longer than the model's {self.context} tokens ({cut / captions:.1%})"

    def _image_table(self) -> str:
        if self.sizes is None or self.sizes["width"] is None:
            return "The images were not decoded." if self.sizes is None else "No image could be decoded."
        rows = [[name, *_cells(self.sizes[name], form)] for name, form in MEASURES.items()]
        tallies = {**self.sizes["formats"], **self.sizes["modes"]}
        notes = [", ".join(f"{name} {count:,}" for name, count in tallies.items())]
        notes += [f"{self.sizes['rotated']:,} rotated by EXIF"] if self.sizes["rotated"] else []
        notes += [] if self.side is None else [f"{self.sizes['small']:,} smaller than the model's {self.side}"]
        return f"{text_table(['images', *STATISTICS], rows)}\n{'; '.join(notes)}"

    def _verdict(self) -> str:
        if self.left_out == self.total["records"]:
            return "Nothing to train on: no record can be used."
        if not self.errors:
            ready = "Ready to train, as far as captions show" if self.sizes is None else "Ready to train"
            return f"{ready}; look at the warnings first." if self.warnings else f"{ready}."
        records = f"{self.left_out:,} of {counted(self.total['records'], 'record')}"
        return f"Not ready: {records} will be skipped in training, and {counted(self.unread, 'row')} of the source."


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
            detail = f"{which}{length} tokens, of which the model reads {context}"
            problems.append(Problem("cut caption", records[row].id, detail))

    keys = [record.image.key for record in records]
    sources = {key: record.image for key, record in zip(keys, records)}
    found = dict(zip(sources, inspect_images(list(sources.values()), image_transform))) if images else {}
    valid = {key: info for key, info in found.items() if isinstance(info, ImageInfo)}
    for record, key in zip(records, keys):
        info = found.get(key)
        if isinstance(info, Problem):
            problems.append(replace(info, where=record.id))
        elif info is not None and side is not None and min(info.size) < side:
            detail = "{} × {} pixels, the model takes {}".format(*info.size, side)
            problems.append(Problem("small image", record.id, detail))
    ids = Counter(record.id for record in records)
    problems += [Problem("repeated id", id, f"{count} records have this id") for id, count in ids.items() if count > 1]
    groups, unfinished = find_duplicates(
        records,
        {key: info.content for key, info in valid.items()},
        {info.content: info.fingerprint for info in valid.values() if info.fingerprint is not None},
        [(row, text) for row, _, text in captions],
    )
    problems += [group.to_problem() for group in groups]

    splits = np.array([record.split for record in records], dtype=object)  # [N]
    owner = np.array([row for row, *_ in captions], dtype=np.int64)  # [T]

    def counts(chosen: np.ndarray) -> dict[str, Any]:
        own = chosen[owner]  # [T]
        return {
            "records": int(chosen.sum()),
            "captions": int(own.sum()),
            "images": len({keys[row] for row in np.flatnonzero(chosen)}),
            "words": _statistics(words[own]),
            "tokens": None if context is None else _statistics(tokens[own]),
            "cut": None if context is None else int((tokens[own] > context).sum()),
        }

    return CheckResult(
        name=data.name,
        total=counts(np.ones(len(records), dtype=bool)),
        splits={name: counts(splits == name) for name in dict.fromkeys(splits.tolist()) if name is not None},
        sizes=_sizes(list(valid.values()), side) if images else None,
        problems=sorted([*data.problems, *problems], key=lambda problem: _ORDER[problem.kind]),
        groups=sorted(groups, key=lambda group: _ORDER[group.kind]),
        unfinished=unfinished,
        left_out=sum(not kept or (images and key not in valid) for kept, key in zip(readable, keys)),
        unread=sum(problem.kind in ERRORS for problem in data.problems),
        context=context,
        side=side,
    )


@dataclass(frozen=True)
class ImageInfo:
    """A valid image without its pixels: hash of its bytes, fingerprint (None: too plain), size when upright."""

    content: bytes
    fingerprint: bytes | None
    size: tuple[int, int]
    format: str
    mode: str
    rotated: bool


def inspect_images(sources: Sequence[ImageSource], transform: ImageTransform | None) -> list[ImageInfo | Problem]:
    """Decode all of these in threads; a model's transform may refuse images that are valid otherwise."""
    with decoding_threads(cpu_count()) as pool, progress("reading images") as bar:
        found = in_order(pool, partial(_inspect, transform=transform), sources, AHEAD)
        return [info for info, _ in zip(found, bar.iterate(sources), strict=True)]


def _inspect(source: ImageSource, transform: ImageTransform | None) -> ImageInfo | Problem:
    try:
        content = source.read()
        image = source.decode(content)
        thumbnail = preprocess_image(image, THUMBNAIL).numpy()
        size, turned = upright_shape(image), orientation(image) > 1
        if transform is not None:
            transform.resized(*size)
    except InvalidImage as error:
        return Problem(error.kind, source.key, str(error))
    fingerprint = image_fingerprint(thumbnail)
    return ImageInfo(sha256(content).digest(), fingerprint, size, image.format or "no format", image.mode, turned)


def _garbled(text: str) -> int | None:
    """Where letters were lost or decoded in the wrong encoding."""
    if text.isascii():
        return None
    from ftfy.badness import is_bad

    found = re.search("\ufffd", text) or (re.search(r"[^\x00-\x7f]", text) if is_bad(text) else None)
    return found and found.start()


def _sizes(images: Sequence[ImageInfo], side: int | None) -> dict[str, Any]:
    sizes = np.array([image.size for image in images]).reshape(-1, 2)  # [N, 2]
    measures = (*sizes.T, sizes.prod(1) / 1e6)
    return {
        **{name: _statistics(values) for name, values in zip(MEASURES, measures, strict=True)},
        "formats": dict(Counter(image.format for image in images).most_common()),
        "modes": dict(Counter(image.mode for image in images).most_common()),
        "rotated": sum(image.rotated for image in images),
        "small": None if side is None else int((sizes.min(1) < side).sum()),
    }


def _statistics(values: np.ndarray) -> dict[str, float] | None:
    """Mean, least, three percentiles and greatest; None if there are no values."""
    if not len(values):
        return None
    return dict(zip(STATISTICS, [float(np.mean(values)), *np.quantile(values, [0, 0.05, 0.5, 0.95, 1]).tolist()]))


def _cells(statistics: Mapping[str, float] | None, form: str = ",.0f") -> list[str]:
    return [""] * len(STATISTICS) if statistics is None else [format(value, form) for value in statistics.values()]


def _printable(text: str) -> str:
    """Control characters and lone surrogates are escaped."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
