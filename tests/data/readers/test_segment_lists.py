"""GOAL's and StructXLIP's training lists as a table: `--data LIST.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_pictures import png, shade, write_png, write_tar

from hnclip.config import ReadConfig
from hnclip.core import Region
from hnclip.data.pictures import FileImage
from hnclip.data.readers.locate import Pictures
from hnclip.data.readers.paths import read_path
from hnclip.data.readers.segments import map_finder, regions_of


def segment(sentence: str, score: Any, box: Any = (0, 1, 2, 3), **more: Any) -> dict[str, Any]:
    corners = {**dict(zip(("x1", "y1", "x2", "y2"), box)), "width": 7, "height": 9}
    return {"filename": "c/1.png", "caption": sentence, "similarity_score": score, "bbox_coordinates": corners, **more}


def row(name: str, *segments: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"original_filename": f"/there/{name}", "original_caption": f"Of {name}.", "segment": [*segments], **more}


def nothing(written: str, of: str) -> None:
    return None


@pytest.mark.parametrize("name", ["list.json", "list.jsonl"])
def test_regions_and_maps_arrive(tmp_path: Path, name: str) -> None:
    rows = [
        row(
            "photos/1.png",
            segment("A roof", 21.5),
            segment("A door", 30, filename_structure_cropped="/there/cropped/door.png"),
            original_filename_structure="/there/canny/1.png",
        ),
        row("photos/2.png"),
    ]
    content = json.dumps(rows) if name == "list.json" else "\n".join(map(json.dumps, rows))
    (tmp_path / name).write_text(content)
    for path, red in (("pictures/1.png", 1), ("pictures/2.png", 2), ("canny/1.png", 3), ("cropped/door.png", 4)):
        write_png(tmp_path / path, red)
    found = read_path(tmp_path / name, ReadConfig(images=str(tmp_path / "pictures")))
    assert found.problems == ()
    first, second = found.records
    assert (first.captions, shade(first.image)) == (("Of photos/1.png.",), 1)
    assert [(region.sentence, region.score, region.box) for region in first.regions] == [
        ("A door", 30.0, (0, 1, 2, 3)),
        ("A roof", 21.5, (0, 1, 2, 3)),
    ]
    assert first.edges is not None
    assert shade(first.edges) == 3
    assert first.regions[0].edges is not None
    assert shade(first.regions[0].edges) == 4
    assert first.regions[1].edges is None
    assert (second.regions, second.edges) == ((), None)


def test_maps_in_the_tar_of_the_pictures(tmp_path: Path) -> None:
    tar = write_tar(tmp_path / "p.tar", {"photos/1.png": png(1), "canny/1.png": png(3)})
    path = tmp_path / "list.json"
    path.write_text(json.dumps([row("photos/1.png", original_filename_structure="/there/canny/1.png")]))
    (record,) = read_path(path, ReadConfig(images=str(tar))).records
    assert record.edges is not None
    assert (shade(record.image), shade(record.edges)) == (1, 3)


def test_rows_of_one_picture_share_their_regions(tmp_path: Path) -> None:
    rows = [row("1.png", segment("A roof", 21.5)), row("1.png", segment("A door", 30), segment("A roof", 21.5))]
    (tmp_path / "list.json").write_text(json.dumps(rows))
    (record,) = read_path(tmp_path / "list.json", ReadConfig()).records
    assert [region.sentence for region in record.regions] == ["A door", "A roof"]


def test_the_user_may_name_other_columns(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(json.dumps([row("1.png", segment("A roof", 1), other="Something else.")]))
    (record,) = read_path(tmp_path / "list.json", ReadConfig(caption_column="other")).records
    assert record.captions == ("Something else.",)
    assert len(record.regions) == 1


def test_original_names_in_other_tables_mean_nothing(tmp_path: Path) -> None:
    rows = [{"image": "1.png", "caption": "one", "original_filename": "x.png", "segment": [segment("A roof", 1)]}]
    (tmp_path / "list.json").write_text(json.dumps(rows))
    (record,) = read_path(tmp_path / "list.json", ReadConfig()).records
    assert (record.id, record.regions) == ("1.png", ())


def test_goals_test_list(tmp_path: Path) -> None:
    write_png(tmp_path / "photos" / "1.png", 1)
    (tmp_path / "list.json").write_text(json.dumps([{"filename": "chage/path/1.png", "caption": "One. Two."}]))
    (record,) = read_path(tmp_path / "list.json", ReadConfig(images=str(tmp_path / "photos"))).records
    assert (record.captions, record.regions, shade(record.image)) == (("One. Two.",), (), 1)


@pytest.mark.parametrize(
    "segments",
    [
        None,
        "text",
        3,
        [None, 3, "x"],
        [{}],
        [segment(" ", 1)],
        [segment("&nbsp; ", 1)],
        [segment("A", 1, (2, 1, 2, 3))],
    ],
)
def test_what_is_no_region_is_left_out(segments: Any) -> None:
    assert regions_of(segments, nothing) == ()


def test_scores_that_are_none_come_last() -> None:
    scores = [None, 3, float("nan"), 5.0, "7", True]
    regions = regions_of([segment(str(score), score) for score in scores], nothing)
    assert regions[:2] == (Region((0, 1, 2, 3), "5.0", 5.0), Region((0, 1, 2, 3), "3", 3.0))
    assert [region.score for region in regions[2:]] == [None] * 4


@pytest.mark.parametrize(
    ("files", "written", "expected"),
    [
        (["photos/1.png", "edges/1.png"], "/there/canny/1.png", None),  # the base name alone may be anything
        (["photos/1.png", "edges/canny/1.png"], "/there/canny/1.png", "edges/canny/1.png"),
        (["photos/1.png", "a/canny/1.png", "b/canny/1.png"], "/there/canny/1.png", None),  # either
        (["photos/1.png", "a/1.png", "b/1.png"], "/there/b/1.png", "b/1.png"),  # the longer end
        (["photos/1.png"], "/there/canny/1.png", None),
        (["photos/1.png", "old/there/photos/1.png"], "/there/canny/1.png", None),  # a copy of the picture
        (["photos/1.png", "canny/1.png"], "canny/1.png", "canny/1.png"),
        (["photos/1.png"], "photos/1.png", None),
    ],
)
def test_which_map_a_path_means(tmp_path: Path, files: list[str], written: str, expected: str | None) -> None:
    for file in files:
        write_png(tmp_path / file)
    find = map_finder([Pictures(tmp_path)], FileImage(tmp_path / "photos/1.png"))
    found = find(written, "/there/photos/1.png")
    assert (found and found.key) == (expected and str(tmp_path / expected))


def test_the_picture_is_never_its_own_map(tmp_path: Path) -> None:
    picture = FileImage(write_png(tmp_path / "photos" / "1.png"))
    find = map_finder([Pictures(tmp_path)], picture)
    assert find("/there/canny/1.png", "") is None
    write_png(tmp_path / "canny" / "1.png")
    again = map_finder([Pictures(tmp_path)], picture)("/there/canny/1.png", "")
    assert again is not None
    assert again.key == str(tmp_path / "canny" / "1.png")


def test_outside_the_pictures_the_base_name_is_enough(tmp_path: Path) -> None:
    picture = FileImage(write_png(tmp_path / "photos" / "train" / "1.png"))
    write_png(tmp_path / "photos" / "val" / "1.png")
    places = [Pictures(tmp_path / "photos"), Pictures(tmp_path)]
    assert map_finder(places, picture)("/there/canny/1.png", "/there/train/1.png") is None
    edges = write_png(tmp_path / "edges" / "1.png")
    found = map_finder([Pictures(tmp_path / "photos"), Pictures(tmp_path)], picture)
    assert found("/there/canny/1.png", "/there/train/1.png") == FileImage(edges)
    # Of a tar what lies in it is among the pictures, and what lies beside it is not.
    tar = write_tar(tmp_path / "p.tar", {"photos/1.png": png(1), "val/1.png": png(2)})
    inside = Pictures(tar)
    first = inside.exact("photos/1.png")
    assert first is not None
    assert map_finder([inside], first)("/there/canny/1.png", "") is None
    assert map_finder([inside, Pictures(tmp_path / "edges")], first)("/there/canny/1.png", "") == FileImage(edges)


@pytest.mark.parametrize("maps", ["/there/canny/{}/1.png", "/there/canny/1.png"])
def test_another_rows_picture_is_no_map(tmp_path: Path, maps: str) -> None:
    """Before and after the row whose picture it is."""
    rows = []
    for name, other in (("train", "val"), ("val", "train")):
        write_png(tmp_path / "photos" / name / "1.png")
        written = maps.format(other)
        rows.append(
            row(
                f"{name}/1.png",
                segment("A roof", 1, filename_structure_cropped=written),
                original_filename_structure=written,
            )
        )
    (tmp_path / "list.json").write_text(json.dumps(rows))
    for images in (None, str(tmp_path / "photos")):
        records = read_path(tmp_path / "list.json", ReadConfig(images=images)).records
        assert [record.edges for record in records] == [None, None]
        assert [record.regions[0].edges for record in records] == [None, None]
        assert len({record.image.key for record in records}) == 2
