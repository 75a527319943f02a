from __future__ import annotations

import pytest
from small_copies import list_rows, segment, train_row, write_json, write_picture

from hnclip.core import Region
from hnclip.data.benchmarks import BENCHMARKS, open_benchmark
from hnclip.data.benchmarks.rows import base_name, stem
from hnclip.data.readers.segments import box_of


def dci_test(folder, names=("sa_1.jpg", "sa_2.jpg")):
    write_json(folder / "DCI_test.json", list_rows(list(names)))
    return folder


def test_the_table_of_benchmarks():
    paper = {"docci": 5_100, "dci": 1_999, "long-dci": 7_444, "urban-1k": 1_000}  # the paper's table S1
    assert {name: BENCHMARKS[name].counts["test"] for name in paper} == paper
    assert (BENCHMARKS["docci"].counts["train"], BENCHMARKS["dci"].counts["train"]) == (9_450, 5_445)
    assert BENCHMARKS["long-dci"].counts["test"] == sum(BENCHMARKS["dci"].counts.values())
    assert sum(BENCHMARKS["docci/official"].counts.values()) == 14_847
    assert sum(BENCHMARKS["dci/official"].counts.values()) == 7_805
    assert sum(BENCHMARKS["sharegpt4v"].counts.values()) == 1_246_901
    for name, benchmark in BENCHMARKS.items():
        assert benchmark.name == name
        assert benchmark.title
        assert benchmark.licence
        assert benchmark.page.startswith("https://")
        assert all(file.name and file.what and file.origin for file in benchmark.files)
        assert len(set(benchmark.files)) == len(benchmark.files) > 0


def test_optional_files_are_listed_too():
    assert [file.name for file in BENCHMARKS["docci"].files] == [
        "docci_segment_sim_bbox_del_org.json",
        "docci_descriptions.jsonlines",
        "docci_test.json",
        "docci_metadata.jsonlines",
    ]


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no benchmark is called 'coco'; known: docci, docci/official, dci"):
        open_benchmark("coco", tmp_path)
    with pytest.raises(ValueError, match="dci has no split 'dev'; it has train, test"):
        open_benchmark("dci", tmp_path, splits={"dev"})
    with pytest.raises(ValueError, match="dci has no split 'validation'; it has train, test"):
        open_benchmark("dci", tmp_path, counts={"validation": 3})


@pytest.mark.parametrize("name", BENCHMARKS)
def test_an_empty_folder_lacks_every_file_of_every_split(tmp_path, name):
    benchmark = BENCHMARKS[name]
    with pytest.raises(ValueError, match=rf"^{name} in .* lacks files") as caught:
        open_benchmark(name, tmp_path)
    for file in benchmark.files:
        assert (str(file) in str(caught.value)) == (file not in benchmark.optional)
    for split in benchmark.splits:
        assert split in str(caught.value)


def test_only_what_was_asked_for_is_required(tmp_path):
    dci_test(tmp_path)
    assert open_benchmark("dci", tmp_path, splits={"test"}, counts={"test": 2}).splits() == {"test": 2}
    with pytest.raises(ValueError, match=r"lacks files .*\n  train: DCI_segment_sim_bbox_del_org.json") as caught:
        open_benchmark("dci", tmp_path, splits={"train", "test"}, counts={"test": 2})
    assert "DCI_test.json" not in str(caught.value)


def test_a_split_that_was_not_asked_for_is_not_made_up(tmp_path):
    write_json(tmp_path / "dci_train.json", list_rows([f"sa_{n}.jpg" for n in range(9)]))
    data = open_benchmark("dci", dci_test(tmp_path, ["sa_9.jpg"]), splits={"test"}, counts={"test": 1})
    with pytest.raises(ValueError, match="dci has no split 'validation' here: it was not read, only test"):
        data.part("validation")


