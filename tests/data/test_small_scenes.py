"""`scenes/STYLE/small` and `scenes/STYLE/doubles`."""

from __future__ import annotations

import pytest

from hnclip.config import ReadConfig
from hnclip.data.scenes import MEMBERS, SMALL
from hnclip.data.sources import open_data, open_records


@pytest.mark.parametrize("style", ["park", "shelf"])
def test_small_scenes_are_the_first_families(style: str) -> None:
    for split in ("train", "validation", "test"):
        whole, small = open_records(f"scenes/{style}", split), open_records(f"scenes/{style}/small", split)
        assert small == whole[: SMALL.get(split, len(whole)) * MEMBERS[split]]
    counts = open_data(f"scenes/{style}/small", ReadConfig()).splits()
    assert counts == {"train": 384, "validation": 200, "test": 1000}


def test_every_second_family_has_one_caption() -> None:
    small, doubled = open_records("scenes/park/small", "train"), open_records("scenes/park/doubles", "train")
    assert [record.image for record in small] == [record.image for record in doubled]
    assert [record.id for record in small] == [record.id for record in doubled]
    members = MEMBERS["train"]
    for first in range(0, len(small), members):
        family, other = doubled[first : first + members], small[first : first + members]
        if (first // members) % 2 == 0:
            assert family == other
        else:
            assert {record.captions for record in family} == {other[0].captions}
            assert {record.short for record in family} == {other[0].short}
            assert family[0].regions
            assert not any(record.regions for record in family[1:])
    for split in ("validation", "test"):
        assert open_records("scenes/park/doubles", split) == open_records("scenes/park/small", split)
