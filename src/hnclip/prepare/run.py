"""`hnclip prepare`: regions of images, or captions without words of appearance."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hnclip.command import differences
from hnclip.config import ReadConfig
from hnclip.core import Problem, Record
from hnclip.data.decoding import in_order
from hnclip.data.lexicon import CaptionFilter, filter_version, load_filter
from hnclip.data.manifest import Kind, manifest_path, record_mark, write_manifest
from hnclip.data.sources import open_data
from hnclip.data.validate import list_problems
from hnclip.options import PrepareRegions, PrepareText
from hnclip.prepare.regions import Made, Make, open_regions
from hnclip.util.console import progress
from hnclip.util.text import counted

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrepareResult:
    """What a call of `hnclip prepare` did.

    Args:
        records: of the split; `made` now, `kept` from earlier calls, `own` have regions of their own and were left as
            they are. The others have `problems`.
        counts: of what the manifest holds for these records, by name.
        next: the command that uses it.
    """

    kind: Kind
    data: str
    records: int
    made: int
    kept: int
    own: int
    counts: Mapping[str, int]
    problems: Sequence[Problem]
    manifest: Path
    next: str

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "manifest": str(self.manifest), "problems": [asdict(found) for found in self.problems]}

    def to_text(self) -> str:
        lines = [f"{self.kind} of {counted(self.records, 'record')} of {self.data}:"]
        if self.own:
            lines.append(f"  {self.own:,} have regions of their own; name a --proposer to find others")
        if self.problems:
            lines += [f"  {len(self.problems):,} skipped:", *list_problems(self.problems)]
        if self.made or self.kept:
            counts = ", ".join(f"{count:,} {name}" for name, count in self.counts.items())
            lines += [f"  {self.made:,} prepared now, {self.kept:,} before: {counts}", f"manifest: {self.manifest}"]
        return "\n".join([*lines, f"next: {self.next}"])


def prepare(options: PrepareRegions | PrepareText) -> PrepareResult:
    """Make what the manifest of the data lacks, one record at a time; a killed process loses the current one."""
    kind: Kind = "regions" if isinstance(options, PrepareRegions) else "text"
    read = options.read if options.out is None else replace(options.read, prepared=str(options.out))
    path = manifest_path(read, options.data, kind)
    data = open_data(options.data, options.read, splits=None if options.split is None else {options.split})
    split = options.split or ("train" if "train" in data.splits() else "all")
    # Unless the split was named, nothing is held out: a later training may hold out other records.
    records = data.part(split, validation_share=0.0 if options.split is None else options.read.validation_share)
    log.info(f"{counted(len(records), 'record')} of {options.data}, split {split}")
    # Unless a proposer is named, records with regions of their own keep them.
    keep_own = isinstance(options, PrepareRegions) and options.proposer == "auto"
    wanted = [record for record in records if not (keep_own and record.regions)]
    done, problems, kept = list[tuple[Record, Any]](), list[Problem](), 0
    if wanted:
        opened: AbstractContextManager[tuple[str, dict[str, Any], Make]]
        if isinstance(options, PrepareRegions):
            opened = open_regions(options)
        else:
            filtering = partial(filter_captions, change=load_filter(options.filter), workers=options.workers)
            opened = nullcontext((options.filter, {"filter": filter_version(options.filter)}, filtering))
        with (
            opened as (by, tool, make),
            write_manifest(path, kind, by=by, tool=tool, data=options.data, overwrite=options.replace) as manifest,
        ):
            pending = [record for record in wanted if manifest.current(record) is None]
            kept = len(wanted) - len(pending)
            log.info(f"{kind} by {by}")
            with progress("records", len(wanted), kept) as bar, closing(make(pending)) as stream:
                for made in stream:
                    if isinstance(made, Problem):
                        problems.append(made)
                    else:
                        manifest.append(*made)
                    bar.advance()
            done = [(record, content) for record in wanted if (content := manifest.current(record)) is not None]
        if not done and len(wanted) == len(records):
            raise ValueError("\n".join([f"nothing of {options.data} could be prepared:", *list_problems(problems)]))
    if kind == "regions":
        counts = {"regions": sum(len(content) for _, content in done)}
    else:
        pairs = [pair for record, content in done for pair in zip(record.captions, content)]
        counts = {"captions": len(pairs), "changed": sum(old != new for old, new in pairs)}
    train = ["hnclip", "train", "--objective", "goal" if kind == "regions" else "structxlip", "--data", options.data]
    return PrepareResult(
        kind=kind,
        data=options.data,
        records=len(records),
        made=len(done) - kept,
        kept=kept,
        own=len(records) - len(wanted),
        counts=counts,
        problems=problems,
        manifest=path,
        next=shlex.join([*train, *differences(read, ReadConfig(), "read.")]),
    )


def filter_captions(
    records: Sequence[Record], change: CaptionFilter, *, workers: int
) -> Generator[Made | Problem, None, None]:
    """Id, mark and filtered captions of each record. Threads wait for the filter, which may ask a service."""

    def filtered(record: Record) -> Made | Problem:
        if not record.captions:
            return Problem("no caption", record.id, "the record has no caption")
        try:
            return record.id, record_mark("text", record), [change(caption) for caption in record.captions]
        except Exception as error:  # the user's function may raise anything
            raise ValueError(
                f"the filter failed on a caption of {record.id} ({type(error).__name__}: {error}); what was done "
                "before is kept, and the same command continues"
            ) from error

    pool = ThreadPoolExecutor(workers)
    try:
        yield from in_order(pool, filtered, records, 4 * workers)
    finally:
        pool.shutdown(cancel_futures=True)
