"""`hnclip data check`: everything that can be known to be wrong with data before training."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from textwrap import wrap
from typing import Any

import numpy as np

from hnclip.core import ImageSource, InvalidImage, Problem, Record, orientation
from hnclip.data.decoding import cpu_count, decoding_threads, in_order
from hnclip.data.duplicates import THUMBNAIL, DuplicateGroup, ImageInfo, find_duplicates, image_fingerprint
from hnclip.data.images import ImageTransform, checked_size, preprocess_image
from hnclip.data.problems import ADVICE, ERRORS, WARNINGS
from hnclip.data.readers.columns import invalid_text
from hnclip.data.records import DataSet
from hnclip.data.texts import TextTransform
from hnclip.util.console import progress
from hnclip.util.tables import text_table
from hnclip.util.text import counted

WIDTH = 110  # columns of the text; longer lines are cut
AHEAD = 128  # images that are decoded ahead; no pixels are kept
MEASURES = ("width", "height", "megapixels")
STATISTICS = ("mean", "least", "5 %", "50 %", "95 %", "most")
_KINDS = {**ERRORS, **WARNINGS}
_ORDER = {kind: place for place, kind in enumerate(_KINDS)}


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
    problems: tuple[Problem, ...]
    groups: tuple[DuplicateGroup, ...]
    unfinished: tuple[str, ...]
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

    def _by_kind(self, kinds: Iterable[str]) -> dict[str, list[Problem]]:
        found = {kind: [problem for problem in self.problems if problem.kind == kind] for kind in kinds}
        return {kind: problems for kind, problems in found.items() if problems}

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with complete lists."""
        found = {name: value for name, value in vars(self).items() if name != "problems"}
        for name in ("errors", "warnings"):
            found[name] = {
                kind: [{"where": problem.where, "detail": problem.detail} for problem in problems]
                for kind, problems in getattr(self, name).items()
            }
        return {**found, "groups": [asdict(group) for group in self.groups]}

    def to_text(self, listed: int = 5) -> str:
        """For a terminal, with the first `listed` problems of each kind."""
        counts = ", ".join(counted(self.total[f"{noun}s"], noun) for noun in ("record", "caption", "image"))
        splits = ", ".join(f"{name} {counts['records']:,}" for name, counts in self.splits.items())
        paragraphs = [
            _printable(f"{self.name}: {counts}{f'; {splits}' if splits else ''}"),
            *(self._kind_text("ERROR", kind, found, listed) for kind, found in self.errors.items()),
            *(self._kind_text("warning", kind, found, listed) for kind, found in self.warnings.items()),
            *(f"There may be more of {kind!r}: there is too much to compare." for kind in self.unfinished),
            self._caption_table(),
            self._image_table(),
            self._verdict(),
        ]
        return "\n\n".join(paragraphs)

    def _kind_text(self, level: str, kind: str, problems: Sequence[Problem], listed: int) -> str:
        sizes = [len(group.ids) for group in self.groups if group.kind == kind]
        extent = f"{sum(sizes):,} records in {counted(len(sizes), 'group')}" if sizes else f"{len(problems):,}"
        lines = [f"{level}  {kind}: {extent}"]
        lines += wrap(f"{_KINDS[kind]} → {ADVICE[kind]}", WIDTH, initial_indent="  ", subsequent_indent="  ")
        for problem in problems[:listed]:
            line = _printable(f"    {problem.where}: {problem.detail}")
            lines.append(line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…")
        return "\n".join([*lines, *([f"    and {len(problems) - listed:,} more"] if len(problems) > listed else [])])

    def _caption_table(self) -> str:
        parts = {**(self.splits if len(self.splits) > 1 else {}), "all": self.total}
        rows = [
            [f"{unit}, {_printable(name)}", f"{counts['captions']:,}", *_cells(counts[unit])]
            for unit in ("words", *(["tokens"] if self.context else []))
            for name, counts in parts.items()
        ]
        table = text_table(["captions", "number", *STATISTICS], rows)
        if self.context is None:
            return table
        cut, captions = self.total["cut"], max(1, self.total["captions"])
        return f"{table}\n{cut:,} longer than the model's {self.context} tokens ({cut / captions:.1%})"

    def _image_table(self) -> str:
        if self.sizes is None:
            return "The images were not decoded."
        if self.sizes["width"] is None:
            return "No image could be decoded."
        rows = [[name, *_cells(self.sizes[name], ".2f" if name == "megapixels" else ",.0f")] for name in MEASURES]
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
        records = f"{self.left_out:,} of {counted(self.total['records'], 'record')} will be skipped in training"
        parts = [records if self.left_out else "every record can be used, but not everything in it"]
        parts += [f"{counted(self.unread, 'row')} of the source cannot be used"] if self.unread else []
        if "shared image" in self.errors:
            parts.append("images are in two splits, so results would look better than they are")
        return "\n".join(wrap(f"Not ready: {'; '.join(parts)}.", WIDTH))


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
    captions, problems = _read_captions(records, text_transform)
    keys = [record.image.key for record in records]
    sources = {key: record.image for key, record in zip(keys, records)}
    found = dict(zip(sources, inspect_images(list(sources.values()), image_transform))) if images else {}
    valid = {key: info for key, info in found.items() if isinstance(info, ImageInfo)}
    for record, key in zip(records, keys):
        info = found.get(key)
        if isinstance(info, Problem):
            problems.append(replace(info, where=record.id))
        elif info is not None and side is not None and info.shortest < side:
            detail = f"{info.width} × {info.height} pixels, the model takes {side}"
            problems.append(Problem("small image", record.id, detail))
    ids = Counter(record.id for record in records)
    problems += [Problem("repeated id", id, f"{count} records have this id") for id, count in ids.items() if count > 1]
    groups, unfinished = find_duplicates(records, valid, [(index, text) for index, text, _ in captions])
    problems += [group.to_problem() for group in groups]
    readable = {index for index, _, _ in captions}
    usable = [index in readable and (not images or key in valid) for index, key in enumerate(keys)]
    names = dict.fromkeys(record.split for record in records if record.split is not None)
    captions_of = {name: [caption for caption in captions if records[caption[0]].split == name] for name in names}
    return CheckResult(
        name=data.name,
        total=_counts(records, captions, context),
        splits={
            name: _counts([record for record in records if record.split == name], captions_of[name], context)
            for name in names
        },
        sizes=_sizes(list(valid.values()), side) if images else None,
        problems=tuple(sorted([*data.problems, *problems], key=lambda problem: _ORDER[problem.kind])),
        groups=tuple(sorted(groups, key=lambda group: _ORDER[group.kind])),
        unfinished=unfinished,
        left_out=usable.count(False),
        unread=sum(problem.kind in ERRORS for problem in data.problems),
        context=context,
        side=side,
    )


def inspect_images(sources: Sequence[ImageSource], transform: ImageTransform | None) -> list[ImageInfo | Problem]:
    """Decode all of these in threads; a model's transform may refuse images that are valid otherwise."""
    inspect = partial(_inspect, transform=transform)
    with decoding_threads(cpu_count()) as pool, progress("reading images", len(sources)) as bar:
        found = []
        for info in in_order(pool, inspect, sources, AHEAD):
            found.append(info)
            bar.advance()
        return found


def _inspect(source: ImageSource, transform: ImageTransform | None) -> ImageInfo | Problem:
    try:
        content = source.read()
        image = source.decode(content)
    except InvalidImage as error:
        return Problem(error.kind, source.key, str(error))
    try:
        thumbnail = preprocess_image(image, THUMBNAIL).numpy()
        if transform is not None:
            checked_size(*image.size, transform)
    except ValueError as error:
        return Problem("unusual image", source.key, f"{source.key}: {error}")
    turned = orientation(image)
    return ImageInfo(
        sha256(content).digest(),
        image_fingerprint(thumbnail),
        *(image.size if turned < 5 else image.size[::-1]),
        image.format or "no format",
        image.mode,
        turned > 1,
    )


def _read_captions(
    records: Sequence[Record], transform: TextTransform | None
) -> tuple[list[tuple[int, str, int]], list[Problem]]:
    """The captions that a model can read, as (index of the record, text, tokens before cutting), and the problems."""
    uncut = None if transform is None else replace(transform, context=sys.maxsize)
    captions: list[tuple[int, str, int]] = []
    problems: list[Problem] = []
    for index, record in enumerate(records):
        if not record.captions:
            problems.append(Problem("no caption", record.id, "the record has no caption"))
        for number, text in enumerate(record.captions, 1):
            which = f"caption {number}: " if len(record.captions) > 1 else ""
            if bad := invalid_text(text):
                problems.append(Problem("bad text", record.id, f"{which}{text!r} {bad}"))
                continue
            tokens = _count_tokens(text, uncut)
            if not tokens:
                problems.append(Problem("empty caption", record.id, f"{which}there is no word in {text!r}"))
                continue
            captions.append((index, text, tokens))
            if (place := _garbled(text)) is not None:
                detail = f"{which}… {text[max(0, place - 20) : place + 20]} …"
                problems.append(Problem("garbled caption", record.id, detail))
            if transform is not None and tokens > transform.context:
                detail = f"{which}{tokens} tokens, of which the model reads {transform.context}"
                problems.append(Problem("cut caption", record.id, detail))
    return captions, problems


def _count_tokens(text: str, uncut: TextTransform | None) -> int:
    """0 if the tokenizer finds no word; without one, the number of words."""
    if uncut is None:
        return len(text.split())
    try:
        return len(uncut([text])[0])
    except ValueError:
        return 0


def _garbled(text: str) -> int | None:
    """Where letters were lost or decoded in the wrong encoding."""
    if text.isascii():
        return None
    from ftfy.badness import is_bad

    found = re.search("\ufffd", text) or (re.search(r"[^\x00-\x7f]", text) if is_bad(text) else None)
    return found and found.start()


def _counts(records: Sequence[Record], captions: Sequence[tuple[int, str, int]], context: int | None) -> dict[str, Any]:
    tokens = [count for _, _, count in captions]
    return {
        "records": len(records),
        "captions": len(captions),
        "images": len({record.image.key for record in records}),
        "words": _statistics([len(text.split()) for _, text, _ in captions]),
        "tokens": None if context is None else _statistics(tokens),
        "cut": None if context is None else sum(count > context for count in tokens),
    }


def _sizes(images: Sequence[ImageInfo], side: int | None) -> dict[str, Any]:
    return {
        **{name: _statistics([getattr(image, name) for image in images]) for name in MEASURES},
        "formats": dict(Counter(image.format for image in images).most_common()),
        "modes": dict(Counter(image.mode for image in images).most_common()),
        "rotated": sum(image.rotated for image in images),
        "small": None if side is None else sum(image.shortest < side for image in images),
    }


def _statistics(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, least, three percentiles and greatest; None if there are no values."""
    if not values:
        return None
    return dict(zip(STATISTICS, [float(np.mean(values)), *np.quantile(values, [0, 0.05, 0.5, 0.95, 1]).tolist()]))


def _cells(statistics: Mapping[str, float] | None, form: str = ",.0f") -> list[str]:
    return [""] * len(STATISTICS) if statistics is None else [format(value, form) for value in statistics.values()]


def _printable(text: str) -> str:
    """Control characters and lone surrogates are escaped."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
