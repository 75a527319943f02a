from __future__ import annotations

import pytest
from small_copies import list_rows, segment, train_row, write_json, write_picture

from hnclip.core import Region
from hnclip.data.benchmarks import held_out, open_benchmark

TRAIN = ["sa_11.jpg", "sa_13.jpg", "sa_14.jpg", "sa_17.jpg", "sa_18.jpg"]
TEST = ["sa_12.jpg", "sa_15.jpg"]
COUNTS = {"train": 5, "test": 2}


@pytest.fixture
def folder(tmp_path):
    """GOAL's lists, as a copy of its folder, and DCI's photographs."""
    rows = [train_row(name, segment("A wall", 25.0, (0, 1, 3, 4))) for name in TRAIN]
    write_json(tmp_path / "datasets" / "DCI_segment_sim_bbox_del_org.json", rows)
    write_json(tmp_path / "datasets" / "DCI_test.json", list_rows(TEST, "..\\DCI\\photos\\"))
    for name in [*TRAIN, *TEST]:
        write_picture(tmp_path / "densely_captioned_images" / "photos" / name)
    return tmp_path


def annotation(number, **changes):
    return {
        "image": f"sa_{number}.jpg",
        "short_caption": f"Short of {number}",
        "extra_caption": f"Long of {number}.",
        "mask_data": {
            "0": {
                "caption": " A door of wood. ",
                "bounds": {"topLeft": {"x": 1, "y": 0}, "bottomRight": {"x": 5, "y": 3}},
            },
            "1": {"caption": "", "bounds": {"topLeft": {"x": 0, "y": 0}, "bottomRight": {"x": 2, "y": 2}}},
            "2": {"caption": "No area.", "bounds": {"topLeft": {"x": 2, "y": 2}, "bottomRight": {"x": 2, "y": 3}}},
            "3": {"caption": "As on the page.", "bounds": [[0, 0], [6, 4]]},
            "4": {"label": "low quality", "mask_quality": 1},
        },
        **changes,
    }


@pytest.fixture
def official(tmp_path):
    """DCI as published."""
    home = tmp_path / "densely_captioned_images"
    splits = {"train": [1, 2, 3], "valid": [4], "test": [5, 6]}
    write_json(home / "splits.json", {name: [f"{n}-data.json" for n in part] for name, part in splits.items()})
    for number in range(1, 7):
        write_json(home / "complete" / f"{number}-data.json", annotation(number))
        write_picture(home / "photos" / f"sa_{number}.jpg")
    return tmp_path


OFFICIAL = {"train": 3, "validation": 1, "test": 2}


def test_goals_lists(folder):
    data = open_benchmark("dci", folder, counts=COUNTS)
    assert data.exact
    assert data.splits() == COUNTS
    assert [record.id for record in data.part("test")] == ["sa_12", "sa_15"]
    assert {record.id for record in data.records if record.split == "train"} == {name[:-4] for name in TRAIN}
    assert data.records[0].regions == (Region((0, 1, 3, 4), "A wall", 25.0),)
    assert all(record.image.load().size == (6, 4) for record in data.records)


def test_dci_has_no_validation_split_so_some_training_records_become_one(folder):
    data = open_benchmark("dci", folder, counts=COUNTS)
    train, validation = data.part("train"), data.part("validation")
    assert len(train) == 3
    assert {*train, *validation} == {record for record in data.records if record.split == "train"}


def test_without_the_training_list_validation_says_so_too(folder):
    (folder / "datasets" / "DCI_segment_sim_bbox_del_org.json").unlink()
    data = open_benchmark("dci", folder, counts=COUNTS)
    for split in ("train", "validation"):
        with pytest.raises(ValueError, match=f"no split '{split}' here: .* lacks DCI_segment_sim_bbox_del_org.json"):
            data.part(split)


def test_a_picture_in_both_lists_is_an_error(folder):
    write_json(folder / "datasets" / "DCI_test.json", list_rows(["sa_12.jpg", "sa_13.jpg"]))
    with pytest.raises(ValueError, match="sa_13 is in both train and test"):
        open_benchmark("dci", folder, counts=COUNTS)
    with pytest.raises(ValueError, match="gives 6\n  unusable rows, 1: repeated id, sa_13: is in both of GOAL's lists"):
        open_benchmark("long-dci", folder, counts={"test": 7})


