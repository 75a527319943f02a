from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_pictures import png, write_png

from hnclip.core import InvalidImage
from hnclip.data.readers.cells import (
    RowProblem,
    bad_text,
    caption_texts,
    is_blank,
    listed_texts,
    picture_bytes,
    plain_text,
)


@pytest.mark.parametrize(
    ("cell", "texts"),
    [
        ("one", ["one"]),
        (["one", "two"], ["one", "two"]),
        ([{"raw": "one", "tokens": ["one"]}, {"raw": "two"}], ["one", "two"]),
        ([{"caption": "one"}], ["one"]),
        ({"raw": "one"}, ["one"]),
        ([["one", "two"], ["three"]], ["one", "two", "three"]),
        ([], []),
        (None, []),
        (float("nan"), []),
        ("", [""]),
    ],
)
def test_captions_of_a_cell(cell: Any, texts: list[str]) -> None:
    assert caption_texts(cell, "caption") == texts


@pytest.mark.parametrize("cell", [7, 1.5, True, b"bytes", {"tokens": ["one"]}, [3]])
def test_a_cell_without_captions_is_a_problem(cell: Any) -> None:
    with pytest.raises(RowProblem, match="column caption holds") as caught:
        caption_texts(cell, "caption")
    assert caught.value.kind == "unreadable row"


@pytest.mark.parametrize(
    ("cell", "texts"),
    [
        ('["one", "two"]', ["one", "two"]),
        ("['one', \"it's two\"]", ["one", "it's two"]),
        ("[1, 2]", "[1, 2]"),
        ("[]", "[]"),
        ("[sic] a dog [sic]", "[sic] a dog [sic]"),
        ("[" * 100_000 + "]" * 100_000, "[" * 100_000 + "]" * 100_000),
        ("a dog", "a dog"),
    ],
)
def test_lists_written_into_text(cell: str, texts: list[str] | str) -> None:
    assert listed_texts(cell) == texts


@given(st.lists(st.text(), min_size=1))
def test_a_list_that_python_printed_comes_back(texts: list[str]) -> None:
    assert listed_texts(str(texts)) == texts


@pytest.mark.parametrize(("cell", "text"), [(" a ", "a"), (7, "7"), (None, ""), (float("nan"), ""), ("  ", "")])
def test_plain_text(cell: Any, text: str) -> None:
    assert plain_text(cell, "id") == text
    assert is_blank(cell) == (text == "")


@pytest.mark.parametrize("cell", [["a"], {"a": 1}, True, b"a"])
def test_what_is_no_plain_text_is_a_problem(cell: Any) -> None:
    with pytest.raises(RowProblem, match=r"column id holds .*, not text"):
        plain_text(cell, "id")


@given(st.binary())
def test_bad_text_is_what_is_not_utf_8(content: bytes) -> None:
    try:
        content.decode()
        good = True
    except UnicodeDecodeError:
        good = False
    assert (bad_text(content.decode(errors="surrogateescape")) is None) == good


def test_bad_text_says_what_is_bad() -> None:
    assert "byte 0xe9 is not UTF-8" in str(bad_text(b"caf\xe9".decode(errors="surrogateescape")))
    assert "half of a surrogate pair, U+D83D" in str(bad_text("\ud83d"))


def test_pictures_in_cells(tmp_path: Path) -> None:
    write_png(tmp_path / "1.png", 1)
    assert picture_bytes(png(2), tmp_path, "here") == png(2)
    assert picture_bytes({"bytes": png(2), "path": "1.png"}, tmp_path, "here") == png(2)
    assert picture_bytes({"bytes": None, "path": "1.png"}, tmp_path, "here") == png(1)
    for cell in (None, {"bytes": None, "path": None}, {"bytes": None, "path": "2.png"}):
        with pytest.raises(InvalidImage) as caught:
            picture_bytes(cell, tmp_path, "here")
        assert caught.value.kind == "missing image"
