"""The published benchmarks: their files, the numbers of their records, and their readers (docs/benchmarks.md)."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

from hnclip.core import Record
from hnclip.data.benchmark_folder import (
    Benchmark,
    BenchmarkFile,
    BenchmarkFolder,
    BenchmarkSplit,
    SplitReader,
    base_name,
    checked_caption,
    first_of,
    image_name,
    read_benchmark,
    stem_of,
)
from hnclip.data.readers.collect import goal_regions
from hnclip.data.readers.columns import GOAL_CAPTION, GOAL_IMAGE, GOAL_REGIONS, Row, RowError
from hnclip.data.readers.rows import decode_text, read_rows
from hnclip.data.records import DataSet, ReadLog


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
        splits: read these, and require the files of these alone. None reads every split whose files are there; asking
            the data set for another one says which file is missing.
        counts: other numbers of records than the published ones, for copies in miniature.

    Raises:
        ValueError: files are missing (all of them are named, with where they come from) or damaged, or a split does
            not have its verified number of records.
    """
    if name not in BENCHMARKS:
        raise ValueError(f"there is no benchmark {name!r}; known: {', '.join(BENCHMARKS)}")
    return read_benchmark(BENCHMARKS[name], folder, images, splits, counts)


def held_out(name: str, data: DataSet) -> frozenset[str] | None:
    """Ids of the records that no training split of the benchmark's own source contains, where the test split mixes
    both: the 1,999 of Long-DCI's 7,444. None for anything else: there every test record is held out."""
    benchmark = BENCHMARKS.get(name)
    if benchmark is None or benchmark.held_out is None:
        return None
    return frozenset(record.id for record in data.records if record.id.startswith(benchmark.held_out))


def _read_list(file: BenchmarkFile, folder: BenchmarkFolder, split: str) -> Iterator[Record]:
    """GOAL's lists, which others took over: `[{"filename", "caption"}]` for tests, and for training
    `[{"original_filename", "original_caption", "segment": […]}]`. `image` is another spelling of `filename`."""

    def make(row: Row) -> Record:
        written = image_name(row, GOAL_IMAGE, "filename", "image")
        caption = checked_caption(first_of(row, (GOAL_CAPTION, "caption"), "no caption"))
        return Record(
            stem_of(written), folder.image(written), (caption,), split, regions=goal_regions(row.get(GOAL_REGIONS))
        )

    return folder.records(file, make)


def _list_reader(file: BenchmarkFile) -> tuple[tuple[BenchmarkFile, ...], SplitReader]:
    return (file,), partial(_read_list, file)


GOAL_PAGE = "github.com/PerceptualAI-Lab/GOAL, folder datasets"
DOCCI_PAGE = "https://google.github.io/docci"
DOCCI_CAPTIONS = BenchmarkFile("docci_descriptions.jsonlines", "all captions", DOCCI_PAGE)
DOCCI_METADATA = BenchmarkFile("docci_metadata.jsonlines", "optional: groups of related images", DOCCI_PAGE)
# The list with regions, or the one of whole images only.
DOCCI_TRAIN = BenchmarkFile(
    "docci_segment_sim_bbox_del_org.json",
    "GOAL's training list",
    GOAL_PAGE,
    ("docci_train_del_org.json", "docci_train.json"),
)
DOCCI_TEST = BenchmarkFile("docci_test.json", "GOAL's test list", GOAL_PAGE)


def _read_docci(parts: Collection[str], folder: BenchmarkFolder, split: str) -> Iterator[Record]:
    """These of DOCCI's own parts as one split."""

    def make(row: Row) -> Record | None:
        if not isinstance(row.get("split"), str):
            raise RowError("unreadable row", "has no split")
        if row["split"] not in parts:
            return None
        name = image_name(row, "image_file")
        caption = checked_caption(first_of(row, ("description",), "no caption"))
        return Record(stem_of(name), folder.image(name), (caption,), split)

    return folder.records(DOCCI_CAPTIONS, make)