def test_long_dci_is_both_lists_and_tells_the_held_out_apart(folder):
    data = open_benchmark("long-dci", folder, counts={"test": 7})
    records = data.part("test")
    assert len(records) == 7
    held = held_out("long-dci", data)
    assert held == {"test/sa_12", "test/sa_15"}
    dci = open_benchmark("dci", folder, counts=COUNTS)
    assert {record.image for record in records if record.id in held} == {record.image for record in dci.part("test")}
    assert {record.captions for record in records} == {record.captions for record in dci.records}


def test_long_dci_is_not_for_training(folder):
    data = open_benchmark("long-dci", folder, counts={"test": 7})
    for split in ("train", "validation"):
        with pytest.raises(ValueError, match="the paper trains on dci"):
            data.part(split)


def test_long_dci_needs_both_lists(folder):
    (folder / "datasets" / "DCI_segment_sim_bbox_del_org.json").unlink()
    with pytest.raises(ValueError, match=r"test: DCI_segment_sim_bbox_del_org.json \(.*\), from .*GOAL") as caught:
        open_benchmark("long-dci", folder)
    assert "DCI_test.json" not in str(caught.value)


def test_only_long_dci_holds_out(folder):
    data = open_benchmark("dci", folder, counts=COUNTS)
    assert held_out("dci", data) is None
    assert held_out("scenes/park", data) is None


def test_published_counts(folder):
    for name, count in (("dci", "1,999"), ("long-dci", "7,444")):
        with pytest.raises(ValueError, match=f"split test must have {count} records"):
            open_benchmark(name, folder, splits={"test"})


def test_official_splits(official):
    data = open_benchmark("dci/official", official, counts=OFFICIAL)
    assert data.splits() == OFFICIAL
    assert [record.id for record in data.part("validation")] == ["sa_4"]
    record = data.part("test")[0]
    assert record.captions == ("Long of 5.",)
    assert record.short == "Short of 5"
    assert record.regions == (
        Region((1, 0, 5, 3), "A door of wood."),
        Region((0, 0, 6, 4), "As on the page."),
    )
    assert record.image.load().size == (6, 4)


def test_annotations_may_be_the_other_directory(official):
    home = official / "densely_captioned_images"
    (home / "complete").rename(home / "annotations")
    assert open_benchmark("dci/official", official, counts=OFFICIAL).splits() == OFFICIAL


def test_short_caption_stands_in_for_an_empty_long_one(official):
    file = official / "densely_captioned_images" / "complete" / "5-data.json"
    write_json(file, annotation(5, extra_caption=" "))
    assert open_benchmark("dci/official", official, counts=OFFICIAL).part("test")[0].captions == ("Short of 5",)
    write_json(file, annotation(5, short_caption=" "))
    assert open_benchmark("dci/official", official, counts=OFFICIAL).part("test")[0].short is None
    write_json(file, annotation(5, extra_caption=None, short_caption=""))
    with pytest.raises(ValueError, match=r"empty caption, .*5-data.json"):
        open_benchmark("dci/official", official, counts=OFFICIAL)


@pytest.mark.parametrize("bounds", [None, {}, {"topLeft": 3}, [1, 2], [["a", 0], [1, 1]], "text", [[0, 0]]])
def test_masks_without_usable_bounds_are_no_regions(official, bounds):
    mask = {"caption": "Something.", "bounds": bounds}
    write_json(
        official / "densely_captioned_images" / "complete" / "5-data.json", annotation(5, mask_data={"0": mask, "1": 3})
    )
    assert open_benchmark("dci/official", official, counts=OFFICIAL).part("test")[0].regions == ()


def test_missing_and_damaged_annotations_are_named(official):
    home = official / "densely_captioned_images"
    (home / "complete" / "5-data.json").unlink()
    (home / "complete" / "6-data.json").write_text('{"image": ')
    write_json(home / "complete" / "4-data.json", ["a list"])
    with pytest.raises(ValueError, match="gives 0") as caught:
        open_benchmark("dci/official", official, splits={"test"}, counts=OFFICIAL)
    assert "5-data.json: the annotation file does not exist" in str(caught.value)
    assert "6-data.json is not valid JSON" in str(caught.value)
    with pytest.raises(ValueError, match=r"gives 0\n  unusable rows, 1: unreadable row, .*4-data.json: a list, not an"):
        open_benchmark("dci/official", official, splits={"validation"}, counts=OFFICIAL)
    assert open_benchmark("dci/official", official, splits={"train"}, counts=OFFICIAL).splits() == {"train": 3}


def test_splits_file_of_another_kind_is_an_error(official):
    write_json(official / "densely_captioned_images" / "splits.json", {"train": []})
    with pytest.raises(ValueError, match=r"splits.json has no list 'valid'"):
        open_benchmark("dci/official", official, splits={"validation"}, counts=OFFICIAL)
