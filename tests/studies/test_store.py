"""Runs and results on disk: they are read as they were written, and a changed file is never taken for a result."""

from __future__ import annotations

import json
import random
import re
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from study_data import write_pairs

from hnclip.config import RunOptions, TrainConfig, with_fields
from hnclip.evaluation.ranks import Ranks
from hnclip.evaluation.retrieval import EvaluationResult
from hnclip.models.load import load
from hnclip.studies.plan import Plan, plan
from hnclip.studies.spec import Domain, Setting, Study, Variant
from hnclip.studies.store import Store, read_result, read_sealed, write_result, write_sealed
from hnclip.util.files import Busy, exclusive_lock

SHORT = {"optim.epochs": 1, "optim.micro_batch": 4, "optim.accumulate": 1, "optim.precision": "fp32"}
ALONE = {"objective.token_weight": 0.0}
INFONCE = Variant("InfoNCE", method="hn_clip", global_loss="infonce", set=ALONE)
NO_PROBE = {"probe_gradients": 0}
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
    assert found == saved  # of a result, everything but its tensors
    for one, other in ((found, saved), (found.held_out, held_out)) if held_out else ((found, saved),):
        assert one is not None
        assert other is not None
        assert all(torch.equal(a, b) for a, b in zip(vars(one.ranks).values(), vars(other.ranks).values()))
        assert torch.equal(one.groups, other.groups)


@pytest.mark.parametrize("is_json", [True, False])
def test_every_changed_byte_is_an_error(tmp_path: Path, is_json: bool) -> None:
    """Every flip is an error that names the file, or in the white space of JSON the same content."""
    path, content = tmp_path / "saved.file", {"mean": 0.25, "rows": [1, 2.5, None, "ü"]}
    if is_json:
        write_sealed(path, content)
    else:
        write_result(path, result(held_out=result(7, 1)))
    written, random_numbers = path.read_bytes(), random.Random(0)
    for place in random_numbers.sample(range(len(written)), min(400, len(written))):
        flipped = written[place] ^ 1 << random_numbers.randrange(8)
        path.write_bytes(written[:place] + bytes([flipped]) + written[place + 1 :])
        if is_json and chr(written[place]).isspace():
            with suppress(ValueError):
                assert read_sealed(path) == content
        else:
            with pytest.raises(ValueError, match=r"saved\.file"):
                _ = read_sealed(path) if is_json else read_result(path)


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
    found, training = done.result(run, run.galleries[0]), done.training(run)
    assert found is not None
    assert training is not None
    assert (found.images, training["steps"], done.training(untrained)) == (8, 4, None)
    assert [entry["step"] for entry in done.metrics(run, "step")] == [1, 2, 3, 4]
    about = json.loads((done.home(run) / "about.json").read_text(encoding="utf-8"))
    assert about["places"]["one"][0]["row"] == "InfoNCE"


@pytest.fixture
def copied(done: Store, tmp_path: Path) -> Store:
    """The same runs in another directory."""
    return Store(Path(shutil.copytree(done.directory, tmp_path / "runs")), OPTIONS)


def test_moved_data_and_a_moved_store_are_followed(setting: Setting, copied: Store, tmp_path: Path) -> None:
    folder = shutil.copytree(Path(setting.domains[0].data).parent, tmp_path / "elsewhere")
    data = str(Path(folder) / "pairs.jsonl")
    (moved,) = planned(replace(setting, domains=(Domain(data, (data,)),)), INFONCE).runs
    assert copied.is_done(moved)


@pytest.mark.parametrize("name", ["result.json", "metrics.jsonl"])
def test_a_changed_file_of_a_run_is_an_error(setting: Setting, copied: Store, name: str) -> None:
    (run,) = planned(setting, INFONCE).runs
    path = copied.home(run) / name
    path.write_text(re.sub(r"\d\.\d", "9.9", path.read_text(encoding="utf-8"), count=1), encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(name)):
        _ = copied.training(run) if name == "result.json" else copied.metrics(run, "step")


def test_a_run_without_an_observation_is_not_done_for_it(setting: Setting, copied: Store) -> None:
    """The observed run has the same weights, and serves those that ask for fewer observations too."""
    (plain,) = planned(setting, INFONCE).runs
    (observed,) = planned(setting, INFONCE, watch=True, probe=True).runs
    before = copied.home(plain)
    assert observed.identity == plain.identity
    assert not copied.is_trained(observed)
    copied.do(observed)
    assert copied.is_done(observed)
    assert copied.home(plain) == before != copied.home(observed)
    watched = copied.metrics(observed, "watched")
    assert [(entry["epoch"], entry["text_to_image"]["queries"]) for entry in watched] == [(0, 8), (1, 8)]
    assert copied.metrics(observed, "gradients")
    same = ("best/model.safetensors", "last/model.safetensors")
    assert all((before / name).read_bytes() == (copied.home(observed) / name).read_bytes() for name in same)
    shutil.rmtree(before)
    fewer = [replace(observed, config=replace(observed.config, **less)) for less in ({"watch": None}, NO_PROBE)]
    assert {copied.home(job) for job in (plain, *fewer)} == {copied.home(observed)}
    other = replace(observed, config=replace(observed.config, probe_gradients=50))
    assert not copied.is_trained(other)
    (copied.home(observed) / "result.json").unlink()  # stopped: a run without observations does not continue it
    assert copied.home(plain) == before


def test_another_gallery_is_evaluated_without_training(setting: Setting, copied: Store) -> None:
    (run,) = planned(setting, INFONCE, whole=True).runs
    assert copied.is_trained(run)
    assert not copied.is_done(run)
    log = (copied.home(run) / "metrics.jsonl").stat().st_mtime_ns
    copied.do(run)
    whole = copied.result(run, run.galleries[1])
    assert whole is not None
    assert whole.held_out is not None
    assert (whole.images, whole.held_out.images) == (32, 8)
    assert (copied.home(run) / "metrics.jsonl").stat().st_mtime_ns == log


def test_a_job_that_another_process_does_is_busy(setting: Setting, tmp_path: Path) -> None:
    store, (run,) = Store(tmp_path), planned(setting, INFONCE).runs
    with exclusive_lock(tmp_path / ".locks" / run.identity, "?"), pytest.raises(Busy):
        store.do(run)


def test_a_measurement_is_kept(setting: Setting, tmp_path: Path) -> None:
    store, (job,) = Store(tmp_path, OPTIONS), planned(setting, parts=("duplicates",)).measures
    assert store.measurement(job) is None
    store.do(job)
    assert store.is_done(job)
    assert store.measurement(job) == {"pairs": 16, "caption": 0, "image": 0, "either": 0}


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
