"""What is indexed: all pictures of a folder, described or not, or the records of any other data."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hnclip.config import ReadConfig
from hnclip.core import ImageSource, Problem, Record
from hnclip.data.benchmarks import BENCHMARKS
from hnclip.data.image_sources import FileImage, TarImage, is_image_name
from hnclip.data.readers.columns import invalid_text
from hnclip.data.readers.folders import count_captioned
from hnclip.data.readers.locate import files_below
from hnclip.data.records import DataSet
from hnclip.data.sources import SCENES, is_data_name, open_data
from hnclip.search.index.layout import HEADER, read_header
from hnclip.search.index.places import file_place, place_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """A picture to be indexed: what it is called, where it is, and what is said of it."""

    name: str
    image: ImageSource
    place: str
    captions: tuple[str, ...]

    def stamp(self) -> str:
        """What changes when the picture may have changed; InvalidImage if there is none."""
        if isinstance(self.image, FileImage | TarImage):
            return self.image.stamp()  # its path is the place's matter: the folder may move
        return f"{self.image.key} {self.image.stamp()}"


@dataclass(frozen=True)
class IndexSource:
    """Entries by number, each made when it is asked for: a folder may hold millions.

    Args:
        data: what was given, of files and folders the absolute path.
        root: directory that places are relative to.
        files: pictures below the root, named by their paths.
        captions: of these files, as far as they have any.
        records: further pictures, named by their ids.
        problems: of rows, captions and folders that could not be read.
        unread: files whose captions are there but cannot be read now: those that the index has stay.
        hidden: folders below the root that cannot be listed now: what the index has of them stays.
    """

    data: str
    root: Path | None
    files: Sequence[str]
    captions: Mapping[str, tuple[str, ...]]
    records: Sequence[Record]
    problems: tuple[Problem, ...]
    unread: frozenset[str] = frozenset()
    hidden: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.files) + len(self.records)

    def entry(self, number: int) -> Entry:
        if number < len(self.files):
            assert self.root is not None
            name = self.files[number]
            return Entry(name, FileImage(self.root / name), file_place(name), self.captions.get(name, ()))
        record = self.records[number - len(self.files)]
        return Entry(record.id, record.image, place_of(record.image, self.root), record.captions)


def open_index_source(source: str, read: ReadConfig, *, split: str) -> IndexSource:
    """All images of a directory, with captions where `open_data` finds some of the same files; of other data the
    records of a split. If the captions of a directory cannot be read, its images are indexed without them.

    Raises:
        ValueError: there is not one picture.
    """
    path = data_path(source)
    if path is None or not path.is_dir():
        data = open_data(source, read, splits={split})
        records = data.part(split, validation_share=read.validation_share)
        if not records:
            raise ValueError(f"there are no pictures in {source}")
        return IndexSource(str(path or source), path and path.parent, (), {}, records, data.problems)
    files, hidden = _listed(path)
    pictures = [file for file in files if is_image_name(file)]
    described = count_captioned(files)[1] > 0 or any(map(is_data_name, files))
    if not pictures and not described:
        raise ValueError(f"there are no pictures in {source}")
    data, problems = DataSet(source, ()), list(hidden.values())
    if described or split != "all":
        try:
            data = open_data(source, read)
        except ValueError as error:
            if not pictures or split != "all":
                raise
            problems.append(Problem("unreadable row", str(path), f"there are no captions: {error}"))
            why = str(error).partition("\n")[0].rstrip(":")
            log.warning(f"the images are indexed without captions: {why}")
    records = data.part(split, validation_share=read.validation_share)
    found = _folder(path, files, replace(data, problems=(*data.problems, *problems)), records, tuple(hidden))
    chosen = found.files if split == "all" else [name for name in found.files if name in found.captions]
    if not chosen and not found.records:
        raise ValueError(f"there are no pictures in {path} that could be indexed")
    return replace(found, files=chosen)


def data_path(source: str) -> Path | None:
    """The absolute path of a file or directory, unless the name means something else."""
    if source in SCENES or source.partition("=")[0] in BENCHMARKS:
        return None
    path = Path(os.path.abspath(Path(source).expanduser()))
    return path if path.exists() else None


def _listed(path: Path) -> tuple[list[str], dict[str, Problem]]:
    """Files below a path, without those of indexes that lie there, and what is wrong with folders that cannot be
    listed, by their names."""
    errors: list[OSError] = []
    files = list(files_below(path, errors.append))
    headers = [file for file in files if file.endswith(f"/{HEADER}")]
    indexes = [folder for file in headers if _is_index(path / (folder := os.path.dirname(file)))]
    files = [file for file in files if not lies_in(file, indexes)]
    hidden: dict[str, Problem] = {}
    for error in errors:
        if isinstance(error, FileNotFoundError | NotADirectoryError):  # it went just now
            continue
        folder = os.path.relpath(error.filename, path)
        if folder == ".":
            raise ValueError(f"{path} cannot be listed: {error.strerror or error}")
        name = folder.encode(errors="backslashreplace").decode()
        hidden[folder] = Problem("missing image", name, f"{name} cannot be listed: {error.strerror or error}")
    return files, hidden


def _folder(
    path: Path, listed: Sequence[str], data: DataSet, records: Sequence[Record], hidden: tuple[str, ...]
) -> IndexSource:
    """Pictures below a path with what the records say of them, and records whose pictures lie elsewhere."""
    pictures = [file for file in listed if is_image_name(file)]
    texts = {os.path.splitext(file)[0]: file for file in listed if file.lower().endswith(".txt")}
    files = {name for name in pictures if not invalid_text(name)}
    captions: dict[str, tuple[str, ...]] = {}
    others: list[Record] = []
    for record in records:
        name = os.path.relpath(record.image.key, path) if isinstance(record.image, FileImage) else ""
        if name in files:
            captions[name] = (*captions.get(name, ()), *record.captions)
        elif not lies_in(name, hidden):
            others.append(record)
    problems = [problem for problem in data.problems if not _no_matter(problem, files, texts)]
    for record in others:
        if record.id in files:
            problems.append(Problem("repeated id", record.id, f"the name of a picture in {path}, and an id elsewhere"))
    others = [record for record in others if record.id not in files]
    for name in pictures:
        if bad := invalid_text(name):
            where = name.encode(errors="backslashreplace").decode()
            problems.append(Problem("bad text", where, f"the picture's name cannot be used: {bad}"))
    beside = {name: texts[stem] for name in files - captions.keys() if (stem := os.path.splitext(name)[0]) in texts}
    unread = frozenset(name for name, text in beside.items() if _out_of_reach(path / text))
    chosen = [name for name in pictures if name in files]
    return IndexSource(str(path), path, chosen, captions, others, tuple(problems), unread, hidden)


def _is_index(folder: Path) -> bool:
    try:
        read_header(folder)
    except (ValueError, OSError):
        return False
    return True


def lies_in(name: str, folders: Sequence[str]) -> bool:
    """Whether a path below the root lies in one of these folders."""
    return any(name.startswith(f"{folder}/") for folder in folders)


def _out_of_reach(file: Path) -> bool:
    """Whether a file is there but cannot be read now."""
    try:
        with file.open("rb") as opened:
            opened.read(1)
    except OSError as error:
        return not isinstance(error, FileNotFoundError | NotADirectoryError)
    return False


def _no_matter(problem: Problem, files: Collection[str], texts: Collection[str]) -> bool:
    """Whether it is none of a folder, of which pictures are indexed whether or not, and by which name, they are
    described, and wherever they lie.

    Args:
        texts: paths of .txt files, without suffix.
    """
    if problem.kind == "unreadable row" and problem.where in files:
        return os.path.splitext(problem.where)[0] not in texts
    return problem.kind in ("no caption", "no image") or (problem.kind == "repeated id" and problem.where in files)
