"""The JSON lists that GOAL publishes and others took over: for training with regions, for tests without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hnclip.data.benchmarks.benchmark import Way
from hnclip.data.benchmarks.folder import Folder, NeededFile
from hnclip.data.benchmarks.rows import Row, base_name, box_of, caption_of, file_records, picture_of, stem
from hnclip.data.records import Problem, Record, Region

GOAL = "github.com/PerceptualAI-Lab/GOAL, folder datasets"


def list_way(file: NeededFile) -> Way:
    """A split that is one of these lists."""
    return Way((file,), lambda folder, split: read_list(folder, file, split))


def read_list(folder: Folder, file: NeededFile, split: str) -> Iterator[Record | Problem]:
    """Records of a list `[{"filename", "caption"}]` or `[{"original_filename", "original_caption", "segment": […]}]`.

    Paths inside are those of the machine that wrote them: only base names count. `image` is another spelling of
    `filename`, of lists that come wrapped as `{"annotations": […]}`. StructXLIP's lists have the same keys
    and paths of edge pictures, which are not read: edges are computed here.
    """

    def make(row: Row) -> Record:
        name = base_name(picture_of(row, "original_filename", "filename", "image"))
        return Record(
            id=stem(name),
            image=folder.pictures.find(name),
            captions=(caption_of(row, "original_caption", "caption"),),
            split=split,
            regions=_regions(row.get("segment")),
        )

    return file_records(folder.path(file), make)


def _regions(segments: Any) -> tuple[Region, ...]:
    """The segments that have a sentence and a box, the most similar first: GOAL trains on that one alone."""
    if not isinstance(segments, list):
        return ()
    segments = [segment for segment in segments if isinstance(segment, dict)]
    segments.sort(key=_similarity, reverse=True)
    regions = []
    for segment in segments:
        corners = segment.get("bbox_coordinates")
        box = box_of(*(corners.get(key) for key in ("x1", "y1", "x2", "y2"))) if isinstance(corners, dict) else None
        sentence = segment.get("caption")
        if box and isinstance(sentence, str) and sentence.strip():
            regions.append(Region(box, sentence.strip()))
    return tuple(regions)


def _similarity(segment: Row) -> float:
    score = segment.get("similarity_score")
    return score if isinstance(score, int | float) else float("-inf")
