"""A folder of pictures, each with its caption in a .txt of the same name."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from hnclip.data.pictures import FileImage, is_image_name
from hnclip.data.readers.gather import Found, Gather
from hnclip.data.readers.splits import SPLITS
from hnclip.data.records import normal_split


def read_folder(root: Path, files: Sequence[str]) -> Found:
    """Pictures with a .txt of the same name beside them; `files` are all below the folder, relative to it.

    A .txt holds one caption; its lines are joined by spaces. Ids are paths without suffix, relative to the folder. If
    there are directories train, validation (val, dev), test at the top, they are splits, and nothing may lie outside.
    Of two pictures that differ by their suffix alone the first has the caption, the other is a repeated id.
    """
    pictures: dict[str, list[str]] = {}
    texts: dict[str, str] = {}
    for file in files:
        stem = os.path.splitext(file)[0]
        if is_image_name(file):
            pictures.setdefault(stem, []).append(file)
        elif file.lower().endswith(".txt"):
            texts[stem] = file
    has_splits = any(_top_split(stem) for stem in pictures)
    gather = Gather(own_ids=True)
    for stem, (picture, *others) in pictures.items():
        split = _top_split(stem)
        if has_splits and split is None:
            gather.problem("unreadable row", picture, "lies outside the directories that are splits")
            continue
        for other in others:
            gather.problem("repeated id", other, f"differs from {picture} by its suffix alone; {picture} is used")
        if stem not in texts:
            gather.problem("no caption", picture, f"there is no {stem}.txt")
            continue
        try:
            caption = one_caption((root / texts[stem]).read_bytes())
        except OSError as error:
            gather.problem("unreadable row", texts[stem], f"cannot be read: {error.strerror}")
            continue
        gather.add(texts[stem], FileImage(root / picture), [caption], name=stem, split=split)
    for stem, file in texts.items():
        if stem not in pictures:
            gather.problem("no image", file, "there is no picture of the same name")
    return gather.finish(f"pictures in {root} with a .txt of the same name beside them")


def has_captioned_pictures(files: Sequence[str]) -> bool:
    """Whether any picture has a .txt of the same name."""
    texts = {os.path.splitext(file)[0] for file in files if file.lower().endswith(".txt")}
    return any(is_image_name(file) and os.path.splitext(file)[0] in texts for file in files)


def one_caption(content: bytes) -> str:
    """A caption file's text on one line. Bytes that are not UTF-8 come as surrogate escapes."""
    lines = re.split(r"[\r\n]+", content.decode("utf-8-sig", "surrogateescape"))
    return " ".join(line.strip() for line in lines if line.strip())


def _top_split(path: str) -> str | None:
    top, slash, _ = path.partition("/")
    split = normal_split(top)
    return split if slash and split in SPLITS else None
