"""The data of a run: captions by epoch, invalid records, duplicates, splits, fractions, clusters, and further views."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from small import config_for, options_for, scenes, train_scenes

import hnclip.training.data as run_data
from hnclip.cli import main
from hnclip.config import ObjectiveConfig, ReadConfig, TrainConfig
from hnclip.core import Problem, Record
from hnclip.data.image_sources import FileImage
from hnclip.data.lexicon import filter_caption
from hnclip.data.records import DataSet, fraction_of
from hnclip.data.scenes import scene_records
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load
from hnclip.objectives.registry import build_objective
from hnclip.training.data import RunData, add_views, open_run_data

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
    assert (len(data.validation.owner), len(data.problems)) == (40, 52)


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


def test_duplicates_under_other_names_have_equal_ids(
    config: TrainConfig, opened: Opened, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Files with the same bytes, and captions that are equal to the tokenizer. In validation they are counted."""
    caplog.set_level("INFO", logger="hnclip")
    copies = []
    for number, record in enumerate([*RECORDS[:8], *RECORDS[:8]]):
        file = tmp_path / f"{number}.png"
        record.image.load().save(file)
        captions = (record.captions[0].upper(),) if number >= 8 else record.captions
        copies.append(replace(record, id=file.name, image=FileImage(file), captions=captions))
    data = opened(config, [*copies, *RECORDS[8:]])
    assert len(data.pairs) == 40
    assert len({pair for batch in seen(data, config, 0) for pair in batch}) == 32
    unsplit = [replace(record, split=None) for record in copies[8:]]
    opened(replace(config, validation="other"), [*copies[:8], *RECORDS[8:32]], other=unsplit)
    assert any("8 of 8 validation images are" in line for line in caplog.messages)


def test_invalid_records_are_skipped_listed_and_counted(config: TrainConfig, tmp_path: Path) -> None:
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
    kinds = ["unreadable row", "truncated image", "missing image", "empty caption"]
    assert [line["kind"] for line in lines] == kinds


def test_validation_records_and_fractions(config: TrainConfig, opened: Opened) -> None:
    """Another source, with or without splits, or a share of unsplit data; a fraction concerns training alone, before
    the limit, and is the same for another seed and another order of the records."""
    unsplit = [replace(record, split=None, group=None) for record in RECORDS]
    other, shared = replace(config, validation="other"), replace(config, read=ReadConfig(validation_share=0.25))
    for data, expected in (
        (opened(other, unsplit[:32], other=unsplit[32:40]), (32, 8)),
        (opened(other, unsplit[:32], other=RECORDS[30:]), (32, 20)),
        (opened(replace(other, fraction=0.5), unsplit[:32], other=unsplit[32:40]), (16, 8)),
        (opened(shared, unsplit), (39, 13)),
    ):
        assert (len(data.pairs), len(data.validation.records)) == expected
    chosen, brief = [record.id for record in fraction_of(RECORDS[:32], 0.25)], replace(config, fraction=0.25)
    for data in (opened(brief), opened(replace(brief, seed=7), RECORDS[::-1])):
        assert {record.id for record in data.pairs.records} == set(chosen)
    assert [record.id for record in opened(replace(brief, limit=3)).pairs.records] == chosen[:3]
    with pytest.raises(ValueError, match="--fraction"):
        opened(replace(brief, fraction=0.01))


# Views that methods need ----------------------------------------------------------------------------------------


@pytest.fixture
def records() -> list[Record]:
    return scene_records("park", "train", families=2)


def completed(method: str, records: Sequence[Record], **read: object) -> tuple[Record, ...]:
    objective = ObjectiveConfig(method=method, token_weight=0.0)  # type: ignore[arg-type]
    config = TrainConfig(data="somewhere.json", read=ReadConfig(**read), objective=objective)  # type: ignore[arg-type]
    return add_views(config, records, build_objective(objective))


def test_prepared_captions_are_used_for_unchanged_records(records: list[Record], tmp_path: Path) -> None:
    """If some records have changed, these get the default; if all have, that is an error."""
    command = ["prepare", "text", "scenes/park/small", "--filter", "lexicon:colours", "--read.prepared", str(tmp_path)]
    command += ["--quiet"]
    assert main(command) == 0
    found = completed("structxlip", records, prepared=str(tmp_path))
    assert found[0].filtered == (filter_caption(records[0].captions[0], ["colours"]),)
    changed = [replace(record, captions=("A red car.",)) for record in records]
    partly = completed("structxlip", [*records[:1], *changed[1:]], prepared=str(tmp_path))
    assert partly[0] == found[0]
    assert partly[1].filtered == (filter_caption("A red car."),)
    with pytest.raises(ValueError, match="changed"):
        completed("structxlip", changed, prepared=str(tmp_path))
    with pytest.raises(ValueError, match="hnclip prepare regions somewhere"):
        completed("goal", [replace(record, regions=()) for record in records])
    completed("goal", changed, prepared=str(tmp_path))  # needs no text
