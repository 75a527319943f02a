"""Evaluation of models on records: one protocol, invalid records skipped and counted, what is compared is paired."""

from __future__ import annotations

import csv
from collections.abc import Sequence
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
from hnclip.evaluation.compare import read_queries
from hnclip.evaluation.retrieval import (
    Task,
    comparisons,
    drop_unusable,
    evaluate,
    evaluate_models,
    evaluate_task,
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


def test_invalid_records_and_rows_are_skipped_counted_and_limited(model: DualEncoder, table: Path) -> None:
    """The held-out ids are those of all test records, of which one has no valid image."""
    (table.parent / "3.png").write_bytes(b"damaged")
    task, lenient = open_task(str(table), None, READ), ReadConfig(max_bad=0.1)
    assert (task.split, len(task.records)) == ("all", 10)
    with pytest.raises(ValueError, match="1 of 10 records"):
        drop_unusable(task, model, READ)
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
    """Long-DCI's test records have names of their own, and are compared a second time without the others."""
    named = [replace(record, id=f"{'test' if i < 8 else 'train'}/{i}") for i, record in enumerate(records)]
    tasks, opened = [task_of(records, "one"), task_of(named, "long-dci")], []
    models = [(name, lambda name=name: opened.append(name) or model) for name in "ab"]
    results = evaluate_models(models, tasks, READ, queries=tmp_path)
    assert opened == ["a", "b"]
    assert [(r.model, r.data) for r in results] == [(name, task.data.name) for name in "ab" for task in tasks]
    assert results[1].to_dict()["held_out"] == evaluate_task("m", model, task_of(named[:8]), READ).metrics
    found = [(one.result.data, one.result.model, one.held_out) for one in comparisons(results)]
    assert found == [(data, "b", part) for data, part in (("one", 0), ("long-dci", 0), ("long-dci", 1)) for _ in "ti"]
    ranks = [query.rank for query in read_queries(tmp_path / "1-2-long-dci-test.jsonl")]
    assert ranks == [*results[1].ranks.text_to_image.tolist(), *results[1].ranks.image_to_text.tolist()]
    with pytest.raises(ValueError, match="model a"):
        evaluate_models([models[0], models[0]], tasks, READ)


def test_models_are_compared_on_the_records_that_all_of_them_can_use(
    model_directory: Path, records: list[Record]
) -> None:
    """Model a cannot use record 4, model b cannot use record 7 and one caption of record 9."""

    def without(*unknown: str) -> DualEncoder:
        model = load(model_directory)
        validate = model.text_transform.validate

        def strict(captions: Sequence[str]) -> list[str | None]:
            return ["unknown" if text in unknown else reason for text, reason in zip(captions, validate(captions))]

        object.__setattr__(model.text_transform, "validate", strict)
        return model

    first = ("a", lambda: without(*records[4].captions))
    second = ("b", lambda: without(*records[7].captions, records[9].captions[1]))
    results = evaluate_models([first, second], [task_of(records)], ReadConfig(max_bad=0.2))
    for found in results:
        assert (found.images, found.captions, found.skipped) == (18, 24, 2)
        assert found.ids == tuple(record.id for i, record in enumerate(records) if i not in (4, 7))
    assert all(found.comparison.difference.mean == 0 for found in comparisons(results))
