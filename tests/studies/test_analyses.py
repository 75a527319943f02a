"""Measurements on a few images with a small model: what is stored as JSON, and what reports show of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_studies import study_results

from hnclip.config import RunOptions, TrainConfig, with_fields
from hnclip.data.scenes import scene_records
from hnclip.encode.loop import encode_captions
from hnclip.models.load import load
from hnclip.studies import step_timer
from hnclip.studies.analyses import MEASURES
from hnclip.studies.catalogue import STUDIES
from hnclip.studies.page import PARTS
from hnclip.studies.plan import MeasureJob, RunJob
from hnclip.studies.spec import Domain
from hnclip.studies.store import Store
from hnclip.util.timing import Timing

COUNTS = {"train": 16, "validation": 4, "test": 12}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> TrainConfig:
    """Two training pairs have one caption, three others one image, and one of the latter the caption of a fourth."""
    root, rows = tmp_path_factory.mktemp("data"), []
    for split, count in COUNTS.items():
        for record in scene_records("park", split, families=count // 4, members=4):
            image = f"{record.id.replace('/', '-')}.png"
            record.image.load().resize((24, 24)).save(root / image)
            rows.append({"image": image, "caption": record.captions[0], "split": split, "id": image})
    rows[1]["caption"], rows[6]["caption"] = rows[0]["caption"], rows[7]["caption"]
    for copy in (5, 6):
        shutil.copy(root / rows[4]["image"], root / rows[copy]["image"])
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = TrainConfig(model=str(model_directory), data=str(root / "pairs.jsonl"))
    return with_fields(plain, {"optim.micro_batch": 4, "optim.accumulate": 2, "optim.precision": "fp32"})


def measure(kind: str, config: TrainConfig, *runs: RunJob) -> dict[str, Any]:
    """As the store writes it, and as it is read again."""
    job = MeasureJob(kind, kind, config, Domain(config.data, (config.data,)), runs)
    store = Store(Path("no-such-store"), RunOptions(device="cpu", threads=1))
    return json.loads(json.dumps(MEASURES[kind](job, store)))


def blocks(study: str, found: dict[str, Any]) -> list[Any]:
    return PARTS[STUDIES[study].parts[0]](study_results(STUDIES[study], measured=lambda kind, domain: found))


def test_duplicates_are_counted(config: TrainConfig) -> None:
    found = measure("duplicates", config)
    assert found == {"pairs": 16, "caption": 4, "image": 3, "either": 6}
    (table,) = blocks("duplicates", found)
    assert tuple(table.rows[0]) == ("a", "16", "4", "3", "6")


def test_geometry_is_that_of_the_training_captions(config: TrainConfig) -> None:
    found, model = measure("geometry", config), load(config.model)
    captions = [json.loads(line)["caption"] for line in Path(config.data).read_text().splitlines()[:16]]
    text = encode_captions(model, model.text_transform(captions)).cpu()
    cosines = (text @ text.T)[~torch.eye(16, dtype=torch.bool)]
    assert found["pairwise"]["mean"] == pytest.approx(float(cosines.mean()), abs=1e-5)
    assert found["hardest"]["mean"] == pytest.approx(float(cosines.view(16, 15).amax(1).mean()), abs=1e-5)
    assert sum(found["negatives"]["shares"]) == pytest.approx(1)


def test_retrievals_that_differ_are_counted(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model and itself, none."""
    monkeypatch.setattr(Store, "open_model", lambda self, job: load(job.config.model))
    found = measure("retrievals", config, *(RunJob(name, config, True, False, ()) for name in "ab"))
    assert (sum(found["counts"]), found["counts"][1:3], found["examples"]) == (COUNTS["test"], [0, 0], [])
    (table,) = blocks("retrievals", found)  # and nothing to draw
    assert list(table.rows[0][1:]) == list(map(str, found["counts"]))


def test_a_step_of_every_row_is_timed_in_turns(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: dict[str, Any] = {}

    def time_ways(ways: Mapping[str, Callable[[], Any]], **options: Any) -> dict[str, Timing]:
        steps.update({name: way() for name, way in ways.items()})
        return {name: Timing((1.0, 2.0)) for name in ways}

    monkeypatch.setattr(step_timer, "time_ways", time_ways)
    other = replace(config, objective=replace(config.objective, global_loss="infonce", token_weight=0.0))
    memory = replace(other, optim=replace(other.optim, negatives="memory", memory=8))
    runs = [RunJob(name, one, True, False, ()) for name, one in (("a", config), ("b", other), ("c", memory))]
    assert measure("step_time", config, *runs)["seconds"] == {name: [1.0, 2.0] for name in "abc"}
    assert {*steps["a"]} > {*steps["b"]}  # HN-CLIP has a token term, InfoNCE has not
    assert steps["c"]["infonce"] > steps["b"]["infonce"]  # among more negatives
