"""Which columns of a table, or keys of objects, hold what, and what their cells hold."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from hnclip.config import ReadConfig
from hnclip.data.image_sources import is_image_name
from hnclip.data.readers.locate import is_url
from hnclip.data.records import SPLITS, normal_split

Row = Mapping[str, Any]


class RowError(ValueError):
    """Why no record can be made of a row. `kind` is one of `hnclip.data.problems`."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


@dataclass(frozen=True)
class Role:
    """What a column can hold, the setting that names it, and its common names, without case and punctuation.

    Names come in ranks: the first rank with a column counts, and of two columns in one rank the user must name one.
    """

    holds: str
    setting: str
    ranks: tuple[tuple[str, ...], ...]

    @property
    def option(self) -> str:
        return "--read." + self.setting.replace("_", "-")

    def candidates(self, names: Iterable[str]) -> list[str]:
        """The columns of the first rank that has any."""
        plain = {name: re.sub(r"[\W_]+", "", name.lower()) for name in names}
        ranks = ([name for name in plain if plain[name] in rank] for rank in self.ranks)
        return next((found for found in ranks if found), [])


_PATHS = ("imagepath", "filepath", "imgpath", "imagefilepath")
_FILES = ("filename", "imagefile", "imagefilename", "imagename", "imgfile", "imgname")
_LONG_CAPTIONS = ("longcaption", "densecaption", "detailedcaption")

IMAGE = Role("an image", "image_column", (_PATHS, _FILES, ("image", "img", "picture", "photo"), ("path", "file")))
IMAGE_NAME = Role("an image's name", "id_column", (_PATHS, _FILES))
URL = Role("a URL", "image_column", (("imageurl",), ("url",), ("link",)))
CAPTION = Role(
    "a caption",
    "caption_column",
    (
        ("caption", "captions", *_LONG_CAPTIONS, "description", "descriptions", "paragraph", "paragraphs", "sentences"),
        ("text", "texts", "title", "sentence", "raw", "prompt", "comment", "alttext", "txt"),
    ),
)
ID = Role("an id", "id_column", (("imageid", "imgid"), ("exampleid", "sampleid"), ("id",), ("key",), ("uid", "uuid")))
SPLIT = Role("a split", "split_column", (("split",), ("karpathysplit",)))
MAYBE_SPLIT = Role("a split", "split_column", (("partition",), ("subset",), ("set",)))
SHORT = Role("a short caption", "short_column", (("shortcaption", "captionshort", "shortdescription", "short"),))
GROUP = Role("a group", "group_column", (("group", "groupid"), ("clusterid",), ("family", "familyid")))

_NUMBERED_CAPTION = re.compile(r"(captions?|texts?|sentences?|descriptions?|comments?)[\W_]*\d+", re.IGNORECASE)
_CAPTION_KEYS = ("raw", "caption", "text", "sentence")

# GOAL's training lists.
GOAL_IMAGE, GOAL_CAPTION, GOAL_REGIONS = "original_filename", "original_caption", "segment"


@dataclass(frozen=True)
class Columns:
    """The column of each role; None where there is none.

    `name` says, if `image` holds the image itself, which image it is. `regions` holds the segments of GOAL's lists.
    """

    captions: tuple[str, ...]
    image: str
    name: str | None = None
    id: str | None = None
    split: str | None = None
    short: str | None = None
    group: str | None = None
    regions: str | None = None

    def all(self) -> list[str]:
        every = (*self.captions, self.image, self.name, self.id, self.split, self.short, self.group, self.regions)
        return list(dict.fromkeys(column for column in every if column is not None))


