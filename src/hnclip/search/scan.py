"""What is indexed: all images of a folder, captioned or not, or the records of other data; and what has changed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from hnclip.config import ReadConfig
from hnclip.core import ImageSource, InvalidImage, Problem, Record
from hnclip.data.decoding import in_order
from hnclip.data.image_sources import FileImage, TarImage, is_image_name
from hnclip.data.readers.columns import invalid_text
from hnclip.data.readers.folders import count_captioned
from hnclip.data.readers.locate import files_below
from hnclip.data.records import DataSet, printable
from hnclip.data.sources import is_data_name, local_path, open_data
from hnclip.search.database import is_index
from hnclip.search.reader import place_of, source_at
from hnclip.search.writer import Known, Noted, captions_hash

log = logging.getLogger(__name__)

TOGETHER = 512  # entries that a thread compares at a time


@dataclass(frozen=True)
class Entry:
    """An image to index under a name, and its captions."""

    name: str
    image: ImageSource
    place: str
    captions: tuple[str, ...]

    def stamp(self) -> str:
        """Changes when the image may have changed; InvalidImage if there is none."""
        if isinstance(self.image, FileImage | TarImage):
            return self.image.stamp()  # without its path: the folder may move
        return f"{self.image.key} {self.image.stamp()}"


@dataclass(frozen=True)
class Source:
    """The entries of a data source.

    Args:
        data: as given; of files and folders the absolute path.
        root: the directory that places are relative to.
        files: images below the root, named by their paths.
        captions: of these files.
        records: further images, named by their ids.
        problems: of rows, captions and folders that could not be read.
        unread: files whose captions exist but cannot be read now; the index keeps those that it has.
        hidden: folders that cannot be listed now; the index keeps their files.
    """

    data: str
    root: Path | None
    files: Sequence[str]
    captions: Mapping[str, tuple[str, ...]]
    records: Sequence[Record]
    problems: Sequence[Problem]
    unread: frozenset[str] = frozenset()
    hidden: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.files) + len(self.records)

    def entries(self) -> Iterator[Entry]:
        for name in self.files:
            image = FileImage(name, str(self.root))
            yield Entry(name, image, place_of(image, self.root), self.captions.get(name, ()))
        for record in self.records:
            yield Entry(record.id, record.image, place_of(record.image, self.root), record.captions)


def open_source(source: str, read: ReadConfig, *, split: str) -> Source:
    """All images of a folder with the captions that `open_data` finds for them; of other data the records of a split.
    If the captions of a folder cannot be read, its images are indexed without them.

    Raises:
        ValueError: there is no image.
    """
    path = local_path(source)
    if path is not None and path.is_dir():
        found = _open_folder(path, source, read, split)
    else:
        data = open_data(source, read, splits={split})
        records = data.part(split, validation_share=read.validation_share)
        found = Source(str(path or source), path and path.parent, (), {}, records, data.problems)
    if not len(found):
        raise ValueError(f"there are no images in {source} that could be indexed")
    return found


def _open_folder(path: Path, source: str, read: ReadConfig, split: str) -> Source:
    files, hidden = _list_files(path)
    images = [file for file in files if is_image_name(file)]
    described = count_captioned(files)[1] > 0 or any(map(is_data_name, files))
    if not images and not described:
        raise ValueError(f"there are no images in {source}; is its disk mounted?")
    data, problems = DataSet(source, ()), list(hidden.values())
    if described or split != "all":
        try:
            data = open_data(source, read)
        except ValueError as error:
            if not images or split != "all":
                raise
            problems.append(Problem("unreadable row", str(path), f"there are no captions: {error}"))
            reason = str(error).partition("\n")[0].rstrip(":")
            log.warning(f"the images are indexed without captions: {reason}")
    names = dict.fromkeys(name for name in images if not invalid_text(name))
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
        elif not _lies_in(name, hidden):
            others.append(record)
    texts = {os.path.splitext(file)[0]: file for file in files if file.lower().endswith(".txt")}
    unread = frozenset(
        name
        for name in names.keys() - captions.keys()
        if (text := texts.get(os.path.splitext(name)[0])) and _unreachable(FileImage(text, str(path)).read)
    )
    return Source(
        str(path),
        path,
        [name for name in names if split == "all" or name in captions],
        captions,
        others,
        # Both list the folders that cannot be listed.
        list(dict.fromkeys([*(each for each in data.problems if not _is_irrelevant(each, names, texts)), *problems])),
        unread,
        tuple(hidden),
    )


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
    return [file for file in files if not _lies_in(file, indexes)], hidden


def _is_irrelevant(problem: Problem, images: Mapping[str, None], texts: Mapping[str, str]) -> bool:
    """Whether a problem of the captions does not matter for a folder, whose images are indexed with or without them."""
    if problem.kind == "unreadable row" and problem.where in images:
        return os.path.splitext(problem.where)[0] not in texts
    return problem.kind in ("no caption", "no image") or (problem.kind == "repeated id" and problem.where in images)


def _lies_in(name: str, folders: Iterable[str]) -> bool:
    return any(name.startswith(f"{folder}/") for folder in folders)


@dataclass
class UpdatePlan:
    """What an update has to do.

    Args:
        work: entries to read: new ones, and those with another stamp, place or captions.
        unchanged: number of entries that are as they were.
        deleted: names of files that the source does not have any more.
        problems: what still cannot be indexed, problems of the source, and files that are out of reach and stay.
    """

    work: list[Entry] = field(default_factory=list)
    unchanged: int = 0
    deleted: list[str] = field(default_factory=list)
    problems: Noted = field(default_factory=dict)


def compare(
    source: Source,
    known: Mapping[str, Known],
    problems: Noted,
    pool: ThreadPoolExecutor,
    advance: Callable[[int], None],
) -> UpdatePlan:
    """Compare a source with an index by names, stamps and captions; no image is read.

    Args:
        known: the files of the index.
        problems: what it could not index.
        advance: called with the number of entries that were compared.
    """
    plan = UpdatePlan(problems=_noted(source.problems))
    present = set[str]()

    def compared(entries: list[Entry]) -> list[tuple[Entry, bool]]:
        return [(entry, _is_same(entry, known.get(entry.name), problems.get(entry.name))) for entry in entries]

    for part in in_order(pool, compared, _chunks(source.entries()), 64):
        for entry, same in part:
            present.add(entry.name)
            if not same:
                plan.work.append(entry)
            elif entry.name in known:
                plan.unchanged += 1
            else:
                plan.problems[entry.name] = problems[entry.name]
        advance(len(part))
    for name in known.keys() - present:
        image = source_at(known[name].place, source.root)
        if _lies_in(name, source.hidden):
            plan.unchanged += 1
        elif image and (error := _unreachable(image.stamp)):  # not listed, but it may exist
            plan.unchanged += 1
            plan.problems[name] = Problem(error.kind, name, str(error)), ""
        else:
            plan.deleted.append(name)
    return plan


def _is_same(entry: Entry, before: Known | None, problem: tuple[Problem, str] | None) -> bool:
    """Whether an entry is as the index has it, or as bad as it was."""
    if before is None and problem is None:
        return False
    try:
        stamp = entry.stamp()
    except InvalidImage:
        return False
    if before is not None:
        return (before.stamp, before.place, before.captions) == (stamp, entry.place, captions_hash(entry.captions))
    return problem is not None and problem[1] == stamp


def _noted(problems: Iterable[Problem]) -> Noted:
    """Problems of the source by place, those of one place joined; without a stamp, since they are found each time."""
    found: Noted = {}
    for problem in problems:
        if problem.where in found:
            first = found[problem.where][0]
            problem = replace(first, detail=f"{first.detail}; {problem.detail}")
        found[problem.where] = problem, ""
    return found


def _unreachable(look: Callable[[], object]) -> InvalidImage | None:
    """The error of looking at a file that may exist as it was but cannot be read now."""
    try:
        look()
    except InvalidImage as error:
        return error if is_unreachable(error) else None
    return None


def is_unreachable(error: InvalidImage) -> bool:
    """Whether an image may exist as it was but cannot be read now."""
    cause = error.__cause__
    blocked = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError | NotADirectoryError)
    return error.kind == "missing image" and blocked


def _chunks(entries: Iterator[Entry]) -> Iterator[list[Entry]]:
    while chunk := list(islice(entries, TOGETHER)):
        yield chunk
