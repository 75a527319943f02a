from __future__ import annotations

import pytest
from small_copies import write_lines, write_picture

from hnclip.data.benchmarks import open_benchmark

COUNTS = {"test": 2, "dci_test": 1, "docci_test": 1}


@pytest.fixture
def folder(tmp_path):
    """The repository's folder `datasets`, and pictures of three sources anywhere below."""
    rows = [{"image/key": f"aar_test_0000{n}", "IIW": f"Many words {n}.", "IIW-P5B": "By a model."} for n in range(2)]
    write_lines(tmp_path / "datasets" / "IIW-400" / "data.jsonl", rows)
    write_lines(tmp_path / "datasets" / "DCI_Test" / "data.jsonl", [{"image": "sa_15.jpg", "IIW": "A balcony."}])
    write_lines(
        tmp_path / "datasets" / "DOCCI_Test" / "data.jsonl", [{"image": "test_00731", "IIW": "Towels.", "DOCCI": "No."}]
    )
    write_picture(tmp_path / "images_aar" / "aar_test_00000.jpg")
    write_picture(tmp_path / "images_aar" / "aar_test_00001.jpg")
    write_picture(tmp_path / "photos" / "sa_15.jpg")
    write_picture(tmp_path / "docci" / "images" / "test_00731.jpg")
    return tmp_path


def test_the_three_sets_by_people(folder):
    data = open_benchmark("iiw", folder, counts=COUNTS)
    assert data.exact
    assert data.splits() == COUNTS
    assert [(record.id, record.captions) for record in data.records] == [
        ("aar_test_00000", ("Many words 0.",)),
        ("aar_test_00001", ("Many words 1.",)),
        ("sa_15", ("A balcony.",)),
        ("test_00731", ("Towels.",)),
    ]
    assert all(record.image.load().size == (6, 4) for record in data.records)


def test_one_set_alone(folder):
    data = open_benchmark("iiw", folder / "datasets", splits={"docci_test"}, counts=COUNTS)
    assert data.splits() == {"docci_test": 1}
    with pytest.raises(ValueError, match="iiw has no split 'test' here: it was not read, only docci_test"):
        data.part("test")


def test_missing_sets_and_published_count(folder):
    with pytest.raises(ValueError, match="split test must have 400 records"):
        open_benchmark("iiw", folder)
    (folder / "datasets" / "IIW-400" / "data.jsonl").unlink()
    with pytest.raises(
        ValueError, match=r"test: IIW-400/data.jsonl \(.*\), from https://github.com/google/imageinwords"
    ):
        open_benchmark("iiw", folder, splits={"test"})
