"""Urban-1K: a thousand urban scenes with captions of about a hundred words, for tests alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hnclip.core import Problem, Record
from hnclip.data.benchmarks.benchmark import Benchmark, Split, Way
from hnclip.data.benchmarks.folder import Folder, NeededFile
from hnclip.data.benchmarks.goal_lists import GOAL, list_way
from hnclip.data.benchmarks.rows import checked_caption, make_records

PAGE = "https://huggingface.co/datasets/BeichenZhang/Urban1k"
CAPTIONS = NeededFile("caption", "a directory with N.txt for each picture N.jpg", PAGE, ("captions",))
LIST = NeededFile(
    "urban_dataset_test.json",
    "the captions as a JSON list",
    GOAL,
    ("urban1k_test.json", "urban1k.json", "Urban1k.json"),
)


def read_captions(folder: Folder, split: str) -> Iterator[Record | Problem]:
    """`caption/N.txt` describes `image/N.jpg`; its first line is the caption."""

    def make(file: Path) -> Record:
        # Bytes that are not UTF-8 become surrogates, which no caption may hold.
        lines = file.read_text(encoding="utf-8-sig", errors="surrogateescape").splitlines()
        caption = checked_caption(lines[0] if lines else "")
        return Record(file.stem, folder.pictures.find(f"{file.stem}.jpg"), (caption,), split)

    files = sorted(folder.path(CAPTIONS).glob("*.txt"), key=lambda file: (len(file.stem), file.stem))
    return make_records(((str(file), file) for file in files), make)


BENCHMARK = Benchmark(
    name="urban-1k",
    title="Urban-1K",
    licence="CC BY-NC 4.0",
    page=PAGE,
    splits={"test": Split(1_000, (Way((CAPTIONS,), read_captions), list_way(LIST)), numbered=True)},
    images=("image", "images"),
    folders=("urban-1k", "Urban1k"),
    absent={"train": "Urban-1K is for tests alone, the paper trains on vg-paragraphs"},
)
