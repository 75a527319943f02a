"""Paragraphs about pictures of Visual Genome: what the paper trains on before a test on Urban-1K."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hnclip.core import Problem, Record
from hnclip.data.benchmarks.benchmark import Benchmark, Split, Way
from hnclip.data.benchmarks.folder import Folder, NeededFile
from hnclip.data.benchmarks.rows import Row, caption_of, file_records, read_json
from hnclip.data.readers.cells import RowProblem

PAGE = "https://cs.stanford.edu/people/ranjaykrishna/im2p/index.html"
PARAGRAPHS = NeededFile("paragraphs_v1.json", "all paragraphs", PAGE)
SPLITS = {
    split: NeededFile(f"{part}_split.json", f"image ids of the {split} split", PAGE)
    for split, part in (("train", "train"), ("validation", "val"), ("test", "test"))
}


def read_paragraphs(folder: Folder, split: str) -> Iterator[Record | Problem]:
    """One record per picture of the split, in the order of its list. Several paragraphs about one picture are several
    captions of one record."""
    file = folder.path(SPLITS[split])
    ids = read_json(file)
    if not isinstance(ids, list):
        raise ValueError(f"{file} holds {type(ids).__name__}, not a list of image ids")
    wanted = dict.fromkeys(str(name) for name in ids)

    def make(row: Row) -> Record | None:
        if not isinstance(row.get("image_id"), int | str):
            raise RowProblem("no image", "has no image_id")
        name = str(row["image_id"])
        if name not in wanted:
            return None
        return Record(name, folder.pictures.find(_picture(row, name)), (caption_of(row, "paragraph"),), split)

    told: dict[str, Record] = {}
    for item in file_records(folder.path(PARAGRAPHS), make):
        if isinstance(item, Problem):
            yield item
        elif item.id in told:
            captions = dict.fromkeys((*told[item.id].captions, *item.captions))
            told[item.id] = replace(item, captions=tuple(captions))
        else:
            told[item.id] = item
    for name in wanted:
        yield told[name] if name in told else Problem("no caption", str(file), f"image {name} has no paragraph")


def _picture(row: Row, name: str) -> str:
    """`VG_100K/2356347.jpg`, the end of the address: Visual Genome comes in two directories."""
    url = row.get("url")
    return "/".join(url.split("/")[-2:]) if isinstance(url, str) and url else f"{name}.jpg"


BENCHMARK = Benchmark(
    name="vg-paragraphs",
    title="VG paragraphs",
    licence="CC BY 4.0 (Visual Genome)",
    page=PAGE,
    splits={
        split: Split(count, (Way((PARAGRAPHS, SPLITS[split]), read_paragraphs),))
        for split, count in (("train", 14_575), ("validation", 2_487), ("test", 2_489))
    },
    images=(),
    folders=("vg-paragraphs",),
)
