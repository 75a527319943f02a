from __future__ import annotations

import pytest
from small_copies import list_rows, write_json, write_picture

from hnclip.data.benchmarks import open_benchmark

COUNTS = {"test": 11}


@pytest.fixture
def folder(tmp_path):
    """Urban-1K as it unpacks: one level below the folder."""
    for number in range(1, 12):
        write_picture(tmp_path / "Urban1k" / "image" / f"{number}.jpg", number)
        caption = tmp_path / "Urban1k" / "caption" / f"{number}.txt"
        caption.parent.mkdir(exist_ok=True)
        caption.write_text(f"A street, number {number}.\nA second line that no paper reads.\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("below", [".", "Urban1k"])
def test_captions_are_the_first_lines_in_numerical_order(folder, below):
    data = open_benchmark("urban-1k", folder / below, counts=COUNTS)
    assert data.exact
    assert [record.id for record in data.part("test")] == [str(number) for number in range(1, 12)]
    for number, record in enumerate(data.records, 1):
        assert record.captions == (f"A street, number {number}.",)
        assert record.image.load().getpixel((0, 0))[0] in range(number - 3, number + 4)


@pytest.mark.parametrize("wrapped", [False, True])
def test_json_forms_say_the_same(folder, tmp_path_factory, wrapped):
    names = [f"{number}.jpg" for number in range(1, 12)]
    rows = list_rows(names, "change/this/directoryUrban1k/image/")
    content = rows
    if wrapped:
        content = {
            "annotations": [
                {"image_id": i, "image": n, "caption": r["caption"]} for i, (n, r) in enumerate(zip(names, rows))
            ]
        }
    other = tmp_path_factory.mktemp("list")
    write_json(other / "urban1k_test.json", content)
    data = open_benchmark("urban-1k", other, folder / "Urban1k" / "image", counts=COUNTS)
    assert [record.id for record in data.part("test")] == [str(number) for number in range(1, 12)]
    assert data.records[2].captions == ("It shows 3.jpg, at length.",)
    assert data.records[2].image.load().size == (6, 4)


def test_missing_caption_file_is_named(folder):
    (folder / "Urban1k" / "caption" / "9.txt").unlink()
    with pytest.raises(ValueError, match=r"must have 11 records, but .*caption gives 10\n  missing: 9$"):
        open_benchmark("urban-1k", folder, counts=COUNTS)


def test_too_many_records_are_named(folder):
    with pytest.raises(ValueError, match=r"must have 7 records.* gives 11\n  beyond that number: 8, 9, 10 and 1 more$"):
        open_benchmark("urban-1k", folder, counts={"test": 7})


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "empty caption, .*5.txt: "),
        (b"\nOn the second line.", "empty caption, .*5.txt: "),
        (b"Stra\xdfe", "bad text, .*5.txt: .*byte 0xdf is not UTF-8"),
    ],
)
def test_bad_caption_files_are_named(folder, content, told):
    (folder / "Urban1k" / "caption" / "5.txt").write_bytes(content)
    with pytest.raises(ValueError, match=f"unusable rows, 1: {told}"):
        open_benchmark("urban-1k", folder, counts=COUNTS)


def test_urban_is_not_for_training(folder):
    with pytest.raises(ValueError, match="the paper trains on vg-paragraphs"):
        open_benchmark("urban-1k", folder, counts=COUNTS).part("train")


def test_published_count_and_either_form_when_nothing_is_there(folder, tmp_path_factory):
    with pytest.raises(ValueError, match="split test must have 1,000 records"):
        open_benchmark("urban-1k", folder)
    with pytest.raises(ValueError, match=r"test: caption \(.*\), from https://\S+Urban1k; or urban_dataset_test.json"):
        open_benchmark("urban-1k", tmp_path_factory.mktemp("empty"))
