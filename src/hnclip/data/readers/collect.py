"""Tables of any format into records: captions of one image together, and a problem for every row that is not used."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import unescape
from itertools import chain, islice
from pathlib import Path
from typing import Any

from hnclip.config import ReadConfig
from hnclip.core import Box, ImageSource, Record, Region
from hnclip.data.readers.columns import (
    Columns,
    Row,
    RowError,
    caption_texts,
    choose_columns,
    invalid_text,
    is_blank,
    plain_text,
)
from hnclip.data.readers.locate import ImageFinder, is_url
from hnclip.data.readers.rows import read_rows
from hnclip.data.records import DataSet, ReadLog, normal_split

HEAD = 100  # rows that columns are guessed from
SHOWN = 5  # problems that an error message shows


@dataclass(frozen=True)
class SourceTable:
    """A table of any format, before its columns are chosen.

    Args:
        path: as messages spell it.
        label: as ids spell it, the same on every machine.
        names: its columns.
        head: its first rows; cells that hold images may be left out.
        rows: its rows with at least these columns, each with its place in the table. A cell that holds an image is an
            ImageSource.
        holding: columns that hold images themselves.
        lists_in_text: several captions may be written into one cell of text.
        keyed: places are names, and the ids of their rows unless the user names a column.
    """

    path: str
    label: str
    names: Sequence[str]
    head: Sequence[Row]
    rows: Callable[[Columns], Iterator[tuple[str, Row]]]
    holding: Sequence[str] = ()
    lists_in_text: bool = False
    keyed: bool = False


def text_table(path: Path, label: str, log: ReadLog) -> SourceTable:
    """A CSV, TSV, JSON or JSON lines file."""
    rows = read_rows(path, log)
    head = list(islice(rows, HEAD))
    names = list(dict.fromkeys(name for _, row in head for name in row if name))
    in_text = path.suffix.lower() in (".csv", ".tsv")
    return SourceTable(
        str(path), label, names, [row for _, row in head], lambda columns: chain(head, rows), lists_in_text=in_text
    )


class TableImages:
    """Finds the images that tables name: by path below `read.images` or the table's folder, on request by file name."""

    def __init__(self, read: ReadConfig, log: ReadLog) -> None:
        self.images = None if read.images is None else ImageFinder(Path(os.path.expanduser(read.images)))
        log.problems += () if self.images is None else self.images.problems
        self.by_name: list[str] = []
        """Names in tables that only a search by file name found."""
        self._search = read.match == "name"
        self._folders: dict[Path, ImageFinder] = {}
        self._roots: list[ImageFinder] = []
        self._prefix = ""

    def enter(self, folder: Path | None, prefix: str = "") -> None:
        """Go on with a table in this folder, if it has one. `prefix` is the folder's path below that of the whole
        source: the same name in two folders is not the same image."""
        roots = [self.images] if self.images else []
        if folder is not None:
            roots.append(self._folders.setdefault(folder, ImageFinder(folder)))
        self._roots = roots
        self._prefix = "" if self.images else prefix

    def find(self, written: str) -> tuple[ImageSource, str]:
        """The image, and its name for ids. An image that does not exist is found to be missing when it is read."""
        if is_url(written):
            raise RowError("missing image", f"{written!r} is a URL: download the images first")
        if "\0" in written:
            raise RowError("missing image", f"{written!r} cannot be a file's name")
        if not self._roots:
            raise RowError("missing image", f"{written!r} is a file's name: name its directory with --read.images")
        first = self._roots[0]
        if len(self._roots) == 1 and not self._search and first.is_directory and written.isascii():
            # There is no other place to look at, so no directory has to be listed.
            file = first.at(written)
            image: ImageSource = file
            name = str(file.name) if file.base == first.root else first.relative(written)
        else:
            image, name = self._search_all(written), written
            for root in self._roots:
                name = root.relative(name)
        if self._prefix and not os.path.isabs(name):
            name = os.path.normpath(f"{self._prefix}/{name}")
        return image, name

    def _search_all(self, written: str) -> ImageSource:
        found = next((image for root in self._roots if (image := root.find(written))), None)
        if found is None and self._search:
            try:
                found = next((image for root in self._roots if (image := root.find_by_name(written))), None)
            except ValueError as error:
                raise RowError("missing image", str(error)) from error
            if found is not None:
                self.by_name.append(written)
        return found or self._roots[0].at(written)

    def warn_if_none(self, table: str, names: Sequence[str], log: ReadLog) -> None:
        """Report it at once if none of these names, the first of a table, is found."""
        if self._search or not names or not self._roots:
            return
        for root in self._roots:
            if any(os.path.exists(root.at(name).key) if root.is_directory else root.find(name) for name in names):
                return
        detail = f"none of the first {len(names)} images exists: there is no {self._roots[0].at(names[0]).key}"
        log.warn("no image found", table, f"{detail} (--read.images, --read.match name)")

    def warn(self, log: ReadLog) -> None:
        """Report how many images were found by file name."""
        if self.by_name:
            first = ", ".join(map(repr, self.by_name[:3]))
            log.warn("matched by name", self._roots[0].root, f"{len(self.by_name):,} rows, first {first}")


