"""What is indexed: all pictures of a folder, described or not, or the records of any other data."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hnclip.config import ReadConfig
from hnclip.data.benchmarks import BENCHMARKS
from hnclip.data.pictures import FileImage, TarImage, is_image_name
from hnclip.data.readers.cells import bad_text
from hnclip.data.readers.folder import has_captioned_pictures
from hnclip.data.readers.locate import files_below
from hnclip.data.readers.paths import is_data_name
from hnclip.data.records import DataSet, ImageSource, Problem, Record
from hnclip.data.sources import SCENES, open_data
from hnclip.search.index.places import file_place, place_of


@dataclass(frozen=True)
class Entry:
    """A picture to be indexed: what it is called, where it is, and what is said of it."""

    name: str
    image: ImageSource
    place: str
    captions: tuple[str, ...]

    def stamp(self) -> str:
        """What changes when the picture may have changed; BadPicture if there is none."""
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
        problems: of rows and captions that could not be read.
    """

    data: str
    root: Path | None
    files: Sequence[str]
    captions: Mapping[str, tuple[str, ...]]
    records: Sequence[Record]
    problems: tuple[Problem, ...]

    def __len__(self) -> int:
        return len(self.files) + len(self.records)

    def entry(self, number: int) -> Entry:
        if number < len(self.files):
            assert self.root is not None
            name = self.files[number]
            return Entry(name, FileImage(self.root / name), file_place(name), self.captions.get(name, ()))
        record = self.records[number - len(self.files)]
        return Entry(record.id, record.image, place_of(record.image, self.root), record.captions)


def open_index_source(source: str, read: ReadConfig, *, split: str, report: Callable[[str], None]) -> IndexSource:
    """All pictures of a directory, with captions where `open_data` finds some of the same files; of other data the
    records of a split.

    Args:
        report: told why the captions of a folder cannot be read; its pictures are indexed without them.

    Raises:
        ValueError: there is not one picture.
    """
    path = _path(source)
    if path is None or not path.is_dir():
        data = open_data(source, read, splits={split})
        records = data.part(split, validation_share=read.validation_share)
        if not records:
            raise ValueError(f"there are no pictures in {source}")
        return IndexSource(str(path or source), path and path.parent, (), {}, records, data.problems)
    files = list(files_below(path))
    pictures = [file for file in files if is_image_name(file)]
    described = has_captioned_pictures(files) or any(map(is_data_name, files))
    if not pictures and not described:
        raise ValueError(f"there are no pictures in {source}")
    data = DataSet(source, ())
    if described or split != "all":
        try:
            data = open_data(source, read)
        except ValueError as error:
            if not pictures or split != "all":
                raise
            why = str(error).partition("\n")[0].rstrip(":")
            report(f"the pictures are indexed without captions: {why}")
    records = data.part(split, validation_share=read.validation_share)
    return _folder(path, pictures, data, records, only_described=split != "all")


def _path(source: str) -> Path | None:
    """The absolute path of a file or directory, unless the name means something else."""
    if source in SCENES or source.partition("=")[0] in BENCHMARKS:
        return None
    path = Path(os.path.abspath(Path(source).expanduser()))
    return path if path.exists() else None


def _folder(
    path: Path, pictures: Sequence[str], data: DataSet, records: Sequence[Record], *, only_described: bool
) -> IndexSource:
    """Pictures below a path with what the records say of them, and records whose pictures lie elsewhere."""
    files = {name for name in pictures if not bad_text(name)}
    captions: dict[str, tuple[str, ...]] = {}
    others: list[Record] = []
    for record in records:
        name = os.path.relpath(record.image.key, path) if isinstance(record.image, FileImage) else ""
        if name in files:
            captions[name] = (*captions.get(name, ()), *record.captions)
        else:
            others.append(record)
    problems = [problem for problem in data.problems if not _no_matter(problem, files)]
    for record in others:
        if record.id in files:
            problems.append(Problem("repeated id", record.id, f"the name of a picture in {path}, and an id elsewhere"))
    others = [record for record in others if record.id not in files]
    for name in pictures:
        if bad := bad_text(name):
            where = name.encode(errors="backslashreplace").decode()
            problems.append(Problem("bad text", where, f"the picture's name cannot be used: {bad}"))
    chosen = [name for name in pictures if name in (captions if only_described else files)]
    if not chosen and not others:
        raise ValueError(f"there are no pictures in {path} that could be indexed")
    return IndexSource(str(path), path, chosen, captions, others, tuple(problems))


def _no_matter(problem: Problem, files: Collection[str]) -> bool:
    """Whether it is none of a folder, of which pictures are indexed whether or not, and by which name, they are
    described."""
    return problem.kind in ("no caption", "no image") or (problem.kind == "repeated id" and problem.where in files)
