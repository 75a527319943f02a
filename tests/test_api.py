"""The Python API: the ten lines of the tutorial, and settings by name."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import hnclip
from hnclip.api import split_settings
from hnclip.config import RunOptions, TrainConfig
from hnclip.data.records import DataSet
from hnclip.data.scenes import scene_records


def test_every_name_is_there_and_documented() -> None:
    for name in hnclip.__all__:
        assert getattr(hnclip, name).__doc__
    assert {"train", "evaluate", "diagnose", "build_index", "open_index"} <= {*dir(hnclip)}
    with pytest.raises(AttributeError, match="nothing"):
        hnclip.nothing  # noqa: B018


def test_fine_tune_evaluate_and_search(tmp_path: Path, model_directory: Path) -> None:
    captions = []
    for number, record in enumerate(scene_records("park", "train", families=6, members=4)):
        record.image.load().save(tmp_path / f"{number:02}.png")
        captions.append(record.captions[0])
        (tmp_path / f"{number:02}.txt").write_text(captions[-1])

    result = hnclip.train(
        tmp_path,
        model=model_directory,
        out=tmp_path / "run",
        options=hnclip.RunOptions(threads=1),
        epochs=1,
        micro_batch=4,
        accumulate=1,
        lr=1e-4,
    )
    assert result.out == tmp_path / "run"
    queries = str(tmp_path / "queries")
    before, after = (
        hnclip.evaluate(model, tmp_path, split="all", queries=queries) for model in (model_directory, tmp_path / "run")
    )
    assert before.images == after.images == 24
    assert result.best["epoch"] in (0, 1)
    records = DataSet("photos", tuple(scene_records("park", "test", families=3, members=2)))
    loaded = hnclip.evaluate(hnclip.load(tmp_path / "run"), records)
    assert (loaded.images, loaded.data, loaded.split) == (6, "photos", "test")
    hnclip.build_index(tmp_path, tmp_path / "photos.hnc", model=tmp_path / "run", text_encoder=False)
    hnclip.diagnose(tmp_path, model=tmp_path / "run", out=str(tmp_path / "diagnosis"))
    assert (tmp_path / "diagnosis" / "report.html").exists()
    with hnclip.open_index(tmp_path / "photos.hnc") as index:
        hits = index.search(captions[3], k=24).hits
    assert {hit.file.name for hit in hits} == {f"{number:02}.png" for number in range(24)}


def test_settings_belong_to_the_section_that_has_them() -> None:
    settings = {
        "lr": 1e-5,
        "gamma": 0.1,
        "adapt": {"method": "lora"},
        "device": "cpu",
        "limit": 4,
        "speed": {"compile": 1},
    }
    assert split_settings(settings) == (
        {"optim.lr": 1e-5, "objective.gamma": 0.1, "adapt.method": "lora", "limit": 4},
        {"device": "cpu", "speed.compile": 1},
    )
    assert split_settings({"weights": {"local": 0.5}}) == ({"objective.weights": {"local": 0.5}}, {})
    with pytest.raises(ValueError, match="did you mean 'gamma'"):
        split_settings({"gama": 1})


@pytest.mark.parametrize(
    ("arguments", "keyword"),
    [
        ({"data": "somewhere.csv"}, "--model"),
        ({"data": "scenes/park", "epochs": 0}, r"^optim\.epochs: .* got 0$"),
        ({"method": "gaol"}, "goal"),
        ({"global_loss": "nonsense"}, "infonce"),
        ({"model": 3}, "model"),
        ({"recipe": "none"}, "recipe"),
        ({"method": "goal", "fidelity": "official", "token_weight": 1.0}, "token_weight"),
    ],
)
def test_wrong_arguments_are_named_and_nothing_is_written(arguments: dict, keyword: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=keyword):
        hnclip.train(**arguments, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_every_field_of_the_configuration_is_a_setting() -> None:
    parameters = inspect.signature(hnclip.train).parameters
    for kind in (TrainConfig, RunOptions):
        for name in kind.__dataclass_fields__:
            assert name in parameters or any(split_settings({name: None}))
