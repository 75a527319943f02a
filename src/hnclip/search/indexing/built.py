"""What `hnclip index` has done, for people and for programs."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hnclip.core import Problem
from hnclip.search.indexing.run import Counts
from hnclip.util.text import counted, shorten

SHOWN = 5  # problems that people are shown


@dataclass(frozen=True)
class Built:
    """What was done, and what the index holds now.

    Args:
        pictures, captions: of the index.
        seconds: that it took, `working` of them for pictures and captions.
        compacted: what was dead is out of the files.
    """

    out: Path
    data: str
    model: str
    pictures: int
    captions: int
    counts: Counts
    seconds: float
    working: float
    compacted: bool
    problems: tuple[Problem, ...]

    def to_dict(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name not in ("counts", "problems")}
        problems = [asdict(problem) for problem in self.problems]
        return {**own, "out": str(self.out), **asdict(self.counts), "problems": problems}

    def to_text(self) -> str:
        counts = self.counts
        done = {name: getattr(counts, name) for name in ("new", "changed", "moved", "gone", "unchanged")}
        what = ", ".join(f"{number:,} {name}" for name, number in done.items() if number) or "nothing there"
        encoded = [counted(counts.encoded, "picture")] * bool(counts.encoded)
        encoded += [counted(counts.encoded_captions, "caption")] * bool(counts.encoded_captions)
        rate = f", {counts.encoded / self.working:,.0f} pictures/s" if counts.encoded else ""
        lines = [
            f"{self.out}: {counted(self.pictures, 'picture')}, {counted(self.captions, 'caption')}",
            what,
            f"encoded {' and '.join(encoded) or 'nothing'} in {self.working:.1f} s{rate}",
        ]
        if counts.cut_captions:
            lines.append(f"{counted(counts.cut_captions, 'caption')} cut at the model's context")
        if self.compacted:
            lines.append("written anew without what was gone")
        return "\n".join([*lines, *self._left_out(), *self._next()])

    def _left_out(self) -> list[str]:
        if not self.problems:
            return []
        bad, others = self.counts.bad, len(self.problems) - self.counts.bad
        parts = [counted(bad, "picture")] * bool(bad) + [f"{counted(others, 'row')} of text"] * bool(others)
        shown = [f"  {problem.kind}: {_told(problem)}" for problem in self.problems[:SHOWN]]
        more = len(self.problems) - SHOWN
        return [f"left out {' and '.join(parts)}:", *shown, *[f"  and {more:,} more, --json lists all"] * (more > 0)]

    def _next(self) -> list[str]:
        if not self.pictures:
            return []
        place = shlex.quote(str(self.out))
        search = f'hnclip search {place} "what the picture shows, in as many words as you like"'
        return ["next:", f"  {search}", f"  hnclip serve {place}"]


def _told(problem: Problem) -> str:
    """Most details name the file. On one line, and nothing in it that a terminal would obey."""
    text = problem.detail if problem.where in problem.detail else f"{problem.where}: {problem.detail}"
    return " ".join(shorten(text, max(1, len(text))).split())
