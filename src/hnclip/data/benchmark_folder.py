"""What a published benchmark is, and how its folder is read: files, counts, images, rows."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hnclip.core import ImageSource, Record
from hnclip.data.readers.columns import Row, RowError, invalid_text
from hnclip.data.readers.locate import ImageFinder
from hnclip.data.readers.rows import read_rows
from hnclip.data.records import DataSet, ReadLog

SHOWN = 3  # problems that a message shows


@dataclass(frozen=True)
class BenchmarkFile:
    """A file, or directory of files, that a benchmark is read from: its published path in the folder, what it holds,
    where it comes from, and other names that it goes by."""

    name: str
    what: str
    origin: str
    also: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} ({self.what}), from {self.origin}"


@dataclass(frozen=True)
class BenchmarkFolder:
    """A benchmark's folder, its images, and what its readers have to report."""

    root: Path
    images: ImageFinder
    log: ReadLog

    def find(self, file: BenchmarkFile) -> Path | None:
        """The file under any of its names, in the folder or one level below it; None if there is none."""
        return _find_below(self.root, (file.name, *file.also))

    def path(self, file: BenchmarkFile) -> Path:
        found = self.find(file)
        if found is None:
            raise ValueError(f"{self.root} lacks {file}")
        return found

    def image(self, written: str) -> ImageSource:
        """The image that a published list names. Its directories are those of its author's machine: the base name
        decides, and where several images have it, the longest common ending."""
        base = base_name(written)
        try:
            return self.images.find(base) or self.images.find_by_name(written) or self.images.at(base)
        except ValueError as error:
            raise RowError("missing image", str(error)) from error

    def records(self, file: BenchmarkFile, make: Callable[[Row], Record | None]) -> Iterator[Record]:
        """The records of a table; rows that `make` raises RowError for become problems, None is skipped."""
        path = self.path(file)
        return self.collect(((f"{path}:{place}", row) for place, row in read_rows(path, self.log)), make)

    def collect(self, rows: Iterable[tuple[str, Any]], make: Callable[[Any], Record | None]) -> Iterator[Record]:
        for where, row in rows:
            try:
                record = make(row)
            except RowError as error:
                self.log.problem(error.kind, where, str(error))
            else:
                if record is not None:
                    yield record


# Reads one split of a benchmark: folder and name of the split.
SplitReader = Callable[[BenchmarkFolder, str], Iterable[Record]]


@dataclass(frozen=True)
class BenchmarkSplit:
    """How many records a split has, and the files and readers that give it, the best first.

    Another count is an error if it was `verified` in the published file, and a warning if it is the paper's or the data
    set's own statement.
    """

    count: int
    readers: tuple[tuple[tuple[BenchmarkFile, ...], SplitReader], ...]
    verified: bool = False


@dataclass(frozen=True)
class Benchmark:
    """A published set of images and captions with fixed splits.

    Args:
        name, title: as `--data` and as tables spell it.
        licence: of the captions, and of the images where it differs.
        page: the data set's own page.
        splits: by name, in the order of their records.
        images: names that the directory or tar of the images may have in the folder; the folder itself if none exists.
        folders: names of its folder in $HNCLIP_DATA, the first that exists.
        optional: files that add something but are not needed.
        groups: reads groups of near-duplicates from an optional file, by record id.
        absent: splits that it never has, and what to use instead.
        held_out: how the ids of those records begin that no training split of the same source contains, where not all
            records are such.
    """

    name: str
    title: str
    licence: str
    page: str
    splits: Mapping[str, BenchmarkSplit]
    images: tuple[str, ...]
    folders: tuple[str, ...]
    optional: tuple[BenchmarkFile, ...] = ()
    groups: Callable[[BenchmarkFolder], Mapping[str, str]] | None = None
    absent: Mapping[str, str] = field(default_factory=dict)
    held_out: str | None = None

    @property
    def files(self) -> tuple[BenchmarkFile, ...]:
        """Every file that any split can be read from, once, and the optional ones."""
        needed = [file for split in self.splits.values() for files, _ in split.readers for file in files]
        return tuple(dict.fromkeys([*needed, *self.optional]))

    @property
    def counts(self) -> dict[str, int]:
        """The number of records of each split."""
        return {name: split.count for name, split in self.splits.items()}


