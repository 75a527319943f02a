"""Which captions are shown next to each other."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from PIL import Image
from torch import Tensor

from hnclip.analysis.captions import caption_geometry
from hnclip.analysis.near_duplicates import near_duplicate_rows
from hnclip.core import Record
from hnclip.report.document import CaptionedImage, CaptionRow


def on_a_circle(degrees: list[float]) -> Tensor:
    """Unit vectors whose cosines are those of the angles between them."""
    angles = torch.tensor([math.radians(angle) for angle in degrees])
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def rows_of(text: Tensor, **options: float) -> list[CaptionRow]:
    """Captions are called by their numbers, and images are of one grey, by which a test knows their record."""
    images = [SimpleNamespace(load=lambda grey=grey: Image.new("L", (2, 2), grey)) for grey in range(len(text))]
    records = [Record(f"record-{row}", image, (f"caption{row}",), None) for row, image in enumerate(images)]  # type: ignore[arg-type]
    return near_duplicate_rows(text, records, caption_geometry(text, torch.arange(len(text))), **options)  # type: ignore[arg-type]


def number(item: CaptionedImage) -> int:
    return int("".join(piece for piece, _ in item.text).removeprefix("caption"))


# Neighbours are 1, 2, 3, … degrees apart: the nearest of every caption is the one before it, but for the first.
STAIRS = on_a_circle([0, 1, 3, 6, 10, 15, 21, 28, 36, 45, 55])


def test_queries_are_near_the_quantile_and_negatives_nearest_first() -> None:
    rows = rows_of(STAIRS, quantile=0.5, rows=3)
    assert number(rows[0].query) == 5
    assert {number(row.query) for row in rows} == {4, 5, 6}
    assert [number(item) for item in rows[0].negatives] == [4, 6, 3]
    cosines = [f"cosine {math.cos(math.radians(angle)):.3f}" for angle in (5, 6, 9)]
    assert [item.label.partition(":")[0] for item in rows[0].negatives] == cosines
    assert rows[0].query.image is not None
    assert (rows[0].query.image.getpixel((0, 0)), rows[0].query.label) == ((5, 5, 5), "record-5")
    most_similar = rows_of(STAIRS, quantile=1.0, rows=4)  # and no pair twice
    expected = [(0, 1), (2, 1), (3, 2), (4, 3)]
    assert [(number(row.query), number(row.negatives[0])) for row in most_similar] == expected
