"""A benchmark's folder into a data set whose counts are those of the benchmark, or an error that says what is wrong."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hnclip.core import Problem, Record
from hnclip.data.benchmarks.benchmark import Benchmark, Split, Way
from hnclip.data.benchmarks.folder import Folder, find_below
from hnclip.data.readers.locate import Pictures
from hnclip.data.readers.segments import without_pictures
from hnclip.data.records import DataSet

SHOWN = 3  # ids or problems that a message names


def read_benchmark(
    benchmark: Benchmark,
    folder: Path | None,
    images: Path | None,
    splits: Collection[str] | None,
    counts: Mapping[str, int] | None,
) -> DataSet:
    """See `open_benchmark`."""
    for name in [*(splits or ()), *(counts or ())]:
        if name not in benchmark.splits:
            raise ValueError(f"{benchmark.name} has no split {name!r}; it has {', '.join(benchmark.splits)}")
    root = _root(benchmark, folder)
    place = Folder(root, _pictures(benchmark, root, images))
    wanted = [name for name in benchmark.splits if splits is None or name in splits]
    ways = {name: way for name in wanted if (way := _way(place, benchmark.splits[name]))}
    missing = {name: _missing(place, benchmark.splits[name]) for name in wanted if name not in ways}
    if missing and (splits is not None or not ways):
        raise ValueError(f"{benchmark.name} in {root} lacks files (docs/benchmarks.md):\n{_by_files(missing)}")

    expected = {**benchmark.counts, **(counts or {})}
    records: dict[str, Record] = {}
    problems: list[Problem] = list(place.pictures.problems)
    for name, way in ways.items():
        found, faults = _read(place, way, name)
        if len(found) != expected[name]:
            numbered = benchmark.splits[name].numbered
            files = ", ".join(str(place.path(file)) for file in way.files)
            raise ValueError(
                f"{benchmark.name}: split {name} must have {expected[name]:,} records, but {files} gives "
                f"{len(found):,}{_difference([record.id for record in found], expected[name], faults, numbered)}"
            )
        for record in found:
            if record.id in records:
                raise ValueError(
                    f"{benchmark.name}: {record.id} is in both {records[record.id].split} and {name}: "
                    "one of the files is not the published one"
                )
            records[record.id] = record
        problems += faults
    unread = {name: f"it was not read, only {', '.join(wanted)}" for name in benchmark.splits if name not in wanted}
    return DataSet(
        name=benchmark.name,
        records=tuple(without_pictures(_grouped(benchmark, place, records))),
        problems=tuple(dict.fromkeys(problems)),
        exact=True,
        absent={
            **benchmark.absent,
            **unread,
            **{name: f"{root} lacks {files}" for name, files in missing.items()},
        },
    )


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
    for name in benchmark.folders:
        root = Path(base).expanduser() / name
        if root.is_dir():
            return root
    raise ValueError(
        f"{benchmark.name}: HNCLIP_DATA is {base}, which holds no {names}; name the folder, {benchmark.name}=FOLDER"
    )


def _pictures(benchmark: Benchmark, root: Path, images: Path | None) -> Pictures:
    # Captions without pictures are worth opening: what is missing is told when somebody looks at it.
    return Pictures(images or find_below(root, benchmark.images) or root)


def _way(folder: Folder, split: Split) -> Way | None:
    return next((way for way in split.ways if all(folder.find(file) for file in way.files)), None)


def _missing(folder: Folder, split: Split) -> str:
    """The files that are not there, of each way to the split."""
    return "; or ".join(" and ".join(str(file) for file in way.files if not folder.find(file)) for way in split.ways)


def _by_files(missing: Mapping[str, str]) -> str:
    """A line for each set of missing files, with all splits that need it."""
    splits: dict[str, list[str]] = {}
    for name, files in missing.items():
        splits.setdefault(files, []).append(name)
    return "\n".join(f"  {', '.join(names)}: {files}" for files, names in splits.items())


def _read(folder: Folder, way: Way, split: str) -> tuple[list[Record], list[Problem]]:
    """The records of a split by their first row, and the problems of all other rows."""
    records: dict[str, Record] = {}
    problems: list[Problem] = []
    for item in way.read(folder, split):
        if isinstance(item, Problem):
            problems.append(item)
        elif item.id in records:
            problems.append(Problem("repeated id", item.id, f"comes twice in split {split}"))
        else:
            records[item.id] = item
    return list(records.values()), problems


def _difference(ids: Sequence[str], expected: int, problems: Sequence[Problem], numbered: bool) -> str:
    """What can be told about records that are too few or too many."""
    told = ""
    if problems:
        told += f"\n  unusable rows, {len(problems):,}: "
        told += "; ".join(f"{item.kind}, {item.where}: {item.detail}" for item in problems[:SHOWN])
    if numbered and (gaps := _gaps(ids)):
        told += f"\n  missing: {_first(gaps)}"
    if len(ids) > expected:
        told += f"\n  beyond that number: {_first(ids[expected:])}"
    return told or "; is the file complete, and the published one?"


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else "")


def _gaps(ids: Iterable[str]) -> list[str]:
    """The ids that running numbers pass over: `test_00001` between `test_00000` and `test_00002`."""
    runs: dict[str, dict[int, int]] = {}  # number and its digits by what comes before
    for name in ids:
        if match := re.fullmatch(r"(.*?)(\d+)", name):
            runs.setdefault(match[1], {})[int(match[2])] = len(match[2])
    return [
        f"{start}{number:0{min(numbers.values())}}"
        for start, numbers in runs.items()
        for number in range(min(numbers), max(numbers))
        if number not in numbers
    ]


def _grouped(benchmark: Benchmark, folder: Folder, records: Mapping[str, Record]) -> Iterable[Record]:
    groups = benchmark.groups(folder) if benchmark.groups else {}
    return (replace(record, group=groups[name]) if name in groups else record for name, record in records.items())