def read_benchmark(
    benchmark: Benchmark,
    folder: Path | None,
    images: Path | None,
    splits: Collection[str] | None,
    counts: Mapping[str, int] | None,
) -> DataSet:
    """See `hnclip.data.benchmarks.open_benchmark`."""
    name = benchmark.name
    for split in [*(splits or ()), *(counts or ())]:
        if split not in benchmark.splits:
            raise ValueError(f"{name} has no split {split!r}; it has {', '.join(benchmark.splits)}")
    root = _root(benchmark, folder)
    place = BenchmarkFolder(root, ImageFinder(images or _find_below(root, benchmark.images) or root), ReadLog())
    place.log.problems += place.images.problems
    wanted = [split for split in benchmark.splits if splits is None or split in splits]
    readers = {split: _reader(place, benchmark.splits[split]) for split in wanted}
    missing = {split: _missing(place, benchmark.splits[split]) for split in wanted if readers[split] is None}
    if missing and (splits is not None or len(missing) == len(wanted)):
        needed = {files: [split for split in missing if missing[split] == files] for files in missing.values()}
        lines = "".join(f"\n  {', '.join(names)}: {files}" for files, names in needed.items())
        raise ValueError(f"{name} in {root} lacks files (docs/benchmarks.md):{lines}")

    records: dict[str, Record] = {}
    for split, reader in readers.items():
        if reader is None:
            continue
        expected = {**benchmark.counts, **(counts or {})}[split]
        for record in _read_split(benchmark, place, split, expected, *reader):
            if record.id in records:
                raise ValueError(
                    f"{name}: {record.id} is in both {records[record.id].split} and {split}: one of the files is not "
                    "the published one"
                )
            records[record.id] = record
    groups = benchmark.groups(place) if benchmark.groups else {}
    unread = {split: f"it was not read, only {', '.join(wanted)}" for split in benchmark.splits if split not in wanted}
    return DataSet(
        name=name,
        records=tuple(replace(item, group=groups[id]) if id in groups else item for id, item in records.items()),
        problems=tuple(dict.fromkeys(place.log.problems)),
        exact=True,
        absent={**benchmark.absent, **unread, **{split: f"{root} lacks {files}" for split, files in missing.items()}},
        warnings=tuple(dict.fromkeys(place.log.warnings)),
    )


def _read_split(
    benchmark: Benchmark,
    folder: BenchmarkFolder,
    split: str,
    expected: int,
    files: tuple[BenchmarkFile, ...],
    read: SplitReader,
) -> Iterable[Record]:
    """The records of a split, of each id the first."""
    before = len(folder.log.problems)
    records: dict[str, Record] = {}
    for record in read(folder, split):
        if record.id in records:
            folder.log.problem("repeated id", record.id, f"occurs again in split {split}")
        else:
            records[record.id] = record
    if len(records) != expected:
        problems = folder.log.problems[before:]
        names = ", ".join(str(folder.path(file)) for file in files)
        shown = "; ".join(f"{item.kind}, {item.where}: {item.detail}" for item in problems[:SHOWN])
        unusable = f"; unusable rows, {len(problems):,}: {shown}" if problems else ""
        detail = f"split {split} has {len(records):,} records, but {expected:,} {{}} ({names}){unusable}"
        if benchmark.splits[split].verified:
            raise ValueError(f"{benchmark.name}: {detail.format('are published')}; is the file complete?")
        folder.log.warn("other count", benchmark.name, detail.format("are stated in its paper"))
    return records.values()


def _root(benchmark: Benchmark, folder: Path | None) -> Path:
    if folder is not None:
        if not folder.is_dir():
            raise ValueError(f"{benchmark.name}: {folder} is not a directory")
        return folder
    base = os.environ.get("HNCLIP_DATA")
    names = " or ".join(benchmark.folders)
    if not base:
        raise ValueError(
            f"where is {benchmark.name}? Name its folder, {benchmark.name}=FOLDER, or set HNCLIP_DATA to the directory "
            f"that holds {names}"
        )
    roots = [root for name in benchmark.folders if (root := Path(base).expanduser() / name).is_dir()]
    if not roots:
        raise ValueError(
            f"{benchmark.name}: HNCLIP_DATA is {base}, which holds no {names}; name the folder, {benchmark.name}=FOLDER"
        )
    return roots[0]


def _find_below(root: Path, names: Iterable[str]) -> Path | None:
    """The first of these names that exists in the folder or one level below it."""
    folders = sorted(Path(entry.path) for entry in os.scandir(root) if entry.is_dir() and entry.name[0] != ".")
    for name in names:
        if (root / name).exists():
            return root / name
        below = [folder / name for folder in folders if (folder / name).exists()]
        if len(below) > 1:
            raise ValueError(f"{name} is in {root} more than once: {below[0]} and {below[1]}; keep one of them")
        if below:
            return below[0]
    return None


def _reader(folder: BenchmarkFolder, split: BenchmarkSplit) -> tuple[tuple[BenchmarkFile, ...], SplitReader] | None:
    return next((reader for reader in split.readers if all(folder.find(file) for file in reader[0])), None)


def _missing(folder: BenchmarkFolder, split: BenchmarkSplit) -> str:
    """The files that are missing, for each way to read the split."""
    return "; or ".join(
        " and ".join(str(file) for file in files if not folder.find(file)) for files, _ in split.readers
    )


def first_of(row: Row, keys: tuple[str, ...], kind: str) -> Any:
    for key in keys:
        if row.get(key) is not None:
            return row[key]
    raise RowError(kind, f"has no {' or '.join(keys)}")


def checked_caption(value: Any) -> str:
    if not isinstance(value, str):
        raise RowError("unreadable row", f"its caption is {type(value).__name__}, not text")
    if not value.strip():
        raise RowError("empty caption", "its caption has no text")
    if invalid := invalid_text(value):
        raise RowError("bad text", f"its caption cannot be used: {invalid}")
    return value.strip()


def image_name(row: Row, *keys: str) -> str:
    name = first_of(row, keys, "no image")
    if not isinstance(name, str) or not base_name(name) or "\0" in name or invalid_text(name):
        raise RowError("no image", f"names its image {name!r}")
    return name


def base_name(path: str) -> str:
    return re.split(r"[/\\]", path)[-1]


def stem_of(path: str) -> str:
    """The base name without its suffix, which benchmarks use as the image's name."""
    name = base_name(path)
    return name.rpartition(".")[0] or name