@dataclass(slots=True)
class _Entry:
    """A record that more rows may add to. `name` is its id if the guessed ids turn out not to be unique."""

    id: str
    name: str
    image: ImageSource
    split: str | None
    captions: list[str]
    short: str | None = None
    group: str | None = None
    regions: tuple[Region, ...] = ()


class RecordCollector:
    """Collects records in the order in which their images first appear.

    Args:
        own_ids: the user named the column of ids, so two images with one id are a problem. Guessed ids that are not
            unique are no ids: then every record is named after its image.
    """

    def __init__(self, log: ReadLog, *, own_ids: bool = False) -> None:
        self.log = log
        self._own_ids = own_ids
        self._entries: dict[ImageSource | str, _Entry] = {}

    def add(
        self,
        where: str,
        image: ImageSource,
        captions: Sequence[str],
        *,
        name: str,
        id: str = "",
        split: str | None = None,
        short: str = "",
        group: str = "",
        key: str | None = None,
        regions: Sequence[Region] = (),
    ) -> None:
        """Add what one row says about an image; the same image may come again.

        Args:
            where: the row, for messages.
            name: of the image, unique, and the same on every machine.
            id: another name for it; "" for none, as for `short` and `group`.
            key: equal for equal images, if the image itself cannot tell.
        """
        if invalid := invalid_text(name):
            self.log.problem("bad text", where, f"the image's name cannot be used: {invalid}")
            return
        if not captions:
            self.log.problem("no caption", where, "there is an image but no caption")
        texts = [text for caption in captions if self._usable(text := caption.strip(), where)]
        if not texts:
            return
        entry = self._entries.get(key or image)
        if entry is None:
            entry = self._entries[key or image] = _Entry(id or name, name, image, split, texts)
        elif entry.split != split:
            detail = f"{name} is in split {split} here, but in {entry.split} before: this row is skipped"
            self.log.problem("shared image", where, detail)
            return
        else:
            entry.captions += texts
        entry.group = entry.group or group or None
        if regions:
            entry.regions += tuple(regions)
        if entry.short is None and (short := short.strip()) and self._usable(short, where):
            entry.short = short

    def finish(self, name: str, looked_for: str) -> DataSet:
        """The data set. No record at all is an error that says what was looked for, and the first problems."""
        entries, self._entries = self._entries, {}
        own_names = not self._own_ids and len({entry.id for entry in entries.values()}) < len(entries)
        records: dict[str, Record] = {}
        for key in list(entries):
            entry = entries.pop(key)
            id = entry.name if own_names else entry.id
            if id in records:
                self.log.problem("repeated id", id, f"{entry.name} has the id of another image and is skipped")
                continue
            captions = tuple(dict.fromkeys(entry.captions) if len(entry.captions) > 1 else entry.captions)
            regions = _best_first(list(dict.fromkeys(entry.regions))) if entry.regions else ()
            records[id] = Record(id, entry.image, captions, entry.split, entry.short, regions, entry.group)
        problems = self.log.problems
        if not records:
            shown = "".join(f"\n  {found.kind}: {found.where}: {found.detail}" for found in problems[:SHOWN])
            more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            raise ValueError(f"no record found; looked for {looked_for}{':' if shown else ''}{shown}{more}")
        return DataSet(name, tuple(records.values()), tuple(problems), warnings=tuple(self.log.warnings))

    def _usable(self, text: str, where: str) -> bool:
        if not text:
            self.log.problem("empty caption", where, "the caption has no text")
            return False
        invalid = invalid_text(text)
        if invalid:
            self.log.problem("bad text", where, f"the caption cannot be used: {invalid}")
        return invalid is None


