"""The data of a run: captions by epoch, invalid records, duplicates, splits, fractions, clusters, and further views."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small import config_for, options_for, scenes, train_scenes

import hnclip.training.data as run_data
from hnclip.cli import main
from hnclip.config import ObjectiveConfig, ReadConfig, TrainConfig
from hnclip.core import Problem, Record, Region
from hnclip.data.image_sources import FileImage
from hnclip.data.lexicon import filter_caption
from hnclip.data.records import DataSet, fraction_of
from hnclip.data.scenes import scene_records
from hnclip.encode.loop import encode_captions
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load
from hnclip.objectives.base import Objective
from hnclip.objectives.registry import apply_method, build_objective
from hnclip.training.data import RunData, add_views, batch_sizes, needed_views, open_run_data

RECORDS = scenes().records  # 32 for training, 20 for validation
Opened = Callable[..., RunData]


@pytest.fixture(scope="module")
def model(model_directory: Path) -> DualEncoder:
    return load(model_directory)


@pytest.fixture
def config(model_directory: Path) -> TrainConfig:
    return config_for(model_directory)


@pytest.fixture
def opened(model: DualEncoder, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """The data of a run on these records; `others` are sources by name."""

    def opened(config: TrainConfig, records: Sequence[Record] = RECORDS, **others: Sequence[Record]) -> RunData:
        sources = {name: DataSet(name, tuple(found)) for name, found in others.items()}
        monkeypatch.setattr(run_data, "open_data", lambda source, read, splits: sources[source])
        return open_run_data(config, model, build_objective(config.objective), DataSet("scenes/park", tuple(records)))

    return opened


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="hnclip")


def seen(data: RunData, config: TrainConfig, epoch: int) -> list[list[tuple[int, int]]]:
    """The ids of image and caption of every pair of an epoch, by batch."""
    pairs, batches = data.batches(config, epoch)
    return [[tuple(row) for row in pairs.batch(rows).ids.tolist()] for rows in batches]  # type: ignore[misc]


def test_every_epoch_uses_another_caption_of_each_image(config: TrainConfig, opened: Opened) -> None:
    """An invalid caption costs no record, and in evaluation all captions count."""
    data = opened(config, [replace(r, captions=(*r.captions, str(r.short), " ")) for r in RECORDS])
    epochs = [{pair for batch in seen(data, config, epoch) for pair in batch} for epoch in (0, 1)]
    for epoch in epochs:
        assert {image for image, _ in epoch} == set(range(32))
    assert not epochs[0] & epochs[1]
    assert (len(data.validation.captions), len(data.problems)) == (40, 52)


def test_equal_captions_lose_no_pair(config: TrainConfig, opened: Opened) -> None:
    """Every pair is used in every epoch, however often its caption repeats; equal ids let the loss mask duplicates."""
    repeated = [replace(r, captions=("one for many",)) if i < 20 else r for i, r in enumerate(RECORDS)]
    data = opened(config, repeated)
    for epoch in (0, 1):
        images, captions = zip(*(pair for batch in seen(data, config, epoch) for pair in batch))
        assert sorted(images) == list(range(32))
        assert sorted(Counter(captions).values())[-1] == 20
    unmasked = opened(replace(config, objective=ObjectiveConfig(mask_duplicates=False)), repeated)
    assert len({caption for batch in seen(unmasked, config, 0) for _, caption in batch}) == 32


def copies_of(records: Sequence[Record], folder: Path, name: str) -> list[Record]:
    """The same images and captions under other ids and in other files."""
    files = [folder / f"{name}{number}.png" for number in range(len(records))]
    for record, file in zip(records, files):
        record.image.load().save(file)
    return [replace(r, id=file.name, image=FileImage(file)) for r, file in zip(records, files)]


def test_duplicates_under_other_names_have_equal_ids(
    config: TrainConfig, opened: Opened, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Files with the same bytes, and captions that are equal to the tokenizer. In validation they are counted."""
    first, second = (copies_of(RECORDS[:8], tmp_path, name) for name in ("one", "two"))
    upper = [replace(record, captions=(record.captions[0].upper(),)) for record in second]
    data = opened(config, [*first, *upper, *RECORDS[8:]])
    assert len(data.pairs) == 40
    assert len({pair for batch in seen(data, config, 0) for pair in batch}) == 32
    long = [replace(record, split=None, captions=("a red house " * 99,)) for record in second]
    opened(replace(config, validation="other"), [*first, *RECORDS[8:32]], other=long)
    for words in ("8 of 8 validation images are", "8 of 8 validation captions are truncated", "4 optimiser steps"):
        assert any(words in line for line in caplog.messages)


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
            train_scenes(replace(config, read=ReadConfig(max_bad=limit)), options, data=data)
    assert not options.out.exists()
    train_scenes(replace(config, read=ReadConfig(max_bad=0.2), limit=8), options, data=data)
    lines = [json.loads(line) for line in (options.out / "left_out.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["where"]) for line in lines] == [
        ("unreadable row", "line 9"),
        ("truncated image", "broken"),
        ("missing image", "gone"),
        ("empty caption", "silent"),
    ]
    assert any("left_out.jsonl" in line for line in caplog.messages)


def test_validation_records_and_fractions(config: TrainConfig, opened: Opened) -> None:
    """Another source, with or without splits, or a share of unsplit data; a fraction concerns training alone, before
    the limit, and is the same for another seed and another order of the records."""
    unsplit = [replace(record, split=None, group=None) for record in RECORDS]

    def sizes(config: TrainConfig, *arguments: Sequence[Record], **others: Sequence[Record]) -> tuple[int, int]:
        data = opened(config, *arguments, **others)
        return len(data.pairs), len(data.validation.records)

    assert sizes(replace(config, validation="other"), unsplit[:32], other=unsplit[32:40]) == (32, 8)
    assert sizes(replace(config, validation="other"), unsplit[:32], other=RECORDS[30:]) == (32, 20)
    assert sizes(replace(config, validation="other", fraction=0.5), unsplit[:32], other=unsplit[32:40]) == (16, 8)
    assert sizes(replace(config, read=ReadConfig(validation_share=0.25)), unsplit) == (39, 13)

    chosen, brief = [record.id for record in fraction_of(RECORDS[:32], 0.25)], replace(config, fraction=0.25)

    def ids(config: TrainConfig, records: Sequence[Record] = RECORDS) -> set[str]:
        return {record.id for record in opened(config, records).pairs.records}

    assert ids(brief) == ids(replace(brief, seed=7), RECORDS[::-1]) == set(chosen)
    assert ids(replace(brief, limit=3)) == set(chosen[:3])
    with pytest.raises(ValueError, match="--fraction"):
        opened(replace(brief, fraction=0.01))


def test_clusters_put_near_duplicates_into_one_batch(config: TrainConfig, opened: Opened) -> None:
    """Families share most words, so their captions are similar even to an untrained encoder."""

    def together(config: TrainConfig) -> float:
        batches = seen(opened(config), config, 0)
        pairs = [(a[0] // 4 == b[0] // 4) for batch in batches for i, a in enumerate(batch) for b in batch[:i]]
        return sum(pairs) / len(pairs)

    assert together(replace(config, cluster=4)) > 2 * together(config)


def test_frozen_margins_come_from_the_initial_encoder(config: TrainConfig, opened: Opened, model: DualEncoder) -> None:
    frozen = opened(replace(config, objective=ObjectiveConfig(margin_source="frozen", token_weight=0.0)))
    assert frozen.pairs.margin_text is not None
    expected = encode_captions(model, model.text_transform([record.captions[0] for record in RECORDS[:32]]))
    torch.testing.assert_close(frozen.pairs.margin_text, expected, atol=2e-6, rtol=0)


def test_batches_are_in_order_of_length_with_negatives_from_the_batch(config: TrainConfig, opened: Opened) -> None:
    data = opened(config)
    batch = replace(config, optim=replace(config.optim, negatives="batch"))
    lengths = data.pairs.texts["caption"].lengths
    for plain, ordered in zip(data.batches(config, 0)[1], data.batches(batch, 0)[1], strict=True):
        assert sorted(plain) == sorted(ordered)
        assert [lengths[row] for row in ordered] == sorted(lengths[row] for row in plain)
    assert batch_sizes(33, config) == [8, 8, 8, 9]


def test_the_fingerprint_covers_views(config: TrainConfig, opened: Opened) -> None:
    """Other short or filtered captions are other data."""
    config = apply_method(config, "structxlip", "corrected")
    changes = ({}, {"short": "another"}, {"filtered": ("other words",)})
    assert len({opened(config, [replace(r, **change) for r in RECORDS]).fingerprint for change in changes}) == 3  # type: ignore[arg-type]


# Views that methods need ----------------------------------------------------------------------------------------


@pytest.fixture
def records() -> list[Record]:
    return scene_records("park", "train", families=2)


def objective_of(method: str, **changes: object) -> Objective:
    return build_objective(ObjectiveConfig(method=method, token_weight=0.0, **changes))  # type: ignore[arg-type]


def completed(method: str, records: Sequence[Record], **read: object) -> tuple[Record, ...]:
    objective = ObjectiveConfig(method=method, token_weight=0.0)  # type: ignore[arg-type]
    config = TrainConfig(data="somewhere.json", read=ReadConfig(**read), objective=objective)  # type: ignore[arg-type]
    return add_views(config, records, objective_of(method))


@pytest.mark.parametrize(
    ("method", "left_out", "needs"),
    [
        ("long_clip", (), set()),
        ("finelip", (), set()),
        ("smartclip", (), set()),
        ("goal", (), {"regions"}),
        ("structxlip", (), {"regions", "text"}),
        ("goal", ("local", "patch", "text"), set()),
        ("structxlip", ("structure", "chunks"), set()),
    ],
)
def test_views_that_methods_need(
    method: str, left_out: tuple[str, ...], needs: set[str], records: list[Record]
) -> None:
    """Terms with weight zero need none."""
    changes = {"weights": dict.fromkeys(left_out, 0.0)} if left_out else {}
    assert needed_views(objective_of(method, **changes)) == needs
    if not needs and not left_out:
        assert completed(method, records) == tuple(records)


def test_records_without_filtered_captions_get_them(records: list[Record]) -> None:
    made = completed("structxlip", records)
    for before, after in zip(records, made):
        assert after.regions == before.regions
        assert len(after.filtered) == len(before.captions)
        assert len(after.filtered[0]) < len(before.captions[0])
    own = replace(records[0], filtered=("own words",))
    assert completed("structxlip", [own, *records[1:]]) == (replace(made[0], filtered=("own words",)), *made[1:])


def test_missing_regions_are_an_error_that_names_the_command(
    records: list[Record], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bare = [replace(record, regions=()) for record in records]
    with pytest.raises(ValueError, match="hnclip prepare regions somewhere"):
        completed("goal", bare)
    completed("goal", [replace(bare[0], regions=(Region((0, 0, 9, 9), "a corner"),)), *bare[1:]])
    assert f"1 of {len(records)} training records have regions" in caplog.messages
    with pytest.raises(ValueError, match="does not exist"):
        completed("goal", records, prepared=str(tmp_path / "none"))


def test_prepared_captions_are_used_for_unchanged_records(
    records: list[Record], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If some records have changed, these get the default; if all have, that is an error."""
    command = ["prepare", "text", "scenes/park/small", "--filter", "lexicon:colours", "--out", str(tmp_path), "--quiet"]
    assert main(command) == 0
    caplog.set_level("INFO", logger="hnclip")  # which the command has raised
    found = completed("structxlip", records, prepared=str(tmp_path))
    assert found[0].filtered == (filter_caption(records[0].captions[0], ["colours"]),)
    assert any("lexicon:colours" in line for line in caplog.messages)
    changed = [replace(record, captions=("A red car.",)) for record in records]
    partly = completed("structxlip", [*records[:1], *changed[1:]], prepared=str(tmp_path))
    assert partly[0] == found[0]
    assert partly[1].filtered == (filter_caption("A red car."),)
    with pytest.raises(ValueError, match="changed"):
        completed("structxlip", changed, prepared=str(tmp_path))
    completed("goal", changed, prepared=str(tmp_path))  # needs no text
