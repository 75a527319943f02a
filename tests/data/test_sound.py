"""What cannot be used is left out and listed; what can be used is not touched."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from hnclip.core import Problem, Record
from hnclip.data.image_sources import FileImage
from hnclip.data.images import ImageTransform
from hnclip.data.texts import TextTransform
from hnclip.data.validate import check_share, drop_invalid, write_problems
from hnclip.models.preprocessing import train_tokenizer

SMALL = ImageTransform(8)


@pytest.fixture(scope="module")
def text_transform() -> TextTransform:
    return TextTransform(train_tokenizer(["a dog", "two cats"], 600), 77)


@pytest.fixture
def records(tmp_path: Path) -> list[Record]:
    found = []
    for name in "abcde":
        path = tmp_path / f"{name}.png"
        Image.new("RGB", (20, 12), (ord(name), 0, 0)).save(path)
        found.append(Record(id=name, image=FileImage(path), captions=(f"the letter {name}",), split=None))
    return found


def check(records: list[Record], text_transform: TextTransform, cache: Path | None = None):
    return drop_invalid(records, text_transform, SMALL, cache=cache)


def test_sound_records_are_left_as_they_are(records: list[Record], text_transform: TextTransform) -> None:
    found = check(records, text_transform)
    assert found.records == tuple(records)
    assert found.problems == ()


def test_bad_pictures_and_captions_are_listed_and_the_others_stay_in_order(
    records: list[Record], text_transform: TextTransform, tmp_path: Path
) -> None:
    (tmp_path / "b.png").write_bytes(b"nothing of a picture")
    (tmp_path / "e.png").unlink()
    records[2] = replace(records[2], captions=("  ", "still good", "half \ud83d"))
    records[3] = replace(records[3], captions=("\n",))
    records.append(replace(records[0], id="f", captions=()))
    found = check(records, text_transform, tmp_path / "cache")
    assert [record.id for record in found.records] == ["a", "c"]
    assert found.records[1].captions == ("still good",)
    assert {(problem.kind, problem.where) for problem in found.problems} == {
        ("corrupt image", "b"),
        ("empty caption", "c"),
        ("bad text", "c"),
        ("empty caption", "d"),
        ("missing image", "e"),
        ("no caption", "f"),
    }
    assert all(problem.detail for problem in found.problems)


def test_nothing_sound_at_all(records: list[Record], text_transform: TextTransform) -> None:
    found = check([replace(record, captions=(" ",)) for record in records], text_transform)
    assert found.records == ()
    assert len(found.problems) == 5


def test_a_share_above_the_limit_is_refused_with_examples() -> None:
    problems = [Problem("missing image", f"r{i}", "gone") for i in range(7)]
    check_share(7, 700, problems, what="records", largest=0.01, name="my.csv")
    check_share(0, 0, [], what="records", largest=0.0, name="my.csv")
    check_share(0, 10, problems, what="records", largest=0.0, name="my.csv")  # captions were bad, no record was lost
    with pytest.raises(ValueError, match=r"7 of 699 records of my\.csv cannot be used") as caught:
        check_share(7, 699, problems, what="records", largest=0.01, name="my.csv")
    message = str(caught.value)
    assert "missing image: r4: gone" in message
    assert "r5" not in message
    assert "and 2 more" in message
    assert "hnclip data check my.csv" in message


def test_problems_are_written_one_to_a_line(tmp_path: Path) -> None:
    problems = [Problem("bad text", "ü/1", "a\nb"), Problem("no image", "2", "")]
    write_problems(tmp_path / "left_out.jsonl", problems)
    lines = (tmp_path / "left_out.jsonl").read_text(encoding="utf-8").splitlines()
    assert [Problem(**json.loads(line)) for line in lines] == problems
