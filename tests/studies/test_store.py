"""Runs and results on disk: they are read as they were written, and a changed file is never taken for a result."""

from __future__ import annotations

import json
import random
import re
import shutil
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
OPTIONS = RunOptions(threads=1, device="cpu")


def result(images: int = 20, seed: int = 0, held_out: EvaluationResult | None = None) -> EvaluationResult:
    generator = torch.Generator().manual_seed(seed)
    owner = torch.arange(images).repeat_interleave(2)
    ranks = Ranks(*(torch.randint(1, 9, (count,), generator=generator) for count in (2 * images, images)), owner)
    ids = tuple(f'画像 "{number}"\n' for number in range(images))
    metrics = {"mean_R@1": 1 / 3, "text_to_image": {"R@1": 0.1}}
    return EvaluationResult(ranks, torch.arange(images) // 2, ids, metrics, data="données", held_out=held_out)


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    saved = result(held_out=result(7, 1))
    write_result(tmp_path / "a", saved)
    found = read_result(tmp_path / "a")
    assert found == saved  # of a result, everything but its tensors
    for one, other in ((found, saved), (found.held_out, saved.held_out)):
        assert one is not None
        assert other is not None
        assert all(torch.equal(a, b) for a, b in zip(vars(one.ranks).values(), vars(other.ranks).values()))
        assert torch.equal(one.groups, other.groups)


@pytest.mark.parametrize("is_json", [True, False])
def test_every_changed_byte_is_an_error(tmp_path: Path, is_json: bool) -> None:
    """Every flip is an error that names the file."""
    path = tmp_path / "saved.file"
    if is_json:
        write_sealed(path, {"mean": 0.25, "rows": [1, 2.5, None, "ü"]})
    else:
        write_result(path, result(held_out=result(7, 1)))
    written, random_numbers = path.read_bytes(), random.Random(0)
    places = [place for place, byte in enumerate(written) if not (is_json and chr(byte).isspace())]
    for place in random_numbers.sample(places, min(200, len(places))):
        flipped = written[place] ^ 1 << random_numbers.randrange(8)
        path.write_bytes(written[:place] + bytes([flipped]) + written[place + 1 :])
        with pytest.raises(ValueError, match=r"saved\.file"):
            _ = read_sealed(path) if is_json else read_result(path)


@pytest.fixture(scope="module")
def setting(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    data = str(write_pairs(tmp_path_factory.mktemp("store") / "data"))
    base = with_fields(TrainConfig(model=str(model_directory)), SHORT)
    return Setting(Study("none", "None", "?", ()), base, (Domain(data, (data,)),), seeds=(42,))


def planned(setting: Setting, *rows: Variant, parts: tuple[str, ...] = ("recalls",), **more: object) -> Plan:
    return plan([replace(setting, study=Study("one", "One", "?", rows, parts, **more))])  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def done(setting: Setting, tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store(tmp_path_factory.mktemp("done") / "runs", OPTIONS)
    for job in planned(setting, Variant("zero-shot", trained=False), INFONCE).runs:
        store.do(job)
        assert store.is_done(job)
    return store


def test_a_run_is_found_with_its_result_training_and_log(setting: Setting, done: Store, copied: Store) -> None:
    """And where a file of it was changed, that is an error."""
    untrained, run = planned(setting, Variant("zero-shot", trained=False), INFONCE).runs
    found, training = done.result(run, run.galleries[0]), done.training(run)
    assert found is not None
    assert training is not None
    assert (found.images, training["steps"], done.training(untrained)) == (8, 4, None)
    assert [entry["step"] for entry in done.metrics(run, "step")] == [1, 2, 3, 4]
    for name in ("result.json", "metrics.jsonl"):
        path = copied.home(run) / name
        path.write_text(re.sub(r"\d\.\d", "9.9", path.read_text(encoding="utf-8"), count=1), encoding="utf-8")
        with pytest.raises(ValueError, match=re.escape(name)):
            _ = copied.training(run) if name == "result.json" else copied.metrics(run, "step")


@pytest.fixture
def copied(done: Store, tmp_path: Path) -> Store:
    """The same runs in another directory."""
    return Store(Path(shutil.copytree(done.directory, tmp_path / "runs")), OPTIONS)


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
    assert copied.metrics(observed, "watched")
    assert copied.metrics(observed, "gradients")
    weights = "best/model.safetensors"
    assert (before / weights).read_bytes() == (copied.home(observed) / weights).read_bytes()
    shutil.rmtree(before)
    assert copied.home(plain) == copied.home(observed)


def test_a_measurement_is_kept_and_made_by_one_process(setting: Setting, tmp_path: Path) -> None:
    store, (job,) = Store(tmp_path, OPTIONS), planned(setting, parts=("duplicates",)).measures
    assert store.measurement(job) is None
    with exclusive_lock(tmp_path / ".locks" / job.identity, "?"), pytest.raises(Busy):
        store.do(job)
    store.do(job)
    assert store.measurement(job) == {"pairs": 16, "caption": 0, "image": 0, "either": 0}


def test_the_matched_margin_is_gamma_times_the_mean_similarity(setting: Setting, tmp_path: Path) -> None:
    """By a literal twin: every caption with every caption of another image, before training."""
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
