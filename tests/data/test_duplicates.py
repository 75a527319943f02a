"""Near-duplicates against comparing all pairs, and which groups of records are reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps

from hnclip.core import Record
from hnclip.data import duplicates
from hnclip.data.check import check_data
from hnclip.data.duplicates import THUMBNAIL, image_fingerprint, near_duplicate_captions, near_duplicate_images
from hnclip.data.image_sources import FileImage
from hnclip.data.images import preprocess_image
from hnclip.data.records import DataSet

LONG = " ".join(f"word{number}" for number in range(60))
NEARLY = LONG.replace("word30", "other")


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
def test_captions_are_those_of_comparing_all_pairs(texts: list[str], threshold: float) -> None:
    def similar(one: int, other: int) -> bool:
        first, second = runs(texts[one]), runs(texts[other])
        return bool(first) and bool(second) and len(first & second) / len(first | second) >= threshold

    assert near_duplicate_captions(texts, threshold) == (components(len(texts), similar), True)


def test_case_punctuation_and_scripts_without_spaces() -> None:
    assert near_duplicate_captions([LONG, LONG.upper().replace(" ", ", "), "a dog"])[0] == [[0, 1]]
    chinese = "一只棕色的狗在绿色的草地上奔跑追逐一个红色的球而孩子们在旁边笑着看着它"
    assert near_duplicate_captions([chinese, chinese.replace("红", "蓝"), chinese[::-1]])[0] == [[0, 1]]


def test_too_much_to_compare_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "MOST_CAPTION_PAIRS", 0)
    assert near_duplicate_captions([LONG, NEARLY]) == ([], False)
    monkeypatch.setattr(duplicates, "MOST", 1)
    assert near_duplicate_captions([LONG, LONG]) == near_duplicate_images([fingerprint(blobs(1))] * 2) == ([], False)


def blobs(seed: int, width: int = 80, height: int = 60) -> Image.Image:
    """An image with a structure of its own: soft patches of colour."""
    noise = np.random.default_rng(seed).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def fingerprint(image: Image.Image) -> bytes:
    found = image_fingerprint(preprocess_image(image, THUMBNAIL).numpy())
    assert found is not None
    return found


@pytest.mark.parametrize(("bits", "correlation"), [(0, -1.0), (1, 0.9), (4, -1.0), (4, 0.9), (15, 0.9)])
def test_images_are_those_of_comparing_all_pairs(
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


@pytest.mark.parametrize(
    ("change", "near"),
    [
        (lambda image: image.resize((200, 110), Image.Resampling.BICUBIC), True),
        (lambda image: ImageEnhance.Contrast(image).enhance(0.8), True),
        (lambda image: image.convert("L"), True),
        (ImageOps.mirror, False),
        (lambda image: image.crop((20, 15, 80, 60)), False),
        (lambda image: blobs(99), False),
    ],
)
def test_near_duplicates_by_fingerprint(change: Callable[[Image.Image], Image.Image], near: bool) -> None:
    for seed in range(20):
        prints = [fingerprint(blobs(seed)), fingerprint(change(blobs(seed)))]
        assert near_duplicate_images(prints)[0] == ([[0, 1]] if near else [])


def test_plain_images_have_no_fingerprint_and_drawings_on_one_background_differ_by_strength() -> None:
    for image in (Image.new("RGB", (50, 50), "red"), Image.linear_gradient("L")):
        assert image_fingerprint(preprocess_image(image, THUMBNAIL).numpy()) is None
    vectors = (np.full(64, 3.0), np.where(np.arange(64) % 2, 1.0, 9.0), np.full(64, 3.9))  # all signs agree
    assert near_duplicate_images([vector.astype(np.float16).tobytes() for vector in vectors])[0] == [[0, 2]]


# Groups of records


@pytest.fixture
def image(tmp_path: Path) -> Callable[..., FileImage]:
    """A new file of the image of a seed."""

    def make(seed: int, width: int = 80) -> FileImage:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.png"
        blobs(seed, width).save(path)
        return FileImage(path)

    return make


def groups(*records: Record, images: bool = True) -> list[tuple[str, str, tuple[str, ...]]]:
    """Kinds, ids as one word, and splits."""
    found = check_data(DataSet("small", records), images=images).groups
    return [(group.kind, "".join(group.ids), group.splits) for group in found]


def test_equal_and_similar_images(image: Callable[..., FileImage]) -> None:
    one, copy, wide, c = image(1), image(1), image(1, width=96), Record("c", image(2), ("z",), "train")
    a, b = Record("a", one, ("x",), "train"), Record("b", one, ("y",), "train")
    assert groups(a, b, c) == []  # captions of one image
    assert groups(replace(a, split=None), b) == []
    assert groups(a, replace(b, image=copy)) == [("same image", "ab", ("train",))]
    leak = [a, replace(b, image=copy, split="test"), c]
    assert groups(*leak) == [("shared image", "ab", ("train", "test"))]
    assert groups(*leak, images=False) == []  # only names are known
    assert groups(a, replace(b, image=wide, split="test"), c) == [("similar image", "ab", ("train", "test"))]
    assert groups(replace(a, group="g"), replace(b, image=wide, group="g")) == []


def test_equal_and_similar_captions(image: Callable[..., FileImage]) -> None:
    texts = {"a": "A dog", "b": "a  dog", "c": "A cat"}
    a, b, c = (Record(id, image(seed), (text,), "train") for seed, (id, text) in enumerate(texts.items()))
    assert groups(a, b, c) == [("same caption", "ab", ("train",))]
    assert groups(a, replace(b, split="test")) == [("shared caption", "ab", ("train", "test"))]
    assert groups(a, replace(b, image=a.image)) == []
    a, b = replace(a, captions=(LONG,)), replace(b, captions=(NEARLY,))
    assert groups(a, b, replace(c, captions=(LONG[:200],))) == [("similar caption", "ab", ("train",))]
    assert groups(replace(a, group="g"), replace(b, group="g")) == []
