"""The published benchmarks: their files, the numbers of their records, and their readers (hnclip docs benchmarks)."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from hnclip.config import ReadConfig
from hnclip.data.readers import benchmark_rows
from hnclip.data.readers.benchmark_rows import COLUMNS, SplitReader, find_below
from hnclip.data.readers.collect import RecordCollector, SourceTable
from hnclip.data.readers.rows import read_rows
from hnclip.data.records import DataSet

_SHOWN = 3  # problems that a message shows

# The path of a file or directory in the benchmark's folder, as published, followed by other names that it goes by.
File = tuple[str, ...]


@dataclass(frozen=True)
class BenchmarkSplit:
    """How many records a split has, its reader, and the files that it reads.

    Another count is an error if it was `verified` in the published file, and a warning if it is the paper's or the data
    set's own statement.
    """

    count: int
    read: SplitReader
    files: tuple[File, ...]
    verified: bool = False


@dataclass(frozen=True)
class Benchmark:
    """A published set of images and captions with fixed splits."""

    name: str  # as `--data` spells it
    origin: str  # of its files
    splits: Mapping[str, BenchmarkSplit]
    folders: tuple[str, ...]  # names of its folder in $HNCLIP_DATA, the first that exists
    images: File = ()  # directory or tar of the images; the folder itself if there is none
    groups: File = ()  # groups of near-duplicates by record id, if there is one
    absent: Mapping[str, str] = field(default_factory=dict)  # splits that it never has, and what to use instead
    held_out: str | None = None  # how the ids of records begin that no training split has, if not all are such
    match: Literal["path", "name"] = "name"  # how its files name images, as `ReadConfig.match`

    @property
    def counts(self) -> dict[str, int]:
        """The number of records of each split."""
        return {name: split.count for name, split in self.splits.items()}


def open_benchmark(
    name: str,
    folder: Path | None,
    images: Path | None = None,
    *,
    splits: Collection[str] | None = None,
    counts: Mapping[str, int] | None = None,
) -> DataSet:
    """A benchmark's records.

    Args:
        folder: of its files; one in `$HNCLIP_DATA` when None.
        images: directory or .tar with the images, if they are not in the folder. The captions open without images.
        splits: read these, and require the files of these alone; a validation split that the benchmark lacks is held
            out of its training split. None reads every split whose files are there; the error of
            a split that was not read names the missing file.
        counts: other numbers of records than the published ones, for copies in miniature.

    Raises:
        ValueError: files are missing (all of them are named) or damaged, or a split does not have its verified number
            of records.
    """
    if name not in BENCHMARKS:
        raise ValueError(f"there is no benchmark {name!r}; known: {', '.join(BENCHMARKS)}")
    benchmark = BENCHMARKS[name]
    chosen = {*benchmark.splits} if splits is None else {*splits}
    if "validation" in chosen - benchmark.splits.keys():
        chosen.add("train")
    wanted = [split for split in benchmark.splits if split in chosen]
    if not wanted:
        why = "".join(f"; {benchmark.absent[split]}" for split in sorted(chosen) if split in benchmark.absent)
        raise ValueError(f"{name} has no split {', '.join(sorted(chosen))}: it has {', '.join(benchmark.splits)}{why}")
    root = _root(benchmark, folder)
    place = images or find_below(root, benchmark.images) or root
    collector = RecordCollector(ReadConfig(images=str(place), match=benchmark.match, id_column="id"))
    missing: dict[str, str] = {}
    for split in wanted:
        paths = {file[0]: find_below(root, file) for file in benchmark.splits[split].files}
        if None in paths.values():
            missing[split] = " and ".join(file for file, path in paths.items() if path is None)
            continue
        rows = benchmark.splits[split].read(collector.log, *paths.values())
        collector.add_table(SourceTable(str(root), "", lambda columns: rows, COLUMNS), split)  # noqa: B023
    if missing and (splits is not None or len(missing) == len(wanted)):
        lines = "".join(f"\n  {split}: {files}" for split, files in missing.items())
        raise ValueError(f"{name} in {root} lacks files of {benchmark.origin} (hnclip docs benchmarks):{lines}")
    groups: dict[str, str] = {}
    if (file := find_below(root, benchmark.groups)) is not None:
        clusters = [(row.get("example_id"), row.get("cluster_id")) for _, row in read_rows(file, collector.log)]
        groups = {str(id): str(cluster) for id, cluster in clusters if cluster is not None}
    data = collector.finish(f"{name} in {root}")
    problems = tuple(dict.fromkeys(data.problems))  # a file may be read for several splits
    shown = "".join(f"; {item.kind}, {item.where}: {item.detail}" for item in problems[:_SHOWN])
    for split in wanted:
        found, expected = data.splits().get(split, 0), (counts or benchmark.counts)[split]
        if split not in missing and found != expected:
            detail = f"split {split} in {root} has {found:,} records, not the {expected:,} of the"
            detail += f" published file or paper; unusable rows: {len(problems):,}{shown}"
            if benchmark.splits[split].verified:
                raise ValueError(f"{name}: {detail}")
            collector.log.warn("other count", name, detail)
    unread = {split: f"it was not read, only {', '.join(wanted)}" for split in benchmark.splits if split not in wanted}
    return DataSet(
        name=name,
        records=tuple(replace(record, group=groups.get(record.id)) for record in data.records),
        problems=problems,
        exact=True,
        absent={**benchmark.absent, **unread, **{split: f"{root} lacks {files}" for split, files in missing.items()}},
        # The directories of published lists are those of another machine.
        warnings=tuple(warning for warning in collector.log.warnings if warning.kind != "matched by name"),
    )


def held_out(name: str, data: DataSet) -> frozenset[str] | None:
    """Ids of the records that no training split of the benchmark's own source contains, where the test split mixes
    both: the 1,999 of Long-DCI's 7,444. None for anything else: there every test record is held out."""
    benchmark = BENCHMARKS.get(name)
    if benchmark is None or benchmark.held_out is None:
        return None
    return frozenset(record.id for record in data.records if record.id.startswith(benchmark.held_out))


