"""The protocol: one loop for all models and data, what is left out is counted, what is compared is paired."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

import hnclip.evaluate.protocol as protocol
from hnclip.config import ReadConfig
from hnclip.core import Record
from hnclip.data.records import DataSet
from hnclip.data.scenes import scene_records
from hnclip.data.validate import ValidRecords
from hnclip.evaluate.protocol import Task, comparisons, evaluate_models, evaluate_task, open_task
from hnclip.evaluate.queries import read_queries
from hnclip.evaluate.retrieval import evaluate, prepare_gallery
from hnclip.evaluate.sweep import sweep
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load

READ = ReadConfig()


@pytest.fixture(scope="module")
def model(model_directory: Path) -> DualEncoder:
    return load(model_directory)


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return scene_records("park", "test", families=5)


@pytest.fixture
def table(tmp_path: Path, records: list[Record]) -> Path:
    """Ten pictures as files, and a CSV of their captions without splits."""
    with (tmp_path / "data.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "caption"])
        for number, record in enumerate(records[:10]):
            record.image.load().save(tmp_path / f"{number}.png")
            writer.writerow([f"{number}.png", record.captions[0]])
    return tmp_path / "data.csv"


def task_of(records: list[Record], name: str = "some", **changes: object) -> Task:
    return Task(DataSet(name, tuple(records), **changes), "test", tuple(records))  # type: ignore[arg-type]


def test_the_default_split_is_the_test_split_or_everything(table: Path) -> None:
    assert (open_task(str(table), None, READ).split, len(open_task(str(table), None, READ).records)) == ("all", 10)
    assert open_task("scenes/park", None, READ).split == "test"
    assert len(open_task("scenes/shelf", "validation", READ).records) == 400
    with pytest.raises(ValueError, match="has no split 'test'"):
        open_task(str(table), "test", READ)


def test_a_result_holds_the_numbers_of_a_plain_evaluation(model: DualEncoder, records: list[Record]) -> None:
    found = evaluate_task("mine", model, task_of(records), READ, batch=7)
    plain = evaluate(model, prepare_gallery(records, model), intervals=True)
    assert found.metrics == plain.metrics.to_dict()
    assert (found.model, found.data, found.split, found.images, found.skipped) == ("mine", "some", "test", 20, 0)
    assert found.held_out is None


def test_a_table_of_files_gives_the_numbers_of_its_records(
    model: DualEncoder, records: list[Record], table: Path
) -> None:
    """The same pictures through PNG files, the CSV reader and the cache."""
    from_files = evaluate_task("m", model, open_task(str(table), None, READ), READ)
    ungrouped = [replace(record, group=None) for record in records[:10]]
    assert from_files.metrics == evaluate_task("m", model, task_of(ungrouped), READ).metrics


def test_what_cannot_be_used_is_left_out_counted_and_limited(model: DualEncoder, table: Path) -> None:
    (table.parent / "3.png").write_bytes(b"damaged")
    task = open_task(str(table), None, READ)
    with pytest.raises(ValueError, match="1 of 10 records"):
        evaluate_task("m", model, task, READ)
    found = evaluate_task("m", model, task, ReadConfig(max_bad=0.1))
    assert (found.images, found.skipped) == (9, 1)
    exact = replace(task, data=replace(task.data, exact=True))
    with pytest.raises(ValueError, match="none"):
        evaluate_task("m", model, exact, ReadConfig(max_bad=0.1))


def test_held_out_records_are_reported_beside_the_whole(
    model: DualEncoder, records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = frozenset(record.id for record in records[:8])
    monkeypatch.setattr(protocol, "held_out", lambda name, data: apart if name == "long-dci" else None)
    found = evaluate_task("m", model, task_of(records, "long-dci"), READ)
    alone = evaluate_task("m", model, task_of(records[:8]), READ)
    assert found.held_out == alone.metrics
    both = evaluate_models([("a", lambda: model), ("b", lambda: model)], [task_of(records, "long-dci")], READ)
    assert [compared.held_out for compared in comparisons(both)] == [False, False, True, True]
    assert found.metrics["image_to_text"]["queries"] == 20


def test_every_model_meets_every_task_and_is_compared_with_the_first(
    model: DualEncoder, records: list[Record], tmp_path: Path
) -> None:
    opened: list[str] = []

    def opens(name: str):
        return name, lambda: opened.append(name) or model

    tasks = [task_of(records, "one"), task_of(records[:8], "two/three")]
    results = evaluate_models([opens("a"), opens("b")], tasks, READ, queries=tmp_path, top=3)
    assert opened == ["a", "b", "a", "b"]  # first to see what each of them can use
    assert [(r.model, r.data) for r in results.results] == [
        ("a", "one"),
        ("a", "two/three"),
        ("b", "one"),
        ("b", "two/three"),
    ]
    compared = comparisons(results)
    assert [(found.data, found.model, found.against, found.held_out) for found in compared] == [
        (data, "b", "a", False) for data in ("one", "two/three") for _ in range(2)
    ]
    for found in compared:  # the same model twice: no difference at all
        assert found.comparison.difference.mean == 0
        assert not found.comparison.clear
    names = ["1-1-one-test.jsonl", "1-2-two-three-test.jsonl", "2-1-one-test.jsonl", "2-2-two-three-test.jsonl"]
    assert sorted(file.name for file in tmp_path.iterdir()) == [*names, "index.json"]
    index = json.loads((tmp_path / "index.json").read_text())
    assert index[names[1]] == {"model": "a", "data": "two/three", "split": "test"}
    queries = read_queries(tmp_path / names[1])
    assert [query.rank for query in queries if query.direction == "image_to_text"] == (
        results.results[1].queries.ranks.image_to_text.tolist()  # type: ignore[union-attr]
    )


def test_models_are_compared_on_the_records_that_all_of_them_can_use(
    model: DualEncoder, records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two models cannot use another record; the counts are the same, the pairs would be wrong."""
    original, turns = protocol.drop_invalid, iter([3, 7, None, None])

    def drop(found: tuple[Record, ...], *arguments: object, **options: object) -> ValidRecords:
        lost = next(turns)
        kept = original(found, *arguments, **options)  # type: ignore[arg-type]
        return replace(kept, records=tuple(r for r in kept.records if lost is None or r.id != records[lost].id))

    monkeypatch.setattr(protocol, "drop_invalid", drop)
    results = evaluate_models([("a", lambda: model), ("b", lambda: model)], [task_of(records)], ReadConfig(max_bad=0.2))
    for found in results.results:
        assert (found.images, found.skipped) == (18, 2)
        assert found.queries is not None
        assert found.queries.ids == tuple(r.id for i, r in enumerate(records) if i not in (3, 7))


