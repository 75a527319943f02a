"""Which columns of a table, or keys of objects, hold what, and what their cells hold."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import Any

from hnclip.config import ReadConfig
from hnclip.data.image_sources import is_image_name
from hnclip.data.readers.locate import is_url
from hnclip.data.records import RowError

Row = Mapping[str, Any]

# Common names of columns, without case and punctuation, by the setting that names them: the first that a table has
# counts. URLs are last among images, to tell the user what they are.
_FILES = ("imagepath", "filepath", "imgpath", "imagefilepath", "filename", "imagefile", "imagefilename", "imagename")
_NAMES = {
    "image_column": (*_FILES, "image", "img", "picture", "photo", "path", "file", "imageurl", "url", "link"),
    "caption_column": (
        *("longcaption", "densecaption", "detailedcaption", "caption", "captions", "description", "descriptions"),
        *("paragraph", "paragraphs", "sentences", "text", "texts", "title", "sentence", "raw", "prompt", "comment"),
        *("alttext", "txt"),
    ),
    "id_column": ("imageid", "imgid", "exampleid", "sampleid", "id", "key", "uid", "uuid"),
    "split_column": ("split", "karpathysplit"),
    "short_column": ("shortcaption", "captionshort", "shortdescription", "short"),
    "group_column": ("group", "groupid", "clusterid", "family", "familyid"),
}
_NUMBERED_CAPTION = re.compile(r"(captions?|texts?|sentences?|descriptions?|comments?)[\W_]*\d+", re.IGNORECASE)
_CAPTION_KEYS = ("raw", "caption", "text", "sentence")

# GOAL's training lists.
GOAL_IMAGE, GOAL_CAPTION, GOAL_REGIONS = "original_filename", "original_caption", "segment"


@dataclass(frozen=True)
class Columns:
    """The column of each role; "" where there is none. `name` says, if `image` holds the image itself, which one it is;
    `regions` holds the segments of GOAL's lists."""

    captions: tuple[str, ...]
    image: str
    name: str = ""
    id: str = ""
    split: str = ""
    short: str = ""
    group: str = ""
    regions: str = ""

    def all(self) -> list[str]:
        return list(dict.fromkeys(filter(None, (*self.captions, *astuple(self)[1:]))))


def choose_columns(
    table: str, names: Sequence[str], head: Sequence[Row], read: ReadConfig, *, holding: Sequence[str] = ()
) -> Columns:
    """The columns of a table; those in `holding` contain images themselves, not their names. The first rows tell names
    of images from other text."""

    def error(problem: str, setting: str) -> ValueError:
        option = "--read." + setting.replace("_", "-")
        return ValueError(f"the columns of {table} cannot be read: {problem} ({option}); there are {listed(names)}")

    def known(setting: str, name: str) -> str:
        if name not in names:
            raise error(f"there is no column {name[:200]!r}", setting)
        return name

    def pick(setting: str, among: Sequence[str] = names, needed: bool = False) -> str:
        """The column that the user named for a setting, or one with a common name; "" if there is none."""
        if (named := getattr(read, setting)) is not None:
            return known(setting, named)
        found = _common(_NAMES[setting], among)
        if len(found) > 1 or (needed and not found):
            raise error(f"{listed(found)} may each be meant" if found else "none has a common name", setting)
        return found[0] if found else ""

    goal = GOAL_IMAGE in names and GOAL_CAPTION in names
    if (goal or len(holding) == 1) and read.image_column is None:
        image = GOAL_IMAGE if goal else holding[0]
    else:
        # Of Karpathy's `filepath` and `filename` the first is a directory: columns with names of images go first.
        likely = holding or [name for name in names if any(_names_image(row.get(name)) for row in head)]
        image = pick("image_column", likely if holding or _common(_NAMES["image_column"], likely) else names, True)
    captions = (GOAL_CAPTION,) if goal else tuple(filter(_NUMBERED_CAPTION.fullmatch, names))
    if read.caption_column is not None:
        parts = [read.caption_column] if read.caption_column in names else read.caption_column.split(",")
        captions = tuple(known("caption_column", part.strip()) for part in parts)
    elif not goal and (one := pick("caption_column", needed=not captions)):
        captions = (one,)
    urls = [cell for row in head if isinstance(cell := row.get(image), str) and cell.strip()]
    if urls and all(map(is_url, urls)):
        raise error(f"column {image!r} holds URLs ({urls[0][:100]}): download the images first", "image_column")
    others = [name for name in names if name != image]
    return Columns(
        captions,
        image,
        name=(read.id_column or "".join(_common(_FILES, others)[:1])) if image in holding else "",
        id=pick("id_column"),
        split=pick("split_column") if read.splits else "",
        short="" if (short := pick("short_column")) in captions else short,
        group=pick("group_column"),
        regions=GOAL_REGIONS if goal and GOAL_REGIONS in names else "",
    )


def _common(common: Sequence[str], names: Sequence[str]) -> list[str]:
    """The columns with the first common name that there is: several if they differ only in case or punctuation."""
    plain = {name: re.sub(r"[\W_]+", "", name.lower()) for name in names}
    return next((found for wanted in common if (found := [name for name in plain if plain[name] == wanted])), [])


def listed(names: Sequence[str]) -> str:
    """The first names, for messages."""
    more = f" and {len(names) - 40} more" if len(names) > 40 else ""
    return ", ".join(repr(name[:60]) for name in names[:40]) + more


def _names_image(cell: Any) -> bool:
    return isinstance(cell, str) and not is_url(cell) and is_image_name(cell.strip().replace("\\", "/"))


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


def caption_texts(cell: Any, column: str) -> list[str]:
    """The captions in a cell: a string, which may be a list of strings as JSON or, from pandas, as Python writes it; or
    a list of strings or of objects such as Karpathy's {"raw": …}."""
    if isinstance(cell, str):
        if cell.lstrip().startswith("["):
            for parse in (json.loads, ast.literal_eval):
                with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                    texts = parse(cell.strip())
                    if texts and all(isinstance(text, str) for text in texts):
                        return texts
        return [cell]
    if isinstance(cell, Mapping):
        for key in _CAPTION_KEYS:
            if key in cell:
                return caption_texts(cell[key], column)
    elif isinstance(cell, Sequence) and not isinstance(cell, bytes):
        return [text for item in cell for text in caption_texts(item, column)]
    elif is_blank(cell):
        return []
    raise RowError("unreadable row", f"column {column!r} holds {type(cell).__name__}, not a caption or a list of them")


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
