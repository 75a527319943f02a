"""What a run needs in addition to image and caption: prepared, part of the data, or made when it starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hnclip.cli import main
from hnclip.config import ObjectiveConfig, ReadConfig, TrainConfig
from hnclip.core import Record, Region
from hnclip.data.lexicon import filter_caption
from hnclip.data.scenes import scene_records
from hnclip.objectives.base import Objective
from hnclip.objectives.registry import build_objective
from hnclip.training.data import add_views, needed_views


def objective_of(method: str, **changes: object) -> Objective:
    return build_objective(ObjectiveConfig(method=method, token_weight=0.0, **changes))  # type: ignore[arg-type]


@pytest.fixture
def records() -> list[Record]:
    return scene_records("park", "train", families=2)


@pytest.fixture(autouse=True)
def messages(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="hnclip")


def completed(method: str, records: list[Record], **read: object) -> tuple[Record, ...]:
    config = TrainConfig(
        data="somewhere.json",
        read=ReadConfig(**read),  # type: ignore[arg-type]
        objective=ObjectiveConfig(method=method, token_weight=0.0),  # type: ignore[arg-type]
    )
    return add_views(config, records, objective_of(method))


@pytest.mark.parametrize(
    ("method", "needs"),
    [
        ("long_clip", set()),
        ("finelip", set()),
        ("smartclip", set()),
        ("goal", {"regions"}),
        ("structxlip", {"regions", "text"}),
    ],
)
def test_what_methods_need(
    method: str, needs: set[str], records: list[Record], caplog: pytest.LogCaptureFixture
) -> None:
    assert needed_views(objective_of(method)) == needs
    if not needs:
        found = completed(method, records)
        assert found == tuple(records)
        assert not caplog.messages


def test_terms_that_are_left_out_need_nothing() -> None:
    weights = {"local": 0.0, "patch": 0.0, "text": 0.0}
    assert needed_views(objective_of("goal", weights=weights)) == set()
    only = objective_of("structxlip", weights={"structure": 0.0, "chunks": 0.0})
    assert needed_views(only) == set()


def test_filtered_captions_are_made(records: list[Record], caplog: pytest.LogCaptureFixture) -> None:
    found = completed("structxlip", records)
    assert [record.regions for record in found] == [record.regions for record in records]
    for before, after in zip(records, found):
        assert len(after.filtered) == len(before.captions)
        assert len(after.filtered[0]) < len(before.captions[0])
    assert f"{len(records)} of {len(records)} training records have regions" in caplog.messages


def test_defaults_are_made_for_exactly_the_records_that_lack_them(records: list[Record]) -> None:
    mixed = [replace(records[0], filtered=("own words",)), *records[1:]]
    found = completed("structxlip", mixed)
    made = completed("structxlip", records)
    assert found[0] == replace(made[0], filtered=("own words",))
    assert found[1:] == made[1:]
    assert all(record.filtered for record in made)


def test_without_regions_it_says_how_to_get_some(records: list[Record], caplog: pytest.LogCaptureFixture) -> None:
    bare = [replace(record, regions=()) for record in records]
    with pytest.raises(ValueError, match=r"goal needs regions.*hnclip prepare regions somewhere\.json"):
        completed("goal", bare)
    some = [replace(bare[0], regions=(Region((0, 0, 9, 9), "a corner"),)), *bare[1:]]
    completed("goal", some)
    assert f"1 of {len(records)} training records have regions" in caplog.messages


def test_a_directory_that_is_not_there(records: list[Record], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        completed("goal", records, prepared=str(tmp_path / "none"))


def test_prepared_captions_are_used_as_long_as_they_fit(
    records: list[Record], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If some records have changed, these get the default; if all have, that is an error."""
    made = ["prepare", "text", "scenes/park", "--filter", "lexicon:colours", "--out", str(tmp_path), "--quiet"]
    assert main(made) == 0
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