def _read_docci_test(folder: BenchmarkFolder, split: str) -> Iterable[Record]:
    """The paper's test split from DOCCI's own file. GOAL's list, if it is there too, must name the same images."""
    records = list(_read_docci(("test", "qual_test"), folder, split))
    if folder.find(DOCCI_TEST):
        ids = {record.id for record in records}
        listed = {record.id for record in _read_list(DOCCI_TEST, replace(folder, log=ReadLog()), split)}
        if ids != listed:
            raise ValueError(
                f"{folder.path(DOCCI_CAPTIONS)} and {folder.path(DOCCI_TEST)} disagree about the test split: "
                f"{len(ids ^ listed)} images are in one only, first {min(ids ^ listed)}; remove the wrong file"
            )
    return records


def _read_docci_clusters(folder: BenchmarkFolder) -> Mapping[str, str]:
    """DOCCI's clusters of related images by record id; none without the metadata."""
    file = folder.find(DOCCI_METADATA)
    if file is None:
        return {}
    log = ReadLog()
    rows = [row for _, row in read_rows(file, log) if row.get("cluster_id") is not None]
    if log.problems:
        raise ValueError(f"{log.problems[0].where} is not a row of DOCCI's metadata: {log.problems[0].detail}")
    return {str(row.get("example_id")): str(row["cluster_id"]) for row in rows}


def _docci_split(count: int, *parts: str, verified: bool = False) -> BenchmarkSplit:
    return BenchmarkSplit(count, (((DOCCI_CAPTIONS,), partial(_read_docci, parts)),), verified)


DOCCI = Benchmark(
    name="docci",
    title="DOCCI",
    licence="CC BY 4.0",
    page=DOCCI_PAGE,
    splits={
        "train": BenchmarkSplit(9_450, (_list_reader(DOCCI_TRAIN),)),
        "validation": _docci_split(100, "qual_dev"),
        "test": BenchmarkSplit(5_100, (((DOCCI_CAPTIONS,), _read_docci_test), _list_reader(DOCCI_TEST)), verified=True),
    },
    images=("images", "docci_images", "docci_images.tar", "images.tar"),
    folders=("docci",),
    optional=(DOCCI_METADATA,),
    groups=_read_docci_clusters,
)
DOCCI_OFFICIAL = replace(
    DOCCI,
    name="docci/official",
    title="DOCCI (official)",
    splits={
        "train": _docci_split(9_647, "train"),
        "validation": _docci_split(100, "qual_dev"),
        "test": _docci_split(5_000, "test", verified=True),
        "qual_test": _docci_split(100, "qual_test", verified=True),
    },
)

# The list with regions, or the one of whole images only.
DCI_TRAIN = BenchmarkFile(
    "DCI_segment_sim_bbox_del_org.json", "GOAL's training list", GOAL_PAGE, ("DCI_train_del_org.json", "dci_train.json")
)
DCI_TEST = BenchmarkFile("DCI_test.json", "GOAL's test list", GOAL_PAGE, ("dci_test.json",))


def _read_long_dci(folder: BenchmarkFolder, split: str) -> Iterator[Record]:
    """Both of GOAL's lists as one gallery: ids begin with the list that a record comes from. An image in both lists is
    not held out."""
    trained = set()
    for record in _read_list(DCI_TRAIN, folder, split):
        trained.add(record.id)
        yield replace(record, id=f"train/{record.id}")
    for record in _read_list(DCI_TEST, folder, split):
        if record.id in trained:
            folder.log.problem("repeated id", record.id, "is in both of GOAL's lists")
        else:
            yield replace(record, id=f"test/{record.id}")


DCI = Benchmark(
    name="dci",
    title="DCI",
    licence="CC BY-NC 4.0; photographs under the SA-1B licence",
    page="https://github.com/facebookresearch/DCI",
    splits={
        "train": BenchmarkSplit(5_445, (_list_reader(DCI_TRAIN),)),
        "test": BenchmarkSplit(1_999, (_list_reader(DCI_TEST),), verified=True),
    },
    images=("photos", "images", "sa_000138", "sa_000138.tar"),
    folders=("dci",),
)
LONG_DCI = replace(
    DCI,
    name="long-dci",
    title="Long-DCI",
    splits={"test": BenchmarkSplit(7_444, (((DCI_TRAIN, DCI_TEST), _read_long_dci),))},
    folders=("long-dci", "dci"),
    absent={"train": "Long-DCI is for tests only, the paper trains on dci"},
    held_out="test/",
)

