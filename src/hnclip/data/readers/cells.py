"""What a cell of a table says: a name, one caption or several, or a picture itself."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hnclip.core import InvalidImage
from hnclip.data.pictures import FileImage

_CAPTION_KEYS = ("raw", "caption", "text", "sentence")


class RowProblem(Exception):
    """Why no record can be made of a row. `kind` is one of data/problems.py."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


def is_blank(cell: Any) -> bool:
    """No value: absent, null, a table's NaN, or text of white space."""
    if isinstance(cell, str):
        return not cell.strip()
    return cell is None or (isinstance(cell, float) and math.isnan(cell))


def plain_text(cell: Any, column: str) -> str:
    """A cell that holds a name or a number, stripped; "" if it is blank."""
    if is_blank(cell):
        return ""
    if isinstance(cell, bool) or not isinstance(cell, str | int | float):
        raise RowProblem("unreadable row", f"column {column} holds {type(cell).__name__}, not text")
    text = str(cell).strip()
    bad = bad_text(text)
    if bad:
        raise RowProblem("bad text", f"column {column}: {bad}")
    return text


def caption_texts(cell: Any, column: str) -> list[str]:
    """The captions in a cell: a string, or a list of strings or of objects such as Karpathy's {"raw": …}."""
    if isinstance(cell, str):
        return [cell]
    if isinstance(cell, Mapping):
        for key in _CAPTION_KEYS:
            if key in cell:
                return caption_texts(cell[key], column)
    elif isinstance(cell, Sequence) and not isinstance(cell, bytes):
        return [text for item in cell for text in caption_texts(item, column)]
    elif is_blank(cell):
        return []
    raise RowProblem("unreadable row", f"column {column} holds {type(cell).__name__}, not a caption or a list of them")


def listed_texts(cell: str) -> list[str] | str:
    """The strings of a list that was written into a cell as JSON or as Python prints it; other text as it is."""
    text = cell.strip()
    if not (text.startswith("[") and text.endswith("]")):
        return cell
    for parse in (json.loads, ast.literal_eval):
        try:
            values = parse(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
            return values
    return cell


def bad_text(text: str) -> str | None:
    """What is wrong with a text that has no UTF-8 form: bytes that were not UTF-8 (read as surrogate escapes), or half
    of a surrogate pair."""
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        if 0xDC80 <= code <= 0xDCFF:
            return f"byte 0x{code - 0xDC00:02x} is not UTF-8; save the file as UTF-8"
        return f"holds half of a surrogate pair, U+{code:04X}"
    return None


def picture_bytes(cell: Any, folder: Path | None, where: str) -> bytes:
    """The bytes of a picture in a cell: bytes, or Hugging Face's {"bytes", "path"}, where the path counts if the bytes
    are not there."""
    path = None
    if isinstance(cell, Mapping):
        cell, path = cell.get("bytes"), cell.get("path")
    if isinstance(cell, bytes):
        return cell
    if path:
        return FileImage(Path(folder or "", path)).read()
    raise InvalidImage("missing image", f"{where} holds no picture")
