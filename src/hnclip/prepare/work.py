"""What every kind of preparation does: open the data, find what the manifest lacks, say what was done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hnclip.core import InvalidImage, Problem, Record
from hnclip.data.image_cache import cache_directory
from hnclip.data.sources import open_data
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load
from hnclip.options import PrepareEdges, PrepareRegions, PrepareText
from hnclip.prepare.lines import Entry, Kind, Manifest
from hnclip.prepare.manifest import current_entry, manifest_path
from hnclip.prepare.outcome import Outcome
from hnclip.train.runs import models_of
from hnclip.util.text import counted

Options = PrepareRegions | PrepareEdges | PrepareText


@dataclass(frozen=True)
class Work:
    """The records of a call, and where what is prepared of them goes."""

    data: str
    split: str
    records: tuple[Record, ...]
    manifest: Path

    def outcome(
        self,
        kind: Kind,
        done: int,
        made: int,
        counts: Mapping[str, int],
        tool: Mapping[str, Any],
        problems: Sequence[Problem],
        *,
        own: int = 0,
        note: str = "",
    ) -> Outcome:
        """What was done: `done` records have it in the manifest now, `made` of them since this call."""
        return Outcome(
            kind=kind,
            data=self.data,
            split=self.split,
            records=len(self.records),
            made=made,
            kept=done - made,
            own=own,
            counts=counts,
            tool=tool,
            problems=tuple(problems),
            manifest=self.manifest,
            seconds=0.0,
            note=note,
        )


def open_work(options: Options) -> Work:
    """The records of the split that is asked for, and the manifest of the data."""
    data = open_data(options.data, options.read, splits=None if options.split is None else {options.split})
    split = options.split or ("train" if "train" in data.splits() else "all")
    # Unless the split was named, nothing is held out: training may hold out others another time.
    share = 0.0 if options.split is None else options.read.validation_share
    records = data.part(split, validation_share=share)
    return Work(options.data, split, records, _manifest(options))


def _manifest(options: Options) -> Path:
    """Where to write: as --out says, or --read.prepared, which is where training would look."""
    named = options.out or options.read.prepared
    if named is None:
        return manifest_path(cache_directory(options.read.cache), options.data)
    path = Path(named).expanduser()
    if path.is_dir():
        raise ValueError(f"{path} is a directory: name the file in it that is to be written, as {path / 'views.jsonl'}")
    inside = next((place for place in path.parents if place.exists()), path)
    if not inside.is_dir():
        raise ValueError(f"{path} cannot be written: {inside} is not a directory")
    return path


def load_model(options: PrepareRegions | PrepareEdges) -> DualEncoder:
    """The model that the options name; of a run its best epoch."""
    return load(models_of(options.model)[0][1], **vars(options.opening)).eval()


@dataclass(frozen=True)
class Plan:
    """What is to be done.

    Args:
        pending: records of which the manifest has nothing, or nothing that counts.
        kept: those of which it has what others made and nobody asked to replace, with what it has.
        note: what becomes of the work of others, for people.
    """

    pending: list[Record]
    kept: list[tuple[Record, Entry]]
    note: str


def plan(manifest: Manifest, kind: Kind, records: Sequence[Record], tool: str, *, named: bool, option: str) -> Plan:
    """Which records a tool has to work on.

    Args:
        tool: its key in the manifest.
        named: the user named it. One that was chosen for want of a name does not replace what another one made, which
            may have cost much; its own work with other settings it does.
        option: that names tools.
    """
    name = manifest.tools[tool]["name"]
    pending: list[Record] = []
    kept: list[tuple[Record, Entry]] = []
    others: Counter[str] = Counter()
    replaced: Counter[str] = Counter()
    current = {record.id: entry for record, entry in _current(manifest, kind, records)}
    for record in records:
        entry = current.get(record.id)
        by = None if entry is None else str(manifest.tools[entry.tool]["name"])
        if entry is None or by is None:
            pending.append(record)
        elif entry.tool == tool:
            continue
        elif named or by == name:
            replaced[by] += 1
            pending.append(record)
        else:
            others[by] += 1
            kept.append((record, entry))
    notes = [f"{kind} of {counted(count, 'record')} by {by} are replaced" for by, count in replaced.items()]
    notes += [
        f"{kind} of {counted(count, 'record')} by {by} are kept; name {option} to make them again"
        for by, count in others.items()
    ]
    return Plan(pending, kept, "; ".join(notes))


def done_records(manifest: Manifest, kind: Kind, records: Sequence[Record], tool: str) -> list[tuple[Record, Entry]]:
    """Records of which the manifest has what this tool made of what they are now, and what it has."""
    return [(record, entry) for record, entry in _current(manifest, kind, records) if entry.tool == tool]


def _current(manifest: Manifest, kind: Kind, records: Sequence[Record]) -> Iterator[tuple[Record, Entry]]:
    for record in records:
        try:
            entry = current_entry(manifest, kind, record)
        except InvalidImage:
            continue
        if entry is not None:
            yield record, entry
