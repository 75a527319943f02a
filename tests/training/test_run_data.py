"""The data of a run: captions by epoch, invalid records, duplicates, splits, fractions, clusters."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from small import config_for, options_for, scenes

import hnclip.training.data as run_data
from hnclip.config import ObjectiveConfig, ReadConfig, TrainConfig
from hnclip.core import Problem, Record
from hnclip.data.image_sources import FileImage
from hnclip.data.records import DataSet, fraction_of
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load
from hnclip.objectives.registry import apply_method, build_objective
from hnclip.training.data import RunData, batch_sizes, open_run_data
from hnclip.training.runs import train

RECORDS = scenes().records  # 32 for training, 20 for validation


@pytest.fixture(scope="module")
def model(model_directory: Path) -> DualEncoder:
    return load(model_directory)


@pytest.fixture
def config(model_directory: Path) -> TrainConfig:
    return config_for(model_directory)


@pytest.fixture
def opened(model: DualEncoder, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunData]:
    """The data of a run on these records; `others` are sources by name."""

    def opened(config: TrainConfig, records: tuple[Record, ...] = RECORDS, **others: tuple[Record, ...]) -> RunData:
        sources = {name: DataSet(name, tuple(found)) for name, found in others.items()}
        monkeypatch.setattr(run_data, "open_data", lambda source, read, splits: sources[source])
        data = DataSet("scenes/park", tuple(records))
        return open_run_data(config, model, build_objective(config.objective), data)

    return opened


def seen(data: RunData, config: TrainConfig, epoch: int) -> list[list[tuple[int, int]]]:
    """The ids of image and caption of every pair of an epoch, by batch."""
    pairs, batches = data.batches(config, epoch)
    return [[tuple(row) for row in pairs.batch(rows).ids.tolist()] for rows in batches]  # type: ignore[misc]


def test_every_epoch_uses_another_caption_of_each_image(config: TrainConfig, opened: Callable) -> None:
    data = opened(config, [replace(record, captions=(*record.captions, str(record.short))) for record in RECORDS])
    epochs = [{pair for batch in seen(data, config, epoch) for pair in batch} for epoch in (0, 1)]
    for epoch in epochs:
        assert {image for image, _ in epoch} == set(range(32))
    assert not epochs[0] & epochs[1]
    assert len(data.validation.captions) == 40  # all of them count in evaluation


def test_equal_captions_lose_no_pair(config: TrainConfig, opened: Callable) -> None:
    """Every pair is used in every epoch, however often its caption repeats; equal ids let the loss mask duplicates."""
    repeated = [replace(r, captions=("one for many",)) if i < 20 else r for i, r in enumerate(RECORDS)]
    data = opened(config, repeated)
    for epoch in (0, 1):
        images, captions = zip(*(pair for batch in seen(data, config, epoch) for pair in batch))
        assert sorted(images) == list(range(32))
        assert sorted(Counter(captions).values())[-1] == 20
    unmasked = opened(replace(config, objective=ObjectiveConfig(mask_duplicates=False)), repeated)
    assert len({caption for batch in seen(unmasked, config, 0) for _, caption in batch}) == 32


def test_copies_under_other_names_have_the_ids_of_duplicates(
    config: TrainConfig, opened: Callable, tmp_path: Path
) -> None:
    """Files with the same bytes, and captions that are equal to the tokenizer."""
    copies = []
    for number, record in enumerate(RECORDS[:8]):
        for name in "ab":
            record.image.load().save(tmp_path / f"{number}{name}.png")
            caption = record.captions[0].upper() if name == "b" else record.captions[0]
            image = FileImage(tmp_path / f"{number}{name}.png")
            copies.append(replace(record, id=f"{number}{name}", image=image, captions=(caption,)))
    data = opened(config, [*copies, *RECORDS[8:]])
    assert len(data.pairs) == 40
    assert len({pair for batch in seen(data, config, 0) for pair in batch}) == 32


def test_invalid_records_are_skipped_listed_and_counted(
    config: TrainConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 broken")
    bad = [
        replace(RECORDS[0], id="broken", image=FileImage(tmp_path / "broken.jpg")),
        replace(RECORDS[1], id="gone", image=FileImage(tmp_path / "gone.jpg")),
        replace(RECORDS[40], id="silent", captions=(" ",)),
    ]
    data = DataSet("mine", (*bad, *RECORDS[2:]), (Problem("unreadable row", "line 9", "not JSON"),))
    options = options_for(tmp_path / "run")
    for limit, message in ((0.01, "1 of 54 rows"), (0.03, "3 of 53 records")):
        with pytest.raises(ValueError, match=message):
            train(replace(config, read=ReadConfig(max_bad=limit)), options, data=data)
    assert not (options.out / "config.json").exists()
    config = replace(config, read=ReadConfig(max_bad=0.1), optim=replace(config.optim, epochs=1))
    train(config, options, data=data)
    lines = (options.out / "left_out.jsonl").read_text().splitlines()
    assert [(json.loads(line)["kind"], json.loads(line)["where"]) for line in lines] == [
        ("unreadable row", "line 9"),
        ("truncated image", "broken"),
        ("missing image", "gone"),
        ("empty caption", "silent"),
    ]
    assert any("left_out.jsonl" in line for line in caplog.messages)


def test_an_invalid_caption_among_valid_ones_costs_no_record(config: TrainConfig, opened: Callable) -> None:
    data = opened(config, [replace(record, captions=(*record.captions, " ")) for record in RECORDS])
    assert (len(data.pairs), len(data.pairs.owner), len(data.problems)) == (32, 32, 52)


def test_validation_records(config: TrainConfig, opened: Callable) -> None:
    """Another source, with or without splits, or a share of unsplit data; a fraction concerns training alone."""
    unsplit = [replace(record, split=None, group=None) for record in RECORDS]
    for name, count in (("other", 8), ("split", 20)):
        data = opened(replace(config, validation=name), unsplit[:32], other=unsplit[32:40], split=RECORDS[30:])
        assert (len(data.pairs), len(data.validation.records)) == (32, count)
    half = opened(replace(config, validation="other", fraction=0.5), unsplit[:32], other=unsplit[32:40])
    assert (len(half.pairs), len(half.validation.records)) == (16, 8)
    held_out = opened(replace(config, read=ReadConfig(validation_share=0.25)), unsplit)
    assert (len(held_out.pairs), len(held_out.validation.records)) == (39, 13)


def test_a_fraction_is_of_the_training_pairs(config: TrainConfig, opened: Callable) -> None:
    """Before the limit, and the same for another seed and another order of the records."""
    chosen = [record.id for record in fraction_of(RECORDS[:32], 0.25)]
    brief = replace(config, fraction=0.25)

    def ids(config: TrainConfig, records: tuple[Record, ...] = RECORDS) -> set[str]:
        return {record.id for record in opened(config, records).pairs.records}

    assert len(chosen) == 8
    assert ids(brief) == ids(replace(brief, seed=7), RECORDS[::-1]) == set(chosen)
    assert ids(replace(brief, limit=3)) == set(chosen[:3])
    with pytest.raises(ValueError, match="--fraction"):
        opened(replace(brief, fraction=0.01))


def test_clusters_bring_near_duplicates_into_one_batch(config: TrainConfig, opened: Callable) -> None:
    """Families share most words, so their captions are similar even to an untrained encoder."""

    def together(config: TrainConfig) -> float:
        batches = seen(opened(config), config, 0)
        pairs = [(a[0] // 4 == b[0] // 4) for batch in batches for i, a in enumerate(batch) for b in batch[:i]]
        return sum(pairs) / len(pairs)

    assert together(replace(config, cluster=4)) > 2 * together(config)


def test_batches_in_order_of_length_where_negatives_are_those_of_the_batch(
    config: TrainConfig, opened: Callable
) -> None:
    data = opened(config)
    batch = replace(config, optim=replace(config.optim, negatives="batch"))
    lengths = data.pairs.texts["caption"].lengths
    for plain, ordered in zip(data.batches(config, 0)[1], data.batches(batch, 0)[1], strict=True):
        assert sorted(plain) == sorted(ordered)
        assert [lengths[row] for row in ordered] == sorted(lengths[row] for row in plain)
    assert batch_sizes(33, config) == [8, 8, 8, 9]


def test_validation_images_that_are_training_images_are_counted(
    config: TrainConfig, opened: Callable, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Under another name, from another source; and captions that are truncated."""
    copies, files = [], []
    for number, record in enumerate(RECORDS[:3]):
        paths = [tmp_path / f"{name}{number}.png" for name in ("one", "two")]
        for path in paths:
            record.image.load().save(path)
        files.append(replace(record, image=FileImage(paths[0])))
        long = replace(
            record, id=f"copy{number}", split=None, image=FileImage(paths[1]), captions=("a red house " * 99,)
        )
        copies.append(long)
    opened(replace(config, validation="other"), [*files, *RECORDS[3:32]], other=copies)
    for words in ("3 of 3 validation images are", "3 of 3 validation captions are truncated", "4 optimiser steps"):
        assert any(words in line for line in caplog.messages)


def test_the_fingerprint_covers_views(model: DualEncoder, config: TrainConfig, opened: Callable) -> None:
    """Other short or filtered captions are other data."""
    config = apply_method(config, "structxlip", "corrected")
    marks = {
        opened(config, [replace(record, **change) for record in RECORDS]).fingerprint
        for change in ({}, {"short": "another"}, {"filtered": ("other words",)})
    }
    assert len(marks) == 3
