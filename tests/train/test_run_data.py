"""The data of a run, in the loop: several captions, bad records, batches without doubles, clusters."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hnclip.train.loop as loop
import hnclip.train.run_data as run_data
from hnclip.config import ObjectiveConfig, OptimConfig, ReadConfig, RunOptions, TrainConfig
from hnclip.core import Batch, Problem, Record
from hnclip.data.batching import PairData, prepare
from hnclip.data.image_sources import FileImage
from hnclip.data.records import DataSet, fraction_of
from hnclip.data.scenes import scene_records
from hnclip.models.load import load
from hnclip.train.log import read_metrics
from hnclip.train.loop import resume, train

Seen = list[list[tuple[int, int]]]


@pytest.fixture
def config(model_directory: Path) -> TrainConfig:
    return TrainConfig(model=str(model_directory), optim=OptimConfig(epochs=2, micro_batch=4, accumulate=2, lr=1e-3))


@pytest.fixture
def options(tmp_path: Path) -> RunOptions:
    return RunOptions(out=tmp_path / "run", device="cpu", threads=1, save_every=2)


@pytest.fixture
def scenes() -> list[Record]:
    return [*scene_records("park", "train", families=8, members=4), *scene_records("park", "validation", families=5)]


@pytest.fixture
def prepared(scenes: list[Record], model_directory: Path) -> PairData:
    model = load(str(model_directory))
    return prepare(scenes[:16], model.text_transform, model.image_transform)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let `--data` open these records."""

    def use(records: list[Record], problems: tuple[Problem, ...] = (), **others: list[Record]) -> None:
        sources = {"scenes/park": DataSet("scenes/park", tuple(records), problems)}
        sources |= {name: DataSet(name, tuple(found)) for name, found in others.items()}
        monkeypatch.setattr(run_data, "open_data", lambda source, read, splits: sources[source])

    return use


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The picture and caption identities of every batch that reaches a step."""
    batches: Seen = []
    original = loop.Run._step

    def watched(self: loop.Run, epoch: int, batch: Batch, **others: float) -> dict:
        batches.append([tuple(row) for row in batch.ids.tolist()])
        return original(self, epoch, batch, **others)

    monkeypatch.setattr(loop.Run, "_step", watched)
    return batches


@pytest.fixture(autouse=True)
def messages(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="hnclip")


def test_every_epoch_shows_another_caption_of_each_picture(
    config: TrainConfig,
    options: RunOptions,
    scenes: list[Record],
    use: Callable,
    seen: Seen,
    caplog: pytest.LogCaptureFixture,
) -> None:
    use([replace(record, captions=(*record.captions, str(record.short))) for record in scenes])
    train(config, options)
    epochs = [{pair for batch in part for pair in batch} for part in (seen[:4], seen[4:])]
    assert [len(epoch) for epoch in epochs] == [32, 32]
    for epoch in epochs:
        assert {picture for picture, _ in epoch} == set(range(32))
    assert not epochs[0] & epochs[1]
    assert any("32 training pairs with 64 captions, one of each image in an epoch," in line for line in caplog.messages)
    (entry,) = read_metrics(options.out, "data")
    assert entry["captions"] == 64
    assert entry["validation_captions"] == 40  # all of them count in evaluation


def test_a_stopped_run_goes_on_with_the_same_captions_and_batches(
    config: TrainConfig,
    options: RunOptions,
    scenes: list[Record],
    use: Callable,
    seen: Seen,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the middle of an epoch, with several captions, clusters and frozen margins."""
    use([replace(record, captions=(*record.captions, str(record.short))) for record in scenes])
    config = replace(config, cluster=3, objective=ObjectiveConfig(margin_source="frozen"))
    train(config, options)
    whole = list(seen)
    seen.clear()
    with monkeypatch.context() as patch:
        patch.setattr(loop.Run, "_save", stop_after(loop.Run._save))
        with pytest.raises(KeyboardInterrupt):
            train(config, replace(options, out=options.out.with_name("stopped")))
    resume(options.out.with_name("stopped"))
    assert seen == whole
    first, second = (
        torch.load(options.out.with_name(name) / "checkpoint.pt", weights_only=True) for name in ("run", "stopped")
    )
    for name, value in first["model"].items():
        assert torch.equal(value, second["model"][name])


def stop_after(save: Callable) -> Callable:
    def saved(self: loop.Run) -> None:
        save(self)
        raise KeyboardInterrupt

    return saved


def test_duplicates_lose_no_pair(
    config: TrainConfig, options: RunOptions, scenes: list[Record], use: Callable, seen: Seen
) -> None:
    """Every pair is used in every epoch, however often its caption repeats; equal ids let the loss mask duplicates."""
    use([replace(record, captions=("one for many",)) if i < 20 else record for i, record in enumerate(scenes)])
    train(config, options)
    for epoch in (seen[:4], seen[4:]):
        images, captions = zip(*(pair for batch in epoch for pair in batch))
        assert sorted(images) == list(range(32))
        assert len(set(captions)) == 13


