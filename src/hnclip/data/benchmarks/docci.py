"""DOCCI: 15k photographs, each described by people in about 130 words, many of them nearly alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hnclip.core import Problem, Record
from hnclip.data.benchmarks.benchmark import Benchmark, Reader, Split, Way
from hnclip.data.benchmarks.folder import Folder, NeededFile
from hnclip.data.benchmarks.goal_lists import GOAL, list_way, read_list
from hnclip.data.benchmarks.rows import Row, caption_of, file_records, picture_of, stem
from hnclip.data.readers.cells import RowProblem
from hnclip.data.readers.rows import read_rows

PAGE = "https://google.github.io/docci"
DESCRIPTIONS = NeededFile("docci_descriptions.jsonlines", "all captions", PAGE)
METADATA = NeededFile("docci_metadata.jsonlines", "optional: families of related pictures", PAGE)
# The list with regions, or the one of whole pictures only.
TRAIN = NeededFile(
    "docci_segment_sim_bbox_del_org.json",
    "GOAL's training list",
    GOAL,
    ("docci_train_del_org.json", "docci_train.json"),
)
TEST = NeededFile("docci_test.json", "GOAL's test list", GOAL)
IMAGES = ("images", "docci_images", "docci_images.tar", "images.tar")


def descriptions(*parts: str) -> Reader:
    """Reads these of DOCCI's own parts as one split."""

    def read(folder: Folder, split: str) -> Iterator[Record | Problem]:
        def make(row: Row) -> Record | None:
            if not isinstance(row.get("split"), str):
                raise RowProblem("unreadable row", "has no split")
            if row["split"] not in parts:
                return None
            name = picture_of(row, "image_file")
            return Record(stem(name), folder.pictures.find(name), (caption_of(row, "description"),), split)

        return file_records(folder.path(DESCRIPTIONS), make)

    return read


def read_test(folder: Folder, split: str) -> Iterator[Record | Problem]:
    """The paper's test split out of DOCCI's own file. GOAL's list, if it is there too, must name the same pictures."""
    records = list(descriptions("test", "qual_test")(folder, split))
    if folder.find(TEST):
        ids = {record.id for record in records if isinstance(record, Record)}
        listed = {record.id for record in read_list(folder, TEST, split) if isinstance(record, Record)}
        if ids != listed:
            raise ValueError(
                f"{folder.path(DESCRIPTIONS)} and {folder.path(TEST)} disagree about the test split: "
                f"{len(ids ^ listed)} pictures are in one only, first {min(ids ^ listed)}; remove the wrong file"
            )
    yield from records


def read_clusters(folder: Folder) -> Mapping[str, str]:
    """DOCCI's clusters of related pictures by record id; none without the metadata."""
    file = folder.find(METADATA)
    if file is None:
        return {}
    unreadable: list[Problem] = []
    rows = [row for _, row in read_rows(file, unreadable) if row.get("cluster_id") is not None]
    if unreadable:
        raise ValueError(f"{unreadable[0].where} is not a row of DOCCI's metadata: {unreadable[0].detail}")
    return {str(row.get("example_id")): str(row["cluster_id"]) for row in rows}


PAPER = Benchmark(
    name="docci",
    title="DOCCI",
    licence="CC BY 4.0",
    page=PAGE,
    splits={
        "train": Split(9_450, (list_way(TRAIN),)),
        "validation": Split(100, (Way((DESCRIPTIONS,), descriptions("qual_dev")),), numbered=True),
        "test": Split(5_100, (Way((DESCRIPTIONS,), read_test), list_way(TEST)), numbered=True),
    },
    images=IMAGES,
    folders=("docci",),
    optional=(METADATA,),
    groups=read_clusters,
)

OFFICIAL = Benchmark(
    name="docci/official",
    title="DOCCI (official)",
    licence="CC BY 4.0",
    page=PAGE,
    splits={
        name: Split(count, (Way((DESCRIPTIONS,), descriptions(part)),), numbered=True)
        for name, part, count in (
            ("train", "train", 9_647),
            ("validation", "qual_dev", 100),
            ("test", "test", 5_000),
            ("qual_test", "qual_test", 100),
        )
    },
    images=IMAGES,
    folders=("docci",),
    optional=(METADATA,),
    groups=read_clusters,
)
