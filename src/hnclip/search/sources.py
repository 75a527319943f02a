"""What is to be encoded: `DATA` as everywhere, and folders of pictures that nobody has described."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from hnclip.config import ReadConfig
from hnclip.core import Problem, Record
from hnclip.data.benchmarks import BENCHMARKS
from hnclip.data.image_sources import FileImage, is_image_name
from hnclip.data.readers.columns import invalid_text
from hnclip.data.readers.locate import files_below
from hnclip.data.records import DataSet
from hnclip.data.sources import open_data

Only = Literal["both", "images", "captions"]


def open_source(source: str, read: ReadConfig, *, split: str, only: Only) -> DataSet:
    """The records of one split, and the problems of the source.

    With `only` "images" a directory that holds pictures is all of its pictures, whatever else lies beside them.
    """
    folder = _folder(source)
    if only == "images" and folder is not None:
        data = _all_pictures(source, folder)
    else:
        try:
            data = open_data(source, read, splits={split})
        except ValueError as error:
            if folder is None:
                raise
            raise ValueError(f"{error}\nPictures are encoded without captions by --only images") from error
    records = data.part(split, validation_share=read.validation_share)
    return DataSet(data.name, records, data.problems, data.exact)


def _folder(source: str) -> Path | None:
    """The directory of that name, if it holds pictures and the name does not mean something else."""
    if source.partition("/")[0] in {"scenes", *BENCHMARKS}:
        return None
    path = Path(source).expanduser()
    return path if path.is_dir() and any(is_image_name(file) for file in files_below(path)) else None


def _all_pictures(source: str, folder: Path) -> DataSet:
    """One record for each picture; its id is its path below the folder."""
    records: list[Record] = []
    problems: list[Problem] = []
    for file in files_below(folder):
        if not is_image_name(file):
            continue
        if bad := invalid_text(file):
            where = file.encode(errors="backslashreplace").decode()
            problems.append(Problem("bad text", where, f"the picture's name cannot be used: {bad}"))
        else:
            records.append(Record(file, FileImage(folder / file), (), None))
    return DataSet(source, tuple(records), tuple(problems))