def test_bad_records_are_left_out_listed_and_counted(
    config: TrainConfig,
    options: RunOptions,
    scenes: list[Record],
    use: Callable,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 broken")
    bad = [
        replace(scenes[0], id="broken", image=FileImage(tmp_path / "broken.jpg")),
        replace(scenes[1], id="gone", image=FileImage(tmp_path / "gone.jpg")),
        replace(scenes[40], id="silent", captions=(" ",)),
    ]
    use([*bad, *scenes[2:]], (Problem("unreadable row", "line 9", "not JSON"),))
    with pytest.raises(ValueError, match=r"1 of 54 rows of scenes/park are invalid.*--read\.max-bad"):
        train(config, options)
    with pytest.raises(ValueError, match=r"3 of 53 records of scenes/park are invalid.*--read\.max-bad"):
        train(replace(config, read=ReadConfig(max_bad=0.03)), options)
    assert not (options.out / "config.json").exists()
    train(replace(config, read=ReadConfig(max_bad=0.1)), options)
    lines = (options.out / "left_out.jsonl").read_text().splitlines()
    assert [(json.loads(line)["kind"], json.loads(line)["where"]) for line in lines] == [
        ("unreadable row", "line 9"),
        ("truncated image", "broken"),
        ("missing image", "gone"),
        ("empty caption", "silent"),
    ]
    assert any(line.startswith("4 problems in the data") for line in caplog.messages)
    (entry,) = read_metrics(options.out, "data")
    assert (entry["pairs"], entry["problems"]) == (30, 4)


def test_a_bad_caption_beside_good_ones_costs_no_record(
    config: TrainConfig, options: RunOptions, scenes: list[Record], use: Callable
) -> None:
    use([replace(record, captions=(*record.captions, " ")) for record in scenes])
    train(config, options)
    (entry,) = read_metrics(options.out, "data")
    assert (entry["pairs"], entry["captions"], entry["problems"]) == (32, 32, 52)


def test_a_run_is_not_resumed_on_other_data(
    config: TrainConfig, options: RunOptions, scenes: list[Record], use: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A picture that was there when the run began is gone: another order, so other batches under the same steps."""
    use(scenes)
    with monkeypatch.context() as patch:
        patch.setattr(loop.Run, "_save", stop_after(loop.Run._save))
        with pytest.raises(KeyboardInterrupt):
            train(config, options)
    use(scenes[1:])
    with pytest.raises(ValueError, match=r"has seen 32 pairs, 20 validation.*there are 31 pairs, 20 validation"):
        resume(options.out)
    use(scenes)
    resume(options.out)
    assert [entry["step"] for entry in read_metrics(options.out, "step")] == list(range(1, 9))


def test_copies_under_other_names_have_the_ids_of_duplicates(
    config: TrainConfig, options: RunOptions, scenes: list[Record], use: Callable, seen: Seen, tmp_path: Path
) -> None:
    """Files with the same bytes, and captions that a tokenizer cannot tell apart."""
    copies = []
    for number, record in enumerate(scenes[:8]):
        for name in "ab":
            record.image.load().save(tmp_path / f"{number}{name}.png")
            caption = record.captions[0].upper() if name == "b" else record.captions[0]
            image = FileImage(tmp_path / f"{number}{name}.png")
            copies.append(replace(record, id=f"{number}{name}", image=image, captions=(caption,)))
    use([*copies, *scenes[8:]])
    train(config, options)
    pairs = {pair for batch in seen for pair in batch}
    assert len(pairs) == 32  # 8 of 40 pairs have the image and the caption of another


def test_a_source_of_its_own_for_validation(
    config: TrainConfig, options: RunOptions, scenes: list[Record], use: Callable
) -> None:
    unsplit = [replace(record, split=None) for record in scenes]
    use(unsplit[:32], other=unsplit[32:40], split=scenes[30:])
    for name, pictures in (("other", 8), ("split", 20)):
        out = options.out.with_name(name)
        train(replace(config, validation=name), replace(options, out=out))
        (entry,) = read_metrics(out, "data")
        assert (entry["pairs"], entry["validation_captions"]) == (32, pictures)


def test_unsplit_data_hold_out_a_share(
    config: TrainConfig, options: RunOptions, scenes: list[Record], use: Callable
) -> None:
    use([replace(record, split=None, group=None) for record in scenes])
    train(replace(config, read=ReadConfig(validation_share=0.25)), options)
    (entry,) = read_metrics(options.out, "data")
    assert (entry["pairs"], entry["validation_captions"]) == (39, 13)


def test_clusters_bring_near_duplicates_into_one_batch(
    config: TrainConfig, options: RunOptions, scenes: list[Record], use: Callable, seen: Seen
) -> None:
    """Families share most words, so even an untrained encoder finds them alike."""

    def together() -> float:
        pairs = [(a[0] // 4 == b[0] // 4) for batch in seen for i, a in enumerate(batch) for b in batch[:i]]
        return sum(pairs) / len(pairs)

    use(scenes)
    train(config, options)
    random = together()
    seen.clear()
    train(replace(config, cluster=4), replace(options, out=options.out.with_name("clusters")))
    assert together() > 2 * random


def test_validation_pictures_that_training_shows_too_are_counted(
    config: TrainConfig,
    options: RunOptions,
    scenes: list[Record],
    use: Callable,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Under another name, from another source."""
    copies = []
    for number, record in enumerate(scenes[:3]):
        for name in ("one", "two"):
            record.image.load().save(tmp_path / f"{name}{number}.png")
        copies.append(replace(record, id=f"copy{number}", split=None, image=FileImage(tmp_path / f"two{number}.png")))
    files = [replace(r, image=FileImage(tmp_path / f"one{n}.png")) for n, r in enumerate(scenes[:3])]
    use([*files, *scenes[3:32]], other=[*copies, *(replace(record, split=None) for record in scenes[40:])])
    train(replace(config, validation="other"), options)
    assert "3 of 15 validation images are training images too" in caplog.messages


def test_like_lengths_come_together_where_negatives_are_the_whole_batchs(prepared: PairData) -> None:
    lengths = [len(prepared.texts["caption"][int(row)]) for row in prepared.chosen]
    rows = list(range(len(prepared)))[::-1]
    optim = OptimConfig(negatives="batch")
    ordered = run_data.length_order(prepared, rows, optim)
    assert sorted(ordered) == sorted(rows)
    assert [lengths[row] for row in ordered] == sorted(lengths)
    assert len(set(lengths)) > 1
    assert run_data.length_order(prepared, rows, OptimConfig(negatives="micro")) == rows


def test_several_processes_get_short_and_long_captions_alike(
    prepared: PairData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_data, "world_size", lambda: 2)
    lengths = [len(prepared.texts["caption"][int(row)]) for row in prepared.chosen]
    ordered = run_data.length_order(prepared, range(len(prepared)), OptimConfig(negatives="batch"))
    half = len(ordered) // 2
    first, second = ([lengths[row] for row in part] for part in (ordered[:half], ordered[half:]))
    assert first == sorted(first)
    assert second == sorted(second)
    assert all(a <= b for a, b in zip(first, second))
    assert all(b <= a for a, b in zip(first[1:], second))


def test_a_fraction_is_of_the_training_pairs_alone(
    config: TrainConfig, options: RunOptions, scenes: list[Record], use: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the limit, of the training split only, and the same for another seed and another order of the records."""
    use(scenes)
    chosen = {record.id for record in fraction_of(scenes[:32], 0.25)}
    brief = replace(config, optim=replace(config.optim, epochs=1), fraction=0.25)
    train(brief, options)
    assert "25 % of the training pairs, by their ids: 8 of 32" in caplog.messages
    (entry,) = read_metrics(options.out, "data")
    assert (entry["pairs"], entry["validation_captions"]) == (8, 20)

    def pairs(config: TrainConfig, records: list[Record]) -> set[str]:
        data, _, _ = run_data._records(config, DataSet("scenes/park", tuple(records)))
        return {record.id for record in data}

    assert pairs(brief, scenes) == chosen
    assert pairs(replace(brief, seed=7), scenes[::-1]) == chosen
    assert pairs(replace(brief, limit=3), scenes) == {record.id for record in fraction_of(scenes[:32], 0.25)[:3]}
    with pytest.raises(ValueError, match="at least 2: raise --fraction"):
        train(replace(brief, fraction=0.01), replace(options, out=options.out.with_name("none")))


def test_a_fraction_beside_a_source_for_validation(
    config: TrainConfig, options: RunOptions, scenes: list[Record], use: Callable
) -> None:
    unsplit = [replace(record, split=None) for record in scenes]
    use(unsplit[:32], other=unsplit[32:40])
    train(replace(config, validation="other", fraction=0.5, optim=replace(config.optim, epochs=1)), options)
    (entry,) = read_metrics(options.out, "data")
    assert (entry["pairs"], entry["validation_captions"]) == (16, 8)


@pytest.mark.parametrize(
    ("steps", "images", "named"),
    [
        (9, 50, ["9 optimiser steps"]),
        (10, 49, ["49 validation"]),
        (1, 2, ["1 optimiser", "2 validation"]),
        (10, 50, []),
    ],
)
def test_data_that_are_too_small_to_compare_runs_on(steps: int, images: int, named: list[str]) -> None:
    reason = run_data.too_small(steps, images)
    assert (reason is not None) == bool(named)
    assert all(part in reason for part in named)
