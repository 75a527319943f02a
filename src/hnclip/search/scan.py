"""What is indexed: all images of a folder, captioned or not, or the records of other data."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hnclip.config import ReadConfig
from hnclip.core import InvalidImage, Problem, Record
from hnclip.data.image_sources import FileImage, is_image_name
from hnclip.data.readers.columns import invalid_text
from hnclip.data.readers.folders import count_captioned
from hnclip.data.readers.locate import files_below
from hnclip.data.records import DataSet, printable
from hnclip.data.sources import is_data_name, local_path, open_data
from hnclip.search.database import is_index

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """The images of a data source and their captions.

    Args:
        data: as given; of files and folders the absolute path.
        root: the directory that places are relative to.
        records: the id is the name in the index; of an image below a folder its path there.
        problems: of rows, captions and folders that could not be read.
        unread: records whose captions cannot be read now; the index keeps those that it has.
        hidden: folders that cannot be listed now; the index keeps their files.
    """

    data: str
    root: Path | None
    records: Sequence[Record]
    problems: Sequence[Problem]
    unread: frozenset[str] = frozenset()
    hidden: tuple[str, ...] = ()


def open_source(source: str, read: ReadConfig, *, split: str) -> Source:
    """All images of a folder with the captions that `open_data` finds for them; of other data the records of a split.
    If the captions of a folder cannot be read, its images are.

    Raises:
        ValueError: there is no image.
    """
    path = local_path(source)
    if path is not None and path.is_dir():
        found = _open_folder(path, source, read, split)
    else:
        data = open_data(source, read, splits={split})
        records = data.part(split, validation_share=read.validation_share)
        found = Source(str(path or source), path and path.parent, records, data.problems)
    if not found.records:
        raise ValueError(f"there are no images in {source} that could be indexed")
    return found


def _open_folder(path: Path, source: str, read: ReadConfig, split: str) -> Source:
    files, hidden = _list_files(path)
    images = [file for file in files if is_image_name(file)]
    described = count_captioned(files)[1] > 0 or any(map(is_data_name, files))
    if not images and not described:
        raise ValueError(f"there are no images in {source}; is its disk mounted?")
    data, problems, unread = DataSet(source, ()), list(hidden.values()), False
    if described or split != "all":
        try:
            data = open_data(source, read)
        except ValueError as error:
            if not images or split != "all":
                raise
            unread = True
            problems.append(Problem("unreadable row", str(path), f"the captions cannot be read: {error}"))
            reason = str(error).partition("\n")[0].rstrip(":")
            log.warning(f"the captions cannot be read: {reason}")
    base, names = str(path), dict.fromkeys(name for name in images if not invalid_text(name))
    for image in images:
        if image not in names:
            detail = f"the name of the image cannot be used: {invalid_text(image)}"
            problems.append(Problem("bad text", printable(image), detail))
    captions: dict[str, tuple[str, ...]] = {}
    others: list[Record] = []  # whose images are elsewhere
    for record in data.part(split, validation_share=read.validation_share):
        name = os.path.relpath(record.image.key, path) if isinstance(record.image, FileImage) else ""
        if name in names:
            captions[name] = (*captions.get(name, ()), *record.captions)
        elif record.id in names:
            detail = f"the name of an image in {path}, and an id elsewhere"
            problems.append(Problem("repeated id", record.id, detail))
        elif not lies_in(name, hidden):
            others.append(record)
    found = [
        Record(name, FileImage(name, base), captions.get(name, ()), None)
        for name in names
        if split == "all" or name in captions
    ]
    texts = {os.path.splitext(file)[0]: file for file in files if file.lower().endswith(".txt")}
    bad = {problem.where for problem in data.problems if problem.kind == "unreadable row"}
    unread_names = frozenset(
        name for name in names.keys() - captions.keys() if unread or texts.get(os.path.splitext(name)[0]) in bad
    )
    problems += [problem for problem in data.problems if not _is_irrelevant(problem, names, texts)]
    problems = list(dict.fromkeys(problems))  # both list the folders that cannot be listed
    return Source(base, path, [*found, *others], problems, unread_names, tuple(hidden))


def _list_files(path: Path) -> tuple[list[str], dict[str, Problem]]:
    """Files below a path except those of indexes, and the problems of folders that cannot be listed, by folder."""
    errors: list[OSError] = []
    files = list(files_below(path, errors.append))
    databases = {os.path.dirname(file) for file in files if os.path.basename(file).startswith("index-")}
    indexes = [folder for folder in databases if folder and is_index(path / folder)]
    hidden: dict[str, Problem] = {}
    for error in errors:
        if isinstance(error, FileNotFoundError | NotADirectoryError):  # deleted in this moment
            continue
        folder = os.path.relpath(error.filename, path)
        if folder == ".":
            raise ValueError(f"{path} cannot be listed: {error.strerror or error}")
        name = printable(folder)
        hidden[folder] = Problem("missing image", name, f"{name} cannot be listed: {error.strerror or error}")
    return [file for file in files if not lies_in(file, indexes)], hidden


def _is_irrelevant(problem: Problem, images: Mapping[str, None], texts: Mapping[str, str]) -> bool:
    """Whether a problem of the captions does not matter for a folder, whose images are indexed with or without them."""
    if problem.kind == "unreadable row" and problem.where in images:
        return os.path.splitext(problem.where)[0] not in texts
    return problem.kind in ("no caption", "no image") or (problem.kind == "repeated id" and problem.where in images)


def lies_in(name: str, folders: Iterable[str]) -> bool:
    return any(name.startswith(f"{folder}/") for folder in folders)


def is_unreachable(error: InvalidImage) -> bool:
    """Whether an image may exist as it was but cannot be read now."""
    cause = error.__cause__
    blocked = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError | NotADirectoryError)
    return error.kind == "missing image" and blocked