def test_one_family_or_one_picture_has_numbers_but_no_intervals(model: DualEncoder, records: list[Record]) -> None:
    for few in (records[:4], records[:1]):
        found = evaluate_task("m", model, task_of(few), READ)
        assert "R@1" in found.metrics["text_to_image"]
        assert "R@1_interval" not in found.metrics["text_to_image"]
    both = evaluate_models([("a", lambda: model), ("b", lambda: model)], [task_of(records[:4])], READ)
    assert comparisons(both) == []


def test_rows_that_cannot_be_read_are_counted_and_limited(model: DualEncoder, table: Path) -> None:
    with table.open("a", encoding="utf-8") as file:
        file.write("10.png,\n")
    with pytest.raises(ValueError, match="1 of 11 rows"):
        open_task(str(table), None, READ)
    lenient = ReadConfig(max_bad=0.1)
    assert evaluate_task("m", model, open_task(str(table), None, lenient), lenient).unread == 1


def test_names_that_come_twice_are_refused_before_anything_is_opened(records: list[Record]) -> None:
    def never() -> DualEncoder:
        pytest.fail("opened")

    one, task = ("a", never), task_of(records)
    with pytest.raises(ValueError, match="the model a is named twice"):
        evaluate_models([one, one], [task], READ)
    with pytest.raises(ValueError, match="the data set some test is named twice"):
        evaluate_models([one], [task, task], READ)


def test_a_sweep_names_models_and_data(model: DualEncoder, table: Path) -> None:
    found = sweep([(0.5, model)], [str(table)], ReadConfig(validation_share=0.5), batch=4)
    assert found[0.5][str(table)]["text_to_image"]["queries"] == 5


def test_pictures_that_are_not_there_are_named(model: DualEncoder, table: Path) -> None:
    Image.new("RGB", (4, 4)).save(table.parent / "spare.png")
    for number in range(10):
        (table.parent / f"{number}.png").unlink()
    with pytest.raises(ValueError, match=r"10 of 10 .*\n  missing image: 0\.png"):
        evaluate_task("m", model, open_task(str(table), None, READ), READ)


def test_a_damaged_training_list_is_not_in_the_way_of_the_test_split(tmp_path: Path) -> None:
    numbers = [("qual_test", 100), ("test", 5000)]
    rows = [
        {"filename": f"elsewhere/{split}_{number:05}.jpg", "caption": f"{split} {number}"}
        for split, count in numbers
        for number in range(count)
    ]
    (tmp_path / "docci_test.json").write_text(json.dumps(rows))
    (tmp_path / "docci_train_del_org.json").write_text("[{")
    task = open_task(f"docci={tmp_path}", None, READ)
    assert (task.data.name, task.split, len(task.records)) == ("docci", "test", 5100)
    with pytest.raises(ValueError, match="docci_train_del_org"):
        open_task(f"docci={tmp_path}", "train", READ)


def test_declared_splits_can_be_set_aside(table: Path) -> None:
    lines = table.read_text(encoding="utf-8").splitlines()
    split = [lines[0] + ",split", *(f"{line},{'test' if n < 3 else 'val'}" for n, line in enumerate(lines[1:]))]
    table.write_text("\n".join(split), encoding="utf-8")
    assert len(open_task(str(table), None, READ).records) == 3
    aside = ReadConfig(splits=False)
    assert (open_task(str(table), None, aside).split, len(open_task(str(table), None, aside).records)) == ("all", 10)
    assert len(open_task(str(table), "train", aside).records) == 8