def _root(benchmark: Benchmark, folder: Path | None) -> Path:
    base = os.environ.get("HNCLIP_DATA")
    if folder is None and not base:
        raise ValueError(f"where is {benchmark.name}? Name its folder, {benchmark.name}=FOLDER, or set HNCLIP_DATA")
    places = [folder] if folder else [Path(base or "").expanduser() / name for name in benchmark.folders]
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        raise ValueError(f"{benchmark.name}: {' or '.join(map(str, places))} is not a directory")
    return found


_GOAL = "github.com/PerceptualAI-Lab/GOAL, folder datasets"
_SEGMENTS = "_segment_sim_bbox_del_org.json"  # GOAL's training lists with regions; others are of whole images only
_DCI_TRAIN = (f"DCI{_SEGMENTS}", "DCI_train_del_org.json", "dci_train.json")
_DCI_TEST = ("DCI_test.json", "dci_test.json")
_URBAN_LISTS = ("urban_dataset_test.json", "urban1k_test.json", "urban1k.json", "Urban1k.json")


def _list(count: int, *file: str, parts: tuple[str, ...] = (), verified: bool = False) -> BenchmarkSplit:
    return BenchmarkSplit(count, partial(benchmark_rows.list_rows, parts=parts), (file,), verified)


def _docci(count: int, *parts: str, verified: bool = False) -> BenchmarkSplit:
    return _list(count, "docci_descriptions.jsonlines", parts=parts, verified=verified)


def _vg(count: int, split: str) -> BenchmarkSplit:
    return BenchmarkSplit(count, benchmark_rows.vg_rows, (("paragraphs_v1.json",), (f"{split}_split.json",)))


