"""`--data` into records."""

from __future__ import annotations

from hnclip.data.records import Record
from hnclip.data.scenes import scene_records
from hnclip.data.scenes.world import STYLES


def open_records(source: str, split: str) -> list[Record]:
    """The records of a split. `scenes/park` and `scenes/shelf` are generated; `scenes` alone means the first."""
    name, _, style = source.partition("/")
    if name != "scenes":
        known = ", ".join(f"scenes/{style}" for style in STYLES)
        raise ValueError(f"data {source!r} is not known; use one of: {known}")
    return scene_records(style or "park", split)
