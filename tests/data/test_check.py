"""`check_data`: every problem once, what training would skip, lengths and sizes, JSON and text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hnclip.core import Problem, Record
from hnclip.data import problems as kinds
from hnclip.data.check import check_data
from hnclip.data.image_sources import FileImage
from hnclip.data.images import ImageTransform
from hnclip.data.records import DataSet
from hnclip.data.texts import TextTransform
from hnclip.data.validate import drop_invalid
from hnclip.models.preprocessing import train_tokenizer


@pytest.fixture(scope="module")
def transform() -> TextTransform:
    return TextTransform(train_tokenizer(["a red dog runs"] * 3, 600), context=24)


def blobs(seed: int, width: int = 80, height: int = 60) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def save(path: Path, image: Image.Image | int, **options: Any) -> FileImage:
    (blobs(image) if isinstance(image, int) else image).save(path, **options)
    return FileImage(path)


@pytest.fixture
def valid(tmp_path: Path) -> DataSet:
    """Six records of two splits without a problem."""
    splits = ["train", "train", "train", "train", "test", "test"]
    images = [save(tmp_path / f"valid{seed}.png", seed) for seed in range(6)]
    pairs = enumerate(zip(images, splits))
    return DataSet(
        "small", tuple(Record(f"r{n}", image, (f"dog {n}", f"cat {n}"), split) for n, (image, split) in pairs)
    )


@pytest.fixture
def broken(tmp_path: Path) -> DataSet:
    """Data with something of nearly everything."""
    names = [
        "good",
        "missing",
        "half",
        "mute",
        "blank",
        "partly",
        "torn",
        "void",
        "long",
        "again",
        "tiny",
        "garbled",
    ]
    images = {name: save(tmp_path / f"{name}.png", seed) for seed, name in enumerate(names)}
    save(tmp_path / "tiny.png", blobs(20, 20, 50))
    whole = (tmp_path / "half.png").read_bytes()
    (tmp_path / "half.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "missing.png").unlink()
    captions: dict[str, tuple[str, ...]] = {name: (f"a caption of {name}",) for name in names}
    captions |= {"mute": (), "blank": (" ",), "partly": (" ", "a word"), "torn": ("a \ud83d",)}
    captions |= {"void": ("<|endoftext|>",), "long": ("a very long caption about zebras and their stripes",)}
    captions |= {"garbled": ("the dogâ€™s ball",)}
    records = [Record(name, images[name], captions[name], "train") for name in names]
    records[9] = replace(records[9], id="good")
    records.append(Record("copy", save(tmp_path / "copy.png", 0), ("another dog",), "test"))
    return DataSet("broken", tuple(records), (Problem("unreadable row", "broken.csv:7", "3 cells, not 4"),))


def test_valid_data_are_ready(valid: DataSet, transform: TextTransform) -> None:
    result = check_data(valid, text_transform=transform, image_transform=ImageTransform(48))
    assert (result.problems, result.left_out, result.unread) == ([], 0, 0)
    assert [result.total[name] for name in ("records", "captions", "images")] == [6, 12, 6]
    assert {name: (split["records"], split["captions"]) for name, split in result.splits.items()} == {
        "train": (4, 8),
        "test": (2, 4),
    }
    assert result.to_text().endswith("Ready to train.")


def test_every_problem_is_found_once_and_in_order(broken: DataSet, transform: TextTransform) -> None:
    result = check_data(broken, text_transform=transform, image_transform=ImageTransform(48))
    assert [(problem.kind, problem.where) for problem in result.problems] == [
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
        ("garbled caption", "garbled"),
        ("cut caption", "long"),
        ("small image", "tiny"),
    ]
    assert list(result.warnings) == ["garbled caption", "cut caption", "small image"]
    assert result.unread == 1
    kept = drop_invalid(broken.records, transform, ImageTransform(48), cache=None).records
    assert result.left_out == len(broken.records) - len(kept) == 6  # what training skips
    assert check_data(broken, images=False).left_out == 3  # mute, blank and torn


def test_json_is_complete(broken: DataSet, transform: TextTransform) -> None:
    result = check_data(broken, text_transform=transform, image_transform=ImageTransform(48))
    found = json.loads(json.dumps(result.to_dict()))
    levels = {**found["errors"], **found["warnings"]}
    listed = [(kind, each["where"]) for kind, problems in levels.items() for each in problems]
    assert listed == [(problem.kind, problem.where) for problem in result.problems]
    assert found["groups"] == [
        {"kind": "shared image", "ids": ["good", "copy"], "splits": ["train", "test"], "example": None}
    ]
    assert found["splits"]["test"]["words"]["mean"] == 2
    assert (found["total"]["cut"], found["context"], found["side"]) == (1, 24, 48)


def test_lengths_are_those_of_the_model(tmp_path: Path, transform: TextTransform) -> None:
    texts = ["a dog", "a red dog", "a red dog runs", "zebras are cut off here"]
    transform = replace(transform, context=12)
    data = DataSet("x", (Record("a", save(tmp_path / "a.png", 1), tuple(texts), None),))
    total = check_data(data, text_transform=transform).total
    tokens = [len(transform.tokenizer(text)["input_ids"]) for text in texts]
    expected = [np.mean(tokens), *np.percentile(tokens, [0, 5, 50, 95, 100])]
    assert list(total["tokens"].values()) == pytest.approx(expected)
    assert total["words"]["mean"] == 3.5
    assert total["cut"] == sum(length > 12 for length in tokens) == transform(texts).truncated == 1
    without = check_data(data)
    assert (without.total["tokens"], without.total["cut"], without.context) == (None, None, None)
    assert "tokens" not in without.to_text()


def test_sizes_of_images(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    images = [
        save(tmp_path / "turned.jpg", blobs(1, 40, 30), exif=exif),
        save(tmp_path / "grey.png", blobs(2, 100, 45).convert("L")),
        save(tmp_path / "large.png", blobs(3, 200, 1000)),
        FileImage(tmp_path / "nowhere.png"),
    ]
    records = (Record(str(n), image, (f"caption {n}",), None) for n, image in enumerate([*images, images[0]]))
    found = check_data(DataSet("x", tuple(records)), image_transform=ImageTransform(40, shortest=50)).sizes
    assert found is not None
    assert [found["width"][name] for name in ("least", "50 %", "most")] == [30, 100, 200]
    assert [found["height"][name] for name in ("least", "50 %", "most")] == [40, 45, 1000]
    assert found["megapixels"]["most"] == 0.2
    assert (found["formats"], found["modes"]) == ({"PNG": 2, "JPEG": 1}, {"RGB": 2, "L": 1})
    assert (found["rotated"], found["small"]) == (1, 2)  # 40 pixels are enough for the crop, not for the resize


def test_text_names_problems_advice_and_verdict(broken: DataSet, valid: DataSet) -> None:
    text = check_data(broken).to_text()
    for part in ("missing image", kinds.ADVICE["missing image"], "2 records in 1 group", "Not ready", "1 row"):
        assert part in text
    assert "Nothing to train on" in check_data(DataSet("none", ())).to_text()
    warned = replace(valid, problems=(Problem("garbled caption", "x.png", "no row"),))
    assert "look at the warnings" in check_data(warned).to_text()
    assert "as far as captions show" in check_data(valid, images=False).to_text()


@pytest.mark.parametrize("listed", [0, 5, 9])
def test_lines_are_few_short_and_escaped(listed: int) -> None:
    text = f"a \x1b[31mdog {'very ' * 50}big \ud83d"
    records = (Record(f"r{n}\x1b[31m\udce9", FileImage(Path(f"no{n}.png")), (f"{n} {text}",), None) for n in range(7))
    text = check_data(DataSet("na\x1bme", tuple(records))).to_text(listed)
    text.encode()
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 110
    assert text.count("\n    r") == 2 * min(listed, 7)  # bad text and missing images
    assert text.count(f"\n    and {7 - listed} more") == 2 * (listed < 7)