def _sharegpt4v(count: int, start: int, stop: int | None) -> BenchmarkSplit:
    read = partial(benchmark_rows.sharegpt4v_rows, start=start, stop=stop)
    return BenchmarkSplit(count, read, (("share-captioner_coco_lcs_sam_1246k_1107.json",),))


_DOCCI = Benchmark(
    "docci",
    f"https://google.github.io/docci and {_GOAL}",
    {
        "train": _list(9_450, f"docci{_SEGMENTS}", "docci_train_del_org.json", "docci_train.json"),
        "validation": _docci(100, "qual_dev"),
        "test": _list(
            *(5_100, "docci_descriptions.jsonlines", "docci_test.json"), parts=("test", "qual_test"), verified=True
        ),
    },
    folders=("docci",),
    images=("images", "docci_images", "docci_images.tar", "images.tar"),
    groups=("docci_metadata.jsonlines",),
)
_DOCCI_OFFICIAL = {
    "train": _docci(9_647, "train"),
    "validation": _docci(100, "qual_dev"),
    "test": _docci(5_000, "test", verified=True),
    "qual_test": _docci(100, "qual_test", verified=True),
}
_DCI = Benchmark(
    "dci",
    _GOAL,
    {"train": _list(5_445, *_DCI_TRAIN), "test": _list(1_999, *_DCI_TEST, verified=True)},
    folders=("dci",),
    images=("photos", "images", "sa_000138", "sa_000138.tar"),
)
_LONG_DCI = Benchmark(
    "long-dci",
    _GOAL,
    {"test": BenchmarkSplit(7_444, benchmark_rows.long_dci_rows, (_DCI_TRAIN, _DCI_TEST))},
    folders=("long-dci", "dci"),
    images=_DCI.images,
    absent={"train": "Long-DCI is for tests only, the paper trains on dci"},
    held_out="test/",
)
_URBAN_1K = Benchmark(
    "urban-1k",
    f"https://huggingface.co/datasets/BeichenZhang/Urban1k or {_GOAL}",
    {"test": _list(1_000, "caption", "captions", *_URBAN_LISTS, verified=True)},
    folders=("urban-1k", "Urban1k"),
    images=("image", "images"),
    absent={"train": "Urban-1K is for tests only, the paper trains on vg-paragraphs"},
)
_VG_PARAGRAPHS = Benchmark(
    "vg-paragraphs",
    "https://cs.stanford.edu/people/ranjaykrishna/im2p/index.html",
    {"train": _vg(14_575, "train"), "validation": _vg(2_487, "val"), "test": _vg(2_489, "test")},
    folders=("vg-paragraphs",),
)
_IIW = Benchmark(
    "iiw",
    "https://github.com/google/imageinwords, folder datasets",
    {
        "test": _list(400, "IIW-400/data.jsonl", "iiw-400/data.jsonl", verified=True),
        "dci_test": _list(112, "DCI_Test/data.jsonl", "DCI_TEST/data.jsonl"),
        "docci_test": _list(100, "DOCCI_Test/data.jsonl", "DOCCI_TEST/data.jsonl"),
    },
    folders=("iiw",),
    absent={"train": "IIW publishes no training captions by people"},
)
_SHAREGPT4V = Benchmark(
    "sharegpt4v",
    "https://huggingface.co/datasets/Lin-Chen/ShareGPT4V",
    # The first thousand rows are for validation, as in Long-CLIP.
    {"train": _sharegpt4v(1_245_901, 1_000, None), "validation": _sharegpt4v(1_000, 0, 1_000)},
    folders=("sharegpt4v", "ShareGPT4V"),
    images=("data",),
    match="path",
)
_OFFICIAL = replace(_DOCCI, name="docci/official", splits=_DOCCI_OFFICIAL)
BENCHMARKS: Mapping[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (_DOCCI, _OFFICIAL, _DCI, _LONG_DCI, _URBAN_1K, _VG_PARAGRAPHS, _IIW, _SHAREGPT4V)
}
