"""`check_data`: every problem once, what training would skip, lengths and sizes, groups of duplicates; near-duplicates
against comparing all pairs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hnclip.core import Problem, Record
from hnclip.data import duplicates
from hnclip.data.check import check_data
from hnclip.data.duplicates import near_duplicate_captions, near_duplicate_images
from hnclip.data.image_sources import FileImage
from hnclip.data.images import ImageTransform
from hnclip.data.records import DataSet
from hnclip.data.texts import TextTransform
from hnclip.data.validate import ADVICE, check_rows, check_share, drop_invalid, write_problems
from hnclip.models.preprocessing import train_tokenizer
from hnclip.report.data_check import check_report

SIDE = ImageTransform(48)
LONG = " ".join(f"word{number}" for number in range(60))
NEARLY = LONG.replace("word30", "other")


@pytest.fixture(scope="module")
def transform() -> TextTransform:
    return TextTransform(train_tokenizer(["a red dog runs"] * 3, 600), context=24)


def blobs(seed: int, width: int = 80, height: int = 60) -> Image.Image:
    """An image with a structure of its own: soft patches of colour."""
    noise = np.random.default_rng(seed).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def save(path: Path, seed: int, width: int = 80, height: int = 60, **options: Any) -> FileImage:
    blobs(seed, width, height).save(path, **options)
    return FileImage(path)


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
    valid = drop_invalid(broken.records, transform, SIDE, cache=None)
    assert result.left_out == len(broken.records) - len(valid.records) == 6  # what training skips
    skipped = {(problem.kind, problem.where) for problem in valid.problems}
    assert skipped == {pair for pair in levels[0][1:] if pair[0] not in ("repeated id", "shared image")}
    (partly,) = (record for record in valid.records if record.id == "partly")
    assert (partly.captions, partly.filtered) == (("a word",), ("2",))
    assert check_data(broken, images=False).left_out == 3  # mute, blank and torn
    text = check_report(check_data(broken)).to_text()
    assert all(part in text for part in ("missing image", ADVICE["missing image"], "Not ready"))


# Near-duplicates


def test_too_large_a_share_of_problems_is_an_error_and_problems_are_listed_in_a_file(tmp_path: Path) -> None:
    problems = [Problem("missing image", f"ü{i}", "gone\n") for i in range(7)]
    check_share(7, 700, problems, what="records", largest=0.01, name="my.csv")
    with pytest.raises(ValueError, match=r"(?s)--read\.images.*hnclip data check my\.csv"):
        check_rows(DataSet("my.csv", (), tuple(problems)), largest=0.5)
    write_problems(tmp_path / "problems.jsonl", problems)
    lines = (tmp_path / "problems.jsonl").read_text(encoding="utf-8").splitlines()
    assert [Problem(**json.loads(line)) for line in lines] == problems


def components(count: int, similar: Callable[[int, int], bool]) -> list[list[int]]:
    """Groups of two and more by the definition: all pairs, joined until nothing changes."""
    label = list(range(count))
    pairs = [pair for pair in combinations(range(count), 2) if similar(*pair)]
    for _ in range(count):
        for one, other in pairs:
            label[one] = label[other] = min(label[one], label[other])
    groups = [[index for index in range(count) if label[index] == name] for name in range(count)]
    return [members for members in groups if len(members) > 1]


def runs(text: str) -> set[tuple[str, ...]]:
    words = text.lower().split()
    padded = ["", "", *words, "", ""]
    return {tuple(padded[start : start + 3]) for start in range(len(words) + 2)} if words else set()


@given(
    st.lists(st.lists(st.sampled_from("abcd"), max_size=9).map(" ".join), max_size=12),
    st.sampled_from([0.2, 0.4, 0.5, 0.6, 0.75, 0.8, 1.0]),
)
def test_similar_captions_are_those_of_comparing_all_pairs(texts: list[str], threshold: float) -> None:
    def similar(one: int, other: int) -> bool:
        first, second = runs(texts[one]), runs(texts[other])
        return bool(first) and bool(second) and len(first & second) / len(first | second) >= threshold

    assert near_duplicate_captions(texts, threshold) == (components(len(texts), similar), True)


@pytest.mark.parametrize(("bits", "correlation"), [(0, -1.0), (1, 0.9), (4, -1.0), (15, 0.9)])
def test_similar_images_are_those_of_comparing_all_pairs(
    monkeypatch: pytest.MonkeyPatch, bits: int, correlation: float
) -> None:
    monkeypatch.setattr(duplicates, "BLOCK", 7)
    random = np.random.default_rng(0)
    waves = (random.normal(size=(5, 64)) * 20)[random.integers(0, 5, 80)].astype(np.float16)
    for row in waves:
        row[random.choice(64, random.integers(0, 10), replace=False)] *= -1
    speeds = np.array(sorted(across + down for across in range(32) for down in range(32))[1:65])

    def similar(one: int, other: int) -> bool:
        first, second = waves[one].astype(float), waves[other].astype(float)
        strengths = [sum(speeds * vector * vector) for vector in (first, second)]
        correlates = sum(speeds * first * second) / (strengths[0] * strengths[1]) ** 0.5 >= correlation
        return correlates and sum((a > 0) != (b > 0) for a, b in zip(first, second)) <= bits

    assert near_duplicate_images([row.tobytes() for row in waves], bits, correlation) == (components(80, similar), True)


def groups(*records: Record, images: bool = True) -> list[tuple[str, str, tuple[str, ...]]]:
    """Kinds, ids as one word, and splits."""
    found = check_data(DataSet("small", records), images=images).groups
    return [(group.kind, "".join(group.ids), group.splits) for group in found]


def test_groups_of_equal_and_similar_images_and_captions(tmp_path: Path) -> None:
    one, copy, wide = save(tmp_path / "1.png", 1), save(tmp_path / "2.png", 1), save(tmp_path / "3.png", 1, width=96)
    a, b = Record("a", one, ("x",), "train"), Record("b", one, ("y",), "train")
    assert groups(a, b) == []  # captions of one image
    assert groups(a, replace(b, image=copy)) == [("same image", "ab", ("train",))]
    leak = [a, replace(b, image=copy, split="test")]
    assert groups(*leak) == [("shared image", "ab", ("train", "test"))]
    assert groups(*leak, images=False) == []  # only names are known
    assert groups(a, replace(b, image=wide, split="test")) == [("similar image", "ab", ("train", "test"))]
    assert groups(replace(a, group="g"), replace(b, image=wide, group="g")) == []
    b = replace(b, image=save(tmp_path / "4.png", 2), captions=("X ",))
    assert groups(a, b) == [("same caption", "ab", ("train",))]
    assert groups(a, replace(b, split="test")) == [("shared caption", "ab", ("train", "test"))]
    a, b = replace(a, captions=(LONG,)), replace(b, captions=(NEARLY,))
    assert groups(a, b) == [("similar caption", "ab", ("train",))]
    assert groups(replace(a, group="g"), replace(b, group="g")) == []
