"""Files, directories and patterns: what lies there, and which reader it is for."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path

from hnclip.config import ReadConfig
from hnclip.data.readers.folder import has_captioned_pictures, read_folder
from hnclip.data.readers.gather import Found
from hnclip.data.readers.huggingface import is_saved, read_saved
from hnclip.data.readers.locate import files_below
from hnclip.data.readers.splits import SPLITS, splits_of_paths
from hnclip.data.readers.table_files import SUFFIXES, read_tables
from hnclip.data.readers.webdataset import read_shards
from hnclip.data.records import normal_split

_TAR = re.compile(r"\.(tar|tgz|tbz2?|txz|tar\.\w+)$", re.IGNORECASE)
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_PART = re.compile(r"-\d+-of-\d+")  # Hugging Face's numbers
_NO_TABLE = re.compile(r"dataset_infos?\.json|.*_stats\.json")  # what Hugging Face and img2dataset write beside data
_METADATA = re.compile(r"(^|/)metadata\.(csv|jsonl|parquet)$")
_SHOWN = 4  # names that a message shows


def read_path(path: Path, read: ReadConfig) -> Found:
    """A file or a directory."""
    return _read_directory(path, read) if path.is_dir() else _read_files([path], read, path.parent)


def is_data_name(name: str) -> bool:
    """Whether a file of that name could be read."""
    return _is_table(name) or _TAR.search(name) is not None


def is_pattern(source: str) -> bool:
    return any(mark in source for mark in "*?[{")


def read_pattern(pattern: str, read: ReadConfig) -> Found:
    """All files of a pattern: `*`, `?`, `**` as in a shell, `{000..010}` and `{a,b}`."""
    files: list[Path] = []
    for name in _expand(pattern):
        found = sorted(glob.glob(name, recursive=True)) if glob.has_magic(name) else [name]
        files += [Path(file) for file in found]
    missing = [str(file) for file in files if not file.is_file()]
    if not files or missing:
        raise ValueError(f"{missing[0]} does not exist" if missing else f"there is no file of the pattern {pattern}")
    return _read_files(files, read, Path(os.path.commonpath([file.parent for file in files])))


def _read_files(files: Sequence[Path], read: ReadConfig, base: Path) -> Found:
    """Tables, or shards. Several files are splits if all their names say so, and so is one that is numbered as a part
    of a split; any other single file is all there is."""
    for file in files:
        with file.open("rb") as handle:
            if handle.read(40).startswith(b"version https://git-lfs"):
                raise ValueError(f"{file} is a pointer of Git LFS, not the data themselves: run `git lfs pull`")
    names = [file.relative_to(base).as_posix() for file in files]
    has_splits = len(names) > 1 or _PART.search(names[0])
    placed = list(zip(files, splits_of_paths(names) if has_splits else [None]))
    if all(_TAR.search(name) for name in names):
        return read_shards(placed, read, base)
    if all(_is_table(name) for name in names):
        return read_tables(placed, read, base)
    raise ValueError(
        f"{_listed(names)} cannot be read: data are files that end in {', '.join(SUFFIXES)} or .tar, one of these at a "
        "time; unpack other archives into a directory"
    )


def _read_directory(root: Path, read: ReadConfig) -> Found:
    """In this order: what `save_to_disk` wrote, Hugging Face's image folder (metadata.csv and pictures), pictures with
    .txt files, shards, Parquet files at any depth, other tables at the top."""
    if is_saved(root):
        return read_saved(root, read)
    files = list(files_below(root))
    metadata = [file for file in files if _METADATA.search(file)]
    shards = [file for file in files if _TAR.search(file)]
    parquet = [file for file in files if file.lower().endswith(".parquet")]
    tables = [file for file in files if "/" not in file and _is_table(file) and not file.lower().endswith(".parquet")]
    if metadata:
        chosen = metadata
    elif has_captioned_pictures(files):
        return read_folder(root, files)
    elif shards:
        if tables:
            raise ValueError(
                f"{root} holds tables ({_listed(tables)}) and tar files ({_listed(shards)}): name the table, and the "
                "tar file with --read.images; or, if these are WebDataset shards, name them by a pattern such as "
                "'folder/*.tar'"
            )
        chosen = shards
    elif parquet and not tables:
        folders = {_without_split(os.path.dirname(file)) for file in parquet}
        if len(folders) > 1:
            raise ValueError(
                f"{root} holds several data sets, in {_listed(sorted(folders))}: name the directory of one"
            )
        chosen = parquet
    elif len(tables) + len(parquet) == 1 or (tables and not parquet and None not in splits_of_paths(tables)):
        chosen = tables
    elif tables:
        raise ValueError(
            f"{root} holds several tables: {_listed(tables + parquet)}; name one of them, or several by a pattern such "
            "as 'folder/part-*.csv'"
        )
    else:
        return read_folder(root, files)
    return _read_files([root / file for file in chosen], read, root)


def _is_table(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not _NO_TABLE.fullmatch(os.path.basename(name))


def _without_split(folder: str) -> str:
    return "/".join(part for part in folder.split("/") if normal_split(part) not in SPLITS)


def _expand(pattern: str) -> list[str]:
    """A pattern without its braces: `{000..010}` counts, with leading zeros, `{a,b}` lists."""
    match = _BRACES.search(pattern)
    if match is None:
        return [pattern]
    span = _RANGE.fullmatch(match[1])
    if span is None:
        parts = match[1].split(",")
    else:
        first, last = int(span[1]), int(span[2])
        parts = [str(number).zfill(len(span[1])) for number in range(first, last + 1)]
    return [name for part in parts for name in _expand(pattern[: match.start()] + part + pattern[match.end() :])]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
