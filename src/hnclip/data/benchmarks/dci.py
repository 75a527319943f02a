"""DCI, Densely Captioned Images: photographs of SA-1B with long captions and captioned masks; and Long-DCI."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from hnclip.core import Problem, Record, Region
from hnclip.data.benchmarks.benchmark import Benchmark, Split, Way
from hnclip.data.benchmarks.folder import Folder, NeededFile
from hnclip.data.benchmarks.goal_lists import GOAL, list_way, read_list
from hnclip.data.benchmarks.rows import (
    Row,
    base_name,
    checked_caption,
    make_records,
    picture_of,
    read_json,
    stem,
)
from hnclip.data.readers.cells import RowProblem
from hnclip.data.readers.segments import box_of

PAGE = "https://github.com/facebookresearch/DCI"
LICENCE = "CC BY-NC 4.0; photographs under the SA-1B licence"
# The list with regions, or the one of whole pictures only.
TRAIN = NeededFile(
    "DCI_segment_sim_bbox_del_org.json", "GOAL's training list", GOAL, ("DCI_train_del_org.json", "dci_train.json")
)
TEST = NeededFile("DCI_test.json", "GOAL's test list", GOAL, ("dci_test.json",))
SPLITS = NeededFile("splits.json", "DCI's own splits", f"{PAGE}, dci.tar.gz")
ANNOTATIONS = NeededFile("complete", "a directory, one JSON file per picture", f"{PAGE}, dci.tar.gz", ("annotations",))
IMAGES = ("photos", "images", "sa_000138", "sa_000138.tar")

# The long captions of Long-DCI are those of DCI, so its records keep DCI's ids behind the list that each comes from.
TRAINED, HELD_OUT = "train/", "test/"


def read_long(folder: Folder, split: str) -> Iterator[Record | Problem]:
    """Both of GOAL's lists as one gallery. A picture in both is not held out, whatever the lists say."""
    trained: set[str] = set()
    for start, file in ((TRAINED, TRAIN), (HELD_OUT, TEST)):
        for item in read_list(folder, file, split):
            if isinstance(item, Problem):
                yield item
            elif start == HELD_OUT and item.id in trained:
                yield Problem("repeated id", item.id, "is in both of GOAL's lists")
            else:
                trained.add(item.id)
                yield replace(item, id=f"{start}{item.id}")


def read_official(folder: Folder, split: str) -> Iterator[Record | Problem]:
    """A split by DCI's own file: the long caption, or the short one where annotators added nothing to it."""
    file = folder.path(SPLITS)
    splits = read_json(file)
    part = {"validation": "valid"}.get(split, split)
    names = splits.get(part) if isinstance(splits, dict) else None
    if not isinstance(names, list):
        raise ValueError(f"{file} has no list {part!r}: it must hold train, valid and test, each a list of file names")

    def make(annotation: Path) -> Record:
        row = _annotation(annotation)
        name = base_name(picture_of(row, "image"))
        short = _text(row.get("short_caption"))
        return Record(
            id=stem(name),
            image=folder.pictures.find(name),
            captions=(checked_caption(_text(row.get("extra_caption")) or short),),
            split=split,
            short=checked_caption(short) if short else None,
            regions=_masks(row.get("mask_data")),
        )

    place = folder.path(ANNOTATIONS)
    annotations = [place / base_name(str(name)) for name in names]
    return make_records(((str(annotation), annotation) for annotation in annotations), make)


def _annotation(file: Path) -> Row:
    try:
        row = read_json(file)
    except FileNotFoundError as error:
        raise RowProblem("no caption", "the annotation file does not exist") from error
    except ValueError as error:
        raise RowProblem("unreadable row", str(error)) from error
    if not isinstance(row, dict):
        raise RowProblem("unreadable row", f"a {type(row).__name__}, not an object")
    return row


def _text(value: Any) -> str:
    return value.strip() if isinstance(value, str) else ""


def _masks(masks: Any) -> tuple[Region, ...]:
    """The masks that have a caption of their own; annotators gave none to masks of low quality."""
    if not isinstance(masks, dict):
        return ()
    regions = []
    for mask in masks.values():
        caption = _text(mask.get("caption")) if isinstance(mask, dict) else ""
        box = _bounds(mask.get("bounds")) if caption else None
        if box:
            regions.append(Region(box, caption))
    return tuple(regions)


def _bounds(bounds: Any) -> tuple[int, int, int, int] | None:
    """`{topLeft: {x, y}, bottomRight: {x, y}}` as the files have it, or `[[x, y], [x, y]]` as DCI's page has it."""
    try:
        if isinstance(bounds, dict):
            corners = [bounds[corner][axis] for corner in ("topLeft", "bottomRight") for axis in ("x", "y")]
        else:
            corners = [number for corner in bounds for number in corner]
    except (KeyError, TypeError):
        return None
    return box_of(*corners)


PAPER = Benchmark(
    name="dci",
    title="DCI",
    licence=LICENCE,
    page=PAGE,
    splits={
        "train": Split(5_445, (list_way(TRAIN),)),
        "test": Split(1_999, (list_way(TEST),)),
    },
    images=IMAGES,
    folders=("dci",),
)

OFFICIAL = Benchmark(
    name="dci/official",
    title="DCI (official)",
    licence=LICENCE,
    page=PAGE,
    splits={
        name: Split(count, (Way((SPLITS, ANNOTATIONS), read_official),))
        for name, count in (("train", 7_599), ("validation", 98), ("test", 108))
    },
    images=IMAGES,
    folders=("dci",),
)

LONG = Benchmark(
    name="long-dci",
    title="Long-DCI",
    licence=LICENCE,
    page=PAGE,
    splits={"test": Split(7_444, (Way((TRAIN, TEST), read_long),))},
    images=IMAGES,
    folders=("long-dci", "dci"),
    absent={"train": "Long-DCI is for tests alone, the paper trains on dci"},
    held_out=HELD_OUT,
)
