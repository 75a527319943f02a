"""The published benchmarks: their files, the numbers of their records, and their readers (docs/benchmarks.md)."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hnclip.config import ReadConfig
from hnclip.data.readers.benchmark_rows import (
    COLUMNS,
    BenchmarkFile,
    SplitReader,
    find_below,
    goal_rows,
    list_rows,
    long_dci_rows,
    sharegpt4v_rows,
    vg_rows,
)
from hnclip.data.readers.collect import RecordCollector, SourceTable
from hnclip.data.readers.rows import read_rows
from hnclip.data.records import DataSet

_SHOWN = 3  # problems that a message shows


Reading = tuple[SplitReader, tuple[BenchmarkFile, ...]]


@dataclass(frozen=True)
class BenchmarkSplit:
    """How many records a split has, and the ways to read it, a reader and its files each, the best first.

    Another count is an error if it was `verified` in the published file, and a warning if it is the paper's or the data
    set's own statement.
    """

    count: int
    readings: tuple[Reading, ...]
    verified: bool = False


@dataclass(frozen=True)
class Benchmark:
    """A published set of images and captions with fixed splits.

    Args:
        name: as `--data` spells it.
        splits: by name, in the order of their records.
        folders: names of its folder in $HNCLIP_DATA, the first that exists.
        images: names that the directory or tar of the images may have in the folder; the folder itself if none exists.
        groups: optional file with groups of near-duplicates by record id.
        absent: splits that it never has, and what to use instead.
        held_out: how the ids of those records begin that no training split of the same source contains, where not all
            records are such.
        match: how its files name images, as `ReadConfig.match`.
    """

    name: str
    splits: Mapping[str, BenchmarkSplit]
    folders: tuple[str, ...]
    images: tuple[str, ...] = ()
    groups: BenchmarkFile | None = None
    absent: Mapping[str, str] = field(default_factory=dict)
    held_out: str | None = None
    match: Literal["path", "name"] = "name"

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
        name: one of `BENCHMARKS`.
        folder: of its files; `$HNCLIP_DATA/<name before the slash>` when None.
        images: directory or .tar with the images, if they are not in the folder. The captions open without images.
        splits: read these, and require the files of these alone; a validation split that the benchmark lacks is held
            out of its training split. None reads every split whose files are there; asking the data set for another one
            says which file is missing.
        counts: other numbers of records than the published ones, for copies in miniature.

    Raises:
        ValueError: files are missing (all of them are named, with where they come from) or damaged, or a split does
            not have its verified number of records.
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
    lacking = {split: _add_split(collector, root, split, benchmark.splits[split].readings) for split in wanted}
    missing = {split: files for split, files in lacking.items() if files}
    if missing and (splits is not None or len(missing) == len(wanted)):
        lines = "".join(f"\n  {split}: {files}" for split, files in missing.items())
        raise ValueError(f"{name} in {root} lacks files (docs/benchmarks.md):{lines}")
    groups: dict[str, str] = {}
    if benchmark.groups and (file := find_below(root, benchmark.groups.names)):
        rows = [row for _, row in read_rows(file, collector.log) if row.get("cluster_id") is not None]
        groups = {str(row.get("example_id")): str(row["cluster_id"]) for row in rows}
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


def _add_split(collector: RecordCollector, root: Path, split: str, readings: Sequence[Reading]) -> str:
    """Add the rows of a split by the first reading whose files are there; without any, the files that are missing."""
    lacking = []
    for read, files in readings:
        paths = {file: find_below(root, file.names) for file in files}
        absent = [str(file) for file, path in paths.items() if path is None]
        if not absent:
            rows = iter(read(collector.log, *paths.values()))
            collector.add_table(SourceTable(str(root), "", COLUMNS, (), lambda columns: rows), split)
            return ""
        lacking.append(" and ".join(absent))
    return "; or ".join(lacking)


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
_DOCCI = "https://google.github.io/docci"
_URBAN = "https://huggingface.co/datasets/BeichenZhang/Urban1k"
_VG = "https://cs.stanford.edu/people/ranjaykrishna/im2p/index.html"
_IIW = "https://github.com/google/imageinwords, folder datasets"
_SHAREGPT4V = "https://huggingface.co/datasets/Lin-Chen/ShareGPT4V"
_SEGMENTS = "_segment_sim_bbox_del_org.json"  # GOAL's training lists with regions; others are of whole images only
DOCCI_CAPTIONS = BenchmarkFile(_DOCCI, ("docci_descriptions.jsonlines",))
DOCCI_CLUSTERS = BenchmarkFile(_DOCCI, ("docci_metadata.jsonlines",))
DOCCI_TRAIN = BenchmarkFile(_GOAL, (f"docci{_SEGMENTS}", "docci_train_del_org.json", "docci_train.json"))
DOCCI_TEST = BenchmarkFile(_GOAL, ("docci_test.json",))
DCI_TRAIN = BenchmarkFile(_GOAL, (f"DCI{_SEGMENTS}", "DCI_train_del_org.json", "dci_train.json"))
DCI_TEST = BenchmarkFile(_GOAL, ("DCI_test.json", "dci_test.json"))
URBAN_CAPTIONS = BenchmarkFile(_URBAN, ("caption", "captions"))
URBAN_LIST = BenchmarkFile(_GOAL, ("urban_dataset_test.json", "urban1k_test.json", "urban1k.json", "Urban1k.json"))
VG_CAPTIONS = BenchmarkFile(_VG, ("paragraphs_v1.json",))
VG_TRAIN, VG_VAL, VG_TEST = (BenchmarkFile(_VG, (f"{name}_split.json",)) for name in ("train", "val", "test"))
IIW_400 = BenchmarkFile(_IIW, ("IIW-400/data.jsonl", "iiw-400/data.jsonl"))
IIW_DCI = BenchmarkFile(_IIW, ("DCI_Test/data.jsonl", "DCI_TEST/data.jsonl"))
IIW_DOCCI = BenchmarkFile(_IIW, ("DOCCI_Test/data.jsonl", "DOCCI_TEST/data.jsonl"))
SHAREGPT4V_CAPTIONS = BenchmarkFile(_SHAREGPT4V, ("share-captioner_coco_lcs_sam_1246k_1107.json",))


def _split(count: int, *readings: tuple[Any, ...], verified: bool = False) -> BenchmarkSplit:
    return BenchmarkSplit(count, tuple((read, tuple(files)) for read, *files in readings), verified)


def _docci(*parts: str) -> tuple[SplitReader, BenchmarkFile]:
    return list_rows(("image_file",), ("description",), parts), DOCCI_CAPTIONS


_IMAGES_IN_WORDS = list_rows(("image/key", "image"), ("IIW",))
DOCCI = Benchmark(
    "docci",
    {
        "train": _split(9_450, (goal_rows, DOCCI_TRAIN)),
        "validation": _split(100, _docci("qual_dev")),
        "test": _split(5_100, _docci("test", "qual_test"), (goal_rows, DOCCI_TEST), verified=True),
    },
    folders=("docci",),
    images=("images", "docci_images", "docci_images.tar", "images.tar"),
    groups=DOCCI_CLUSTERS,
)
DOCCI_OFFICIAL = {
    "train": _split(9_647, _docci("train")),
    "validation": _split(100, _docci("qual_dev")),
    "test": _split(5_000, _docci("test"), verified=True),
    "qual_test": _split(100, _docci("qual_test"), verified=True),
}
DCI = Benchmark(
    "dci",
    {"train": _split(5_445, (goal_rows, DCI_TRAIN)), "test": _split(1_999, (goal_rows, DCI_TEST), verified=True)},
    folders=("dci",),
    images=("photos", "images", "sa_000138", "sa_000138.tar"),
)
LONG_DCI = Benchmark(
    "long-dci",
    {"test": _split(7_444, (long_dci_rows, DCI_TRAIN, DCI_TEST))},
    folders=("long-dci", "dci"),
    images=DCI.images,
    absent={"train": "Long-DCI is for tests only, the paper trains on dci"},
    held_out="test/",
)
URBAN_1K = Benchmark(
    "urban-1k",
    {"test": _split(1_000, (goal_rows, URBAN_CAPTIONS), (goal_rows, URBAN_LIST), verified=True)},
    folders=("urban-1k", "Urban1k"),
    images=("image", "images"),
    absent={"train": "Urban-1K is for tests only, the paper trains on vg-paragraphs"},
)
VG_PARAGRAPHS = Benchmark(
    "vg-paragraphs",
    {
        "train": _split(14_575, (vg_rows, VG_CAPTIONS, VG_TRAIN)),
        "validation": _split(2_487, (vg_rows, VG_CAPTIONS, VG_VAL)),
        "test": _split(2_489, (vg_rows, VG_CAPTIONS, VG_TEST)),
    },
    folders=("vg-paragraphs",),
)
IIW = Benchmark(
    "iiw",
    {
        "test": _split(400, (_IMAGES_IN_WORDS, IIW_400), verified=True),
        "dci_test": _split(112, (_IMAGES_IN_WORDS, IIW_DCI)),
        "docci_test": _split(100, (_IMAGES_IN_WORDS, IIW_DOCCI)),
    },
    folders=("iiw",),
    absent={"train": "IIW publishes no training captions by people"},
)
SHAREGPT4V = Benchmark(
    "sharegpt4v",
    {  # the first thousand rows are for validation, as in Long-CLIP
        "train": _split(1_245_901, (sharegpt4v_rows(1_000, None), SHAREGPT4V_CAPTIONS)),
        "validation": _split(1_000, (sharegpt4v_rows(0, 1_000), SHAREGPT4V_CAPTIONS)),
    },
    folders=("sharegpt4v", "ShareGPT4V"),
    images=("data",),
    match="path",
)
BENCHMARKS: Mapping[str, Benchmark] = {
    "docci": DOCCI,
    "docci/official": replace(DOCCI, name="docci/official", splits=DOCCI_OFFICIAL),
    "dci": DCI,
    "long-dci": LONG_DCI,
    "urban-1k": URBAN_1K,
    "vg-paragraphs": VG_PARAGRAPHS,
    "iiw": IIW,
    "sharegpt4v": SHAREGPT4V,
}
