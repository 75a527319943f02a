"""Runs and results on disk: they are read as they were written, and a changed file is never taken for a result."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from study_data import write_pairs

from hnclip.config import RunOptions, TrainConfig, with_fields
from hnclip.evaluate.ranks import Ranks
from hnclip.evaluate.retrieval import EvaluationResult
from hnclip.models.load import load
from hnclip.studies.plan import Plan, plan
from hnclip.studies.store import Store, read_result, read_sealed, write_result, write_sealed
from hnclip.studies.spec import Domain, Setting, Study, Variant
from hnclip.util.files import Busy
from hnclip.train.runs import train

SHORT = {"optim.epochs": 1, "optim.micro_batch": 4, "optim.accumulate": 1, "optim.precision": "fp32"}
ALONE = {"objective.token_weight": 0.0}
INFONCE = Variant("InfoNCE", method="hn_clip", global_loss="infonce", set=ALONE)
OPTIONS = RunOptions(threads=1, device="cpu")


def result(images: int = 20, seed: int = 0, held_out: EvaluationResult | None = None) -> EvaluationResult:
    generator = torch.Generator().manual_seed(seed)
    owner = torch.arange(images).repeat_interleave(2)
    ranks = Ranks(*(torch.randint(1, 9, (count,), generator=generator) for count in (2 * images, images)), owner)
    ids = tuple(f'画像 "{number}"\n' for number in range(images))
    metrics = {"mean_R@1": 1 / 3, "text_to_image": {"R@1": 0.1}}
    return EvaluationResult(ranks, torch.arange(images) // 2, ids, metrics, data="données", held_out=held_out)


@pytest.mark.parametrize("held_out", [None, result(7, 1)])
def test_a_result_is_read_as_it_was_written(tmp_path: Path, held_out: EvaluationResult | None) -> None:
    saved = result(held_out=held_out)
    write_result(tmp_path / "a", saved)
    found = read_result(tmp_path / "a")
    assert found == saved
    assert (found.held_out is None) == (held_out is None)
    for one, other in [(found, saved), *([(found.held_out, held_out)] if held_out else [])]:
        assert one is not None
        assert other is not None
        assert all(torch.equal(a, b) for a, b in zip(vars(one.ranks).values(), vars(other.ranks).values()))
        assert torch.equal(one.groups, other.groups)
        assert one.ids == other.ids


@pytest.mark.parametrize("kind", ["result", "sealed"])
def test_no_changed_byte_is_overlooked(tmp_path: Path, kind: str) -> None:
    """Every flip gives one line that names the file, or in the white space of JSON the same content."""
    path = tmp_path / "saved.file"
    content = {"mean": 0.25, "rows": [1, 2.5, None, "ü"]}
    if kind == "result":
        write_result(path, result(held_out=result(7, 1)))
    else:
        write_sealed(path, content)
    written, random_numbers = path.read_bytes(), random.Random(0)
    places = random_numbers.sample(range(len(written)), min(400, len(written)))
    unnoticed = []
    for place in places:
        changed = bytearray(written)
        changed[place] ^= 1 << random_numbers.randrange(8)
        path.write_bytes(changed)
        try:
            unnoticed.append(read_result(path) if kind == "result" else read_sealed(path))
        except ValueError as error:
            message = str(error)
            assert str(path) in message, message
            assert "delete it" in message
    if kind == "result":
        assert not unnoticed
    else:
        assert all(found == content for found in unnoticed)
        assert len(unnoticed) < len(places) / 4
    for length in (0, 5, len(written) // 2, len(written) - 2):
        path.write_bytes(written[:length])
        with pytest.raises(ValueError, match=r"saved\.file"):
            _ = read_result(path) if kind == "result" else read_sealed(path)


@pytest.fixture(scope="module")
def setting(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    data = str(write_pairs(tmp_path_factory.mktemp("store") / "data"))
    return Setting(with_fields(TrainConfig(model=str(model_directory)), SHORT), (Domain(data, (data,)),))


def planned(setting: Setting, *rows: Variant, parts: tuple[str, ...] = ("recalls",), **more: object) -> Plan:
    return plan([(Study("one", "One", "?", rows, parts, **more), setting)])  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def done(setting: Setting, tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store(tmp_path_factory.mktemp("done") / "runs", OPTIONS)
    for job in planned(setting, Variant("zero-shot", trained=False), INFONCE).runs:
        assert not store.is_done(job)
        assert store.result(job, job.galleries[0]) is store.training(job) is None
        store.do(job)
        assert store.is_done(job)
    return store


def test_a_run_is_found_with_its_result_training_and_log(setting: Setting, done: Store) -> None:
    untrained, run = planned(setting, Variant("zero-shot", trained=False), INFONCE).runs
    found = done.result(run, run.galleries[0])
    assert found is not None
    assert found.images == 8
    training = done.training(run)
    assert training is not None
    assert (training["steps"], done.training(untrained)) == (4, None)
    assert [entry["step"] for entry in done.metrics(run, "step")] == [1, 2, 3, 4]
    assert "torch" in done.versions(run)
    about = json.loads((done.home(run) / "about.json").read_text(encoding="utf-8"))
    assert about["places"]["one"][0]["row"] == "InfoNCE"


def test_moved_data_and_a_moved_store_are_followed(setting: Setting, done: Store, tmp_path: Path) -> None:
    """Also by a run that was stopped: it ends with the weights of an uninterrupted one."""
    (run,) = planned(setting, INFONCE).runs
    folder = shutil.copytree(Path(setting.domains[0].data).parent, tmp_path / "elsewhere")
    data = str(Path(folder) / "pairs.jsonl")
    (moved,) = planned(replace(setting, domains=(Domain(data, (data,)),)), INFONCE).runs
    store = Store(Path(shutil.copytree(done.directory, tmp_path / "runs")), OPTIONS)
    assert store.is_done(moved)

    def stop(step: int) -> None:
        if step == 2:
            raise InterruptedError

    stopped = Store(tmp_path / "stopped", OPTIONS)
    with pytest.raises(InterruptedError):
        train(run.config, replace(OPTIONS, out=stopped.home(run), save_minutes=0.0), on_step=stop)
    stopped.do(moved)
    assert (stopped.home(moved), [one["step"] for one in stopped.metrics(moved, "step")]) == (
        stopped.home(run),
        [1, 2, 3, 4],
    )
    weights = [(one.home(run) / "best/model.safetensors").read_bytes() for one in (done, stopped)]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("name", ["result.json", "metrics.jsonl"])
def test_a_changed_file_of_a_run_is_noticed(setting: Setting, done: Store, tmp_path: Path, name: str) -> None:
    store = Store(Path(shutil.copytree(done.directory, tmp_path / "runs")), OPTIONS)
    (run,) = planned(setting, INFONCE).runs
    path = store.home(run) / name
    path.write_text(re.sub(r"\d\.\d", "9.9", path.read_text(encoding="utf-8"), count=1), encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(name)):
        _ = store.training(run) if name == "result.json" else store.metrics(run, "step")


def test_a_run_without_an_observation_is_not_done_for_it(setting: Setting, done: Store, tmp_path: Path) -> None:
    """The observed run has the same weights, and serves those that ask for no observation too."""
    store = Store(Path(shutil.copytree(done.directory, tmp_path / "runs")), OPTIONS)
    (plain,) = planned(setting, INFONCE).runs
    (watched,) = planned(setting, INFONCE, watch=True, probe=True).runs
    before = store.home(plain)
    assert watched.identity == plain.identity
    assert not store.is_trained(watched)
    store.do(watched)
    assert store.is_done(watched)
    assert store.home(plain) == before != store.home(watched)
    assert len(store.metrics(watched, "watched")) == 2
    assert store.metrics(watched, "gradients")
    weights = [(home / "best/model.safetensors").read_bytes() for home in (before, store.home(watched))]
    assert weights[0] == weights[1]
    shutil.rmtree(before)
    assert store.is_done(plain)
    assert store.home(plain) == store.home(watched)
    rarer, other = (replace(watched, config=replace(watched.config, probe_gradients=every)) for every in (10, 7))
    assert store.is_trained(rarer)
    assert not store.is_trained(other)
    (store.home(watched) / "result.json").unlink()  # stopped: a run without observations does not continue it
    assert store.home(plain) == before


def test_another_gallery_is_evaluated_without_training(setting: Setting, done: Store, tmp_path: Path) -> None:
    store = Store(Path(shutil.copytree(done.directory, tmp_path / "runs")), OPTIONS)
    (run,) = planned(setting, INFONCE, whole=True).runs
    assert store.is_trained(run)
    assert not store.is_done(run)
    log = (store.home(run) / "metrics.jsonl").stat().st_mtime_ns
    store.do(run)
    whole = store.result(run, run.galleries[1])
    assert whole is not None
    assert whole.held_out is not None
    assert (whole.images, whole.held_out.images) == (32, 8)
    assert (store.home(run) / "metrics.jsonl").stat().st_mtime_ns == log


def test_a_job_that_another_process_does_is_busy(setting: Setting, tmp_path: Path) -> None:
    from hnclip.util.files import exclusive_lock

    store, (run,) = Store(tmp_path), planned(setting, INFONCE).runs
    with exclusive_lock(tmp_path / ".locks" / run.identity, "?"), pytest.raises(Busy):
        store.do(run)


def test_a_measurement_is_kept(setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, (job,) = Store(tmp_path), planned(setting, parts=("geometry",)).measures
    measures = {"geometry": lambda job, store: {"of": job.domain.name}}
    monkeypatch.setitem(sys.modules, "hnclip.studies.analyses", SimpleNamespace(MEASURES=measures))
    assert store.measurement(job) is None
    store.do(job)
    assert store.is_done(job)
    assert store.measurement(job) == {"of": setting.domains[0].name}


def test_the_matched_margin_is_gamma_times_the_mean_similarity(setting: Setting, tmp_path: Path) -> None:
    """By a literal twin: every caption with every caption of another image, before training. It is measured once."""
    row = Variant("fixed", method="hn_clip", global_loss="fixed_margin", matched=True, set=ALONE)
    store, (run,) = Store(tmp_path / "runs", OPTIONS), planned(setting, row).runs
    store.do(run)
    rows = [json.loads(line) for line in Path(run.config.data).read_text(encoding="utf-8").splitlines()]
    model = load(run.config.model).eval()
    with torch.no_grad():
        captions = [row["caption"] for row in rows if row["split"] == "train"]
        vectors = [model.encode_texts(model.tokenize([caption])).vectors[0] for caption in captions]
    cosines = [float(a @ b) for i, a in enumerate(vectors) for j, b in enumerate(vectors) if i != j]
    expected = sum(cosines) / len(cosines)
    config = json.loads((store.home(run) / "config.json").read_text(encoding="utf-8"))
    assert config["objective"]["parameters"]["margin"] == pytest.approx(0.5 * expected, rel=1e-5)
    (kept,) = (tmp_path / "runs/measures").iterdir()
    write_sealed(kept, {"mean": 0.5})
    assert store.mean_similarity(run.config) == 0.5
    assert store.mean_similarity(replace(run.config, limit=9)) != 0.5
