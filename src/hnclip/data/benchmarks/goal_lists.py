"""The JSON lists that GOAL publishes and others took over: for training with regions, for tests without."""

from __future__ import annotations

from collections.abc import Iterator

from hnclip.core import Problem, Record
from hnclip.data.benchmarks.benchmark import Way
from hnclip.data.benchmarks.folder import Folder, NeededFile
from hnclip.data.benchmarks.rows import Row, base_name, caption_of, file_records, picture_of, stem
from hnclip.data.readers.locate import Pictures
from hnclip.data.readers.segments import CAPTION, EDGES, IMAGE, REGIONS, map_finder, map_of, regions_of

GOAL = "github.com/PerceptualAI-Lab/GOAL, folder datasets"


def list_way(file: NeededFile) -> Way:
    """A split that is one of these lists."""
    return Way((file,), lambda folder, split: read_list(folder, file, split))


def read_list(folder: Folder, file: NeededFile, split: str) -> Iterator[Record | Problem]:
    """Records of a list `[{"filename", "caption"}]` or `[{"original_filename", "original_caption", "segment": […]}]`.

    Paths inside are those of the machine that wrote them: only base names count, unless several pictures have the
    same one. `image` is another spelling of `filename`, of lists that come wrapped as `{"annotations": […]}`.
    StructXLIP's lists have edge maps too, of the picture and of each segment, which are looked for among the pictures
    and in the folder; one that is not there is left out.
    """
    places = (folder.pictures, Pictures(folder.root))

    def make(row: Row) -> Record:
        written = picture_of(row, IMAGE, "filename", "image")
        name = base_name(written)
        several = folder.pictures.exact(name) is None and len(folder.pictures.same_name(name)) > 1
        image = folder.pictures.find(written if several else name)
        find = map_finder(places, image)
        return Record(
            id=stem(name),
            image=image,
            captions=(caption_of(row, CAPTION, "caption"),),
            split=split,
            regions=regions_of(row.get(REGIONS), find),
            edges=map_of(row.get(EDGES), written, find),
        )

    return file_records(folder.path(file), make)
