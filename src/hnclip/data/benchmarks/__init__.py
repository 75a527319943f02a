"""Named benchmarks in the folders that their authors publish, with counts that are checked (docs/benchmarks.md)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from hnclip.data.benchmarks import dci, docci, iiw, sharegpt4v, urban_1k, vg_paragraphs
from hnclip.data.benchmarks.benchmark import Benchmark as Benchmark
from hnclip.data.benchmarks.opening import read_benchmark
from hnclip.data.records import DataSet

BENCHMARKS: Mapping[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        docci.PAPER,
        docci.OFFICIAL,
        dci.PAPER,
        dci.OFFICIAL,
        dci.LONG,
        urban_1k.BENCHMARK,
        vg_paragraphs.BENCHMARK,
        iiw.BENCHMARK,
        sharegpt4v.BENCHMARK,
    )
}


def open_benchmark(
    name: str,
    folder: Path | None,
    images: Path | None = None,
    *,
    splits: Collection[str] | None = None,
    counts: Mapping[str, int] | None = None,
) -> DataSet:
    """A benchmark's records, as many in each split as it must have.

    Args:
        name: one of `BENCHMARKS`.
        folder: where its files lie; `$HNCLIP_DATA/<name before the slash>` when None.
        images: directory or .tar with the pictures, if they are not in the folder. Pictures that are not there do not
            keep the captions from being read.
        splits: read these, and require the files of these alone. None reads every split whose files are there; asking
            the data set for another one says which file is missing.
        counts: other numbers of records than the published ones, for copies in miniature.

    Raises:
        ValueError: files are missing (all of them are named, with where they come from) or damaged, or a split does
            not have the number of records that it must have.
    """
    if name not in BENCHMARKS:
        raise ValueError(f"no benchmark is called {name!r}; known: {', '.join(BENCHMARKS)}")
    return read_benchmark(BENCHMARKS[name], folder, images, splits, counts)


def held_out(name: str, data: DataSet) -> frozenset[str] | None:
    """Ids of the records that no training split of the benchmark's own source contains, where the test split mixes
    both: the 1,999 of Long-DCI's 7,444. None for anything else: there every test record is held out."""
    benchmark = BENCHMARKS.get(name)
    if benchmark is None or benchmark.held_out is None:
        return None
    return frozenset(record.id for record in data.records if record.id.startswith(benchmark.held_out))
