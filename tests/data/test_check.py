"""`check_data`: every problem once, what training would skip, lengths and sizes; shares of problems."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hnclip.core import Problem, Record
from hnclip.data.check import check_data
from hnclip.data.image_sources import FileImage
from hnclip.data.images import ImageTransform
from hnclip.data.records import DataSet
from hnclip.data.texts import TextTransform
from hnclip.data.validate import ADVICE, check_rows, check_share, drop_invalid, write_problems
from hnclip.models.preprocessing import train_tokenizer
from hnclip.report.data_check import check_report

SIDE = ImageTransform(48)


@pytest.fixture(scope="module")
def transform() -> TextTransform:
    return TextTransform(train_tokenizer(["a red dog runs"] * 3, 600), context=24)


def save(path: Path, seed: int, width: int = 80, height: int = 60, **options: Any) -> FileImage:
    noise = np.random.default_rng(seed).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).save(path, **options)
    return FileImage(path)


@pytest.fixture
def valid(tmp_path: Path) -> DataSet:
    """Six records of two splits without a problem."""
    splits = ["train", "train", "train", "train", "test", "test"]
    images = [save(tmp_path / f"valid{seed}.png", seed) for seed in range(6)]
    records = [Record(f"r{n}", images[n], (f"dog {n}", f"cat {n}"), split) for n, split in enumerate(splits)]
    return DataSet("small", tuple(records))


@pytest.fixture
def broken(tmp_path: Path) -> DataSet:
    """Data with something of nearly everything."""
    names = ["good", "missing", "half", "mute", "blank", "partly", "torn", "void", "long", "again", "tiny", "garbled"]
    images = {name: save(tmp_path / f"{name}.png", seed) for seed, name in enumerate(names)}
    save(tmp_path / "tiny.png", 20, 20, 50)
    whole = (tmp_path / "half.png").read_bytes()
    (tmp_path / "half.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "missing.png").unlink()
    captions: dict[str, tuple[str, ...]] = {name: (f"a caption of {name}",) for name in names}
    captions |= {"mute": (), "blank": (" ",), "partly": (" ", "a word"), "torn": ("a \ud83d",)}
    captions |= {"void": ("<|endoftext|>",), "long": ("a very long caption about zebras and their stripes",)}
    captions |= {"garbled": ("the dogâ€™s ball",)}
    records = [Record(name, images[name], captions[name], "train") for name in names]
    records[5] = replace(records[5], filtered=("1", "2"))
    records[9] = replace(records[9], id="good")
    records.append(Record("copy", save(tmp_path / "copy.png", 0), ("another dog",), "test"))
    return DataSet("broken", tuple(records), (Problem("unreadable row", "broken.csv:7", "3 cells, not 4"),))


def test_valid_data_are_ready(valid: DataSet, transform: TextTransform) -> None:
    result = check_data(valid, text_transform=transform, image_transform=SIDE)
    assert (result.errors, result.warnings, result.left_out, result.unread) == ({}, {}, 0, 0)
    assert result.total == {"records": 6, "captions": 12, "images": 6, "cut": 0, "small": 0}
    assert result.splits == {"train": 4, "test": 2}
    assert drop_invalid(valid.records, transform, SIDE, cache=None) == (valid.records, ())


def test_every_problem_is_found_once_and_in_order(broken: DataSet, transform: TextTransform) -> None:
    result = check_data(broken, text_transform=transform, image_transform=SIDE)
    found = json.loads(json.dumps(result.to_dict()))
    levels = [
        [(kind, each["where"]) for kind, problems in found[level].items() for each in problems]
        for level in ("errors", "warnings")
    ]
    assert levels[0] == [
        ("unreadable row", "broken.csv:7"),
        ("no caption", "mute"),
        ("empty caption", "blank"),
        ("empty caption", "partly"),
        ("empty caption", "void"),
        ("bad text", "torn"),
        ("missing image", "missing"),
        ("truncated image", "half"),
        ("repeated id", "good"),
        ("shared image", "good"),
    ]
    assert levels[1] == [("garbled caption", "garbled"), ("cut caption", "long"), ("small image", "tiny")]
    group = {"kind": "shared image", "ids": ["good", "copy"], "splits": ["train", "test"], "example": None}
    assert (found["groups"], found["unread"], found["total"]["cut"]) == ([group], 1, 1)
    valid = drop_invalid(broken.records, transform, SIDE, cache=None)
    assert result.left_out == len(broken.records) - len(valid.records) == 6  # what training skips
    skipped = {(problem.kind, problem.where) for problem in valid.problems}
    assert skipped == {pair for pair in levels[0][1:] if pair[0] not in ("repeated id", "shared image")}
    (partly,) = (record for record in valid.records if record.id == "partly")
    assert (partly.captions, partly.filtered) == (("a word",), ("2",))
    assert check_data(broken, images=False).left_out == 3  # mute, blank and torn


def test_lengths_are_those_of_the_model_and_sizes_of_upright_images(tmp_path: Path, transform: TextTransform) -> None:
    texts = ["a dog", "a red dog", "a red dog runs", "zebras are cut off here"]
    transform, exif = replace(transform, context=12), Image.Exif()
    exif[0x0112] = 6
    turned = save(tmp_path / "turned.jpg", 1, 40, 30, exif=exif)
    images = [turned, save(tmp_path / "b.png", 2, 100, 45), save(tmp_path / "c.png", 3, 200, 1000), turned]
    data = DataSet("x", tuple(Record(str(n), image, (texts[n],), None) for n, image in enumerate(images)))
    found = check_data(data, text_transform=transform, image_transform=ImageTransform(40, shortest=50))
    tokens = [len(transform.tokenizer(text)["input_ids"]) for text in texts]
    expected = [np.mean(tokens), *np.percentile(tokens, [0, 5, 50, 95, 100])]
    assert list(found.lengths["tokens"].values()) == pytest.approx(expected)
    assert found.lengths["words"]["mean"] == 3.5
    for name, sizes in {"width": [30, 100, 200], "height": [40, 45, 1000]}.items():
        assert [found.lengths[name][statistic] for statistic in ("least", "50 %", "most")] == sizes
    assert found.lengths["megapixels"]["most"] == 0.2
    assert found.total["cut"] == sum(length > 12 for length in tokens) == transform(texts).truncated == 1
    assert found.total["small"] == 2  # 40 pixels are enough for the crop, not for the resize
    assert list(check_data(data, images=False).lengths) == ["words"]


def test_text_names_problems_advice_and_verdict(broken: DataSet, valid: DataSet) -> None:
    text = check_report(check_data(broken)).to_text()
    for part in ("missing image", ADVICE["missing image"], "2 records in 1 group", "Not ready"):
        assert part in text
    warned = replace(valid, problems=(Problem("garbled caption", "x.png", "no row"),))
    for data, verdict in ((valid, "Ready to train"), (warned, "warnings"), (DataSet("none", ()), "Nothing to train")):
        assert verdict in check_report(check_data(data, images=False)).to_text()


@pytest.mark.parametrize("listed", [0, 5, 9])
def test_lines_are_few_short_and_escaped(listed: int) -> None:
    text = f"a \x1b[31mdog {'very ' * 50}big \ud83d"
    records = (Record(f"r{n}\x1b[31m\udce9", FileImage(Path(f"no{n}.png")), (f"{n} {text}",), None) for n in range(7))
    text = check_report(check_data(DataSet("na\x1bme", tuple(records))), listed).to_text()
    text.encode()
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 120
    assert text.count("\n  r") == 2 * min(listed, 7)  # bad text and missing images
    assert text.count(f"\n  and {7 - listed} more") == 2 * (listed < 7)


def test_too_large_a_share_of_problems_is_an_error_with_examples(tmp_path: Path) -> None:
    problems = [Problem("missing image", f"ü{i}", "gone\n") for i in range(7)]
    for lost, total, largest in ((7, 700, 0.01), (0, 0, 0.0), (0, 10, 0.0)):
        check_share(lost, total, problems, what="records", largest=largest, name="my.csv")
    with pytest.raises(ValueError, match=r"hnclip data check my\.csv") as caught:
        check_share(7, 699, problems, what="records", largest=0.01, name="my.csv")
    assert ("ü4" in str(caught.value), "ü5" in str(caught.value)) == (True, False)
    rows = DataSet("my.csv", (), tuple(problems))
    check_rows(rows, largest=1.0)
    with pytest.raises(ValueError, match="7 of 7"):
        check_rows(rows, largest=0.5)
    write_problems(tmp_path / "problems.jsonl", problems)
    lines = (tmp_path / "problems.jsonl").read_text(encoding="utf-8").splitlines()
    assert [Problem(**json.loads(line)) for line in lines] == problems
