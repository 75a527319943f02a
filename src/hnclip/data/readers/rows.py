"""Rows of text tables: CSV, TSV, JSON lines and JSON, with Karpathy's and COCO's layouts."""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import IO, Any

from hnclip.data.records import ReadLog

# A row's place in its file, for messages, and its cells by column.
PlacedRow = tuple[str, dict[str, Any]]

_DELIMITERS = ("\t", ",", ";", "|")
_LONGEST_ROW = 1000  # lines of one CSV row; beyond it a quote was never closed
_LONGEST_FIELD = 1 << 27  # characters; the csv module's own limit is 128 kB
_CHUNK = 1 << 20  # characters read at once
_LONGEST_OBJECT = 1 << 24  # characters of one row of a JSON list
_JSON_LINES = (".jsonl", ".jsonlines", ".ndjson")
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_ESCAPED = re.compile("[\udc80-\udcff]")  # a byte that is not UTF-8
_DECODED = re.compile("[^\0-\x7f\udc80-\udcff]")  # a character of several bytes that is
_NOT_CP1252 = {0x81, 0x8D, 0x8F, 0x90, 0x9D}  # undefined bytes: such a file has another encoding, or is not text
_BAD_JSON = (ValueError, RecursionError)


def read_rows(path: Path, log: ReadLog) -> Iterator[PlacedRow]:
    """The rows of a table, one after the other. What cannot be read as a row becomes a problem.

    Bytes that are not in the file's encoding become surrogate escapes, which `columns.invalid_text` finds.

    Raises:
        ValueError: the file as a whole cannot be read.
    """
    encoding = text_encoding(path)
    if encoding != "utf-8-sig":
        log.warn("other encoding", str(path), f"the file is not UTF-8 and was read as {encoding}")
    with path.open(encoding=encoding, errors="surrogateescape", newline="") as file:
        suffix = path.suffix.lower()
        try:
            if suffix in (".csv", ".tsv"):
                yield from _csv_rows(path, file, log)
            elif suffix in _JSON_LINES or _is_json_lines(file):
                yield from _json_lines(path, file, log)
            else:
                yield from _json_rows(path, file, log)
        except UnicodeDecodeError as error:  # an odd byte at the end of UTF-16
            raise ValueError(f"{path} cannot be decoded as {encoding}: {error}") from error


def text_encoding(path: Path) -> str:
    """The encoding of a text file: utf-8-sig, utf-16 by its byte order mark, or cp1252 if nothing in it is UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    found_other = False
    with path.open("rb") as file:
        if file.read(2) in _UTF_16:
            return "utf-16"
        file.seek(0)
        while True:
            chunk = file.read(_CHUNK)
            text = decoder.decode(chunk, final=not chunk).removeprefix("\ufeff")
            if not text.isascii():
                found_other = found_other or _ESCAPED.search(text) is not None
                if _DECODED.search(text) or (found_other and not _NOT_CP1252.isdisjoint(chunk)):
                    return "utf-8-sig"
            if not chunk:
                return "cp1252" if found_other else "utf-8-sig"


def decode_text(content: bytes) -> tuple[str, str]:
    """The text of a small file, and its encoding, by the rule of `text_encoding`."""
    try:
        return content.decode("utf-8-sig"), "utf-8-sig"
    except UnicodeDecodeError:
        escaped = content.decode("utf-8-sig", "surrogateescape")
    if _DECODED.search(escaped) or not _NOT_CP1252.isdisjoint(content):
        return escaped, "utf-8-sig"
    return content.decode("cp1252"), "cp1252"


def _csv_rows(path: Path, file: IO[str], log: ReadLog) -> Iterator[PlacedRow]:
    first = next((line for line in file if line.strip()), "")
    file.seek(0)
    delimiter = "\t" if path.suffix.lower() == ".tsv" else _delimiter(first)
    start = 0  # lines before the row

    def lines() -> Iterator[str]:
        for line in file:
            if reader.line_num - start >= _LONGEST_ROW:
                raise csv.Error(f"the row goes on for more than {_LONGEST_ROW} lines")
            yield line

    reader = csv.reader(lines(), delimiter=delimiter, strict=True)
    header: list[str] = []
    empty = True
    while True:
        start = reader.line_num
        where = f"{path}:{start + 1}"
        try:
            cells = _next_cells(reader)
        except csv.Error as error:
            if reader.line_num > start + 1 or "unexpected end" in str(error):
                raise ValueError(f"{where}: a quote is not closed ({error}); quote text as CSV does") from error
            log.problem("unreadable row", where, str(error))
            continue
        if cells is None:
            break
        if not any(map(str.strip, cells)):
            continue
        empty = not header
        if not header:
            header = _header(path, cells)
        elif len(cells) < len(header) or any(cells[len(header) :]):
            detail = f"{len(cells)} cells for {len(header)} columns; text that contains {delimiter!r} must be quoted"
            log.problem("unreadable row", where, detail)
        else:
            yield str(start + 1), dict(zip(header, cells))
    if empty:
        found = f"only {', '.join(repr(name[:60]) for name in header[:8])}" if header else "the file is empty"
        log.problem("unreadable row", str(path), f"there are no rows after a line of column names: {found}")


def _next_cells(reader: Any) -> list[str] | None:
    """The next row, with the csv module's limit raised: it is one for the whole process, so only for this call."""
    limit = csv.field_size_limit(_LONGEST_FIELD)
    try:
        return next(reader, None)
    finally:
        csv.field_size_limit(limit)