def choose_columns(
    table: str, names: Sequence[str], head: Sequence[Row], read: ReadConfig, *, holding: Sequence[str] = ()
) -> Columns:
    """The columns of a table whose rows name an image or hold it.

    Args:
        table: as messages spell it.
        names: all columns.
        head: the first rows, to tell likely columns from unlikely ones.
        read: the columns that the user named.
        holding: columns that hold images themselves, not their names.

    Raises:
        ValueError: with everything that is wrong with the columns, and the columns there are.
    """
    errors: list[str] = []

    def named(role: Role, name: str) -> str:
        if name not in names:
            close = get_close_matches(name, names, 1)
            meant = f"; did you mean {close[0]!r}?" if close else ""
            errors.append(f"there is no column {name[:200]!r} ({role.option}){meant}")
        return name

    def guess(role: Role, among: Iterable[str] = names) -> str | None:
        found = role.candidates(among)
        if len(found) > 1:
            several = ", or several separated by commas" if role is CAPTION else ""
            errors.append(f"{_listed(found)} may each hold {role.holds}: choose one with {role.option}{several}")
        return found[0] if found else None

    def pick(role: Role) -> str | None:
        setting = getattr(read, role.setting)
        return guess(role) if setting is None else named(role, setting)

    def lacking(role: Role) -> str:
        known = ", ".join(name for rank in role.ranks for name in rank)
        errors.append(f"no column has a name that is known for {role.holds} ({known}): choose one with {role.option}")
        return ""

    def image_column() -> str:
        if read.image_column is not None:
            return named(IMAGE, read.image_column)
        if goal:
            return GOAL_IMAGE
        if holding:
            if len(holding) == 1 or IMAGE.candidates(holding):
                return guess(IMAGE, holding) or holding[0]
            errors.append(f"{_listed(holding)} each hold images: choose one with {IMAGE.option}")
            return holding[0]
        # Of Karpathy's `filepath` and `filename` the first is a directory: columns with names of images go first.
        naming = [name for name in names if any(_names_image(row.get(name)) for row in head)]
        return guess(IMAGE, naming if IMAGE.candidates(naming) else names) or guess(URL) or lacking(IMAGE)

    def caption_columns() -> tuple[str, ...]:
        if read.caption_column is not None:
            text = read.caption_column
            return tuple(named(CAPTION, part.strip()) for part in ([text] if text in names else text.split(",")))
        if goal:
            return (GOAL_CAPTION,)
        one = guess(CAPTION)
        return (one,) if one else tuple(filter(_NUMBERED_CAPTION.fullmatch, names)) or (lacking(CAPTION),)

    goal = GOAL_IMAGE in names and GOAL_CAPTION in names
    image, captions = image_column(), caption_columns()
    urls = [cell for row in head if isinstance(cell := row.get(image), str) and cell.strip()]
    if urls and all(map(is_url, urls)):
        errors.append(
            f"column {image!r} holds URLs ({urls[0][:100]}): download the images first, and name a column with their "
            f"paths ({IMAGE.option})"
        )
    split = pick(SPLIT)
    if split is None:
        split = guess(MAYBE_SPLIT, [name for name in names if _holds_splits(row.get(name) for row in head)])
    short = pick(SHORT)
    called = IMAGE_NAME.candidates(name for name in names if name != image)
    columns = Columns(
        captions,
        image,
        name=(read.id_column or (called[0] if len(called) == 1 else None)) if image in holding else None,
        id=pick(ID),
        split=split,
        short=None if short in captions else short,
        group=pick(GROUP),
        regions=GOAL_REGIONS if goal and GOAL_REGIONS in names else None,
    )
    if errors:
        hint = "" if any(name.isidentifier() for name in names) else " Does the file lack a first line of column names?"
        shown = "".join(f"\n  {error}" for error in dict.fromkeys(errors))
        raise ValueError(f"the columns of {table} cannot be read:{shown}\nIt has {_listed(names)}.{hint}")
    return columns


def is_blank(cell: Any) -> bool:
    """No value: absent, null, NaN, or white space."""
    if isinstance(cell, str):
        return not cell.strip()
    return cell is None or (isinstance(cell, float) and math.isnan(cell))


def plain_text(cell: Any, column: str) -> str:
    """A cell that holds a name or a number, stripped; "" if it is blank."""
    if is_blank(cell):
        return ""
    if isinstance(cell, bool) or not isinstance(cell, str | int | float):
        raise RowError("unreadable row", f"column {column!r} holds {type(cell).__name__}, not text")
    text = str(cell).strip()
    if invalid := invalid_text(text):
        raise RowError("bad text", f"column {column!r}: {invalid}")
    return text


def caption_texts(cell: Any, column: str, *, lists_in_text: bool = False) -> list[str]:
    """The captions in a cell: a string, or a list of strings or of objects such as Karpathy's {"raw": …}.

    With `lists_in_text` a string may be a list of strings itself, as JSON or Python write it.
    """
    if isinstance(cell, str):
        return (_listed_texts(cell) if lists_in_text else None) or [cell]
    if isinstance(cell, Mapping):
        for key in _CAPTION_KEYS:
            if key in cell:
                return caption_texts(cell[key], column)
    elif isinstance(cell, Sequence) and not isinstance(cell, bytes):
        return [text for item in cell for text in caption_texts(item, column)]
    elif is_blank(cell):
        return []
    raise RowError("unreadable row", f"column {column!r} holds {type(cell).__name__}, not a caption or a list of them")


def _listed_texts(cell: str) -> list[str] | None:
    text = cell.strip()
    if not (text.startswith("[") and text.endswith("]")):
        return None
    for parse in (json.loads, ast.literal_eval):
        try:
            values = parse(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
            return values
    return None


def invalid_text(text: str) -> str | None:
    """Why a text has no UTF-8 form: bytes that were not UTF-8 (read as surrogate escapes), or a lone surrogate."""
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        if 0xDC80 <= code <= 0xDCFF:
            return f"byte 0x{code - 0xDC00:02x} is not UTF-8; save the file as UTF-8"
        return f"contains half of a surrogate pair, U+{code:04X}"
    return None


def _names_image(cell: Any) -> bool:
    return isinstance(cell, str) and not is_url(cell) and is_image_name(cell.strip().replace("\\", "/"))


def _holds_splits(cells: Iterable[Any]) -> bool:
    values = [cell for cell in cells if not is_blank(cell)]
    return bool(values) and all(isinstance(value, str) and normal_split(value) in SPLITS for value in values)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 40} more" if len(names) > 40 else ""
    return (
        ("the columns " if len(names) > 1 else "the column ") + ", ".join(repr(name[:60]) for name in names[:40]) + more
    )