URBAN_PAGE = "https://huggingface.co/datasets/BeichenZhang/Urban1k"
URBAN_CAPTIONS = BenchmarkFile("caption", "a directory with N.txt for each image N.jpg", URBAN_PAGE, ("captions",))
URBAN_LIST = BenchmarkFile(
    "urban_dataset_test.json",
    "the captions as a JSON list",
    GOAL_PAGE,
    ("urban1k_test.json", "urban1k.json", "Urban1k.json"),
)


def _read_urban(folder: BenchmarkFolder, split: str) -> Iterator[Record]:
    """`caption/N.txt` describes `image/N.jpg`; its first line is the caption."""

    def make(file: Path) -> Record:
        lines = decode_text(file.read_bytes())[0].splitlines()
        return Record(file.stem, folder.image(f"{file.stem}.jpg"), (checked_caption(lines[0] if lines else ""),), split)

    files = sorted(folder.path(URBAN_CAPTIONS).glob("*.txt"), key=lambda file: (len(file.stem), file.stem))
    return folder.collect(((str(file), file) for file in files), make)


URBAN_1K = Benchmark(
    name="urban-1k",
    title="Urban-1K",
    licence="CC BY-NC 4.0",
    page=URBAN_PAGE,
    splits={"test": BenchmarkSplit(1_000, (((URBAN_CAPTIONS,), _read_urban), _list_reader(URBAN_LIST)), verified=True)},
    images=("image", "images"),
    folders=("urban-1k", "Urban1k"),
    absent={"train": "Urban-1K is for tests only, the paper trains on vg-paragraphs"},
)

VG_PAGE = "https://cs.stanford.edu/people/ranjaykrishna/im2p/index.html"
VG_CAPTIONS = BenchmarkFile("paragraphs_v1.json", "all paragraphs", VG_PAGE)


def _read_vg(ids: BenchmarkFile, folder: BenchmarkFolder, split: str) -> Iterator[Record]:
    """One record per image of the split, in the order of its list, with all paragraphs about it as captions."""
    file = folder.path(ids)
    try:
        names = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(names, list):
        raise ValueError(f"{file} holds {type(names).__name__}, not a list of image ids")
    records: dict[str, Record | None] = dict.fromkeys(map(str, names))

    def make(row: Row) -> Record | None:
        if not isinstance(row.get("image_id"), int | str):
            raise RowError("no image", "has no image_id")
        name, url = str(row["image_id"]), row.get("url")
        if name not in records:
            return None
        # `VG_100K/2356347.jpg`, the end of the URL: Visual Genome comes in two directories.
        image = "/".join(url.split("/")[-2:]) if isinstance(url, str) and url else f"{name}.jpg"
        caption = checked_caption(first_of(row, ("paragraph",), "no caption"))
        return Record(name, folder.images.find(image) or folder.image(image), (caption,), split)

    for record in folder.records(VG_CAPTIONS, make):
        earlier = records[record.id]
        captions = record.captions if earlier is None else (*earlier.captions, *record.captions)
        records[record.id] = replace(record, captions=tuple(dict.fromkeys(captions)))
    for name, found in records.items():
        if found is None:
            folder.log.problem("no caption", str(file), f"image {name} has no paragraph")
        else:
            yield found


def _vg_split(count: int, name: str) -> BenchmarkSplit:
    ids = BenchmarkFile(f"{name}_split.json", f"image ids of the {name} split", VG_PAGE)
    return BenchmarkSplit(count, (((VG_CAPTIONS, ids), partial(_read_vg, ids)),))


VG_PARAGRAPHS = Benchmark(
    name="vg-paragraphs",
    title="VG paragraphs",
    licence="CC BY 4.0 (Visual Genome)",
    page=VG_PAGE,
    splits={
        "train": _vg_split(14_575, "train"),
        "validation": _vg_split(2_487, "val"),
        "test": _vg_split(2_489, "test"),
    },
    images=(),
    folders=("vg-paragraphs",),
)


