"""The views of a record by name."""

from __future__ import annotations

from dataclasses import replace

from hnclip.core import Record, Region
from hnclip.data.derived_images import CropImage, EdgeImage
from hnclip.data.image_sources import CellImage
from hnclip.data.views import IMAGE_VIEWS, TEXT_VIEWS

IMAGE = CellImage("a", "1", bytes)
FIRST, SECOND = Region((0, 0, 5, 5), "One."), Region((1, 1, 6, 6), "Two.")
RECORD = Record("a", IMAGE, ("A dog. It runs.", "A cat"), None, regions=(FIRST, SECOND), filtered=("a", "b"))


def test_image_views():
    found = {name: view(RECORD) for name, view in IMAGE_VIEWS.items()}
    assert found == {
        "full": IMAGE,
        "crop": CropImage(IMAGE, FIRST.box),
        "edge": EdgeImage(IMAGE),
        "edge_crop_1": CropImage(EdgeImage(IMAGE), FIRST.box),
        "edge_crop_2": CropImage(EdgeImage(IMAGE), SECOND.box),
        "edge_crop_3": None,
    }
    without = {name for name, view in IMAGE_VIEWS.items() if view(replace(RECORD, regions=())) is None}
    assert without == {"crop", "edge_crop_1", "edge_crop_2", "edge_crop_3"}


def test_text_views():
    found = {name: view.texts(RECORD) for name, view in TEXT_VIEWS.items()}
    assert found == {
        "caption": RECORD.captions,
        "short": ("A dog", "A cat"),
        "sentence": ("One.",),
        "filtered": ("a", "b"),
    }
    bare = replace(RECORD, regions=(), filtered=(), short="short")
    assert [TEXT_VIEWS[name].texts(bare) for name in ("short", "sentence", "filtered")] == [
        ("short", "short"),
        (None,),
        (None, None),
    ]
    assert [name for name, view in TEXT_VIEWS.items() if not view.by_caption] == ["sentence"]
