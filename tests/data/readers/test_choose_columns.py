from __future__ import annotations

import pytest

from hnclip.config import ReadConfig
from hnclip.data.readers.columns import Columns, Row, choose_columns


def choose(row: Row, read: ReadConfig = ReadConfig(), **options: object) -> Columns:  # noqa: B008
    return choose_columns("t.csv", list(row), [row], read, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("row", "image", "captions"),
    [
        ({"filepath": "1.png", "title": "x"}, "filepath", ("title",)),  # open_clip
        ({"file_name": "1.png", "text": "x"}, "file_name", ("text",)),  # Hugging Face's image folder
        ({"Image File": "1.png", "Description": "x"}, "Image File", ("Description",)),
        ({"image": "1.png", "captions": ["x"]}, "image", ("captions",)),
        ({"filepath": "val2014", "filename": "1.png", "sentences": []}, "filename", ("sentences",)),  # Karpathy
        ({"image_path": "a/1.png", "filename": "1.png", "caption": "x"}, "image_path", ("caption",)),
        ({"path": "1.png", "caption": "x", "title": "y"}, "path", ("caption",)),
        ({"img": "17", "paragraph": "x"}, "img", ("paragraph",)),
        ({"image": "1.png", "caption_0": "x", "caption_1": "y", "id": 1}, "image", ("caption_0", "caption_1")),
        ({"image": "1.png", "short_caption": "x", "long_caption": "y"}, "image", ("long_caption",)),
    ],
)
def test_columns_are_guessed_from_common_names(row: Row, image: str, captions: tuple[str, ...]) -> None:
    columns = choose(row)
    assert (columns.image, columns.captions) == (image, captions)


def test_the_other_columns_are_guessed_too() -> None:
    row = {"image": "1.png", "caption": "x", "Image_ID": 1, "karpathy_split": "test"}
    row |= {"short_caption": "y", "cluster_id": 7, "width": 640}
    assert choose(row) == Columns(
        ("caption",), "image", id="Image_ID", split="karpathy_split", short="short_caption", group="cluster_id"
    )


def test_named_columns_win() -> None:
    row = dict.fromkeys("abcdefg", "x") | {"image": "1.png", "caption": "x", "id": 1, "split": "train"}
    read = ReadConfig(
        image_column="a",
        caption_column="b, c",
        id_column="d",
        split_column="e",
        short_column="f",
        group_column="g",
    )
    assert choose(row, read) == Columns(("b", "c"), "a", id="d", split="e", short="f", group="g")


def test_a_short_caption_that_is_the_caption_is_no_short_caption() -> None:
    row = {"image": "1.png", "caption": "x", "short_caption": "y"}
    assert choose(row).short == "short_caption"
    assert choose(row, ReadConfig(caption_column="short_caption")).short is None


def test_a_named_caption_column_may_have_a_comma_in_its_name() -> None:
    assert choose({"image": "1.png", "a, b": "x"}, ReadConfig(caption_column="a, b")).captions == ("a, b",)


@pytest.mark.parametrize("setting", ["image", "caption", "id", "split", "short", "group"])
def test_a_named_column_that_is_not_there_is_an_error_with_those_that_are(setting: str) -> None:
    read = ReadConfig(**{f"{setting}_column": "wrong"})
    with pytest.raises(ValueError, match=rf"no column 'wrong' \(--read.{setting}-column\); it has 'image', 'caption'"):
        choose({"image": "1.png", "caption": "x"}, read)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"image": "1.png", "img": "2.png", "caption": "x"}, r"'image', 'img'; choose one with --read.image-column"),
        (
            {"image": "1.png", "caption": "x", "long_caption": "y"},
            r"'caption', 'long_caption'; choose one with --read.caption-column, or several separated by commas",
        ),
        ({"image": "1.png", "caption": "x", "group": 1, "group_id": 2}, r"'group', 'group_id'.*--read.group-column"),
    ],
)
def test_columns_of_equal_right_are_a_question_to_the_user(row: Row, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(row)


def test_no_known_column_is_an_error_that_says_how_to_name_one() -> None:
    with pytest.raises(ValueError, match=r"known for a picture .*it has 'a', 'caption'.*--read.image-column"):
        choose({"a": "1.png", "caption": "x"})
    with pytest.raises(ValueError, match=r"known for a caption .*it has 'image', 'b'.*--read.caption-column"):
        choose({"image": "1.png", "b": "x"})
    with pytest.raises(ValueError, match="lacks its first line"):
        choose({"1.png": "2.png", "A dog.": "A cat."})


def test_an_address_counts_if_its_picture_is_here() -> None:
    row = {"url": "https://example.org/1.png", "caption": "x"}
    assert choose(row, exists=lambda name: name == row["url"]).image == "url"
    with pytest.raises(ValueError, match=r"only addresses of pictures, in column 'url'.*--read.images"):
        choose(row)


@pytest.mark.parametrize(("value", "split"), [("val", "set"), ("coco", None), (None, None)])
def test_a_column_called_set_is_a_split_if_its_values_are(value: str | None, split: str | None) -> None:
    assert choose({"image": "1.png", "caption": "x", "set": value}).split == split


def test_a_column_that_holds_pictures_is_the_image() -> None:
    row = {"filename": "1.png", "caption": "x"}
    names = ["jpg", "filename", "caption"]
    assert choose_columns("t", names, [row], ReadConfig(), holding=["jpg"]) == Columns(
        ("caption",), "jpg", name="filename"
    )
    named = ReadConfig(id_column="caption")
    assert choose_columns("t", names, [row], named, holding=["jpg"]).name == "caption"
    both = ["image", "mask", "caption"]
    assert choose_columns("t", both, [{"caption": "x"}], ReadConfig(), holding=both[:2]).image == "image"
    with pytest.raises(ValueError, match=r"'left', 'right'; choose one with --read.image-column"):
        choose_columns("t", ["left", "right", "caption"], [], ReadConfig(), holding=["left", "right"])
