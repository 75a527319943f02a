"""IIW, ImageInWords: hyper-detailed captions by people, of pictures that DOCCI and DCI have."""

from __future__ import annotations

from collections.abc import Iterator

from hnclip.core import Problem, Record
from hnclip.data.benchmarks.benchmark import Benchmark, Split, Way
from hnclip.data.benchmarks.folder import Folder, NeededFile
from hnclip.data.benchmarks.rows import Row, base_name, caption_of, file_records, picture_of, stem

PAGE = "https://github.com/google/imageinwords"


def _way(file: NeededFile) -> Way:
    def read(folder: Folder, split: str) -> Iterator[Record | Problem]:
        def make(row: Row) -> Record:
            name = base_name(picture_of(row, "image/key", "image"))
            # DOCCI's pictures are named without the suffix that they have, DCI's with it.
            picture = folder.pictures.find(name if "." in name else f"{name}.jpg")
            return Record(stem(name), picture, (caption_of(row, "IIW"),), split)

        return file_records(folder.path(file), make)

    return Way((file,), read)


def _data(directory: str, what: str, *also: str) -> NeededFile:
    return NeededFile(
        f"{directory}/data.jsonl", what, f"{PAGE}, folder datasets", tuple(f"{name}/data.jsonl" for name in also)
    )


BENCHMARK = Benchmark(
    name="iiw",
    title="IIW",
    licence="CC BY 4.0; photographs as DOCCI and DCI",
    page=PAGE,
    splits={
        "test": Split(400, (_way(_data("IIW-400", "IIW-400, pictures of DOCCI-AAR", "iiw-400")),)),
        "dci_test": Split(112, (_way(_data("DCI_Test", "DCI's test pictures described anew", "DCI_TEST")),)),
        "docci_test": Split(100, (_way(_data("DOCCI_Test", "100 of DOCCI's described anew", "DOCCI_TEST")),)),
    },
    images=(),
    folders=("iiw",),
    absent={"train": "IIW publishes no training captions by people"},
)
