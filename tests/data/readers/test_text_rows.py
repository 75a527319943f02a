"""Rows of CSV, TSV, JSON lines and JSON files, good and bad."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hnclip.core import Problem
from hnclip.data.readers.rows import read_rows


def rows_of(path: Path, content: str | bytes) -> tuple[list[tuple[str, dict[str, Any]]], list[Problem]]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    problems: list[Problem] = []
    return list(read_rows(path, problems)), problems


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_delimiter_of_a_csv_is_found(tmp_path: Path, delimiter: str) -> None:
    text = delimiter.join(["image", '"a, b; c"']) + "\n" + delimiter.join(["1.png", '"x, y; z"']) + "\n"
    rows, problems = rows_of(tmp_path / "t.csv", text)
    assert rows == [("2", {"image": "1.png", "a, b; c": "x, y; z"})]
    assert problems == []


def test_a_tsv_is_divided_by_tabs_whatever_its_header_says(tmp_path: Path) -> None:
    rows, _ = rows_of(tmp_path / "t.tsv", "image\ta,b,c\n1.png\tx\n")
    assert rows == [("2", {"image": "1.png", "a,b,c": "x"})]


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
def test_mark_line_ends_quotes_and_blank_lines(tmp_path: Path, ending: str) -> None:
    lines = ["\ufeffimage , caption,", '1.png,"say ""hi"",', 'twice"', "", ",", "2.png,plain,"]
    rows, problems = rows_of(tmp_path / "t.csv", ending.join(lines))
    assert rows == [
        ("2", {"image": "1.png", "caption": f'say "hi",{ending}twice'}),
        ("6", {"image": "2.png", "caption": "plain"}),
    ]
    assert problems == []


def test_very_large_fields_are_read(tmp_path: Path) -> None:
    long = "word " * 100_000
    rows, _ = rows_of(tmp_path / "t.csv", f"image,caption\n1.png,{long}\n")
    assert rows[0][1]["caption"] == long


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("1.png,a dog, running", "3 cells for 2 columns; text that holds ',' must be quoted"),
        ("1.png", "1 cells for 2 columns"),
        ('1.png,"a dog" running', "expected after"),
        ('1.png,"a dog', "quote|expected after|unexpected end"),  # never closed
    ],
)
@pytest.mark.parametrize("after", [0, 3, 2000])
def test_a_bad_line_is_the_only_one_lost(tmp_path: Path, bad: str, message: str, after: int) -> None:
    lines = ["image,caption", "0.png,first", bad, *(f"{number}.png,later" for number in range(after))]
    rows, problems = rows_of(tmp_path / "t.csv", "\n".join(lines) + "\n")
    assert [place for place, _ in rows] == ["2", *(str(number + 4) for number in range(after))]
    (problem,) = problems
    assert (problem.kind, problem.where) == ("unreadable row", f"{tmp_path}/t.csv:3")
    assert any(part in problem.detail for part in message.split("|"))


def test_an_open_quote_is_not_followed_for_ever(tmp_path: Path) -> None:
    _, problems = rows_of(tmp_path / "t.csv", 'image,caption\n1.png,"open\n' + "2.png,x\n" * 1500)
    assert [problem.detail for problem in problems] == ["a quote is open for more than 1000 lines"]


def test_a_quote_that_is_closed_much_later_costs_no_good_row(tmp_path: Path) -> None:
    rows, problems = rows_of(tmp_path / "t.csv", 'image,caption\n1.png,"open\n2.png,"fine"\n3.png,fine\n')
    assert [row["image"] for _, row in rows] == ["2.png", "3.png"]
    assert [problem.where for problem in problems] == [f"{tmp_path}/t.csv:2"]


def test_bytes_that_are_not_utf_8_spoil_their_own_cell_only(tmp_path: Path) -> None:
    content = b"image,caption\n1.png,caf\xe9\n2.png,caf\xc3\xa9\n"
    rows, problems = rows_of(tmp_path / "t.csv", content)
    assert [row["caption"] for _, row in rows] == ["caf\udce9", "café"]
    assert problems == []


def test_a_csv_in_utf_16_or_with_a_column_twice_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is UTF-16; save it as UTF-8"):
        rows_of(tmp_path / "t.csv", "image,caption\n".encode("utf-16"))
    with pytest.raises(ValueError, match="more than one column 'a'"):
        rows_of(tmp_path / "t.csv", "a,b,a\n1,2,3\n")


@given(st.lists(st.lists(st.text(alphabet="ab \"',;\t\n\r|é\u2028"), min_size=2, max_size=2), max_size=6))
def test_what_the_csv_module_writes_comes_back(
    tmp_path_factory: pytest.TempPathFactory, cells: list[list[str]]
) -> None:
    path = tmp_path_factory.mktemp("csv") / "t.csv"
    text = io.StringIO()
    csv.writer(text).writerows([["a", "b"], *cells])
    rows, problems = rows_of(path, text.getvalue())
    assert [list(row.values()) for _, row in rows] == [row for row in cells if any(row)]
    assert problems == []


def test_json_lines(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf{"a": 1}\n\n  \n{"a": \n[1]\n{"a": "\xe9"}\r\n' + b"[" * 100_000 + b'\n{"a": 2}'
    rows, problems = rows_of(tmp_path / "t.jsonl", content)
    assert rows == [("1", {"a": 1}), ("6", {"a": "\udce9"}), ("8", {"a": 2})]
    assert [(problem.kind, problem.where) for problem in problems] == [
        ("unreadable row", f"{tmp_path}/t.jsonl:{line}") for line in (4, 5, 7)
    ]
    assert problems[1].detail == "a list, not an object"


def test_json_lines_in_a_json_file_are_known_by_their_lines(tmp_path: Path) -> None:
    rows, _ = rows_of(tmp_path / "t.json", '{"a": 1}\n{"a": 2}\n')
    assert rows == [("1", {"a": 1}), ("2", {"a": 2})]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_list(tmp_path: Path, indent: int | None) -> None:
    rows, problems = rows_of(tmp_path / "t.json", json.dumps([{"a": 1}, "x", {"a": 2}], indent=indent))
    assert rows == [("[0]", {"a": 1}), ("[2]", {"a": 2})]
    assert [(problem.where, problem.detail) for problem in problems] == [
        (f"{tmp_path}/t.json:[1]", "a str, not an object")
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[{", "is not valid JSON"),
        ("7", "holds a JSON int"),
        ("[" * 100_000, "is not valid JSON"),
        ("", "not valid JSON"),
    ],
)
def test_a_json_file_without_a_list_is_an_error(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rows_of(tmp_path / "t.json", content)
