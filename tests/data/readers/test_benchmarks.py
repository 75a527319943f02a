"""Benchmarks in miniature: the published layouts with a handful of rows and small images."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from small_images import shade, write_png

from hnclip.core import Region
from hnclip.data.benchmarks import BENCHMARKS, held_out, open_benchmark
from hnclip.data.records import DataSet

SHAREGPT4V = "share-captioner_coco_lcs_sam_1246k_1107.json"
DOCCI = {"train": 6, "test": 4, "qual_dev": 2, "qual_test": 1}
DOCCI_NAMES = [f"{part}_{number:05d}" for part, count in DOCCI.items() for number in range(count)]
DOCCI_TRAIN = ["train_00000", "train_00002", "train_00005"]
DCI_TRAIN, DCI_TEST = [f"sa_{number}.jpg" for number in (11, 13, 14, 17, 18)], ["sa_12.jpg", "sa_15.jpg"]
SEGMENTS = "_segment_sim_bbox_del_org.json"


def list_rows(names: list[str], where: str = "/home/me/data/images/") -> list[dict[str, Any]]:
    """A test list as GOAL publishes it, with the directories of its author's machine."""
    return [{"filename": f"{where}{name}", "caption": f"It shows {name}."} for name in names]


def train_rows(names: list[str]) -> list[dict[str, Any]]:
    segments = [
        {"caption": sentence, "similarity_score": score, "bbox_coordinates": dict(zip(("x1", "y1", "x2", "y2"), box))}
        for sentence, score, box in (("A pale part", 20.5, (0, 0, 2, 2)), ("The best part", 31.0, (1, 0, 6, 4)))
    ]
    where = "../somewhere/else/"
    return [{"original_filename": where + name, "original_caption": "One.", "segment": segments} for name in names]


def paragraph(number: int, text: str = "A paragraph. ", folder: str = "VG_100K") -> dict[str, Any]:
    url = f"https://cs.stanford.edu/people/rak248/{folder}/{number}.jpg"
    return {"url": url, "image_id": number, "paragraph": text}


def share_row(number: int) -> dict[str, Any]:
    turns = [{"from": "human", "value": "?"}, {"from": "gpt", "value": f"Photo {number}.\nIt sleeps. It snores. "}]
    return {"id": number, "image": f"coco/train2017/{number:012d}.jpg", "conversations": turns}


# The files of each benchmark, and its images.
FILES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "docci": (
        {
            "docci_descriptions.jsonlines": [
                {"split": name.rpartition("_")[0], "image_file": f"{name}.jpg", "description": f"Of {name}. "}
                for name in DOCCI_NAMES
            ],
            "docci_metadata.jsonlines": [
                {"example_id": name, "cluster_id": 7 if name.startswith("test") else None} for name in DOCCI_NAMES
            ],
            f"docci{SEGMENTS}": train_rows([f"{name}.jpg" for name in DOCCI_TRAIN]),
        },
        [f"images/{name}.jpg" for name in DOCCI_NAMES],
    ),
    "dci": (
        {
            f"datasets/DCI{SEGMENTS}": train_rows(DCI_TRAIN),
            "datasets/DCI_test.json": list_rows(DCI_TEST, "..\\photos\\"),
        },
        [f"densely_captioned_images/photos/{name}" for name in [*DCI_TRAIN, *DCI_TEST]],
    ),
    "urban-1k": (
        {f"Urban1k/caption/{number}.txt": f"Street {number}.\nNo paper reads this." for number in range(1, 12)},
        [f"Urban1k/image/{number}.jpg" for number in range(1, 12)],
    ),
    "vg-paragraphs": (
        {
            "paragraphs_v1.json": [
                *map(paragraph, (101, 103, 201, 301, 302, 999)),
                *(paragraph(102, text, "VG_100K_2") for text in ("The first.", "The second.", "The first. ")),
            ],
            **{"train_split.json": [103, 101, 102], "val_split.json": [201], "test_split.json": [301, 302]},
        },
        [*(f"VG_100K/{number}.jpg" for number in (101, 103, 201, 301, 302)), "VG_100K_2/102.jpg"],
    ),
    "iiw": (
        {
            "datasets/IIW-400/data.jsonl": [
                {"image/key": f"aar_test_0000{n}", "IIW": f"Words {n}.", "IIW-P5B": "By a model."} for n in range(2)
            ],
            "datasets/DCI_Test/data.jsonl": [{"image": "sa_15.jpg", "IIW": "A balcony."}],
            "datasets/DOCCI_Test/data.jsonl": [{"image": "test_00731", "IIW": "Towels.", "DOCCI": "No."}],
        },
        [f"{name}.jpg" for name in ("aar/aar_test_00000", "aar/aar_test_00001", "photos/sa_15", "docci/a/test_00731")],
    ),
    "sharegpt4v": (
        {SHAREGPT4V: [share_row(number) for number in range(1003)]},
        [f"data/coco/train2017/{number:012d}.jpg" for number in range(990, 1003)],
    ),
}
FILES |= {"docci/official": FILES["docci"], "long-dci": FILES["dci"]}
COUNTS = {
    "docci": {"train": 3, "validation": 2, "test": 5},
    "docci/official": {"train": 6, "validation": 2, "test": 4, "qual_test": 1},
    "dci": {"train": 5, "test": 2},
    "long-dci": {"test": 7},
    "urban-1k": {"test": 11},
    "vg-paragraphs": {"train": 3, "validation": 1, "test": 2},
    "iiw": {"test": 2, "dci_test": 1, "docci_test": 1},
    "sharegpt4v": {"train": 3, "validation": 1000},
}


