"""Invalid records are skipped and listed; valid ones are not changed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from hnclip.core import Problem, Record
from hnclip.data.image_sources import FileImage
from hnclip.data.images import ImageTransform
from hnclip.data.records import DataSet
from hnclip.data.texts import TextTransform
from hnclip.data.validate import ERRORS, check_rows, check_share, drop_invalid, write_problems
from hnclip.models.preprocessing import train_tokenizer
from small_families import bert_tokenizer

SMALL = ImageTransform(8)


@pytest.fixture(scope="module")
def text_transform() -> TextTransform:
    return TextTransform(train_tokenizer(["a dog", "two cats"], 600), 77)


@pytest.fixture
def records(tmp_path: Path) -> list[Record]:
    for name in "abcde":
        Image.new("RGB", (20, 12), (ord(name), 0, 0)).save(tmp_path / f"{name}.png")
    return [Record(name, FileImage(tmp_path / f"{name}.png"), (f"the letter {name}",), None) for name in "abcde"]


def test_invalid_images_and_captions_are_listed_and_the_others_kept_in_order(records, text_transform, tmp_path):
    assert drop_invalid(records, text_transform, SMALL, cache=None).records == tuple(records)
    (tmp_path / "b.png").write_bytes(b"not an image")
    (tmp_path / "e.png").unlink()
    captions = ("  ", "still good", "half \ud83d", "also good")
    records[2] = replace(records[2], captions=captions, filtered=("1", "2", "3", "4"))
    records[3] = replace(records[3], captions=("\n",))
    records.append(replace(records[0], id="f", captions=()))
    found = drop_invalid(records, text_transform, SMALL, cache=tmp_path / "cache")
    assert [record.id for record in found.records] == ["a", "c"]
    assert (found.records[1].captions, found.records[1].filtered) == (("still good", "also good"), ("2", "4"))
    assert sorted((problem.where, problem.kind) for problem in found.problems) == [
        ("b", "corrupt image"),
        ("c", "bad text"),
        ("c", "empty caption"),
        ("d", "empty caption"),
        ("e", "missing image"),
        ("f", "no caption"),
    ]
    assert {problem.kind for problem in found.problems} <= set(ERRORS)


def test_captions_that_only_a_tokenizer_finds_empty(records):
    """BERT has no token for words of more than 100 letters."""
    long = [replace(record, captions=("z" * 101,)) for record in records]
    transform = TextTransform(bert_tokenizer(), 77)
    assert drop_invalid(long, transform, SMALL, cache=None).records == ()
    kept = drop_invalid([*long, replace(records[0], captions=("a dog",))], transform, SMALL, cache=None)
    assert len(transform([record.captions[0] for record in kept.records])) == 1


def test_too_large_a_share_is_an_error_with_examples():
    problems = [Problem("missing image", f"r{i}", "gone") for i in range(7)]
    for lost, total, largest in ((7, 700, 0.01), (0, 0, 0.0), (0, 10, 0.0)):
        check_share(lost, total, problems, what="records", largest=largest, name="my.csv")
    with pytest.raises(ValueError, match=r"hnclip data check my\.csv") as caught:
        check_share(7, 699, problems, what="records", largest=0.01, name="my.csv")
    assert "r4: gone" in str(caught.value)
    assert "r5" not in str(caught.value)
    rows = DataSet("my.csv", (), tuple(problems))
    check_rows(rows, largest=1.0)
    with pytest.raises(ValueError, match="7 of 7"):
        check_rows(rows, largest=0.5)


def test_problems_are_written_one_to_a_line(tmp_path):
    problems = [Problem("bad text", "ü/1", "a\nb"), Problem("no image", "2", "")]
    write_problems(tmp_path / "problems.jsonl", problems)
    lines = (tmp_path / "problems.jsonl").read_text(encoding="utf-8").splitlines()
    assert [Problem(**json.loads(line)) for line in lines] == problems
