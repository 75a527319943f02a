"""Evaluation of models on records: one protocol, invalid records skipped and counted, what is compared is paired."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_galleries import gallery_of, tied_vectors

from hnclip.config import ReadConfig
from hnclip.core import Record
from hnclip.data.records import DataSet
from hnclip.data.scenes import scene_records
from hnclip.data.texts import TextTransform
from hnclip.evaluation.compare import read_queries
from hnclip.evaluation.retrieval import (
    Task,
    comparisons,
    drop_unusable,
    evaluate,
    evaluate_models,
    evaluate_task,
    group_numbers,
    open_task,
    prepare_gallery,
    rank_gallery,
)
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load

READ = ReadConfig()


@pytest.fixture(scope="module")
def model(model_directory: Path) -> DualEncoder:
    return load(model_directory)


@pytest.fixture(scope="module")
def records() -> list[Record]:
    """Twenty images in five groups; every third has a second caption, its short one."""
    found = scene_records("park", "test", families=5)
    return [
        replace(record, captions=(*record.captions, str(record.short))) if index % 3 == 0 else record
        for index, record in enumerate(found)
    ]


@pytest.fixture
def table(tmp_path: Path, records: list[Record]) -> Path:
    """Ten images as files, and a CSV of their captions without splits."""
    with (tmp_path / "data.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "caption"])
        for number, record in enumerate(records[:10]):
            record.image.load().save(tmp_path / f"{number}.png")
            writer.writerow([f"{number}.png", record.captions[0]])
    return tmp_path / "data.csv"


def task_of(records: list[Record], name: str = "some", **changes: object) -> Task:
    return Task(DataSet(name, tuple(records), **changes), "test", tuple(records))  # type: ignore[arg-type]


def test_every_caption_is_encoded_and_belongs_to_its_image(model: DualEncoder, records: list[Record]) -> None:
    gallery = prepare_gallery(records, model)
    assert gallery.owner.tolist()[:9] == [0, 0, 1, 2, 3, 3, 4, 5, 6]
    found = evaluate(model.train(), gallery, batch=5)  # dropout is on; evaluation must switch it off and back on
    assert model.training
    other = evaluate(model, gallery, batch=100)
    torch.testing.assert_close(other.text, found.text, atol=1e-6, rtol=0)
    scores = found.text @ found.image.T
    for row, owner in enumerate(gallery.owner):
        assert found.ranks.text_to_image[row] == (scores[row] >= scores[row, owner] - 1e-6).sum()


def test_a_result_holds_names_counts_and_numbers(model: DualEncoder, records: list[Record]) -> None:
    long = [replace(records[0], captions=("a red house " * 200,)), *records[1:]]
    found = evaluate_task("mine", model, task_of(long), READ, batch=7)
    assert found.metrics == evaluate(model, prepare_gallery(long, model), intervals=True).metrics
    assert found.groups.tolist() == [i // 4 for i in range(20)]
    values = json.loads(json.dumps(found.to_dict()))
    assert [values[key] for key in ("model", "data", "split", "images", "captions", "truncated_captions")] == [
        "mine", "some", "test", 20, 26, 1
    ]  # fmt: skip
    plain = evaluate_task("mine", model, task_of(records), READ, intervals=False)
    assert "R@1_interval" not in plain.metrics["text_to_image"]
    for empty in ([], [replace(records[0], captions=(" ",))]):
        with pytest.raises(ValueError, match="empty"):
            prepare_gallery(empty, model)


def test_one_group_or_one_image_has_numbers_but_no_intervals(model: DualEncoder, records: list[Record]) -> None:
    for few in (records[:4], records[:1]):
        both = evaluate_models([("a", lambda: model), ("b", lambda: model)], [task_of(few)], READ)
        assert "R@1" in both[0].metrics["text_to_image"]
        assert "R@1_interval" not in both[0].metrics["text_to_image"]
        assert comparisons(both) == []
    assert group_numbers([replace(record, group=None) for record in records]).tolist() == list(range(20))


@settings(deadline=None)
@given(tied_vectors(), st.data())
def test_a_held_out_part_equals_an_evaluation_of_the_part_alone(vectors, data):
    image, text, owner = vectors
    kept = sorted(data.draw(st.sets(st.integers(0, len(image) - 1), min_size=1)))
    found = rank_gallery(image, text, gallery_of(owner), held_out={"unknown", *(f"r{i}" for i in kept)}).held_out
    rows = [t for t, own in enumerate(owner.tolist()) if own in kept]
    part = gallery_of(torch.tensor([kept.index(int(owner[t])) for t in rows]))
    alone = rank_gallery(image[kept], text[rows], part)
    assert all(torch.equal(getattr(found.ranks, name), getattr(alone.ranks, name)) for name in vars(alone.ranks))
    assert found.ids == tuple(f"r{i}" for i in kept)
    assert found.metrics == alone.metrics


def test_benchmarks_name_their_held_out_records(model: DualEncoder, records: list[Record]) -> None:
    named = [replace(record, id=f"{'test' if i < 8 else 'train'}/{i}") for i, record in enumerate(records)]
    task = task_of(named, "long-dci")
    both = evaluate_models([("a", lambda: model), ("b", lambda: model)], [task], READ)
    assert both[0].to_dict()["held_out"] == evaluate_task("m", model, task_of(named[:8]), READ).metrics
    assert [compared.held_out for compared in comparisons(both)] == [False, False, True, True]


def test_the_default_split_is_the_test_split_or_everything(table: Path) -> None:
    task = open_task(str(table), None, READ)
    assert (task.split, len(task.records)) == ("all", 10)
    with pytest.raises(ValueError, match="test"):
        open_task(str(table), "test", READ)
    lines = table.read_text(encoding="utf-8").splitlines()
    split = [lines[0] + ",split", *(f"{line},{'test' if n < 3 else 'val'}" for n, line in enumerate(lines[1:]))]
    table.write_text("\n".join(split), encoding="utf-8")
    assert len(open_task(str(table), None, READ).records) == 3
    assert open_task(str(table), None, ReadConfig(splits=False)).split == "all"


def test_invalid_records_and_rows_are_skipped_counted_and_limited(model: DualEncoder, table: Path) -> None:
    """The held-out ids are those of all test records, of which one has no valid image."""
    (table.parent / "3.png").write_bytes(b"damaged")
    task, lenient = open_task(str(table), None, READ), ReadConfig(max_bad=0.1)
    exact = replace(task, data=replace(task.data, exact=True))
    for strict, read in ((task, READ), (exact, lenient)):
        with pytest.raises(ValueError, match="1 of 10 records"):
            drop_unusable(strict, model, read)
    with table.open("a", encoding="utf-8") as file:
        file.write("10.png,\n")
    with pytest.raises(ValueError, match="1 of 11 rows"):
        open_task(str(table), None, READ)
    held_out = frozenset(record.id for record in task.records[2:6])
    task = drop_unusable(open_task(str(table), None, lenient), model, lenient)
    found = evaluate_task("m", model, task, lenient, held_out=held_out)
    assert (found.images, found.skipped, found.unread) == (9, 1, 1)
    assert found.held_out is not None
    assert found.held_out.ids == tuple(record.id for record in task.records[2:5])


def test_every_model_is_opened_once_and_compared_with_the_first(
    model: DualEncoder, records: list[Record], tmp_path: Path
) -> None:
    opened: list[str] = []

    def opens(name: str):
        return name, lambda: opened.append(name) or model

    tasks = [task_of(records, "one"), task_of(records[:8], "two/three")]
    similar = {"pairwise": 0.5, "hardest": 0.9}
    results = evaluate_models(
        [opens("a"), opens("b")], tasks, READ, queries=tmp_path, top=3, caption_similarity=lambda text, owner: similar
    )
    assert opened == ["a", "b"]
    assert [(r.model, r.data) for r in results] == [(name, data) for name in "ab" for data in ("one", "two/three")]
    assert all(r.to_dict()["caption_similarity"] == similar for r in results)
    compared = [(found.result.data, found.result.model, found.against.model) for found in comparisons(results)]
    assert compared == [(data, "b", "a") for data in ("one", "two/three") for _ in range(2)]
    names = ["1-1-one-test.jsonl", "1-2-two-three-test.jsonl", "2-1-one-test.jsonl", "2-2-two-three-test.jsonl"]
    assert sorted(file.name for file in tmp_path.iterdir()) == [*names, "index.json"]
    index = json.loads((tmp_path / "index.json").read_text())
    assert index[names[1]] == {"model": "a", "data": "two/three", "split": "test"}
    ranks = [query.rank for query in read_queries(tmp_path / names[1]) if query.direction == "image_to_text"]
    assert ranks == results[1].ranks.image_to_text.tolist()


class Strict(TextTransform):
    """A tokenizer without some words."""

    def __init__(self, like: TextTransform, unknown: set[str]) -> None:
        vars(self).update(vars(like))
        self.unknown = unknown

    def validate(self, captions):  # type: ignore[no-untyped-def]
        found = super().validate(captions)
        return ["unknown" if caption in self.unknown else reason for caption, reason in zip(captions, found)]


def test_models_are_compared_on_the_records_that_all_of_them_can_use(
    model_directory: Path, records: list[Record], tmp_path: Path
) -> None:
    """Model a cannot use record 4, model b cannot use record 7 and one caption of record 9."""
    opened: list[str] = []

    def opens(name: str, *unknown: str):
        def load_it() -> DualEncoder:
            opened.append(name)
            model = load(model_directory)
            model.text_transform = Strict(model.text_transform, set(unknown))
            return model

        return name, load_it

    first = opens("a", *records[4].captions)
    second = opens("b", *records[7].captions, records[9].captions[1])
    results = evaluate_models([first, second], [task_of(records)], ReadConfig(max_bad=0.2), queries=tmp_path)
    assert opened == ["a", "b", "a"]  # a once more without what b cannot use
    for found in results:
        assert (found.images, found.captions, found.skipped) == (18, 24, 2)
        assert found.ids == tuple(record.id for i, record in enumerate(records) if i not in (4, 7))
    files = [read_queries(path) for path in sorted(tmp_path.glob("*.jsonl"))]
    assert [len(file) for file in files] == [42, 42]
    assert all(found.comparison.difference.mean == 0 for found in comparisons(results))


def test_a_name_given_twice_is_refused_before_anything_is_opened(records: list[Record]) -> None:
    one, task = ("a", lambda: pytest.fail("opened")), task_of(records)
    for models, tasks, twice in (([one, one], [task], "model a"), ([one], [task, task], "data set some test")):
        with pytest.raises(ValueError, match=twice):
            evaluate_models(models, tasks, READ)


def test_a_damaged_training_list_does_not_prevent_evaluation(tmp_path: Path) -> None:
    rows = [
        {"filename": f"elsewhere/{split}_{number:05}.jpg", "caption": f"{split} {number}"}
        for split, count in (("qual_test", 100), ("test", 5000))
        for number in range(count)
    ]
    (tmp_path / "docci_test.json").write_text(json.dumps(rows))
    (tmp_path / "docci_train_del_org.json").write_text("[{")
    assert len(open_task(f"docci={tmp_path}", None, READ).records) == 5100
    with pytest.raises(ValueError, match="docci_train_del_org"):
        open_task(f"docci={tmp_path}", "train", READ)
