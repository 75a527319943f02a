from __future__ import annotations

import pytest
from small_records import blobs, data_set, picture_file, record

from hnclip.data.check import check_data

LONG = " ".join(f"word{number}" for number in range(60))
NEARLY = LONG.replace("word30", "other")


def groups(*records, **options):
    return [(group.kind, group.ids, group.splits) for group in check_data(data_set(*records), **options).groups]


@pytest.fixture
def picture(tmp_path):
    """A new file of the picture of a seed."""
    made = []

    def make(seed, **options):
        made.append(seed)
        return picture_file(tmp_path, f"{len(made)}.{options.pop('suffix', 'png')}", blobs(seed, **options))

    return make


def test_pictures_and_captions_of_their_own_make_no_group(picture):
    assert groups(*(record(str(seed), picture(seed), f"picture number {seed}") for seed in range(6))) == []


def test_one_picture_under_two_names(picture):
    one, copy, other = picture(1), picture(1), picture(2)
    assert groups(record("a", one, "x"), record("b", other, "y"), record("c", copy, "z")) == [
        ("same image", ("a", "c"), ("train",))
    ]


def test_one_picture_in_two_splits_by_content_and_by_key(picture):
    one, copy, other = picture(1), picture(1), picture(2)
    found = groups(
        record("a", one, "v", split="train"),
        record("b", copy, "w", split="test"),
        record("c", other, "x", split="train"),
        record("d", other, "y", split="validation"),
    )
    assert found == [
        ("shared image", ("a", "b"), ("train", "test")),
        ("shared image", ("c", "d"), ("train", "validation")),
    ]


def test_two_records_of_one_file_in_one_split_are_its_captions(picture):
    one = picture(1)
    assert groups(record("a", one, "v"), record("b", one, "w")) == []
    assert groups(record("a", one, "v", split=None), record("b", one, "w", split="train")) == []


def test_without_pictures_only_keys_tell(picture):
    one, copy = picture(1), picture(1)
    records = [record("a", one, "v"), record("b", copy, "w"), record("c", one, "x", split="test")]
    assert groups(*records, images=False) == [("shared image", ("a", "c"), ("train", "test"))]


def test_a_picture_that_cannot_be_decoded_is_known_by_its_key(tmp_path):
    broken = picture_file(tmp_path, "broken.png", b"no picture")
    assert groups(record("a", broken, "v"), record("b", broken, "w", split="test")) == [
        ("shared image", ("a", "b"), ("train", "test"))
    ]


def test_pictures_that_look_alike(picture):
    records = [
        record("a", picture(1, width=80), "u"),
        record("b", picture(2), "v"),
        record("c", picture(1, width=96), "w", split="test"),
        record("d", picture(1, suffix="jpg"), "x"),
    ]
    assert groups(*records) == [("similar image", ("a", "c", "d"), ("train", "test"))]


def test_plain_pictures_are_no_copies_of_each_other(tmp_path):
    from PIL import Image

    colours = ["white", "black", "#f7f7f7", "navy"]
    pictures = [picture_file(tmp_path, f"{colour}.png", Image.new("RGB", (64, 64), colour)) for colour in colours]
    assert groups(*(record(image.path.name, image, image.path.name) for image in pictures)) == []


def test_the_same_caption_of_two_pictures(picture):
    records = [
        record("a", picture(1), "A red  dog"),
        record("b", picture(2), "a red dog\n"),
        record("c", picture(3), "a red dog."),  # only nearly the same
    ]
    assert groups(*records) == [
        ("same caption", ("a", "b"), ("train",)),
        ("similar caption", ("a", "b", "c"), ("train",)),
    ]


def test_the_same_caption_in_two_splits(picture):
    records = [record("a", picture(1), "a dog"), record("b", picture(2), "a dog", split="test")]
    assert groups(*records) == [("shared caption", ("a", "b"), ("train", "test"))]


def test_captions_of_one_picture_may_be_alike(picture):
    one, copy = picture(1), picture(1)
    assert groups(record("a", one, LONG, LONG, NEARLY), record("b", one, LONG)) == []
    assert groups(record("a", one, LONG), record("b", copy, LONG, NEARLY)) == [("same image", ("a", "b"), ("train",))]


def test_similar_captions(picture):
    records = [record("a", picture(1), "short", LONG), record("b", picture(2), "x"), record("c", picture(3), NEARLY)]
    assert groups(*records) == [("similar caption", ("a", "c"), ("train",))]
    assert groups(*records, similar_captions=0.95) == []  # 59 of 65 runs are shared


def test_a_family_that_the_source_names_may_be_similar_but_not_the_same(picture):
    near = [picture(1, width=80), picture(1, width=96)]
    similar = [record("a", near[0], LONG, group="g"), record("b", near[1], NEARLY, group="g")]
    assert groups(*similar) == []
    assert [kind for kind, *_ in groups(similar[0], record("b", near[1], NEARLY, group="h"))] == [
        "similar caption",
        "similar image",
    ]
    same = [record("a", near[0], LONG, group="g"), record("b", picture(2), LONG, group="g")]
    assert [kind for kind, *_ in groups(*same)] == ["same caption"]


def test_groups_of_two_splits_come_first_then_large_ones(picture):
    def several(caption, *splits):
        return [
            record(f"{caption}{number}", picture(len(caption) * 10 + number), caption, split=split)
            for number, split in enumerate(splits)
        ]

    records = [
        *several("x" * 2, "train", "train"),
        *several("x" * 3, "train", "train", "train"),
        *several("x" * 4, "train", "train"),
    ]
    assert [len(ids) for _, ids, _ in groups(*records)] == [3, 2, 2]
    assert [ids[0] for _, ids, _ in groups(*records)] == ["xxx0", "xx0", "xxxx0"]


def test_similar_groups_of_two_splits_come_first(picture):
    other = LONG.replace("word", "thing")
    records = [
        record("a", picture(1), LONG),
        record("b", picture(2), NEARLY),
        record("c", picture(3), LONG.replace("word7 ", "more ")),
        record("d", picture(4), other),
        record("e", picture(5), other.replace("thing9 ", "more "), split="test"),
    ]
    assert [ids for _, ids, _ in groups(*records)] == [("d", "e"), ("a", "b", "c")]
