"""Regions: proposed for each picture, matched to the sentences of its captions; or those that the data bring along."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hnclip.core import InvalidImage, Problem, Record
from hnclip.data.decoding import cpu_count, decoding_threads, in_order
from hnclip.data.images import checked_size, to_rgb
from hnclip.data.sources import SCENES
from hnclip.data.texts import split_sentences
from hnclip.models.dual_encoder import DualEncoder
from hnclip.options import PrepareRegions
from hnclip.prepare.lines import Entry, open_writer
from hnclip.prepare.manifest import TRUTH, data_identity, mark_of, region_content
from hnclip.prepare.matching import Candidates, crop_candidates, match_sentences, readable_sentences
from hnclip.prepare.outcome import Outcome
from hnclip.prepare.proposers import proposer
from hnclip.prepare.work import Work, done_records, load_model, plan
from hnclip.prepare.workers import Propose, proposing
from hnclip.search.fingerprint import model_fingerprint
from hnclip.util.console import progress
from hnclip.util.device import find_device

log = logging.getLogger(__name__)

CROPS = 4  # batches of crops that are encoded, and their records written, together


def prepare_regions(options: PrepareRegions, work: Work) -> Outcome:
    """Write what the manifest lacks, a few batches of crops at a time: whatever ends the process costs so much."""
    own = [record for record in work.records if record.regions]
    auto = options.proposer == "auto"
    truth = options.proposer == TRUTH or (auto and work.data in SCENES)
    if options.weights is not None and (truth or (auto and len(own) == len(work.records))):
        raise ValueError(
            f"--weights are of no use for regions that {work.data} brings along: leave them out, or name --proposer sam"
        )
    if truth:
        if len(own) < len(work.records):
            lacking = f"{len(work.records) - len(own)} of {len(work.records)} records of {work.data} have none"
            raise ValueError(f"--proposer {TRUTH} takes the regions that the data bring along, but {lacking}")
        log.info("regions are those that the data bring along (--proposer truth)")
        return _true_regions(work, named=not auto)
    # Asked for by name, a proposer works on every record.
    records = [record for record in work.records if not auto or not record.regions]
    if not records:
        note = "name a --proposer to prepare others in their place"
        return work.outcome("regions", 0, 0, {}, {}, [], own=len(own), note=note)

    asked = proposer(options.proposer, weights=options.weights, device=options.device)
    model = load_model(options)
    model.require_trained("matching regions")
    model.to(find_device(options.device))
    source = {"source": model.source, "fingerprint": model_fingerprint(model)}
    tool = {"name": asked.name, "version": asked.version, "model": source, "sentences": options.sentences}
    workers = options.workers or cpu_count()
    problems: list[Problem] = []
    with open_writer(work.manifest, data_identity(work.data)) as writer:
        key = writer.tool("regions", tool)
        named = not auto or options.weights is not None
        todo = plan(writer.manifest, "regions", records, key, named=named, option="--proposer")
        pending = todo.pending
        log.info(f"regions by {asked.name}, matched by {model.source}")
        if todo.note:
            log.info(todo.note)
        with (
            progress("images", len(records), len(records) - len(pending)) as bar,
            proposing(asked, workers=workers) as propose,
        ):
            for chunk in _seen(pending, model, options, propose, workers):
                good = [one for one in chunk if isinstance(one, Seen)]
                matched = match_sentences(
                    model, [one.candidates for one in good], [one.sentences for one in good], batch=options.batch
                )
                entries = [
                    Entry(one.record.id, one.mark, key, region_content(found.regions, found.sources))
                    for one, found in zip(good, matched)
                ]
                writer.add("regions", entries)
                problems += [one for one in chunk if isinstance(one, Problem)]
                bar.advance(len(chunk))
        done = done_records(writer.manifest, "regions", records, key)
    found = sum(len(entry.content) for _, entry in done)
    said = sum(len(_sentences(record, options)) for record, _ in done)
    counts = {"regions": found, "sentences": said, "dropped": said - found}
    notes = [todo.note] if todo.note else []
    if done and not found:
        notes.append("no sentence fits a part better than the whole picture: try another --model or --proposer")
    if done and "sam" not in asked.name:
        notes.append("these proposals are not SAM's, which GOAL was published with")
    made, own_only = len(pending) - len(problems), len(work.records) - len(records)
    there = len(done) + len(todo.kept)
    return work.outcome("regions", there, made, counts, tool, problems, own=own_only, note="; ".join(notes))


@dataclass(frozen=True)
class Seen:
    """A record on its way to the encoder."""

    record: Record
    mark: str
    sentences: list[str]
    candidates: Candidates


def _seen(
    records: Sequence[Record], model: DualEncoder, options: PrepareRegions, propose: Propose, workers: int
) -> Iterator[list[Seen | Problem]]:
    """Records with their candidates, in chunks of a few batches of crops. Threads decode and cut, and wait for
    proposals, while the encoder works on the chunk before."""

    def said() -> Iterator[tuple[Record, list[str]]]:
        for record in records:  # not by the threads: tokenizers do not like several of them
            yield record, readable_sentences(_sentences(record, options), model.text_transform)

    def look(item: tuple[Record, list[str]]) -> Seen | Problem:
        record, sentences = item
        if not sentences:
            return Problem("empty caption", record.id, "no sentence of its captions holds a word")
        try:
            mark = mark_of("regions", record)  # before it is read: if it changes in between, it is made again
            picture = to_rgb(record.image.load())
            checked_size(*picture.size, model.image_transform)
        except InvalidImage as error:
            return Problem(error.kind, record.id, str(error))
        except ValueError as error:
            return Problem("unusual image", record.id, str(error))
        return Seen(record, mark, sentences, crop_candidates(picture, propose(picture), model.image_transform))

    chunk: list[Seen | Problem] = []
    crops = 0
    with decoding_threads(workers) as pool:
        for one in in_order(pool, look, said(), workers + 2):  # each may hold a large picture
            chunk.append(one)
            crops += len(one.candidates.pixels) if isinstance(one, Seen) else 0
            if crops >= CROPS * options.batch:
                yield chunk
                chunk, crops = [], 0
    if chunk:
        yield chunk


def _sentences(record: Record, options: PrepareRegions) -> list[str]:
    sentences = [part for caption in record.captions for part in split_sentences(caption, options.sentences)]
    return list(dict.fromkeys(sentences))


def _true_regions(work: Work, *, named: bool) -> Outcome:
    tool = {"name": TRUTH, "version": "as the data have them"}
    with open_writer(work.manifest, data_identity(work.data)) as writer:
        key = writer.tool("regions", tool)
        todo = plan(writer.manifest, "regions", work.records, key, named=named, option="--proposer")
        if todo.note:
            log.info(todo.note)
        left = {record.id for record, _ in todo.kept}
        records = [record for record in work.records if record.id not in left]
        entries = []
        for record in records:
            content = region_content(record.regions, [TRUTH] * len(record.regions))
            found = writer.manifest.entries["regions"].get(record.id)
            entry = Entry(record.id, mark_of("regions", record), key, content)
            if entry != found:
                entries.append(entry)
        writer.add("regions", entries)
    counts = {"regions": sum(len(record.regions) for record in records)}
    return work.outcome("regions", len(work.records), len(entries), counts, tool, [], note=todo.note)
