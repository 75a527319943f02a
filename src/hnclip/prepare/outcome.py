"""What a call of `hnclip prepare` did, for people and for programs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hnclip.core import Problem
from hnclip.prepare.lines import Kind
from hnclip.util.text import counted

LISTED = 5  # problems that the text shows; the JSON has all

_NEXT: dict[Kind, tuple[str, ...]] = {
    "regions": ("hnclip", "train", "--objective", "goal", "--data"),
    "edges": ("hnclip", "prepare", "text"),
    "text": ("hnclip", "train", "--objective", "structxlip", "--data"),
}


# What the counts are called in a sentence.
_CALLED = {
    "dropped": "of them dropped (the whole picture fits better)",
    "changed": "of them changed",
    "maps": "edge maps",
}


@dataclass(frozen=True)
class Outcome:
    """
    Args:
        split: whose records these are.
        records: all of them; `made` now, `kept` from earlier calls, `own` bring it along and need nothing prepared. The
            others have `problems`.
        counts: of what the manifest now has for them, by name.
        tool: what made it.
        note: what else is to be known.
        options: of the command, that the next one needs too.
    """

    kind: Kind
    data: str
    split: str
    records: int
    made: int
    kept: int
    own: int
    counts: Mapping[str, int]
    tool: Mapping[str, Any]
    problems: tuple[Problem, ...]
    manifest: Path
    seconds: float
    note: str = ""
    options: tuple[str, ...] = field(default=())

    @property
    def next(self) -> str:
        return shlex.join([*_NEXT[self.kind], self.data, *self.options])

    def to_dict(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name not in ("options", "manifest", "problems")}
        problems = [asdict(problem) for problem in self.problems]
        return {**own, "manifest": str(self.manifest), "problems": problems, "next": self.next}

    def to_text(self) -> str:
        lines = [f"{self.kind} of {self.data}, {self.split}: {counted(self.records, 'record')}"]
        there = f", {self.kept:,} there already" if self.kept else ""
        if self.made or self.kept:
            lines.append(f"  {self.made:,} prepared in {self.seconds:.0f} s{there}")
            lines.append(
                "  " + ", ".join(f"{count:,} {_CALLED.get(name, name)}" for name, count in self.counts.items())
            )
            lines.append(f"  by {self.tool['name']} ({self.tool['version']})")
            if model := self.tool.get("model"):
                lines.append(f"  matched by {model['source']}")
        if self.own:
            lines.append(f"  {counted(self.own, 'record')} with {self.kind} of the data's own: nothing to prepare")
        if self.note:
            lines.append(f"  {self.note}")
        if self.problems:
            lines.append(f"  {counted(len(self.problems), 'problem')}; what has one is skipped:")
            lines += [f"    {found.kind}: {found.where}: {found.detail}" for found in self.problems[:LISTED]]
        if len(self.problems) > LISTED:
            lines.append(f"    and {len(self.problems) - LISTED:,} more, see --json")
        if self.made or self.kept:
            lines.append(f"manifest: {self.manifest}")
        return "\n".join([*lines, f"next: {self.next}"])
