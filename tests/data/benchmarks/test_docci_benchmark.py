from __future__ import annotations

import tarfile

import pytest
from small_copies import list_rows, segment, train_row, write_json, write_lines, write_picture

from hnclip.core import InvalidImage, Region
from hnclip.data.benchmarks import open_benchmark

PARTS = {"train": 6, "test": 4, "qual_dev": 2, "qual_test": 1}
NAMES = [f"{part}_{number:05d}" for part, count in PARTS.items() for number in range(count)]
PAPER = {"train": 3, "validation": 2, "test": 5}
OFFICIAL = {"train": 6, "validation": 2, "test": 4, "qual_test": 1}
GOAL_TRAIN = ["train_00000", "train_00002", "train_00005"]


def description(name):
    return {
        "example_id": name,
        "split": name.rpartition("_")[0],
        "image_file": f"{name}.jpg",
        "description": f"A long description of {name}. ",
    }


@pytest.fixture
def folder(tmp_path):
    """DOCCI as published, and GOAL's lists beside it."""
    write_lines(tmp_path / "docci_descriptions.jsonlines", [description(name) for name in NAMES])
    write_lines(
        tmp_path / "docci_metadata.jsonlines",
        [{"example_id": name, "cluster_id": 7 if name.startswith("test") else None} for name in NAMES],
    )
    write_json(
        tmp_path / "docci_segment_sim_bbox_del_org.json",
        [
            train_row(
                f"{name}.jpg",
                segment("A pale part", 20.5, (0, 0, 2, 2)),
                segment("The best part", 31.0, (1, 0, 6, 4)),
            )
            for name in GOAL_TRAIN
        ],
    )
    for name in NAMES:
        write_picture(tmp_path / "images" / f"{name}.jpg")
    return tmp_path


def ids(records):
    return [record.id for record in records]


def test_paper_variant(folder):
    data = open_benchmark("docci", folder, counts=PAPER)
    assert data.exact
    assert data.name == "docci"
    assert data.splits() == PAPER
    assert ids(data.part("train")) == GOAL_TRAIN
    assert ids(data.part("validation")) == ["qual_dev_00000", "qual_dev_00001"]
    assert ids(data.part("test")) == [*(f"test_0000{n}" for n in range(4)), "qual_test_00000"]
    assert data.part("test")[0].captions == ("A long description of test_00000.",)
    assert all(record.image.load().size == (6, 4) for record in data.records)


def test_official_variant_keeps_all_training_pictures_and_qual_test_apart(folder):
    data = open_benchmark("docci/official", folder, counts=OFFICIAL)
    assert data.splits() == OFFICIAL
    assert sorted(ids(data.records)) == sorted(NAMES)
    assert ids(data.part("qual_test")) == ["qual_test_00000"]


def test_regions_of_goals_list_come_best_first(folder):
    record = open_benchmark("docci", folder, splits={"train"}, counts=PAPER).part("train")[0]
    assert record.captions == ("It shows train_00000.jpg. In detail.",)
    assert record.regions == (
        Region((1, 0, 6, 4), "The best part", 31.0),
        Region((0, 0, 2, 2), "A pale part", 20.5),
    )


def test_edge_maps_of_structxlips_list(folder):
    row = train_row("train_00000.jpg", segment("A part", 20.5, (0, 0, 2, 2)), segment("Another", 10.5, (1, 1, 3, 3)))
    row["original_filename_structure"] = "/there/canny/train_00000.jpg"
    row["segment"][0]["filename_structure_cropped"] = "/there/cropped_canny/part.png"
    row["segment"][1]["filename_structure_cropped"] = "/there/cropped_canny/absent.png"
    rows = [row, *(train_row(f"{name}.jpg") for name in GOAL_TRAIN[1:])]
    rows[1]["original_filename_structure"] = "/there/canny/train_00002.jpg"  # only the picture itself has that name
    write_json(folder / "docci_segment_sim_bbox_del_org.json", rows)
    whole = write_picture(folder / "canny" / "train_00000.jpg")
    part = write_picture(folder / "cropped_canny" / "part.png")
    first, second, third = open_benchmark("docci", folder, splits={"train"}, counts=PAPER).part("train")
    assert first.image.key == str(folder / "images" / "train_00000.jpg")
    assert first.edges is not None
    assert first.edges.key == str(whole)
    assert [region.edges and region.edges.key for region in first.regions] == [str(part), None]
    assert second.edges is None
    assert third.edges is None


