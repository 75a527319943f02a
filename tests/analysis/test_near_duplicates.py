"""Which captions are shown next to each other."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from PIL import Image
from torch import Tensor

from hnclip.analysis.captions import Suspect, caption_geometry
from hnclip.analysis.near_duplicates import near_duplicate_rows, suspect_rows
from hnclip.core import Record
from hnclip.report.document import CaptionedImage, CaptionRow


def on_a_circle(degrees: list[float]) -> Tensor:
    """Unit vectors whose cosines are those of the angles between them."""
    angles = torch.tensor([math.radians(angle) for angle in degrees])
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def records_of(captions: list[list[str]]) -> list[Record]:
    """Images are of one grey, by which a test knows their record."""
    images = [SimpleNamespace(load=lambda grey=grey: Image.new("L", (2, 2), grey)) for grey in range(len(captions))]
    return [Record(f"record-{row}", images[row], tuple(own), None) for row, own in enumerate(captions)]  # type: ignore[arg-type]


def rows_of(text: Tensor, sizes: list[int], **options: float) -> list[CaptionRow]:
    """Captions are called by their numbers; `sizes` says how many each record has."""
    numbers = iter(range(len(text)))
    records = records_of([[f"caption{next(numbers)}" for _ in range(size)] for size in sizes])
    owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return near_duplicate_rows(text, records, caption_geometry(text, owner), **options)  # type: ignore[arg-type]


def number(item: CaptionedImage) -> int:
    return int("".join(piece for piece, _ in item.text).removeprefix("caption"))


# Neighbours are 1, 2, 3, … degrees apart: the nearest of every caption is the one before it, but for the first.
STAIRS = on_a_circle([0, 1, 3, 6, 10, 15, 21, 28, 36, 45, 55])


def test_queries_are_near_the_quantile_and_negatives_nearest_first() -> None:
    rows = rows_of(STAIRS, [1] * 11, quantile=0.5, rows=3)
    assert number(rows[0].query) == 5
    assert {number(row.query) for row in rows} == {4, 5, 6}
    assert [number(item) for item in rows[0].negatives] == [4, 6, 3]
    cosines = [f"cosine {math.cos(math.radians(angle)):.3f}" for angle in (5, 6, 9)]
    assert [item.label.partition(":")[0] for item in rows[0].negatives] == cosines
    assert rows[0].query.image is not None
    assert (rows[0].query.image.getpixel((0, 0)), rows[0].query.label) == ((5, 5, 5), "record-5")
    most_similar = rows_of(STAIRS, [1] * 11, quantile=1.0, rows=4)  # and no pair twice
    expected = [(0, 1), (2, 1), (3, 2), (4, 3)]
    assert [(number(row.query), number(row.negatives[0])) for row in most_similar] == expected


def test_no_record_is_a_query_twice_nor_twice_in_a_row() -> None:
    rows = rows_of(
        on_a_circle([0, 0.1, 5, 5.1, 20, 20.2, 40, 60]), [2, 2, 2, 1, 1], quantile=1.0, rows=20, negatives=20
    )
    names = [row.query.label for row in rows]
    assert len(set(names)) == len(names)
    for row in rows:
        assert len({row.query.label, *(item.label.partition(": ")[2] for item in row.negatives)}) == 5
    assert number(rows[0].query) == 1
    assert [number(item) for item in rows[0].negatives[:2]] == [2, 4]


def test_suspects_are_shown_as_pairs_with_their_shared_words() -> None:
    records = records_of([["a dog"], ["a cat", "one dog"]])
    (row,) = suspect_rows([Suspect(0, 2, 0.98765)], records)
    assert row.query.text == (("a ", False), ("dog", True))
    assert [(item.label, item.text) for item in row.negatives] == [
        ("cosine 0.988: record-1", (("one ", False), ("dog", True)))
    ]
