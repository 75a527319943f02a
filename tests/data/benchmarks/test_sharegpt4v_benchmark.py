from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_copies import write_json, write_picture

from hnclip.data.benchmarks import open_benchmark, sharegpt4v
from hnclip.data.benchmarks.sharegpt4v import stream_rows

NAME = "share-captioner_coco_lcs_sam_1246k_1107.json"
COUNTS = {"train": 3, "validation": 1000}


def row(number):
    return {
        "id": number,
        "image": f"coco/train2017/{number:012d}.jpg",
        "conversations": [
            {"from": "human", "value": "Describe it. <image>"},
            {"from": "gpt", "value": f"Photo {number} of a dog.\nIt sleeps. It snores. "},
        ],
    }


@pytest.fixture
def folder(tmp_path):
    write_json(tmp_path / NAME, [row(number) for number in range(1003)])
    write_picture(tmp_path / "data" / "coco" / "train2017" / "000000001001.jpg")
    return tmp_path


def test_first_thousand_rows_are_for_validation(folder):
    data = open_benchmark("sharegpt4v", folder, counts=COUNTS)
    assert data.exact
    assert data.splits() == COUNTS
    assert [record.id for record in data.part("train")] == [f"coco/train2017/{n:012d}.jpg" for n in range(1000, 1003)]
    record = data.part("train")[1]
    assert record.captions == ("Photo 1001 of a dog. It sleeps. It snores.",)
    assert record.short == "Photo 1001 of a dog"
    assert record.image.load().size == (6, 4)
    assert data.part("validation")[-1].id == "coco/train2017/000000000999.jpg"


def test_a_caption_of_one_sentence_is_its_own_short_caption(folder):
    rows = [row(number) for number in range(1000)]
    rows[0]["conversations"][1]["value"] = "One sentence."
    write_json(folder / NAME, rows)
    assert open_benchmark("sharegpt4v", folder, splits={"validation"}).records[0].short == "One sentence."


def test_validation_reads_no_further_than_it_must(folder, monkeypatch):
    text = json.dumps([row(number) for number in range(1000)])[:-1]
    (folder / NAME).write_text(text + ", {damaged behind the part that is read")
    monkeypatch.setattr(sharegpt4v, "CHUNK", 100)
    assert open_benchmark("sharegpt4v", folder, splits={"validation"}).splits() == {"validation": 1000}
    with pytest.raises(ValueError, match=rf"{NAME}:\[1000\] is not valid JSON"):
        open_benchmark("sharegpt4v", folder, splits={"train"}, counts=COUNTS)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"conversations": [{"from": "human", "value": "?"}]}, r"no caption, .*:\[2\]: has no second turn"),
        ({"conversations": [{}, {"from": "gpt"}]}, r"unreadable row, .*:\[2\]: its caption is NoneType"),
        ({"conversations": [{}, {"value": "\n"}]}, r"empty caption, .*:\[2\]"),
        ({"image": None}, r"no image, .*:\[2\]: has no image"),
        ({"image": "coco/"}, r"no image, .*:\[2\]: names its picture 'coco/'"),
    ],
)
def test_bad_rows_are_named(folder, change, told):
    rows = [row(number) for number in range(1000)]
    rows[2] |= change
    write_json(folder / NAME, rows)
    with pytest.raises(ValueError, match=f"gives 999\n  unusable rows, 1: {told}"):
        open_benchmark("sharegpt4v", folder, splits={"validation"})


@pytest.mark.parametrize(
    ("line", "told"),
    [(b'"text"', r"unreadable row, .*:\[2\]: a str, not an object"), (None, "bad text, .*byte 0xdf is not UTF-8")],
)
def test_rows_of_another_kind_and_bytes_that_are_not_utf8_are_named(folder, line, told):
    rows = [json.dumps(row(number)).encode() for number in range(1000)]
    rows[2] = line or rows[2].replace(b"a dog", b"Stra\xdfe")
    (folder / NAME).write_bytes(b"[" + b", ".join(rows) + b"]")
    with pytest.raises(ValueError, match=f"gives 999\n  unusable rows, 1: {told}"):
        open_benchmark("sharegpt4v", folder, splits={"validation"})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(
    rows=st.lists(st.dictionaries(st.text(max_size=5), JSON, max_size=4), max_size=8),
    chunk=st.integers(3, 40),
    indent=st.none() | st.integers(0, 2),
    ascii_only=st.booleans(),
)
def test_streaming_gives_the_rows_that_reading_at_once_gives(tmp_path_factory, rows, chunk, indent, ascii_only):
    file = tmp_path_factory.mktemp("stream") / "rows.json"
    file.write_text(f"  {json.dumps(rows, indent=indent, ensure_ascii=ascii_only)}\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharegpt4v, "CHUNK", chunk)
        assert [row for _, row in stream_rows(file)] == rows


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is not a JSON list"),
        (b'{"rows": []}', "is not a JSON list"),
        (b"[{}, {", r":\[1\] is not valid JSON"),
        (b"[{}", r":\[1\] is not valid JSON"),
        (b'[{"a": "' + b"x" * 500 + b'"}]', r":\[0\] is not valid JSON"),
    ],
)
def test_streaming_says_what_is_wrong(tmp_path, monkeypatch, content, told):
    monkeypatch.setattr(sharegpt4v, "CHUNK", 10)
    monkeypatch.setattr(sharegpt4v, "LONGEST_ROW", 100)
    file = tmp_path / "rows.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=told):
        list(stream_rows(file))