def test_folder_by_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("HNCLIP_DATA", raising=False)
    with pytest.raises(ValueError, match=r"where is dci/official\? .*dci/official=FOLDER, or set HNCLIP_DATA .* dci$"):
        open_benchmark("dci/official", None)
    monkeypatch.setenv("HNCLIP_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=r"HNCLIP_DATA is .*, which holds no dci; name the folder, dci=FOLDER"):
        open_benchmark("dci", None)
    (tmp_path / "dci").mkdir()
    dci_test(tmp_path / "dci")
    assert len(open_benchmark("dci", None, counts={"test": 2}).records) == 2


def test_long_dci_lies_in_the_folder_of_dci(tmp_path, monkeypatch):
    monkeypatch.setenv("HNCLIP_DATA", str(tmp_path))
    with pytest.raises(ValueError, match="holds no long-dci or dci"):
        open_benchmark("long-dci", None)
    (tmp_path / "dci").mkdir()
    write_json(dci_test(tmp_path / "dci") / "dci_train.json", list_rows(["sa_3.jpg"]))
    assert len(open_benchmark("long-dci", None, counts={"test": 3}).records) == 3
    (tmp_path / "long-dci").mkdir()
    with pytest.raises(ValueError, match=r"long-dci in \S+/long-dci lacks files"):
        open_benchmark("long-dci", None)


def test_places_that_do_not_exist(tmp_path):
    with pytest.raises(ValueError, match="nowhere is not a directory"):
        open_benchmark("dci", tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"nothing.* does not exist"):
        open_benchmark("dci", dci_test(tmp_path), tmp_path / "nothing", counts={"test": 2})


def test_a_file_that_lies_twice_below_is_not_guessed(tmp_path):
    dci_test(tmp_path / "a")
    dci_test(tmp_path / "b")
    with pytest.raises(ValueError, match=r"DCI_test.json lies in .* more than once: .*a/DCI_test.json and .*b/"):
        open_benchmark("dci", tmp_path, counts={"test": 2})
    dci_test(tmp_path)
    assert len(open_benchmark("dci", tmp_path, counts={"test": 2}).records) == 2


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b'[{"filename": ', "DCI_test.json is not valid JSON: Expecting value: line 1"),
        (
            b'[{"filename": "a.jpg", "caption": "Stra\xdfe"}]',
            r"gives 0\n  unusable rows, 1: bad text, .*DCI_test.json:\[0\]: .*byte 0xdf",
        ),
        (b'"text"', "DCI_test.json holds a JSON str, not a list of objects"),
        (b'{"rows": []}', "DCI_test.json holds a JSON object with the keys 'rows'"),
        (b"[" * 100_000, "DCI_test.json is not valid JSON"),
    ],
)
def test_damaged_files_are_named(tmp_path, content, told):
    (tmp_path / "DCI_test.json").write_bytes(content)
    with pytest.raises(ValueError, match=told):
        open_benchmark("dci", tmp_path, counts={"test": 2})


def test_a_count_without_any_reason_asks_for_the_file(tmp_path):
    dci_test(tmp_path, ["sa_1.jpg", "sa_4.jpg"])  # these numbers have gaps as published
    with pytest.raises(ValueError, match=r"must have 1,999 records, but .* gives 2; is the file complete"):
        open_benchmark("dci", tmp_path)


def test_problems_of_a_split_with_the_right_count_are_kept(tmp_path):
    rows = [*list_rows(["sa_1.jpg", "sa_2.jpg"]), {"filename": "sa_3.jpg"}]
    write_json(tmp_path / "DCI_test.json", rows)
    data = open_benchmark("dci", tmp_path, counts={"test": 2})
    assert [(problem.kind, problem.detail) for problem in data.problems] == [
        ("no caption", "has no original_caption or caption")
    ]


@pytest.mark.parametrize("place", ["/data1/wh/DCI/photos/", "F:\\Study\\photos\\", "", "./", "a b/"])
def test_paths_of_other_machines_come_down_to_base_names(tmp_path, place):
    write_json(tmp_path / "DCI_test.json", list_rows(["sa_1.jpg", "sa_2.jpg"], place))
    for name in ("sa_1.jpg", "sa_2.jpg"):
        write_picture(tmp_path / "photos" / name)
    data = open_benchmark("dci", tmp_path, counts={"test": 2})
    assert [record.id for record in data.records] == ["sa_1", "sa_2"]
    assert [record.image.load().size for record in data.records] == [(6, 4), (6, 4)]


def test_segments_without_box_or_sentence_are_no_regions(tmp_path):
    good = segment("A wall", 20.0, (0, 1, 3, 4))
    unscored = {**segment("A door", 0.0, (1, 1, 2, 2)), "similarity_score": None}
    bad = [
        "text",
        {**good, "caption": " "},
        {**good, "caption": None},
        {**good, "bbox_coordinates": None},
        {**good, "bbox_coordinates": {"x1": 0, "y1": 0, "x2": 4}},
        segment("Inside out", 40.0, (3, 3, 1, 1)),
    ]
    rows = [train_row("sa_1.jpg", unscored, *bad, good), train_row("sa_2.jpg"), {**train_row("sa_3.jpg"), "segment": 5}]
    write_json(tmp_path / "dci_train.json", rows)
    records = open_benchmark("dci", tmp_path, splits={"train"}, counts={"train": 3}).records
    assert records[0].regions == (Region((0, 1, 3, 4), "A wall", 20.0), Region((1, 1, 2, 2), "A door"))
    assert [record.regions for record in records[1:]] == [(), ()]


def test_names_and_boxes():
    assert [base_name(path) for path in ("a/b.jpg", "C:\\a\\b.jpg", "b.jpg", "a/")] == ["b.jpg", "b.jpg", "b.jpg", ""]
    assert [stem(path) for path in ("a/b.c.jpg", "b", "x/.hidden")] == ["b.c", "b", ".hidden"]
    assert box_of(0, 1.9, 5, 2.0) == (0, 1, 5, 2)
    for corners in [(0, 0, 0, 1), (0, 0, 1), (0, 0, None, 1), (0, 0, float("nan"), 1), (0, 0, float("inf"), 1)]:
        assert box_of(*corners) is None