def test_maps_among_the_pictures_are_told_apart_by_their_paths(folder):
    """Pictures and maps of the same base names below one folder."""
    (folder / "images").rename(folder / "photos")
    rows = [train_row(f"{name}.jpg") for name in GOAL_TRAIN]
    for row, name in zip(rows, GOAL_TRAIN):
        row["original_filename"] = f"/there/photos/{name}.jpg"
        row["original_filename_structure"] = f"/there/canny/{name}.jpg"
        write_picture(folder / "canny" / f"{name}.jpg")
    write_json(folder / "docci_segment_sim_bbox_del_org.json", rows)
    for record in open_benchmark("docci", folder, folder, splits={"train"}, counts=PAPER).part("train"):
        assert record.image.key == str(folder / "photos" / f"{record.id}.jpg")
        assert record.edges is not None
        assert record.edges.key == str(folder / "canny" / f"{record.id}.jpg")


def test_clusters_are_groups(folder):
    records = open_benchmark("docci", folder, counts=PAPER).records
    assert {record.id: record.group for record in records} == {
        record.id: "7" if record.id.startswith("test") else None for record in records
    }
    (folder / "docci_metadata.jsonlines").unlink()
    assert {record.group for record in open_benchmark("docci", folder, counts=PAPER).records} == {None}


def test_damaged_metadata_are_an_error(folder):
    (folder / "docci_metadata.jsonlines").write_text('{"example_id": "test_00000", "cluster_id": 1}\n{"cluster\n')
    with pytest.raises(ValueError, match=r"docci_metadata.jsonlines:2 is not a row of DOCCI's metadata"):
        open_benchmark("docci", folder, counts=PAPER)


def test_goals_test_list_is_enough_for_the_test(tmp_path):
    names = ["qual_test_00000.jpg", *(f"test_0000{n}.jpg" for n in range(4))]
    write_json(tmp_path / "docci_test.json", list_rows(names))
    data = open_benchmark("docci", tmp_path, counts=PAPER)
    assert data.splits() == {"test": 5}
    assert data.part("test")[1].captions == ("It shows test_00000.jpg, at length.",)
    with pytest.raises(InvalidImage) as caught:
        data.records[0].image.load()
    assert caught.value.kind == "missing image"


def test_official_file_wins_over_the_list_and_both_must_agree(folder):
    names = ["qual_test_00000.jpg", *(f"test_0000{n}.jpg" for n in range(4))]
    write_json(folder / "docci_test.json", list_rows(names))
    records = open_benchmark("docci", folder, counts=PAPER).part("test")
    assert all(record.captions[0].startswith("A long description") for record in records)
    write_json(folder / "docci_test.json", list_rows([*names[:-1], "test_00009.jpg"]))
    with pytest.raises(ValueError, match=r"disagree about the test split: 2 pictures .* first test_00003"):
        open_benchmark("docci", folder, counts=PAPER)


def test_without_goals_training_list_only_training_is_refused(folder):
    (folder / "docci_segment_sim_bbox_del_org.json").unlink()
    data = open_benchmark("docci", folder, counts=PAPER)
    assert data.splits() == {"validation": 2, "test": 5}
    with pytest.raises(
        ValueError, match=r"docci has no split 'train' here: .* lacks docci_segment_sim.*PerceptualAI-Lab/GOAL"
    ):
        data.part("train")


def test_without_validation_file_no_training_record_is_taken_for_it(folder):
    (folder / "docci_descriptions.jsonlines").unlink()
    data = open_benchmark("docci", folder, counts=PAPER)
    assert ids(data.part("train")) == GOAL_TRAIN
    with pytest.raises(ValueError, match=r"no split 'validation' here: .* lacks docci_descriptions.jsonlines"):
        data.part("validation")


