"""Tables of any format into records: captions of one image together, and a problem for every row that is not used."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import unescape
from itertools import chain, islice
from typing import Any

from hnclip.config import ReadConfig
from hnclip.core import Box, ImageSource, Record, Region
from hnclip.data.readers.columns import Columns, Row, caption_texts, choose_columns, invalid_text, is_blank, plain_text
from hnclip.data.readers.locate import TableImages
from hnclip.data.records import DataSet, ReadLog, RowError, normal_split

HEAD = 100  # rows that columns are guessed from
_SHOWN = 5  # problems that an error message shows


@dataclass(frozen=True)
class SourceTable:
    """A table of any format."""

    path: str  # as messages spell it
    label: str  # as ids spell it, the same on every machine
    # Its rows with at least these columns, each with its place. A cell that holds an image is an ImageSource.
    rows: Callable[[Columns], Iterable[tuple[str, Row]]]
    columns: Columns | None = None  # chosen by names and first rows if not given
    names: Sequence[str] = ()  # of its columns
    head: Sequence[Row] = ()  # its first rows; cells that hold images may be left out
    holding: Sequence[str] = ()  # columns that hold images themselves
    keyed: bool = False  # places are names, and the ids of their rows unless the user names a column
    caption: str | None = None  # the column of captions, unless the user names one


def streamed_table(path: str, label: str, rows: Iterator[tuple[str, Row]]) -> SourceTable:
    """A table whose rows are read once, one after the other."""
    first = list(islice(rows, HEAD))
    head = [row for _, row in first]
    names = list(dict.fromkeys(name for row in head for name in row if name))
    return SourceTable(path, label, lambda columns: chain(first, rows), names=names, head=head)


class RecordCollector:
    """Collects records in the order in which their images first appear. Rows about one image make one record.

    Two images with one id are a problem if the user named the column of ids. Guessed ids that are not unique are no
    ids: then every record is named after its image.
    """

    def __init__(self, read: ReadConfig) -> None:
        self.log = ReadLog()
        self.images = TableImages(read, self.log)
        self._read = read
        self._first: dict[ImageSource | str, Record] = {}  # what the first row says about each image
        # By the identity of the first record, which is faster than the image's path: what other rows say about the
        # image, and its name if it is not the record's id.
        self._more: dict[int, list[Record]] = {}
        self._names: dict[int, str] = {}

    def add_table(self, table: SourceTable, split: str | None) -> None:
        """Add all rows of a table. `split` is theirs if no column has it."""
        columns, read = table.columns, self._read
        if columns is None:
            if not table.names:
                return
            if table.caption is not None and read.caption_column is None:
                read = replace(read, caption_column=table.caption)
            columns = choose_columns(table.path, table.names, table.head, read, holding=table.holding)
        if table.keyed and read.id_column is None:
            columns = replace(columns, id="", name="")
        for place, row in table.rows(columns):
            try:
                self._add_row(table, place, row, columns, split)
            except RowError as error:
                self.log.problem(error.kind, f"{table.path}:{place}", str(error))

    def _add_row(self, table: SourceTable, place: str, row: Row, columns: Columns, split: str | None) -> None:
        def text(column: str) -> str:
            return plain_text(row.get(column), column) if column else ""

        def usable(caption: str) -> bool:
            if not caption:
                self.log.problem("empty caption", where, "the caption has no text")
            elif invalid := invalid_text(caption):
                self.log.problem("bad text", where, f"the caption cannot be used: {invalid}")
            else:
                return True
            return False

        where = f"{table.path}:{place}"
        if columns.split and not (split := normal_split(text(columns.split))):
            raise RowError("unreadable row", f"column {columns.split!r} is empty (--read.no-splits ignores it)")
        image, own, key = row.get(columns.image), text(columns.id), ""
        if isinstance(image, ImageSource):
            # A cell has no name of its own; the column that names images tells which cells hold the same one.
            same = text(columns.name)
            name, own = f"{table.label}:{place}", own or same or (place if table.keyed else "")
            key = same and f"{split}/{same}"
        else:
            written = text(columns.image)
            if not written:
                raise RowError("no image", f"column {columns.image!r} is empty")
            image, name = self.images.find(written)
        if invalid := invalid_text(name):
            raise RowError("bad text", f"the image's name cannot be used: {invalid}")
        cells = [(row.get(column), column) for column in columns.captions]
        if len(cells) > 1:  # not every image has as many captions as there are columns
            cells = [(cell, column) for cell, column in cells if not is_blank(cell)]
        found = [text.strip() for cell, at in cells for text in caption_texts(cell, at)]
        if not found:
            raise RowError("no caption", "there is an image but no caption")
        short = "".join(caption_texts(row.get(columns.short), columns.short)[:1]).strip() if columns.short else ""
        regions = goal_regions(row.get(columns.regions)) if columns.regions else ()
        group = text(columns.group) or None
        captions = tuple(filter(usable, found))
        short = short if short and usable(short) else ""
        if not captions:
            return
        record = Record(own or name, image, captions, split, short or None, regions, group)
        first = self._first.setdefault(key or image, record)
        if first.split != split:
            detail = f"{name} is in split {split} here, but in {first.split} before: this row is skipped"
            raise RowError("shared image", detail)
        if first is not record:
            self._more.setdefault(id(first), []).append(record)
        elif record.id != name:
            self._names[id(first)] = name

    def finish(self, source: str) -> DataSet:
        """The data set. No record at all is an error that shows the first problems."""
        self.images.warn_of_search()
        rows = self._first.values()
        own_ids = self._read.id_column is not None or len({record.id for record in rows}) == len(rows)
        records: dict[str, Record] = {}
        for record in rows:
            name, more = self._names.get(id(record), record.id), self._more.get(id(record), ())
            chosen = record.id if own_ids else name
            if chosen in records:
                self.log.problem("repeated id", chosen, f"{name} has the id of another image and is skipped")
            elif more or chosen != record.id or len(record.captions) > 1:
                records[chosen] = _merged(chosen, [record, *more])
            else:
                records[chosen] = record
        problems = self.log.problems
        if not records:
            shown = "".join(f"\n  {found.kind}: {found.where}: {found.detail}" for found in problems[:_SHOWN])
            raise ValueError(f"no record with an image and a caption in {source}; {len(problems)} problems{shown}")
        return DataSet(source, tuple(records.values()), tuple(problems), warnings=tuple(self.log.warnings))


def _merged(name: str, rows: Sequence[Record]) -> Record:
    """What several rows say about one image."""
    captions = tuple(dict.fromkeys(text for row in rows for text in row.captions))
    regions = _best_first(list(dict.fromkeys(region for row in rows for region in row.regions)))
    short = next((row.short for row in rows if row.short), None)
    group = next((row.group for row in rows if row.group), None)
    return replace(rows[0], id=name, captions=captions, regions=regions, short=short, group=group)


def goal_regions(segments: Any) -> tuple[Region, ...]:
    """The segments of a row of GOAL's lists that have a sentence and a box, the most similar first: GOAL trains on the
    first one. Only the corners of the box are read: in some lists width and height are those of the image."""
    regions = []
    for segment in segments if isinstance(segments, list) else ():
        if not isinstance(segment, Mapping):
            continue
        box, sentence = _box(segment.get("bbox_coordinates")), segment.get("caption")
        if box and isinstance(sentence, str) and unescape(sentence).strip() and not invalid_text(sentence):
            score: Any = segment.get("similarity_score")
            known = type(score) in (int, float) and abs(score) < 1 << 53
            regions.append(Region(box, sentence.strip(), float(score) if known else None))
    return _best_first(regions)


def _best_first(regions: Sequence[Region]) -> tuple[Region, ...]:
    return tuple(sorted(regions, key=lambda region: -math.inf if region.score is None else region.score, reverse=True))


def _box(corners: Any) -> Box | None:
    """(left, top, right, bottom) in whole pixels; None if these are not four numbers or enclose nothing."""
    try:
        left, top, right, bottom = (int(corners[key]) for key in ("x1", "y1", "x2", "y2"))
    except (LookupError, TypeError, ValueError, OverflowError):
        return None
    return (left, top, right, bottom) if left < right and top < bottom else None