def write(path: Path, content: Any) -> None:
    """JSON, JSON lines or text, by the suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix in (".json", ".txt"):
        path.write_text(content if path.suffix == ".txt" else json.dumps(content))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in content))


def write_benchmark(name: str, root: Path) -> None:
    for file, content in FILES[name][0].items():
        write(root / file, content)
    for number, image in enumerate(FILES[name][1]):
        write_png(root / image, number)


def opened(name: str, root: Path, **options: Any) -> DataSet:
    """The miniature of a benchmark, with its counts unless others are given."""
    return open_benchmark(name, root, **{"counts": COUNTS[name], **options})


def ids(data: DataSet, split: str) -> list[str]:
    return [record.id for record in data.part(split)]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_opens_as_published(tmp_path: Path, name: str) -> None:
    """Without files all of them are named; a verified count is an error if it is another one, others are warnings."""
    with pytest.raises(ValueError, match="lacks files") as caught:
        open_benchmark(name, tmp_path)
    assert all(file[0] in str(caught.value) for split in BENCHMARKS[name].splits.values() for file in split.files)
    write_benchmark(name, tmp_path)
    data = opened(name, tmp_path)
    assert (data.exact, data.splits(), data.problems, data.warnings) == (True, COUNTS[name], (), ())
    for record in data.records[-5:]:
        image = FILES[name][1][shade(record.image)]
        assert Path(image).stem == record.id.rpartition("/")[2].removesuffix(".jpg")
    for split, expected in BENCHMARKS[name].splits.items():
        counts = {split: COUNTS[name][split] + 1}
        if expected.verified:
            with pytest.raises(ValueError, match=f"split {split} .* has"):
                opened(name, tmp_path, splits={split}, counts=counts)
        else:
            data = opened(name, tmp_path, splits={split}, counts=counts)
            assert [warning.kind for warning in data.warnings] == ["other count"]


def test_docci_has_regions_groups_and_images_in_a_tar(tmp_path: Path) -> None:
    write_benchmark("docci", tmp_path)
    data = opened("docci", tmp_path)
    assert ids(data, "train") == DOCCI_TRAIN
    assert ids(data, "test") == [*(f"test_0000{n}" for n in range(4)), "qual_test_00000"]
    assert data.part("test")[0].captions == ("Of test_00000.",)
    regions = Region((1, 0, 6, 4), "The best part", 31.0), Region((0, 0, 2, 2), "A pale part", 20.5)
    assert data.part("train")[0].regions == regions
    assert {record.id for record in data.records if record.group == "7"} == {f"test_0000{n}" for n in range(4)}
    images = [shade(record.image) for record in data.records]
    with tarfile.open(tmp_path / "docci_images.tar", "w") as tar:
        tar.add((tmp_path / "images").rename(tmp_path / "elsewhere"), "images")
    assert [shade(record.image) for record in opened("docci", tmp_path).records] == images


def test_long_dci_distinguishes_the_held_out_records(tmp_path: Path) -> None:
    write_benchmark("dci", tmp_path)
    data, short = opened("long-dci", tmp_path), opened("dci", tmp_path)
    held = held_out("long-dci", data)
    assert (held, held_out("dci", short)) == ({"test/sa_12", "test/sa_15"}, None)
    assert {r.image for r in data.records if r.id in held} == {record.image for record in short.part("test")}
    with pytest.raises(ValueError, match="the paper trains on dci"):
        data.part("train")
    for place in ("F:\\Study\\photos\\", "./"):  # of published paths only the base name counts
        write(tmp_path / "datasets" / "DCI_test.json", list_rows(["sa_12.jpg", "sa_13.jpg"], place))
        with pytest.raises(ValueError, match="shared image"):
            opened("dci", tmp_path)
        assert held_out("long-dci", opened("long-dci", tmp_path)) == {"test/sa_12"}  # the other was trained on


def test_captions_of_the_other_benchmarks_and_bad_rows(tmp_path: Path) -> None:
    for name, id, captions, short in (
        ("urban-1k", "5", ("Street 5.",), None),
        ("vg-paragraphs", "102", ("The first.", "The second."), None),
        ("sharegpt4v", "coco/train2017/000000001001.jpg", ("Photo 1001. It sleeps. It snores.",), "Photo 1001"),
    ):
        write_benchmark(name, tmp_path / name)
        (record,) = (record for record in opened(name, tmp_path / name).records if record.id == id)
        assert (record.captions, record.short) == (captions, short)
    text = json.dumps([share_row(number) for number in range(1000)])[:-1]
    (tmp_path / "sharegpt4v" / SHAREGPT4V).write_text(text + ", {damaged after the rows that are read")
    assert opened("sharegpt4v", tmp_path, splits={"validation"}).splits() == {"validation": 1000}
    with pytest.raises(ValueError, match="not valid JSON"):
        opened("sharegpt4v", tmp_path, splits={"train"})


def test_folders_by_environment_and_only_the_files_of_the_wanted_splits_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HNCLIP_DATA", raising=False)
    with pytest.raises(ValueError, match="HNCLIP_DATA"):
        open_benchmark("dci", None)
    monkeypatch.setenv("HNCLIP_DATA", str(tmp_path))
    write_benchmark("dci", tmp_path / "dci")
    assert len(open_benchmark("long-dci", None, counts=COUNTS["long-dci"]).records) == 7
    (tmp_path / "dci" / "datasets" / f"DCI{SEGMENTS}").unlink()
    with pytest.raises(ValueError, match=f"no split 'train' here: .* lacks DCI{SEGMENTS}"):
        opened("dci", tmp_path / "dci").part("train")
    with pytest.raises(ValueError, match="vg-paragraphs"):  # which has what it lacks
        open_benchmark("urban-1k", tmp_path, splits={"train"})
