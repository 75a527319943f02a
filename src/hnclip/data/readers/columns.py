"""Which columns of a table, or keys of objects, hold what: named by the user, or guessed from common names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hnclip.config import ReadConfig
from hnclip.data.pictures import is_image_name
from hnclip.data.readers.cells import is_blank
from hnclip.data.readers.locate import plain_name
from hnclip.data.readers.splits import SPLITS
from hnclip.data.records import normal_split

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Role:
    """What a column can hold, the setting that names it, and the names it often has, without case and punctuation.

    Names come in ranks: the first rank with a column counts, and two columns of one rank are a question for the user.
    """

    holds: str
    setting: str
    ranks: tuple[tuple[str, ...], ...]


_PATHS = ("imagepath", "filepath", "imgpath", "imagefilepath")
_FILES = ("filename", "imagefile", "imagefilename", "imagename", "imgfile", "imgname")
_LONG_CAPTIONS = ("longcaption", "densecaption", "detailedcaption")

IMAGE = Role("a picture", "image_column", (_PATHS, _FILES, ("image", "img", "picture", "photo"), ("path", "file")))
PICTURE_NAME = Role("a picture's name", "id_column", (_PATHS, _FILES))
ADDRESS = Role("an address", "image_column", (("imageurl",), ("url",), ("link",)))
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

_NUMBERED_CAPTION = re.compile(r"(captions?|texts?|sentences?|descriptions?|comments?)\d+")


@dataclass(frozen=True)
class Columns:
    """The column of each thing; None where there is none."""

    captions: tuple[str, ...]
    image: str
    name: str | None = None
    """If `image` holds the picture itself: the column that says which picture it is."""
    id: str | None = None
    split: str | None = None
    short: str | None = None
    group: str | None = None
    regions: str | None = None
    edges: str | None = None

    def all(self) -> list[str]:
        every = (*self.captions, self.image, self.name, self.id, self.split, self.short, self.group)
        every += (self.regions, self.edges)
        return list(dict.fromkeys(column for column in every if column is not None))


def choose_columns(
    table: str,
    names: Sequence[str],
    head: Sequence[Row],
    read: ReadConfig,
    *,
    holding: Sequence[str] = (),
    exists: Callable[[str], bool] = lambda name: False,
) -> Columns:
    """The columns of a table whose rows name a picture or hold it.

    Args:
        table: what messages call it.
        names: all columns there are.
        head: the first rows, to tell likely columns from unlikely ones.
        read: what the user said.
        holding: columns that hold pictures themselves, not their names.
        exists: whether there is a picture of that name; an address on the web is a name only if there is.
    """
    image = _image_column(table, names, head, read, holding, exists)
    captions = _caption_columns(table, names, read)
    split = _pick(table, names, read, SPLIT)
    if split is None:
        holding_splits = [name for name in names if _holds_splits(row.get(name) for row in head)]
        split = _guess(table, holding_splits, MAYBE_SPLIT)
    short = _pick(table, names, read, SHORT)
    called = _candidates([name for name in names if name != image], PICTURE_NAME)
    return Columns(
        captions,
        image,
        name=(read.id_column or (called[0] if len(called) == 1 else None)) if image in holding else None,
        id=_pick(table, names, read, ID),
        split=split,
        short=None if short in captions else short,
        group=_pick(table, names, read, GROUP),
    )


def _image_column(
    table: str,
    names: Sequence[str],
    head: Sequence[Row],
    read: ReadConfig,
    holding: Sequence[str],
    exists: Callable[[str], bool],
) -> str:
    if read.image_column is not None:
        return _named(table, names, IMAGE, read.image_column)
    if holding:
        image = _guess(table, holding, IMAGE) or (holding[0] if len(holding) == 1 else None)
        if image is None:
            raise _several(table, holding, IMAGE)
        return image
    # Of Karpathy's `filepath` and `filename` the first is a directory: what looks like a picture's name goes first.
    pictures = [name for name in names if any(_names_picture(row.get(name)) for row in head)]
    image = _guess(table, pictures, IMAGE) or _guess(table, names, IMAGE)
    if image is not None:
        return image
    address = _guess(table, names, ADDRESS)
    if address is None:
        raise _nothing(table, names, IMAGE)
    if not any(exists(str(row.get(address))) for row in head):
        raise ValueError(
            f"{table} gives only addresses of pictures, in column {address!r}, and none of these pictures is here: "
            "download them and name their directory with --read.images"
        )
    return address


def _caption_columns(table: str, names: Sequence[str], read: ReadConfig) -> tuple[str, ...]:
    if read.caption_column is not None:
        text = read.caption_column
        parts = [text] if text in names else [part.strip() for part in text.split(",")]
        return tuple(_named(table, names, CAPTION, part) for part in parts)
    one = _guess(table, names, CAPTION)
    if one is not None:
        return (one,)
    numbered = tuple(name for name in names if _NUMBERED_CAPTION.fullmatch(_plain(name)))
    if not numbered:
        raise _nothing(table, names, CAPTION)
    return numbered


def _pick(table: str, names: Sequence[str], read: ReadConfig, role: Role) -> str | None:
    """The column that the user named for a role, or the guessed one."""
    named = getattr(read, role.setting)
    return _guess(table, names, role) if named is None else _named(table, names, role, named)


def _named(table: str, names: Sequence[str], role: Role, name: str) -> str:
    if name not in names:
        raise ValueError(f"{table} has no column {name!r} ({_option(role)}); it has {_listed(names)}")
    return name


def _guess(table: str, names: Sequence[str], role: Role) -> str | None:
    found = _candidates(names, role)
    if len(found) > 1:
        raise _several(table, found, role)
    return found[0] if found else None


def _candidates(names: Sequence[str], role: Role) -> list[str]:
    """The columns of the first rank that has any."""
    for rank in role.ranks:
        found = [name for name in names if _plain(name) in rank]
        if found:
            return found
    return []


def _several(table: str, found: Sequence[str], role: Role) -> ValueError:
    several = ", or several separated by commas" if role is CAPTION else ""
    return ValueError(
        f"{table} has more than one column that may hold {role.holds}: {_listed(found)}; choose one with "
        f"{_option(role)}{several}"
    )


def _nothing(table: str, names: Sequence[str], role: Role) -> ValueError:
    known = ", ".join(name for rank in role.ranks for name in rank)
    return ValueError(
        f"{table} has no column of a name that is known for {role.holds} ({known}); it has {_listed(names)}. Choose "
        f"one with {_option(role)}; if these are no names of columns, the file lacks its first line"
    )


def _plain(name: str) -> str:
    return re.sub(r"[\W_]+", "", name.lower())


def _names_picture(cell: Any) -> bool:
    return isinstance(cell, str) and is_image_name(plain_name(cell.strip()))


def _holds_splits(cells: Any) -> bool:
    values = [cell for cell in cells if not is_blank(cell)]
    return bool(values) and all(isinstance(value, str) and normal_split(value) in SPLITS for value in values)


def _option(role: Role) -> str:
    return "--read." + role.setting.replace("_", "-")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
