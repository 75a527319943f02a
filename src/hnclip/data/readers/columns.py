"""Which columns of a table, or keys of objects, hold what, and what their cells hold."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from hnclip.config import ReadConfig
from hnclip.data.image_sources import is_image_name
from hnclip.data.readers.locate import is_url
from hnclip.data.records import SPLITS, RowError, normal_split

Row = Mapping[str, Any]

_PATHS = ("imagepath", "filepath", "imgpath", "imagefilepath")
_FILES = ("filename", "imagefile", "imagefilename", "imagename", "imgfile", "imgname")
_LONG_CAPTIONS = ("longcaption", "densecaption", "detailedcaption")

# Common names of columns, without case and punctuation, by the setting that names them. They come in ranks: the first
# rank with a column counts, and of two columns in one rank the user must name one.
_Ranks = tuple[tuple[str, ...], ...]
_NAMES: dict[str, _Ranks] = {
    "image_column": (
        *(_PATHS, _FILES, ("image", "img", "picture", "photo"), ("path", "file")),
        *(("imageurl",), ("url",), ("link",)),  # to tell the user that they hold URLs
    ),
    "caption_column": (
        ("caption", "captions", *_LONG_CAPTIONS, "description", "descriptions", "paragraph", "paragraphs", "sentences"),
        ("text", "texts", "title", "sentence", "raw", "prompt", "comment", "alttext", "txt"),
    ),
    "id_column": (("imageid", "imgid"), ("exampleid", "sampleid"), ("id",), ("key",), ("uid", "uuid")),
    "split_column": (("split",), ("karpathysplit",)),
    "short_column": (("shortcaption", "captionshort", "shortdescription", "short"),),
    "group_column": (("group", "groupid"), ("clusterid",), ("family", "familyid")),
}
_MAYBE_SPLIT = (("partition",), ("subset",), ("set",))
_NUMBERED_CAPTION = re.compile(r"(captions?|texts?|sentences?|descriptions?|comments?)[\W_]*\d+", re.IGNORECASE)
_CAPTION_KEYS = ("raw", "caption", "text", "sentence")

# GOAL's training lists.
GOAL_IMAGE, GOAL_CAPTION, GOAL_REGIONS = "original_filename", "original_caption", "segment"


@dataclass(frozen=True)
class Columns:
    """The column of each role; "" where there is none.

    `name` says, if `image` holds the image itself, which image it is. `regions` holds the segments of GOAL's lists.
    """

    captions: tuple[str, ...]
    image: str
    name: str = ""
    id: str = ""
    split: str = ""
    short: str = ""
    group: str = ""
    regions: str = ""

    def all(self) -> list[str]:
        every = (*self.captions, self.image, self.name, self.id, self.split, self.short, self.group, self.regions)
        return list(dict.fromkeys(filter(None, every)))


@dataclass
class _Choice:
    """The columns of a table, those that the user named, and everything that is wrong with them."""

    names: Sequence[str]
    read: ReadConfig
    errors: list[str] = field(default_factory=list)

    def known(self, setting: str, name: str) -> str:
        if name not in self.names:
            close = "".join(f"; did you mean {near!r}?" for near in get_close_matches(name, self.names, 1))
            self.errors.append(f"there is no column {name[:200]!r} ({_option(setting)}){close}")
        return name

    def pick(self, setting: str, among: Sequence[str] | None = None, ranks: _Ranks = (), needed: bool = False) -> str:
        """The column that the user named for a setting, or one with a common name; "" if there is none."""
        named = getattr(self.read, setting)
        if named is not None:
            return self.known(setting, named)
        found = _first_rank(ranks or _NAMES[setting], self.names if among is None else among)
        if len(found) > 1 or (needed and not found):
            which = f"{_listed(found)} may each be meant" if found else "none has a common name"
            self.errors.append(f"{which}: choose a column with {_option(setting)}")
        return found[0] if found else ""


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
    choice = _Choice(names, read)
    goal = GOAL_IMAGE in names and GOAL_CAPTION in names
    if goal and read.image_column is None:
        image = GOAL_IMAGE
    elif len(holding) == 1 and read.image_column is None:
        image = holding[0]
    else:
        # Of Karpathy's `filepath` and `filename` the first is a directory: columns with names of images go first.
        likely = holding or [name for name in names if any(_names_image(row.get(name)) for row in head)]
        likely = likely if holding or _first_rank(_NAMES["image_column"], likely) else names
        image = choice.pick("image_column", likely, needed=True)
    captions: tuple[str, ...] = (GOAL_CAPTION,) if goal else tuple(filter(_NUMBERED_CAPTION.fullmatch, names))
    if read.caption_column is not None:
        parts = [read.caption_column] if read.caption_column in names else read.caption_column.split(",")
        captions = tuple(choice.known("caption_column", part.strip()) for part in parts)
    elif not goal and (one := choice.pick("caption_column", needed=not captions)):
        captions = (one,)
    urls = [cell for row in head if isinstance(cell := row.get(image), str) and cell.strip()]
    if urls and all(map(is_url, urls)):
        found = f"column {image!r} holds URLs ({urls[0][:100]}): download the images first"
        choice.errors.append(f"{found}, and name a column with their paths ({_option('image_column')})")
    holds_splits = [name for name in names if _holds_splits(row.get(name) for row in head)]
    short = choice.pick("short_column")
    called = _first_rank((_PATHS, _FILES), [name for name in names if name != image])
    columns = Columns(
        captions,
        image,
        name=(read.id_column or (called[0] if len(called) == 1 else "")) if image in holding else "",
        id=choice.pick("id_column"),
        split=choice.pick("split_column") or choice.pick("split_column", holds_splits, _MAYBE_SPLIT),
        short="" if short in captions else short,
        group=choice.pick("group_column"),
        regions=GOAL_REGIONS if goal and GOAL_REGIONS in names else "",
    )
    if choice.errors:
        errors = "".join(f"\n  {error}" for error in dict.fromkeys(choice.errors))
        raise ValueError(f"the columns of {table} cannot be read:{errors}\nIts columns are {_listed(names)}")
    return columns


def _first_rank(ranks: _Ranks, names: Iterable[str]) -> list[str]:
    """The columns of the first rank that has any."""
    plain = {name: re.sub(r"[\W_]+", "", name.lower()) for name in names}
    return next((found for rank in ranks if (found := [name for name in plain if plain[name] in rank])), [])


def _option(setting: str) -> str:
    return "--read." + setting.replace("_", "-")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 40} more" if len(names) > 40 else ""
    return ", ".join(repr(name[:60]) for name in names[:40]) + more


def _names_image(cell: Any) -> bool:
    return isinstance(cell, str) and not is_url(cell) and is_image_name(cell.strip().replace("\\", "/"))


def _holds_splits(cells: Iterable[Any]) -> bool:
    values = [cell for cell in cells if not is_blank(cell)]
    return bool(values) and all(isinstance(value, str) and normal_split(value) in SPLITS for value in values)


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


def caption_texts(cell: Any, column: str, lists_in_text: bool = False) -> list[str]:
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