def _header(path: Path, cells: list[str]) -> list[str]:
    header = [name.strip() for name in cells]
    while not header[-1]:
        header.pop()
    repeated = [name for name in dict.fromkeys(header) if name and header.count(name) > 1]
    if repeated:
        raise ValueError(
            f"{path} has several columns of the name {', '.join(repr(name[:60]) for name in repeated[:8])}"
        )
    return header


def _delimiter(header: str) -> str:
    """The delimiter that occurs most often in the line of column names, outside of quotes."""
    bare = "".join(header.split('"')[::2])
    return max(_DELIMITERS, key=bare.count) if any(map(bare.count, _DELIMITERS)) else ","


def _json_lines(path: Path, file: IO[str], log: ReadLog) -> Iterator[PlacedRow]:
    for number, line in enumerate(file, 1):
        if line.isspace():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"a {type(row).__name__}, not an object")
        except _BAD_JSON as error:
            log.problem("unreadable row", f"{path}:{number}", str(error))
        else:
            yield str(number), row


def _json_rows(path: Path, file: IO[str], log: ReadLog) -> Iterator[PlacedRow]:
    rows: Iterator[tuple[str, Any]]
    start = file.read(_CHUNK).lstrip()[:1]
    file.seek(0)
    if start == "[":
        rows = _stream_list(path, file)
    else:
        try:
            content = json.load(file)
        except _BAD_JSON as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{path} holds a JSON {type(content).__name__}, not a list of objects")
        rows = _rows_of_object(path, content)
    for place, row in rows:
        if isinstance(row, dict):
            yield place, row
        else:
            log.problem("unreadable row", f"{path}:{place}", f"a {type(row).__name__}, not an object")


def _stream_list(path: Path, file: IO[str]) -> Iterator[tuple[str, Any]]:
    """The rows of a JSON list one by one: files of gigabytes are never in memory as a whole."""
    decode = json.JSONDecoder().raw_decode
    gap = re.compile(r"[\s,]*")
    buffer = file.read(_CHUNK)
    at = buffer.index("[") + 1
    number = 0
    while True:
        at = gap.match(buffer, at).end()  # type: ignore[union-attr]  # it matches anywhere
        if buffer.startswith("]", at):
            break
        try:
            row, at = decode(buffer, at)
        except _BAD_JSON as error:
            more = file.read(_CHUNK)
            if not more or len(buffer) - at > _LONGEST_OBJECT or isinstance(error, RecursionError):
                raise ValueError(f"{path}:[{number}] is not valid JSON: {error}") from error
            buffer, at = buffer[at:] + more, 0
            continue
        yield f"[{number}]", row
        number += 1
    if buffer[at + 1 :].strip() or any(map(str.strip, file)):
        raise ValueError(f"{path} is not valid JSON: there is more after the list of {number} rows")


def _is_json_lines(file: IO[str]) -> bool:
    """Whether a .json file has an object on each of its first two lines, as many tools write it."""
    lines = [line for line in (file.readline(_CHUNK), file.readline(_CHUNK)) if line.strip()]
    file.seek(0)
    try:
        return len(lines) == 2 and all(isinstance(json.loads(line), dict) for line in lines)
    except _BAD_JSON:
        return False


def _rows_of_object(path: Path, content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The rows of a JSON object, each with its place.

    - Karpathy's splits, {"images": [{"filename", "filepath"?, "split", "sentences": [{"raw"}]}]}: a row per image,
      `filename` with the directory in `filepath`;
    - COCO's captions, {"images": [{"id", "file_name"}], "annotations": [{"image_id", "caption"}]}: a row per caption,
      with the keys of its image, and one without caption for an image that has none;
    - an object with one list of objects, such as {"annotations": [{"image", "caption"}]}: the rows of the list.
    """
    lists = [key for key, value in content.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if "images" in lists and "sentences" in content["images"][0]:
        return _numbered("images", map(_with_directory, content["images"]))
    if "images" in lists and "annotations" in lists and "image_id" in content["annotations"][0]:
        return _coco_rows(content["images"], content["annotations"])
    if len(lists) == 1:
        return _numbered(lists[0], iter(content[lists[0]]))
    keys = ", ".join(repr(name[:60]) for name in list(content)[:8])
    raise ValueError(
        f"{path} holds a JSON object with the keys {keys}; a list of objects is needed, or "
        '{"images": […]} as Karpathy or COCO write it'
    )


def _numbered(part: str, rows: Iterator[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{part}[{number}]", row) for number, row in enumerate(rows))


def _with_directory(image: Any) -> Any:
    if not isinstance(image, dict) or not image.get("filepath"):
        return image
    rest = {key: value for key, value in image.items() if key != "filepath"}
    return {**rest, "filename": f"{image['filepath']}/{image.get('filename', '')}"}


def _coco_rows(images: list[Any], annotations: list[Any]) -> Iterator[tuple[str, Any]]:
    by_id = {str(image["id"]): row for row, image in enumerate(images) if isinstance(image, dict) and "id" in image}
    described = {str(annotation.get("image_id")) for annotation in annotations if isinstance(annotation, dict)}

    def with_image(annotation: Any) -> Any:
        if not isinstance(annotation, dict):
            return annotation
        row = by_id.get(str(annotation.get("image_id")))
        return annotation if row is None else {**annotation, **images[row]}

    return chain(
        _numbered("annotations", map(with_image, annotations)),
        ((f"images[{row}]", images[row]) for name, row in by_id.items() if name not in described),
    )
