from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small_records import blobs, data_set, picture_file, record

from hnclip.core import Problem
from hnclip.data import problems as kinds
from hnclip.data.check import check_data, linking
from hnclip.data.check.counts import spread
from hnclip.data.images import ImageTransform
from hnclip.data.pictures import FileImage
from hnclip.data.records import DataSet
from hnclip.data.texts import TextTransform
from hnclip.data.validate import drop_invalid
from hnclip.models.preprocessing import train_tokenizer


@pytest.fixture(scope="module")
def transform():
    return TextTransform(train_tokenizer(["a red dog runs"] * 3, 600), context=24)


@pytest.fixture
def sound(tmp_path):
    """Six records of two splits with nothing wrong."""
    names = ["train", "train", "train", "train", "test", "test"]
    return data_set(
        *(
            record(f"r{seed}", picture_file(tmp_path, f"{seed}.png", seed), f"dog {seed}", f"cat {seed}", split=split)
            for seed, split in enumerate(names)
        )
    )


@pytest.fixture
def broken(tmp_path, transform):
    """Data with something of nearly everything."""
    whole = picture_file(tmp_path, "whole.jpg", blobs(1, 300, 300)).read()
    return DataSet(
        "broken",
        (
            record("good", picture_file(tmp_path, "good.png", 1), "a good dog"),
            record("copy", picture_file(tmp_path, "copy.png", 1), "another dog", split="test"),
            record("missing", FileImage(tmp_path / "nowhere.png"), "nobody"),
            record("half", picture_file(tmp_path, "half.jpg", whole[: len(whole) // 2]), "half a picture"),
            record("mute", picture_file(tmp_path, "mute.png", 2)),
            record("blank", picture_file(tmp_path, "blank.png", 3), " "),
            record("partly", picture_file(tmp_path, "partly.png", 4), " ", "a word"),
            record("torn", picture_file(tmp_path, "torn.png", 5), "a \ud83d"),
            record("wordless", picture_file(tmp_path, "wordless.png", 6), "<|endoftext|>"),
            record("long", picture_file(tmp_path, "long.png", 7), "a very long caption about zebras and their stripes"),
            record("good", picture_file(tmp_path, "again.png", 8), "of the same name"),
            record("tiny", picture_file(tmp_path, "tiny.png", blobs(9, 20, 50)), "a tiny one"),
        ),
        (Problem("unreadable row", "broken.csv:7", "3 cells, not 4"), Problem("garbled caption", "x.png", "no row")),
    )


def test_sound_data_are_ready(sound, transform):
    report = check_data(sound, text_transform=transform, image_transform=ImageTransform(48))
    assert report.problems == ()
    assert (report.left_out, report.unread, report.pictures) == (0, 0, 6)
    assert (report.total.records, report.total.captions) == (6, 12)
    assert {name: (split.records, split.captions) for name, split in report.splits.items()} == {
        "train": (4, 8),
        "test": (2, 4),
    }
    assert report.to_text().splitlines()[0] == "small: 6 records, 12 captions, 6 pictures; train 4, test 2"
    assert report.to_text().splitlines()[-1] == "Ready to train."


def test_every_problem_is_found_once_and_in_order(broken, transform):
    report = check_data(broken, text_transform=transform, image_transform=ImageTransform(48))
    assert [(problem.kind, problem.where) for problem in report.problems] == [
        ("unreadable row", "broken.csv:7"),
        ("no caption", "mute"),
        ("empty caption", "blank"),
        ("empty caption", "partly"),
        ("empty caption", "wordless"),
        ("bad text", "torn"),
        ("missing image", "missing"),
        ("truncated image", "half"),
        ("repeated id", "good"),
        ("shared image", "good"),
        ("garbled caption", "x.png"),
        ("cut caption", "long"),
        ("small image", "tiny"),
    ]
    assert [problem.kind for problem in report.warnings] == ["garbled caption", "cut caption", "small image"]
    assert len(report.errors) + len(report.warnings) == len(report.problems)
    assert report.unread == 1


def test_what_is_left_out_is_what_training_leaves_out(broken, transform):
    report = check_data(broken, text_transform=transform, image_transform=ImageTransform(48))
    kept = drop_invalid(broken.records, transform, ImageTransform(48), cache=None).records
    assert report.left_out == len(broken.records) - len(kept) == 6


def test_the_report_is_the_same_for_any_number_of_workers(broken):
    texts = {json.dumps(check_data(broken, workers=workers).to_dict()) for workers in (1, 4)}
    assert len(texts) == 1


def test_lengths_and_cuts_by_split(tmp_path, transform):
    def some(split, *captions):
        image = picture_file(tmp_path, f"{split}.png", len(captions))
        return record(split, image, *captions, split=split)

    texts = ["a dog", "a red dog", "a red dog runs", "zebras are cut off here"]
    transform = replace(transform, context=12)
    report = check_data(data_set(some("train", *texts), some("test", "a dog")), text_transform=transform)
    tokens = [len(transform.tokenizer(text)["input_ids"]) for text in texts]
    train = report.splits["train"]
    assert (train.words.mean, train.words.median, train.words.greatest) == (3.5, 3.5, 5)
    assert (train.tokens.mean, train.tokens.greatest) == (np.mean(tokens), max(tokens))
    assert train.cut == sum(length > 12 for length in tokens) == 1
    assert report.splits["test"].cut == 0
    assert report.total.cut == 1
    assert transform(texts).truncated == 1
    assert report.context == 12
    assert "1 (25.0%)" in report.to_text()


def test_without_a_model_nothing_is_said_of_tokens_and_small_pictures(sound):
    report = check_data(sound)
    assert (report.context, report.side, report.total.tokens, report.total.cut) == (None, None, None, None)
    assert report.images.small is None
    text = report.to_text()
    assert "tokens" not in text
    assert "smaller" not in text


def test_sizes_of_pictures(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    blobs(1, 40, 30).save(tmp_path / "turned.jpg", exif=exif)
    pictures = [
        FileImage(tmp_path / "turned.jpg"),
        picture_file(tmp_path, "grey.png", blobs(2, 100, 45).convert("L")),
        picture_file(tmp_path, "large.png", blobs(3, 200, 1000)),
        FileImage(tmp_path / "nowhere.png"),
    ]
    data = data_set(*(record(str(n), image, f"caption {n}") for n, image in enumerate([*pictures, pictures[0]])))
    found = check_data(data, image_transform=ImageTransform(40, shortest=50)).images
    assert (found.width.least, found.width.median, found.width.greatest) == (30, 100, 200)
    assert (found.height.least, found.height.median, found.height.greatest) == (40, 45, 1000)
    assert found.megapixels.greatest == 0.2
    assert dict(found.formats) == {"PNG": 2, "JPEG": 1}
    assert dict(found.modes) == {"RGB": 2, "L": 1}
    assert (found.rotated, found.small) == (1, 2)  # 40 pixels are enough for the crop, not for what it is cut from


def test_spread_is_that_of_numpy():
    values = [float(value) for value in np.random.default_rng(0).integers(0, 100, 57)]
    found = spread(values)
    assert found.mean == np.mean(values)
    assert (found.least, found.median, found.greatest) == (min(values), np.median(values), max(values))
    assert (found.low, found.high) == (np.percentile(values, 5), np.percentile(values, 95))
    assert spread([]) is None


def test_without_looking_at_pictures(broken):
    report = check_data(broken, images=False)
    assert report.images is None
    assert not [problem for problem in report.problems if problem.kind in ("missing image", "truncated image")]
    assert "not looked at" in report.to_text()
    assert report.left_out == 3  # mute, blank and torn


def test_captions_alone_do_not_make_data_ready_unconditionally(sound):
    assert check_data(sound, images=False).to_text().endswith("Ready to train, as far as captions tell.")


def test_the_dictionary_is_complete_and_stable(broken, transform):
    report = check_data(broken, text_transform=transform, image_transform=ImageTransform(48))
    found = json.loads(json.dumps(report.to_dict()))
    assert list(found) == [
        "name",
        "pictures",
        "left_out",
        "unread",
        "context",
        "side",
        "total",
        "splits",
        "images",
        "errors",
        "warnings",
        "groups",
        "unfinished",
    ]
    levels = {**found["errors"], **found["warnings"]}
    listed = [(kind, each["where"]) for kind, problems in levels.items() for each in problems]
    assert listed == [(problem.kind, problem.where) for problem in report.problems]
    assert found["groups"] == [
        {"kind": "shared image", "ids": ["good", "copy"], "splits": ["train", "test"], "example": None}
    ]
    assert found["splits"]["test"]["words"]["mean"] == 2
    assert found["images"]["formats"] == {"PNG": 10}


def test_the_text_says_what_is_wrong_what_to_do_and_what_follows(broken, transform):
    text = check_data(broken, text_transform=transform, image_transform=ImageTransform(48)).to_text()
    paragraphs = text.split("\n\n")
    assert paragraphs[0] == "broken: 12 records, 8 captions, 12 pictures; train 11, test 1"
    levels = [paragraph.split()[0] for paragraph in paragraphs[1:-3]]
    assert levels == ["ERROR"] * 8 + ["warning"] * 3
    [missing] = [paragraph for paragraph in paragraphs if "missing image" in paragraph]
    head, meaning, example = missing.splitlines()
    assert head == "ERROR  missing image: 1"
    assert kinds.ERRORS["missing image"] in meaning
    assert kinds.ADVICE["missing image"] in meaning
    assert example.startswith("    missing: ")
    assert "ERROR  shared image: 2 records in 1 group" in text
    verdict = " ".join(paragraphs[-1].split())
    assert verdict.startswith("Not ready: 6 of 12 records will be left out of training; 1 row of the source")
    assert "two splits" in verdict


@pytest.mark.parametrize("listed", [0, 2, 5, 9])
def test_only_the_first_problems_of_a_kind_are_listed(tmp_path, listed):
    data = data_set(*(record(f"r{n}", FileImage(Path(f"nowhere{n}.png")), f"caption {n}") for n in range(7)))
    lines = check_data(data).to_text(listed).splitlines()
    assert sum(line.startswith("    r") for line in lines) == min(listed, 7)
    assert (f"    and {7 - listed} more" in lines) == (listed < 7)


def test_a_negative_number_to_list_is_refused(sound):
    with pytest.raises(ValueError, match="listed must not be negative, got -1"):
        check_data(sound).to_text(-1)


def test_lines_fit_a_terminal_and_hold_nothing_it_would_obey(tmp_path):
    data = DataSet(
        "na\x1bme",
        (
            record("red\x1b[31m", picture_file(tmp_path, "a.png", 1), f"a \x1b[31mdog {'very ' * 50}big"),
            record("caf\udce9", picture_file(tmp_path, "b.png", 2), f"a \x1b[31mdog {'very ' * 50}big", "a\ud83d"),
        ),
        (Problem("unreadable row", "x.csv:1", f"two\nlines, {'long ' * 50}"),),
    )
    text = check_data(data).to_text()
    text.encode()
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 110
    assert r"    x.csv:1: two\nlines, long" in text
    assert r"“a \x1b[31mdog very" in text


def test_verdicts(tmp_path, sound):
    nothing = data_set(record("a", FileImage(tmp_path / "nowhere.png"), "x"))
    assert (
        check_data(nothing)
        .to_text()
        .endswith("No picture could be decoded.\n\nNothing to train on: no record can be used.")
    )
    warned = DataSet("x", sound.records, (Problem("garbled caption", "x.png", "no row"),))
    assert check_data(warned).to_text().endswith("Ready to train; look at the warnings first.")
    partly = data_set(*sound.records, record("p", picture_file(tmp_path, "p.png", 77), " ", "a word"))
    assert (
        check_data(partly).to_text().endswith("Not ready: every record can be used, though not all that belongs to it.")
    )


def test_data_without_records():
    report = check_data(DataSet("none", ()))
    assert report.to_text().splitlines()[0] == "none: 0 records, 0 captions, 0 pictures"
    assert report.to_text().endswith("Nothing to train on: no record can be used.")
    json.dumps(report.to_dict())


def test_a_search_that_was_given_up_is_said(tmp_path, monkeypatch):
    words = [f"w{number}" for number in range(30)]
    texts = [" ".join([*words[:n], f"n{n}", *words[n + 1 :]]) for n in range(12)]
    data = data_set(*(record(str(n), picture_file(tmp_path, f"{n}.png", n), text) for n, text in enumerate(texts)))
    assert check_data(data).unfinished == ()
    monkeypatch.setattr(linking, "REACH", 1)
    report = check_data(data, similar_captions=0.4)
    assert report.unfinished == ("similar caption",)
    assert "There may be more of 'similar caption'" in report.to_text()


def test_progress_walks_through_the_pictures(sound):
    seen = []

    def progress(numbers):
        seen.append(numbers)
        return iter(numbers)

    check_data(sound, progress=progress)
    assert seen == [range(6)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"similar_captions": 0.0}, "similar_captions must be above 0 and at most 1, got 0.0"),
        ({"similar_captions": 80}, "similar_captions must be above 0 and at most 1, got 80"),
        ({"similar_images": -1}, "similar_images must be between 0 and 15 bits, got -1"),
        ({"similar_images": 64}, "similar_images must be between 0 and 15 bits, got 64"),
        ({"workers": 0}, "workers must be at least 1, got 0"),
    ],
)
def test_wrong_settings_are_refused_by_name(sound, options, message):
    with pytest.raises(ValueError, match=message):
        check_data(sound, **options)


def test_every_kind_has_a_meaning_and_advice():
    assert set(kinds.ADVICE) == {*kinds.ERRORS, *kinds.WARNINGS}
    assert not set(kinds.ERRORS) & set(kinds.WARNINGS)
