"""Splits: declared ones are kept, missing ones are held out by the ids alone, groups stay together."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hnclip.core import Record
from hnclip.data.records import DataSet, fraction_of, normal_split
from hnclip.data.scenes import scene_records


def data_of(splits: list[str | None], groups: list[str | None] | None = None) -> DataSet:
    image = scene_records("park", "test", families=1)[0].image
    groups = groups or [None] * len(splits)
    records = [
        Record(id=f"r{i}", image=image, captions=("a",), split=split, group=group)
        for i, (split, group) in enumerate(zip(splits, groups))
    ]
    return DataSet("some.csv", tuple(records))


def ids(records: tuple[Record, ...]) -> list[str]:
    return [record.id for record in records]


def test_declared_splits_are_taken_as_they_are() -> None:
    data = data_of(["train", "test", "validation", "train", "extra"])
    assert data.splits() == {"train": 2, "test": 1, "validation": 1, "extra": 1}
    assert ids(data.part("train")) == ["r0", "r3"]
    assert ids(data.part("validation")) == ["r2"]
    assert ids(data.part("extra")) == ["r4"]
    assert ids(data.part("all")) == ["r0", "r1", "r2", "r3", "r4"]


@pytest.mark.parametrize("declared", [None, "train"])
def test_without_a_validation_split_a_share_is_held_out(declared: str | None) -> None:
    data = data_of([declared] * 200 + (["test"] * 10 if declared else []))
    train, validation = data.part("train"), data.part("validation")
    assert len(validation) == 10
    assert sorted(ids(train) + ids(validation)) == sorted(f"r{i}" for i in range(200))
    assert len(data.part("validation", validation_share=0.25)) == 50
    assert len(data.part("train", validation_share=0.0)) == 200
    shuffled = replace(data, records=data.records[::-1])
    assert set(ids(shuffled.part("validation"))) == set(ids(validation))  # ids alone decide


@given(
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=15).filter(lambda sizes: sum(sizes) >= 4),
    share=st.floats(0.01, 0.9),
)
def test_groups_stay_together_and_neither_side_is_empty(sizes: list[int], share: float) -> None:
    groups = [f"g{group}" for group, size in enumerate(sizes) for _ in range(size)]
    data = data_of([None] * len(groups), groups)
    train, validation = (data.part(split, validation_share=share) for split in ("train", "validation"))
    assert not {record.group for record in train} & {record.group for record in validation}
    assert train
    assert validation
    assert len(train) + len(validation) == len(groups)


def test_a_split_that_is_not_there_is_an_error_that_says_what_is() -> None:
    cases: list[tuple[list[str | None], str, str]] = [
        ([None] * 9, "test", "it has none"),
        (["test", "other"], "train", "it has test, other"),
        (["test"] * 9, "validation", "it has test"),
        ([None] * 3, "validation", "too few"),
    ]
    for splits, split, message in cases:
        with pytest.raises(ValueError, match=message):
            data_of(splits).part(split)
    with pytest.raises(ValueError, match="validation_share"):
        data_of([None] * 9).part("train", validation_share=1.5)


def test_other_spellings_of_splits() -> None:
    names = {"val": "validation", " Dev ": "validation", "restval": "train", "Training": "train", "test": "test"}
    assert {name: normal_split(name) for name in names} == names


def test_smaller_fractions_lie_inside_larger_ones() -> None:
    """The paper's: of the right sizes, in the order of the records, and no beginning of them."""
    records = data_of([None] * 190).records
    shares = [fraction_of(records, fraction) for fraction in (0.05, 0.2, 0.5, 1.0)]
    assert [len(share) for share in shares] == [10, 38, 95, 190]
    for smaller, larger in pairwise(shares):
        assert set(ids(smaller)) < set(ids(larger))
    for share in shares:
        assert ids(share) == [name for name in ids(records) if name in set(ids(share))]
    assert ids(shares[1]) != ids(records)[:38]
    assert fraction_of(records, 1.0) == records


def test_ids_alone_decide_about_a_fraction() -> None:
    data = data_of([None] * 60)
    chosen = set(ids(fraction_of(data.records, 0.3)))
    renewed = tuple(replace(record, captions=("other",), group="g") for record in data.records[::-1])
    assert set(ids(fraction_of(renewed, 0.3))) == chosen
    held_out = set(ids(data.part("validation", validation_share=0.3)))  # another choice than that of a fraction
    assert held_out != chosen
    assert held_out & chosen


@given(count=st.integers(4, 60), fraction=st.floats(0.5, 1.0))
def test_a_fraction_has_its_size(count: int, fraction: float) -> None:
    assert len(fraction_of(data_of([None] * count).records, fraction)) == round(fraction * count)
    with pytest.raises(ValueError, match="--fraction"):
        fraction_of(data_of([None] * 20).records, 0.05)
