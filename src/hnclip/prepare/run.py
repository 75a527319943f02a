"""`hnclip prepare`: regions, edge maps, or captions without words of appearance."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from hnclip.command import differences
from hnclip.config import ReadConfig
from hnclip.core import InvalidImage, Problem, Record
from hnclip.data.decoding import in_order
from hnclip.data.derived_images import EdgeImage
from hnclip.data.image_cache import cache_directory, load_images
from hnclip.data.lexicon import filter_version, load_filter
from hnclip.data.views.edges import edge_method
from hnclip.options import PrepareEdges, PrepareRegions, PrepareText
from hnclip.prepare.lines import Entry, Kind, open_writer
from hnclip.prepare.manifest import data_identity, mark_of
from hnclip.prepare.outcome import LISTED, Outcome
from hnclip.prepare.regions import prepare_regions
from hnclip.prepare.work import Options, Work, done_records, load_model, open_work, plan
from hnclip.util.console import progress
from hnclip.util.text import counted

log = logging.getLogger(__name__)

AUTO = "auto"  # whatever is usual, where nobody else has been before
CHUNK = 256  # records whose captions enter the manifest together


def prepare(options: Options) -> Outcome:
    """Regions, edges or text, by the kind of the options."""
    start = time.monotonic()
    work = open_work(options)
    log.info(f"{counted(len(work.records), 'record')} of {work.data}, split {work.split}")
    if isinstance(options, PrepareRegions):
        made = prepare_regions(options, work)
    elif isinstance(options, PrepareEdges):
        made = _edges(options, work)
    else:
        made = _text(options, work)
    if made.problems and not made.made + made.kept + made.own:
        shown = "\n".join(f"  {found.kind}: {found.where}: {found.detail}" for found in made.problems[:LISTED])
        raise ValueError(f"nothing of {work.data} could be prepared:\n{shown}")
    words = differences(replace(options.read, prepared=None), ReadConfig(), "read.")
    if options.out is not None or options.read.prepared is not None:
        words += ["--out" if made.kind == "edges" else "--read.prepared", str(work.manifest)]  # as `next` calls it
    return replace(made, seconds=time.monotonic() - start, options=tuple(words))


def _edges(options: PrepareEdges, work: Work) -> Outcome:
    named = options.method != AUTO or options.weights is not None
    name = ("canny" if options.weights is None else "hed") if options.method == AUTO else options.method
    # Asked for by name, a method works on every record.
    asked = [record for record in work.records if named or record.edges is None]
    own = len(work.records) - len(asked)
    if not asked:
        note = "name a --method to prepare others in their place"
        return work.outcome("edges", 0, 0, {}, {}, [], own=own, note=note)
    method = edge_method(name, weights=options.weights, device=options.device)
    transform = load_model(options).image_transform
    tool = {"name": name, "version": method.version}
    if options.weights is not None:
        tool["weights"] = os.path.abspath(options.weights.expanduser())
    with open_writer(work.manifest, data_identity(work.data)) as writer:
        key = writer.tool("edges", tool)
        todo = plan(writer.manifest, "edges", asked, key, named=named, option="--method")
        if todo.note:
            log.info(todo.note)
        pending, kept = {record.id for record in todo.pending}, {record.id for record, _ in todo.kept}
        records = [record for record in asked if record.id not in kept]
        marks = [_mark("edges", record) for record in records]
        # All of them: the cache may lack maps that an earlier call made, or made in the size of another model. After a
        # kill it has those that were made before, and only lines are missing.
        maps = [EdgeImage(record.image, method) for record in records]
        with progress("edge maps") as bar:
            cache = cache_directory(options.read.cache)
            loaded = load_images(maps, transform, cache=cache, workers=options.workers, progress=bar.iterate)
        problems = [replace(bad, where=records[index].id) for index, bad in loaded.problems.items()]
        entries = [
            Entry(records[index].id, mark, key, name)
            for index in loaded.kept
            if records[index].id in pending and (mark := marks[index]) is not None
        ]
        writer.add("edges", entries)
    counts, there = {"maps": len(loaded.kept)}, len(loaded.kept) + len(kept)
    return work.outcome("edges", there, len(entries), counts, tool, problems, own=own, note=todo.note)


def _text(options: PrepareText, work: Work) -> Outcome:
    name = "lexicon" if options.filter == AUTO else options.filter
    change = load_filter(name)
    tool = {"name": name, "version": filter_version(name)}
    problems: list[Problem] = []

    def filtered(record: Record) -> Entry | Problem:
        if not record.captions:
            return Problem("no caption", record.id, "the record has no caption")
        made = [_filtered(change, caption, name, record) for caption in record.captions]
        return Entry(record.id, mark_of("text", record), key, made)

    with open_writer(work.manifest, data_identity(work.data)) as writer:
        key = writer.tool("text", tool)
        todo = plan(writer.manifest, "text", work.records, key, named=options.filter != AUTO, option="--filter")
        if todo.note:
            log.info(todo.note)
        pending = todo.pending
        ready: list[Entry] = []

        def commit() -> None:
            writer.add("text", ready)
            ready.clear()

        with progress("captions of records", len(work.records), len(work.records) - len(pending)) as bar:
            pool = ThreadPoolExecutor(options.workers)
            try:
                for made in in_order(pool, filtered, pending, 4 * options.workers):
                    problems += [made] if isinstance(made, Problem) else []
                    ready += [made] if isinstance(made, Entry) else []
                    bar.advance(1)
                    if len(ready) >= CHUNK:
                        commit()
            finally:  # what a slow filter has done is not lost by its failing later
                pool.shutdown(cancel_futures=True)
                commit()
        done = done_records(writer.manifest, "text", work.records, key)
    captions = sum(len(record.captions) for record, _ in done)
    changed = sum(new != old for record, entry in done for old, new in zip(record.captions, entry.content))
    counts = {"captions": captions, "changed": changed}
    there, made_now = len(done) + len(todo.kept), len(pending) - len(problems)
    return work.outcome("text", there, made_now, counts, tool, problems, note=todo.note)


def _filtered(change: Callable[[str], str], caption: str, name: str, record: Record) -> str:
    try:
        return change(caption)
    except Exception as error:  # a filter of the user's own may fail in any way
        raise ValueError(
            f"the filter {name} failed on a caption of {record.id} ({type(error).__name__}: {error}); what was done "
            "before is kept, and the same command continues"
        ) from error


def _mark(kind: Kind, record: Record) -> str | None:
    try:
        return mark_of(kind, record)
    except InvalidImage:
        return None
