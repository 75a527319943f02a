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

ROOT = Path(__file__).parents[1]


def test_every_name_is_there_and_documented() -> None:
    for name in hnclip.__all__:
        assert getattr(hnclip, name).__doc__
    assert {"train", "evaluate", "diagnose", "build_index", "open_index"} <= {*dir(hnclip)}
    with pytest.raises(AttributeError, match="nothing"):
        hnclip.nothing  # noqa: B018


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of 24 images with captions, in the working directory."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "photos"
    folder.mkdir()
    for number, record in enumerate(scene_records("park", "train", families=6, members=4)):
        record.image.load().save(folder / f"{number:02}.png")
        (folder / f"{number:02}.txt").write_text(record.captions[0])
    return folder


def test_the_example_of_the_page(photos: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
    example = page.partition("```python\n")[2].partition("```")[0]
    exec(example.replace("openai/clip-vit-base-patch16", str(model_directory)), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == [str(model_directory), "runs/mine"]
    assert all((photos / line.split()[1]).exists() for line in lines[2:])
    assert len(lines) == 5


def test_paths_records_and_models_are_taken(photos: Path, tmp_path: Path, model_directory: Path) -> None:
    records = DataSet("mine", tuple(scene_records("park", "train", families=6, members=4)))
    options = hnclip.RunOptions(threads=1)
    result = hnclip.train(
        records, model=model_directory, out=tmp_path / "run", options=options, epochs=1, micro_batch=4, accumulate=1
    )
    assert result.out == tmp_path / "run"
    assert result.best["epoch"] in (0, 1)
    found = hnclip.evaluate(hnclip.load(result.out), records, split="all", queries="queries")
    assert (found.images, found.data, found.split) == (24, "mine", "all")
    assert Path("queries/index.json").exists()
    hnclip.diagnose(photos, model=result.out, out="diagnosis")
    assert Path("diagnosis/report.html").exists()
    hnclip.build_index(photos, "photos.hnc", model=result.out, text_encoder=False)


def test_a_run_of_records_is_resumed_with_them(tmp_path: Path, model_directory: Path) -> None:
    records = [record for split in ("train", "validation") for record in scene_records("park", split, families=4)]
    data = DataSet("of a program", tuple(records))

    def stop(step: int) -> None:
        raise InterruptedError

    settings = {"epochs": 1, "micro_batch": 4, "accumulate": 1, "save_minutes": 0.0, "threads": 1}
    with pytest.raises(InterruptedError):
        hnclip.train(data, model=model_directory, out=tmp_path, **settings, on_step=stop)
    assert hnclip.resume(tmp_path, data=data).steps > 1


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
