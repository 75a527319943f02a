"""`hnclip prepare`: opens the data, finds what the manifest lacks, makes it chunk by chunk.

A chunk is in the manifest before the next one is begun, so whatever ends the process costs one chunk.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from hnclip.command import differences
from hnclip.config import ReadConfig
from hnclip.data.records import Problem, Record
from hnclip.options import PrepareEdges, PrepareRegions, PrepareText
from hnclip.prepare.outcome import Outcome, counted

CHUNK = 256  # records that enter the manifest together, where each is little work
CROPS = 4  # batches of crops that are encoded, and their records written, together

Options = PrepareRegions | PrepareEdges | PrepareText
Report = Callable[[str], None]


@dataclass(frozen=True)
class Work:
    """The records of a call, and where what is prepared of them goes."""

    data: str
    split: str
    records: tuple[Record, ...]
    manifest: Path


@dataclass
class Done:
    """How far a call is: records that need nothing, records that were made now, and what was wrong with others."""

    kept: int = 0
    made: int = 0
    problems: list[Problem] | None = None

    def __post_init__(self) -> None:
        self.problems = []


def prepare(options: Options, *, quiet: bool = False, report: Report = lambda text: None) -> Outcome:
    """Regions, edges or text, by the kind of the options."""
    start = time.monotonic()
    work = _open(options)
    report(f"{counted(len(work.records), 'record')} of {work.data}, {work.split}")
    if isinstance(options, PrepareRegions):
        made = _regions(options, work, quiet, report)
    elif isinstance(options, PrepareEdges):
        made = _edges(options, work, quiet)
    else:
        made = _text(options, work, quiet)
    words = tuple(differences(options.read, ReadConfig(), "read."))
    return replace(made, seconds=time.monotonic() - start, options=words)
