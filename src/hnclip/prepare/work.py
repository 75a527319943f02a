"""What every kind of preparation does: open the data, find what the manifest lacks, say what was done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hnclip.data.cache import cache_directory
from hnclip.data.records import BadPicture, Problem, Record
from hnclip.data.sources import open_data
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load
from hnclip.options import PrepareEdges, PrepareRegions, PrepareText
from hnclip.prepare.lines import Entry, Kind, Manifest
from hnclip.prepare.manifest import current_entry, manifest_path
from hnclip.prepare.outcome import Outcome
from hnclip.train.runs import models_of

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
    path = options.out or manifest_path(cache_directory(options.read.cache), options.data)
    return Work(options.data, split, records, path)


def load_model(options: PrepareRegions | PrepareEdges) -> DualEncoder:
    """The model that the options name; of a run its best epoch."""
    return load(models_of(options.model)[0][1], **vars(options.opening)).eval()


def pending_records(manifest: Manifest, kind: Kind, records: Sequence[Record], tool: str) -> list[Record]:
    """Records of which the manifest has nothing, or nothing that this tool made of what they are now."""
    done = {record.id for record, _ in done_records(manifest, kind, records, tool)}
    return [record for record in records if record.id not in done]


def done_records(manifest: Manifest, kind: Kind, records: Sequence[Record], tool: str) -> list[tuple[Record, Entry]]:
    """Those of which it has that, and what it has."""
    done = []
    for record in records:
        try:
            entry = current_entry(manifest, kind, record)
        except BadPicture:
            continue
        if entry is not None and entry.tool == tool:
            done.append((record, entry))
    return done