def _read_iiw(file: BenchmarkFile, folder: BenchmarkFolder, split: str) -> Iterator[Record]:
    def make(row: Row) -> Record:
        name = base_name(image_name(row, "image/key", "image"))
        # DOCCI's images are named without their suffix, DCI's with it.
        image = folder.image(name if "." in name else f"{name}.jpg")
        return Record(stem_of(name), image, (checked_caption(first_of(row, ("IIW",), "no caption")),), split)

    return folder.records(file, make)


def _iiw_split(count: int, directory: str, also: str, what: str, verified: bool = False) -> BenchmarkSplit:
    origin = "https://github.com/google/imageinwords, folder datasets"
    file = BenchmarkFile(f"{directory}/data.jsonl", what, origin, (f"{also}/data.jsonl",))
    return BenchmarkSplit(count, (((file,), partial(_read_iiw, file)),), verified)


IIW = Benchmark(
    name="iiw",
    title="IIW",
    licence="CC BY 4.0; photographs as DOCCI and DCI",
    page="https://github.com/google/imageinwords",
    splits={
        "test": _iiw_split(400, "IIW-400", "iiw-400", "IIW-400, images of DOCCI-AAR", verified=True),
        "dci_test": _iiw_split(112, "DCI_Test", "DCI_TEST", "new captions of DCI's test images"),
        "docci_test": _iiw_split(100, "DOCCI_Test", "DOCCI_TEST", "new captions of 100 of DOCCI's images"),
    },
    images=(),
    folders=("iiw",),
    absent={"train": "IIW publishes no training captions by people"},
)

SHAREGPT4V_PAGE = "https://huggingface.co/datasets/Lin-Chen/ShareGPT4V"
SHAREGPT4V_CAPTIONS = BenchmarkFile("share-captioner_coco_lcs_sam_1246k_1107.json", "all captions", SHAREGPT4V_PAGE)
SHAREGPT4V_VALIDATION = 1_000


def _read_sharegpt4v(folder: BenchmarkFolder, split: str) -> Iterator[Record]:
    """The first thousand rows are for validation, the rest for training, as in Long-CLIP."""

    def make(row: Row) -> Record:
        name = image_name(row, "image")
        turns = row.get("conversations")
        if not isinstance(turns, list) or len(turns) < 2 or not isinstance(turns[1], dict):
            raise RowError("no caption", "has no second turn in its conversations")
        caption = checked_caption(turns[1].get("value")).replace("\n", " ")
        image = (None if folder.images.is_directory else folder.images.find(name)) or folder.images.at(name)
        return Record(name, image, (caption,), split, short=caption.split(". ")[0])

    path = folder.path(SHAREGPT4V_CAPTIONS)
    rows = ((f"{path}:{place}", row) for place, row in read_rows(path, folder.log))
    first = islice(rows, SHAREGPT4V_VALIDATION) if split == "validation" else islice(rows, SHAREGPT4V_VALIDATION, None)
    return folder.collect(first, make)


SHAREGPT4V = Benchmark(
    name="sharegpt4v",
    title="ShareGPT4V",
    licence="CC BY-NC 4.0, under OpenAI's terms of use; images as COCO, LAION-CC-SBU and SA-1B",
    page=SHAREGPT4V_PAGE,
    splits={
        "train": BenchmarkSplit(1_245_901, (((SHAREGPT4V_CAPTIONS,), _read_sharegpt4v),)),
        "validation": BenchmarkSplit(SHAREGPT4V_VALIDATION, (((SHAREGPT4V_CAPTIONS,), _read_sharegpt4v),)),
    },
    images=("data",),
    folders=("sharegpt4v", "ShareGPT4V"),
)

BENCHMARKS: Mapping[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (DOCCI, DOCCI_OFFICIAL, DCI, LONG_DCI, URBAN_1K, VG_PARAGRAPHS, IIW, SHAREGPT4V)
}
