"""Tables of any format into records: one row is a picture, by name or in a cell, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hnclip.config import ReadConfig
from hnclip.core import ImageSource
from hnclip.data.readers.cells import RowProblem, caption_texts, is_blank, listed_texts, plain_text
from hnclip.data.readers.columns import Columns, Row, choose_columns
from hnclip.data.readers.gather import Gather
from hnclip.data.readers.places import Places
from hnclip.data.readers.segments import CAPTION, EDGES, IMAGE, REGIONS, is_segment_list, map_of, regions_of
from hnclip.data.records import normal_split

HEAD = 100  # rows that columns are guessed from


@dataclass(frozen=True)
class Table:
    """A table of any format, before its columns are chosen.

    Args:
        path: what messages call it.
        label: what ids call it, the same on every machine.
        names: its columns.
        head: its first rows; cells that hold pictures may be left out.
        rows: its rows with at least these columns, each with its place in the table. A cell that holds a picture is an
            ImageSource.
        holding: columns that hold pictures themselves.
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


def add_table(gather: Gather, table: Table, split: str | None, read: ReadConfig, places: Places) -> None:
    """All rows of a table; `split` is theirs if no column says it."""
    goal = is_segment_list(table.names)
    if goal:
        read = replace(read, image_column=read.image_column or IMAGE, caption_column=read.caption_column or CAPTION)
    columns = choose_columns(table.path, table.names, table.head, read, holding=table.holding, exists=places.has)
    if goal:
        regions, edges = (column if column in table.names else None for column in (REGIONS, EDGES))
        columns = replace(columns, regions=regions, edges=edges)
    if table.keyed and read.id_column is None:
        columns = replace(columns, id=None, name=None)
    for place, row in table.rows(columns):
        try:
            _add_row(gather, table, place, row, columns, split, places)
        except RowProblem as problem:
            gather.problem(problem.kind, f"{table.path}:{place}", str(problem))


def _add_row(
    gather: Gather, table: Table, place: str, row: Row, columns: Columns, split: str | None, places: Places
) -> None:
    def text(column: str | None) -> str:
        return "" if column is None else plain_text(row.get(column), column)

    if columns.split is not None:
        split = normal_split(text(columns.split))
        if not split:
            raise RowProblem("unreadable row", f"column {columns.split} is empty: the row is in no split")
    key = None
    image = row.get(columns.image)
    if isinstance(image, ImageSource):
        # A cell has no name of its own; the column that names pictures tells which cells hold the same one.
        called = text(columns.name)
        name, id = f"{table.label}:{place}", text(columns.id) or called or (place if table.keyed else "")
        key = f"{split}/{called}" if called else None
    else:
        written = text(columns.image)
        if not written:
            raise RowProblem("no image", f"column {columns.image} is empty")
        try:
            image = places.find(written)
        except ValueError as error:
            raise RowProblem("missing image", str(error)) from error
        name, id = places.id(written), text(columns.id)
    find = places.maps(image)
    gather.add(
        f"{table.path}:{place}",
        image,
        _captions(row, columns.captions, table.lists_in_text),
        name=name,
        id=id,
        split=split,
        short=next(iter(caption_texts(row.get(columns.short), columns.short)), "") if columns.short else "",
        group=text(columns.group),
        key=key,
        regions=regions_of(row.get(columns.regions), find) if columns.regions else (),
        edges=map_of(row.get(columns.edges), row.get(columns.image), find) if columns.edges else None,
    )


def _captions(row: Row, columns: Sequence[str], lists_in_text: bool) -> list[str]:
    cells = [(row.get(column), column) for column in columns]
    if len(cells) > 1:  # not every picture has as many captions as there are columns
        cells = [(cell, column) for cell, column in cells if not is_blank(cell)]
    return [
        caption
        for cell, column in cells
        for caption in caption_texts(listed_texts(cell) if lists_in_text and isinstance(cell, str) else cell, column)
    ]
