"""The report of `hnclip data check` for a terminal: counts, errors, warnings, lengths, sizes, and a verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from hnclip.core import Problem
from hnclip.data.problems import ADVICE, ERRORS, WARNINGS
from hnclip.tables import text_table

if TYPE_CHECKING:
    from hnclip.data.check.counts import Spread
    from hnclip.data.check.report import CheckReport

WIDTH = 110  # columns; a problem that does not fit into a line is cut
_MEANING = {**ERRORS, **WARNINGS}
_SPREAD = {"mean": "mean", "least": "least", "5 %": "low", "50 %": "median", "95 %": "high", "most": "greatest"}


def report_text(report: CheckReport, listed: int) -> str:
    """Paragraphs with an empty line between them; the first `listed` problems of each kind are shown."""
    if listed < 0:
        raise ValueError(f"listed must not be negative, got {listed}")
    paragraphs = [
        _counts(report),
        *_kinds(report, "ERROR", report.errors, listed),
        *_kinds(report, "warning", report.warnings, listed),
        *(f"There may be more of {kind!r}: too much is alike to compare it all." for kind in report.unfinished),
        _caption_table(report),
        _picture_table(report),
        _verdict(report),
    ]
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def _counts(report: CheckReport) -> str:
    counts = [
        _count(report.total.records, "record"),
        _count(report.total.captions, "caption"),
        _count(report.pictures, "picture"),
    ]
    splits = [f"{name} {split.records:,}" for name, split in report.splits.items()]
    line = f"{report.name}: {', '.join(counts)}"
    return _printable(f"{line}; {', '.join(splits)}" if splits else line)


def _kinds(report: CheckReport, level: str, problems: Sequence[Problem], listed: int) -> Iterator[str]:
    by_kind: dict[str, list[Problem]] = {}
    for problem in problems:
        by_kind.setdefault(problem.kind, []).append(problem)
    for kind, found in by_kind.items():
        lines = [f"{level}  {kind}: {_extent(report, kind, len(found))}"]
        lines += wrap(f"{_MEANING[kind]} → {ADVICE[kind]}", WIDTH, initial_indent="  ", subsequent_indent="  ")
        lines += [_fitting(f"    {problem.where}: {problem.detail}") for problem in found[:listed]]
        if len(found) > listed:
            lines.append(f"    and {len(found) - listed:,} more")
        yield "\n".join(lines)


def _extent(report: CheckReport, kind: str, problems: int) -> str:
    """How many there are: problems, or records in groups."""
    sizes = [len(group.ids) for group in report.groups if group.kind == kind]
    if not sizes:
        return f"{problems:,}"
    parts = [f"{sum(sizes):,} records in {_count(len(sizes), 'group')}"]
    if max(sizes) > 2 and len(sizes) > 1:
        parts.append(f"the largest of {max(sizes):,}")
    if problems > len(sizes):
        parts.append(f"{problems - len(sizes):,} alone")
    return ", ".join(parts)


def _caption_table(report: CheckReport) -> str:
    """One row for words and one for the model's tokens, of each split and of all."""
    splits = {**report.splits, "all": report.total} if len(report.splits) > 1 else {"all": report.total}
    headers = ["captions", "number", *_SPREAD]
    rows = [
        [f"words, {_printable(name)}", f"{split.captions:,}", *_spread(split.words)] for name, split in splits.items()
    ]
    if report.context is not None:
        headers.append(f"cut at {report.context}")
        rows = [[*row, ""] for row in rows]
        for name, split in splits.items():
            cut = split.cut or 0
            share = f"{cut:,} ({cut / max(1, split.captions):.1%})"
            rows.append([f"tokens, {_printable(name)}", f"{split.captions:,}", *_spread(split.tokens), share])
    return text_table(headers, rows)


def _picture_table(report: CheckReport) -> str:
    found = report.images
    if found is None:
        return "The pictures were not looked at."
    if found.width is None:
        return "No picture could be decoded."
    rows = [
        ["width", *_spread(found.width)],
        ["height", *_spread(found.height)],
        ["megapixels", *_spread(found.megapixels, ".2f")],
    ]
    remarks = [_tally(found.formats), _tally(found.modes)]
    if found.rotated:
        remarks.append(f"{found.rotated:,} turned upright by EXIF")
    if found.small is not None:
        remarks.append(f"{found.small:,} smaller than the model's {report.side}")
    return f"{text_table(['pictures', *_SPREAD], rows)}\n{'; '.join(remarks)}"


def _verdict(report: CheckReport) -> str:
    if report.left_out == report.total.records:
        return "Nothing to train on: no record can be used."
    if not report.errors:
        ready = "Ready to train, as far as captions tell" if report.images is None else "Ready to train"
        return f"{ready}; look at the warnings first." if report.warnings else f"{ready}."
    records = f"{report.left_out:,} of {_count(report.total.records, 'record')} will be left out of training"
    parts = [records if report.left_out else "every record can be used, though not all that belongs to it"]
    if report.unread:
        parts.append(f"{_count(report.unread, 'row')} of the source cannot be used")
    if any(problem.kind == "shared image" for problem in report.errors):
        parts.append("pictures are in two splits, so results would look better than they are")
    return "\n".join(wrap(f"Not ready: {'; '.join(parts)}.", WIDTH))


def _spread(found: Spread | None, form: str = ",.0f") -> list[str]:
    if found is None:
        return [""] * len(_SPREAD)
    return [format(getattr(found, name), form) for name in _SPREAD.values()]


def _tally(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _fitting(line: str) -> str:
    line = _printable(line)
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…"


def _printable(text: str) -> str:
    """Data may hold letters that no terminal shows, or that it would obey."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