def add_table(
    collector: RecordCollector, table: SourceTable, split: str | None, read: ReadConfig, images: TableImages
) -> None:
    """Add all rows of a table; `split` is theirs if no column has it."""
    if not table.names:
        return
    columns = choose_columns(table.path, table.names, table.head, read, holding=table.holding)
    if table.keyed and read.id_column is None:
        columns = replace(columns, id=None, name=None)
    named = [cell.strip() for row in table.head if isinstance(cell := row.get(columns.image), str) and cell.strip()]
    images.warn_if_none(table.path, [name for name in named if "\0" not in name], collector.log)
    for place, row in table.rows(columns):
        try:
            _add_row(collector, table, place, row, columns, split, images)
        except RowError as error:
            collector.log.problem(error.kind, f"{table.path}:{place}", str(error))


def _add_row(
    collector: RecordCollector,
    table: SourceTable,
    place: str,
    row: Row,
    columns: Columns,
    split: str | None,
    images: TableImages,
) -> None:
    def text(column: str | None) -> str:
        return "" if column is None else plain_text(row.get(column), column)

    if columns.split is not None:
        split = normal_split(text(columns.split))
        if not split:
            raise RowError("unreadable row", f"column {columns.split!r} is empty: the row is in no split")
    key = None
    image = row.get(columns.image)
    if isinstance(image, ImageSource):
        # A cell has no name of its own; the column that names images tells which cells hold the same one.
        called = text(columns.name)
        name, id = f"{table.label}:{place}", text(columns.id) or called or (place if table.keyed else "")
        key = f"{split}/{called}" if called else None
    else:
        written = text(columns.image)
        if not written:
            raise RowError("no image", f"column {columns.image!r} is empty")
        image, name = images.find(written)
        id = text(columns.id)
    short = caption_texts(row.get(columns.short), columns.short) if columns.short else []
    collector.add(
        f"{table.path}:{place}",
        image,
        _captions(row, columns.captions, table.lists_in_text),
        name=name,
        id=id,
        split=split,
        short=short[0] if short else "",
        group=text(columns.group),
        key=key,
        regions=goal_regions(row.get(columns.regions)) if columns.regions else (),
    )


def _captions(row: Row, columns: Sequence[str], lists_in_text: bool) -> list[str]:
    cells = [(row.get(column), column) for column in columns]
    if len(cells) > 1:  # not every image has as many captions as there are columns
        cells = [(cell, column) for cell, column in cells if not is_blank(cell)]
    return [text for cell, column in cells for text in caption_texts(cell, column, lists_in_text=lists_in_text)]


def goal_regions(segments: Any) -> tuple[Region, ...]:
    """The segments of a row of GOAL's lists that have a sentence and a box, the most similar first: GOAL trains on the
    first one. Only the corners of the box are read: in some lists width and height are those of the image."""
    regions = []
    for segment in segments if isinstance(segments, list) else ():
        if not isinstance(segment, Mapping):
            continue
        corners, sentence = segment.get("bbox_coordinates"), segment.get("caption")
        box = _box(*(corners.get(key) for key in ("x1", "y1", "x2", "y2"))) if isinstance(corners, Mapping) else None
        if box and isinstance(sentence, str) and unescape(sentence).strip() and not invalid_text(sentence):
            regions.append(Region(box, sentence.strip(), _score(segment.get("similarity_score"))))
    return _best_first(regions)


def _best_first(regions: Sequence[Region]) -> tuple[Region, ...]:
    return tuple(sorted(regions, key=lambda region: -math.inf if region.score is None else region.score, reverse=True))


def _box(*corners: Any) -> Box | None:
    """(left, top, right, bottom) in whole pixels; None if these are not four numbers or enclose nothing."""
    try:
        left, top, right, bottom = (int(corner) for corner in corners)
    except (TypeError, ValueError, OverflowError):
        return None
    return (left, top, right, bottom) if left < right and top < bottom else None


def _score(score: Any) -> float | None:
    usable = isinstance(score, float) or (isinstance(score, int) and abs(score) < 1 << 53)
    return float(score) if usable and not isinstance(score, bool) and math.isfinite(score) else None
