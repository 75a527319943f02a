"""Rows of text tables: CSV, TSV, JSON lines and JSON, with Karpathy's and COCO's layouts."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

from hnclip.data.records import ReadLog

# A row's place in its file, for messages, and its cells by column.
PlacedRow = tuple[str, dict[str, Any]]

_DELIMITERS = ("\t", ",", ";", "|")
_LONGEST_FIELD = 1 << 24  # characters of a CSV cell, beyond which a quote was never closed
_CHUNK = 1 << 20  # characters read at once
_LONGEST_OBJECT = 1 << 24  # characters of one row of a JSON list
_AFTER_ROW = re.compile(r"\s*(,\s*|(?=\]))")  # in a JSON list
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# A character of several bytes that are UTF-8, or a byte that is not and that cp1252 does not define either.
_NOT_CP1252 = re.compile("[^\0-\x7f\udc80-\udcff]|[\udc81\udc8d\udc8f\udc90\udc9d]")
_BAD_JSON = (ValueError, RecursionError)


def read_rows(path: Path, log: ReadLog) -> Iterator[PlacedRow]:
    """The rows of a table, one after the other. What cannot be read as a row becomes a problem; ValueError if that is
    the whole file. Bytes that are not in its encoding become surrogate escapes, which `columns.invalid_text` finds.
    """
    with path.open("rb") as content:
        encoding = text_encoding(content)
    if encoding != "utf-8-sig":
        log.warn("other encoding", str(path), f"the file is not UTF-8 and was read as {encoding}")
    with path.open(encoding=encoding, errors="surrogateescape", newline="") as file:
        suffix = path.suffix.lower()
        try:
            if suffix in (".csv", ".tsv"):
                yield from _csv_rows(path, file, log)
                return
            for place, row in _json_rows(file) if suffix == ".json" else _json_lines(file):
                if isinstance(row, dict):
                    yield place, row
                else:
                    detail = str(row) if isinstance(row, Exception) else f"a {type(row).__name__}, not an object"
                    log.problem("unreadable row", f"{path}:{place}", detail)
        except _BAD_JSON as error:
            raise ValueError(f"{path} cannot be read: {error}") from error


def text_encoding(file: IO[bytes]) -> str:
    """The encoding of a text file: utf-8-sig, utf-16 by its byte order mark, or cp1252 if nothing in it is UTF-8."""
    if file.read(2) in _UTF_16:
        return "utf-16"
    file.seek(0)
    chunks = iter(partial(file.read, _CHUNK), b"")
    found_other = False
    for text in codecs.iterdecode(chunks, "utf-8-sig", "surrogateescape"):
        if not text.isascii():
            if _NOT_CP1252.search(text):
                return "utf-8-sig"
            found_other = True
    return "cp1252" if found_other else "utf-8-sig"


def decode_text(content: bytes) -> tuple[str, str]:
    """The text of a small file, and its encoding. Bytes that are not in it become surrogate escapes."""
    encoding = text_encoding(io.BytesIO(content))
    try:
        return content.decode(encoding, "surrogateescape"), encoding
    except UnicodeDecodeError:  # incomplete UTF-16
        return content.decode("utf-8", "surrogateescape"), "utf-8-sig"


def _csv_rows(path: Path, file: IO[str], log: ReadLog) -> Iterator[PlacedRow]:
    first = next((line for line in file if line.strip()), "")
    file.seek(0)
    bare = "".join(first.split('"')[::2])  # what stands outside of quotes
    delimiter = "\t" if path.suffix.lower() == ".tsv" else max(_DELIMITERS, key=bare.count)
    reader = csv.reader(file, delimiter=delimiter, strict=True)
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_FIELD))  # of the whole process
    header: list[str] = []
    empty = True
    while True:
        start = reader.line_num  # lines before the row
        try:
            cells = next(reader, None)
        except csv.Error as error:
            if reader.line_num > start + 1 or "unexpected end" in str(error):
                raise ValueError(f"line {start + 1}: a quote is not closed ({error})") from error
            log.problem("unreadable row", f"{path}:{start + 1}", str(error))
            continue
        if cells is None:
            break
        if not any(map(str.strip, cells)):
            continue
        if not header:
            header = [name.strip() for name in cells]
            while not header[-1]:
                header.pop()
            if repeated := [name for name in header if name and header.count(name) > 1]:
                raise ValueError(f"several columns have the name {repeated[0][:60]!r}")
            continue
        empty = False
        if len(cells) < len(header) or any(cells[len(header) :]):
            detail = f"{len(cells)} cells for {len(header)} columns; text that contains {delimiter!r} must be quoted"
            log.problem("unreadable row", f"{path}:{start + 1}", detail)
        else:
            yield str(start + 1), dict(zip(header, cells))
    if empty:
        log.problem("unreadable row", str(path), "there are no rows after a line of column names")


def _json_lines(file: IO[str]) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(file, 1):
        if not line.isspace():
            try:
                yield str(number), json.loads(line)
            except _BAD_JSON as error:
                yield str(number), error


def _json_rows(file: IO[str]) -> Iterator[tuple[str, Any]]:
    """The rows of a JSON file, each with its place. It holds a list of objects, one object after the other, or one with
    lists:

    - Karpathy's splits, {"images": [{"filename", "filepath"?, "split", "sentences": [{"raw"}]}]}: a row per image,
      `filename` with the directory in `filepath`;
    - COCO's captions, {"images": [{"id", "file_name"}], "annotations": [{"image_id", "caption"}]}: a row per caption,
      with the keys of its image, and one without caption for an image that has none;
    - an object with one list of objects, such as {"annotations": [{"image", "caption"}]}: the rows of the list.
    """
    start = file.read(_CHUNK).lstrip()[:1]
    file.seek(0)
    if start == "[":
        return _stream_list(file)
    try:
        content = json.load(file)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise
        file.seek(0)
        return _json_lines(file)
    found = content.items() if isinstance(content, dict) else ()
    lists = {key: value for key, value in found if isinstance(value, list) and value and isinstance(value[0], dict)}
    images, annotations = lists.get("images"), lists.get("annotations")
    if images and "sentences" in images[0]:
        return _numbered("images", map(_with_directory, images))
    if images and annotations and "image_id" in annotations[0]:
        return _coco_rows(images, annotations)
    if len(lists) == 1:
        return chain.from_iterable(_numbered(key, rows) for key, rows in lists.items())
    raise ValueError('a list of objects is needed, or {"images": […]} as Karpathy or COCO write it')


def _stream_list(file: IO[str]) -> Iterator[tuple[str, Any]]:
    """The rows of a JSON list one by one: files of gigabytes are never in memory as a whole."""
    decode = json.JSONDecoder().raw_decode
    buffer, at = file.read(_CHUNK).lstrip()[1:].lstrip(), 0
    number = 0
    while not buffer.startswith("]", at):
        try:
            row, end = decode(buffer, at)
            after = _AFTER_ROW.match(buffer, end)
            if after is None:  # a number may go on in the next chunk
                raise ValueError("',' or ']' is missing after it")
        except _BAD_JSON as error:
            more = file.read(_CHUNK)
            if not more or len(buffer) - at > _LONGEST_OBJECT or isinstance(error, RecursionError):
                raise ValueError(f"row [{number}] is not valid JSON: {error}") from error
            buffer, at = (buffer[at:] + more).lstrip(), 0
            continue
        yield f"[{number}]", row
        at = after.end()
        number += 1
    if buffer[at + 1 :].strip() or any(map(str.strip, file)):
        raise ValueError(f"there is more after the list of {number} rows")


def _numbered(part: str, rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{part}[{number}]", row) for number, row in enumerate(rows))


def _with_directory(image: Any) -> Any:
    if isinstance(image, dict) and (folder := image.pop("filepath", None)):
        image["filename"] = f"{folder}/{image.get('filename', '')}"
    return image


def _coco_rows(images: list[Any], annotations: list[Any]) -> Iterator[tuple[str, Any]]:
    by_id = {str(image["id"]): row for row, image in enumerate(images) if isinstance(image, dict) and "id" in image}
    without = dict(by_id)
    for number, annotation in enumerate(annotations):
        if isinstance(annotation, dict):
            name = str(annotation.get("image_id"))
            annotation = {**annotation, **images[by_id[name]]} if name in by_id else annotation
            without.pop(name, None)
        yield f"annotations[{number}]", annotation
    yield from ((f"images[{row}]", images[row]) for row in without.values())
