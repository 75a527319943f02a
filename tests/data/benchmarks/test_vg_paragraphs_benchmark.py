from __future__ import annotations

import pytest
from small_copies import write_json, write_picture

from hnclip.data.benchmarks import open_benchmark

COUNTS = {"train": 3, "validation": 1, "test": 2}


def paragraph(number, text=None, folder="VG_100K"):
    return {
        "url": f"https://cs.stanford.edu/people/rak248/{folder}/{number}.jpg",
        "image_id": number,
        "paragraph": text or f"A paragraph about {number}. ",
    }


@pytest.fixture
def folder(tmp_path):
    rows = [
        paragraph(101),
        paragraph(102, "The first.", "VG_100K_2"),
        paragraph(103),
        paragraph(102, "The second.", "VG_100K_2"),
        paragraph(102, "The first. ", "VG_100K_2"),
        *(paragraph(number) for number in (201, 301, 302)),
        paragraph(999),
    ]
    write_json(tmp_path / "paragraphs_v1.json", rows)
    write_json(tmp_path / "train_split.json", [103, 101, 102])
    write_json(tmp_path / "val_split.json", [201])
    write_json(tmp_path / "test_split.json", [301, 302])
    for number in (101, 103, 201, 301, 302):
        write_picture(tmp_path / "VG_100K" / f"{number}.jpg")
    write_picture(tmp_path / "VG_100K_2" / "102.jpg")
    return tmp_path


def test_splits_and_pictures(folder):
    data = open_benchmark("vg-paragraphs", folder, counts=COUNTS)
    assert data.exact
    assert data.splits() == COUNTS
    assert [record.id for record in data.part("train")] == ["103", "101", "102"]
    assert data.part("test")[0].captions == ("A paragraph about 301.",)
    assert all(record.image.load().size == (6, 4) for record in data.records)
    assert data.part("train")[2].image.key.endswith("VG_100K_2/102.jpg")


def test_several_paragraphs_of_a_picture_are_captions_of_one_record(folder):
    record = open_benchmark("vg-paragraphs", folder, counts=COUNTS).part("train")[2]
    assert record.captions == ("The first.", "The second.")


def test_pictures_in_one_directory_without_addresses(folder):
    write_json(
        folder / "paragraphs_v1.json", [{"image_id": 301, "paragraph": "A."}, {"image_id": "302", "paragraph": "B."}]
    )
    data = open_benchmark("vg-paragraphs", folder, splits={"test"}, counts=COUNTS)
    assert [record.image.load().size for record in data.records] == [(6, 4), (6, 4)]


def test_an_image_without_paragraph_is_named(folder):
    write_json(folder / "test_split.json", [301, 302, 303])
    with pytest.raises(ValueError, match=r"gives 2\n  unusable rows, 1: no caption, .*image 303 has no paragraph"):
        open_benchmark("vg-paragraphs", folder, splits={"test"}, counts={"test": 3})


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"image_id": 301, "paragraph": ""}, r"empty caption, .*:\[0\]"),
        ({"image_id": 301}, r"no caption, .*:\[0\]: has no paragraph"),
        ({"paragraph": "A."}, r"no image, .*:\[0\]: has no image_id"),
        ("text", r"unreadable row, .*:\[0\]: a str, not an object"),
    ],
)
def test_bad_rows_are_named(folder, row, told):
    write_json(folder / "paragraphs_v1.json", [row, paragraph(302)])
    with pytest.raises(ValueError, match=f"gives 1\n  unusable rows, 2: {told}"):
        open_benchmark("vg-paragraphs", folder, splits={"test"}, counts=COUNTS)


def test_each_split_needs_its_own_list_only(folder):
    (folder / "train_split.json").unlink()
    data = open_benchmark("vg-paragraphs", folder, counts=COUNTS)
    assert data.splits() == {"validation": 1, "test": 2}
    with pytest.raises(ValueError, match=r"no split 'train' here: .* lacks train_split.json \(image ids"):
        data.part("train")


def test_wrong_kind_of_split_file(folder):
    write_json(folder / "val_split.json", {"ids": [1]})
    with pytest.raises(ValueError, match=r"val_split.json holds dict, not a list of image ids"):
        open_benchmark("vg-paragraphs", folder, counts=COUNTS)


def test_published_counts(folder):
    for split, count in (("train", "14,575"), ("validation", "2,487"), ("test", "2,489")):
        with pytest.raises(ValueError, match=f"split {split} must have {count} records"):
            open_benchmark("vg-paragraphs", folder, splits={split})
