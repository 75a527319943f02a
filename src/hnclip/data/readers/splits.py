"""Splits by the names of files and directories."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hnclip.data.records import normal_split

SPLITS = ("train", "validation", "test")


def split_of_path(path: str) -> str | None:
    """The one split that the words of a path name: `data/train-00000-of-00002.parquet`, `coco_val.csv`."""
    splits = {normal_split(word) for word in re.split(r"[/._-]+", path)} & set(SPLITS)
    return splits.pop() if len(splits) == 1 else None


def splits_of_paths(paths: Sequence[str]) -> list[str | None]:
    """The split of each path if every one names its own; a name that only some have means something else."""
    splits = [split_of_path(path) for path in paths]
    return [None] * len(splits) if None in splits else splits
