"""What `hnclip data check` found: for a program as a dictionary, for a person as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hnclip.core import Problem
from hnclip.data.check.counts import Counts, ImageSizes
from hnclip.data.check.doubles import Group
from hnclip.data.check.text_report import report_text
from hnclip.data.problems import WARNINGS


@dataclass(frozen=True)
class CheckReport:
    """All that is known of data before training.

    Args:
        total, splits: counts of all, and by declared split in the order of the data.
        pictures: how many different ones the records name.
        images: None if they were not looked at.
        problems: kind by kind in the order of data/problems.py, and in the order of the data.
        groups: records that repeat each other; each group is also one of the problems.
        unfinished: kinds of which there may be more, because too much is alike to compare it all.
        left_out: records that training will leave out: the picture cannot be decoded, or no caption can be read.
        unread: rows that are wrong, so that they are in no record.
        context: the most tokens that the model reads, if one was given.
        side: the shortest side of a picture that it wants, in pixels.
    """

    name: str
    total: Counts
    splits: Mapping[str, Counts]
    pictures: int
    images: ImageSizes | None
    problems: tuple[Problem, ...]
    groups: tuple[Group, ...]
    unfinished: tuple[str, ...]
    left_out: int
    unread: int
    context: int | None
    side: int | None

    @property
    def errors(self) -> tuple[Problem, ...]:
        return tuple(problem for problem in self.problems if problem.kind not in WARNINGS)

    @property
    def warnings(self) -> tuple[Problem, ...]:
        return tuple(problem for problem in self.problems if problem.kind in WARNINGS)

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with complete lists."""
        return {
            "name": self.name,
            "pictures": self.pictures,
            "left_out": self.left_out,
            "unread": self.unread,
            "context": self.context,
            "side": self.side,
            "total": asdict(self.total),
            "splits": {name: asdict(counts) for name, counts in self.splits.items()},
            "images": None if self.images is None else asdict(self.images),
            "errors": _by_kind(self.errors),
            "warnings": _by_kind(self.warnings),
            "groups": [asdict(group) for group in self.groups],
            "unfinished": list(self.unfinished),
        }

    def to_text(self, listed: int = 5) -> str:
        """For a terminal, with the first `listed` problems of each kind."""
        return report_text(self, listed)


def _by_kind(problems: Sequence[Problem]) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for problem in problems:
        found.setdefault(problem.kind, []).append({"where": problem.where, "detail": problem.detail})
    return found