def test_list_of_whole_pictures_serves_for_training(folder):
    (folder / "docci_segment_sim_bbox_del_org.json").unlink()
    write_json(folder / "docci_train_del_org.json", list_rows([f"{name}.jpg" for name in GOAL_TRAIN]))
    records = open_benchmark("docci", folder, counts=PAPER).part("train")
    assert ids(records) == GOAL_TRAIN
    assert records[0].regions == ()


def test_pictures_may_lie_in_a_tar_or_elsewhere(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "pictures"
    (folder / "images").rename(elsewhere)
    data = open_benchmark("docci", folder, elsewhere, counts=PAPER)
    assert data.records[0].image.load().size == (6, 4)
    with tarfile.open(folder / "docci_images.tar", "w") as tar:
        tar.add(elsewhere, "images")
    record = open_benchmark("docci", folder, counts=PAPER).records[0]
    assert record.image.key.endswith(f"docci_images.tar!images/{record.id}.jpg")
    assert record.image.load().size == (6, 4)
    whole = (folder / "docci_images.tar").read_bytes()
    (folder / "docci_images.tar").write_bytes(whole[: len(whole) // 2])
    cut = open_benchmark("docci", folder, counts=PAPER)
    assert [problem.where for problem in cut.problems] == [str(folder / "docci_images.tar")]


def test_wrong_count_names_the_missing_ids(folder):
    rows = [description(name) for name in NAMES if name not in ("test_00001", "test_00002")]
    write_lines(folder / "docci_descriptions.jsonlines", rows)
    with pytest.raises(
        ValueError,
        match=r"split test must have 5 records, but \S+jsonlines gives 3\n  missing: test_00001, test_00002$",
    ):
        open_benchmark("docci", folder, counts=PAPER)


def test_published_counts_are_asserted_unless_told_otherwise(folder):
    with pytest.raises(ValueError, match=r"split test must have 5,100 records, but .* gives 5"):
        open_benchmark("docci", folder, splits={"test"})
    with pytest.raises(ValueError, match=r"split train must have 9,647 records, but .* gives 6"):
        open_benchmark("docci/official", folder, splits={"train"})


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"split": "test", "image_file": "test_00001.jpg", "description": "  "}', "empty caption, .*:8: "),
        ('{"split": "test", "image_file": "test_00001.jpg"}', "no caption, .*:8: has no description"),
        ('{"split": "test", "description": "A dog."}', "no image, .*:8: has no image_file"),
        ('{"image_file": "test_00001.jpg", "description": "A dog."}', "unreadable row, .*:8: has no split"),
        ('{"split": "test", "image_file', "unreadable row, .*:8: Invalid control character"),
        ("[1, 2]", "unreadable row, .*:8: a list, not an object"),
        (
            '{"split": "test", "image_file": "test_00001.jpg", "description": "half \\ud83d"}',
            "bad text, .*:8: .*surrogate",
        ),
        (
            '{"split": "test", "image_file": "test_00000.jpg", "description": "Again."}',
            "repeated id, test_00000: comes twice in split test",
        ),
    ],
)
def test_bad_rows_are_named_by_the_count(folder, line, told):
    file = folder / "docci_descriptions.jsonlines"
    lines = file.read_text().splitlines()
    lines[7] = line  # test_00001
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=rf"gives 4\n  unusable rows, 1: {told}"):
        open_benchmark("docci", folder, splits={"test"}, counts=PAPER)


def test_bytes_that_are_not_utf8_are_named_by_the_count(folder):
    file = folder / "docci_descriptions.jsonlines"
    file.write_bytes(file.read_bytes().replace(b"description of test_00001", b"caf\xe9 of test_00001"))
    with pytest.raises(ValueError, match=r"bad text, .*:8: .* byte 0xe9 is not UTF-8"):
        open_benchmark("docci", folder, splits={"test"}, counts=PAPER)
