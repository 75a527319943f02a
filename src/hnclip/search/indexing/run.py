"""Pictures and captions into an index: encoded by batches, committed every few seconds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from hnclip.core import Problem, ViewEmbeddings
from hnclip.data.readers.columns import invalid_text
from hnclip.data.texts import TextTransform
from hnclip.encode.loop import caption_batches, encode_batches
from hnclip.models.dual_encoder import DualEncoder
from hnclip.search.index.catalogue import texts_hash
from hnclip.search.index.changes import Change, Known, NewItem, NewPicture
from hnclip.search.index.writer import IndexWriter
from hnclip.search.indexing.pictures import Pictures, Seen, Unusable
from hnclip.search.indexing.plan import Noted, Plan

TOGETHER = 256  # pictures of one commit
SECONDS = 5.0  # after which there is one even so
ROOM = 2**26  # bytes of patch vectors of one commit
ENDED = 4096  # items that end with one commit

Value = TypeVar("Value")


@dataclass
class Counts:
    """What became of the pictures, and how much was encoded for it."""

    new: int = 0
    changed: int = 0
    moved: int = 0
    gone: int = 0
    unchanged: int = 0
    bad: int = 0
    encoded: int = 0
    encoded_captions: int = 0
    cut_captions: int = 0


@dataclass
class _Batch:
    """Images to encode, and items that can be committed once they are."""

    fresh: list[Seen] = field(default_factory=list)
    items: list[NewItem] = field(default_factory=list)

    def pixels(self) -> Tensor:
        """[B, 3, S, S]; [0] if all items have images that are in the index."""
        found = [seen.picture.pixels for seen in self.fresh if seen.picture]
        return torch.stack(found) if found else torch.empty(0)


class Run:
    """Takes what threads have seen, in any order, and brings it into the index.

    An item is committed with its picture or after it. While the encoder works on a batch, the last change is written by
    a thread of its own.
    """

    def __init__(
        self,
        writer: IndexWriter,
        model: DualEncoder,
        pictures: Pictures,
        known: Mapping[str, Known],
        plan: Plan,
        *,
        batch: int,
        advance: Callable[[int], None],
    ) -> None:
        """
        Args:
            known: what the index had before, by name.
            advance: told how many pictures and captions were worked off.
        """
        self.counts = Counts(gone=len(plan.gone), unchanged=plan.unchanged, bad=plan.bad)
        self.problems: Noted = dict(plan.problems)
        self._writer, self._model, self._pictures, self._known = writer, model, pictures, known
        self._gone, self._left = list(plan.gone), Counter(known[name].content for name in plan.gone)
        self._size, self._advance = batch, advance
        patches = 4 * writer.about.patches * writer.about.width  # bytes
        self._together = min(TOGETHER, max(1, ROOM // patches)) if patches else TOGETHER
        self._again: list[int] = []
        self._waiting: dict[bytes, list[Seen]] = {}  # for content that a thread is decoding
        self._batch = _Batch()
        self._encoded: list[NewPicture] = []
        self._ready: list[NewItem] = []
        self._committed_at = time.monotonic()
        self._thread = ThreadPoolExecutor(1)
        self._committing: Future[None] | None = None

    def take(self, looked: Iterable[Seen | Unusable]) -> None:
        """Encode and commit what threads have seen; what remains at the end is committed by `finish`."""
        for batch, encoded in encode_batches(self._model, self._encode, self._batches(looked)):
            self._collect(batch, encoded)
            if len(self._ready) >= self._together or self._commit_is_due():
                self._commit()

    def _batches(self, looked: Iterable[Seen | Unusable]) -> Iterator[tuple[_Batch, Tensor]]:
        for found in looked:
            self._sort(found)
            batch = self._batch
            full = len(batch.fresh) >= self._size or len(batch.items) >= self._together
            if full or self._commit_is_due():  # images that come slowly are not waited for
                self._batch = _Batch()
                yield batch, batch.pixels()
        batch, self._batch = self._batch, _Batch()
        yield batch, batch.pixels()

    def _encode(self, pixels: Tensor) -> ViewEmbeddings:
        if not len(pixels):
            return ViewEmbeddings(pixels)
        return self._model.encode_images(pixels, tokens=bool(self._writer.about.patches))

    def _commit_is_due(self) -> bool:
        return time.monotonic() > self._committed_at + SECONDS

    def _sort(self, found: Seen | Unusable) -> None:
        if isinstance(found, Unusable):
            self._take_bad(found)
        elif found.picture is not None:
            self._pictures.arrived(found.content)
            self._batch.fresh.append(found)
            for seen in (found, *self._waiting.pop(found.content, ())):
                self._take_item(seen)
        elif self._pictures.waits(found.content):
            self._waiting.setdefault(found.content, []).append(found)
        elif self._pictures.has(found.content):
            self._take_item(found)
        else:  # whoever decoded the same content found that it cannot be used
            self._again.append(found.number)

    def turn(self) -> list[int]:
        """Once all were seen: numbers of those that have to be looked at again."""
        again = [*self._again, *(seen.number for some in self._waiting.values() for seen in some)]
        self._again, self._waiting = [], {}
        return again

    def finish(self, problems: Noted) -> None:
        """Commit what is left, and end what is no longer there.

        Args:
            problems: those that the index knew before.
        """
        self._commit()
        for gone in _parts(self._gone):
            self._write(Change(gone=gone))
        for found in _parts([found for name, found in self.problems.items() if problems.get(name) != found]):
            self._write(Change(problems=found))
        for solved in _parts([name for name in problems if name not in self.problems]):
            self._write(Change(solved=solved))
        self._settle()

    def close(self) -> None:
        self._thread.shutdown()

    def _take_bad(self, found: Unusable) -> None:
        name = found.entry.name
        self.counts.bad += 1
        self.problems[name] = found.problem, found.stamp
        if name in self._known and not found.out_of_reach:
            self._gone.append(name)
        self._advance(1 + len(found.entry.captions))

    def _take_item(self, seen: Seen) -> None:
        entry = seen.entry
        self._batch.items.append(NewItem(entry.name, seen.content, entry.place, seen.stamp, entry.captions))
        self._advance(1)

    def _collect(self, batch: _Batch, encoded: ViewEmbeddings) -> None:
        self._ready += batch.items
        vectors = encoded.vectors.float().cpu().numpy()  # [B, D]
        tokens = None if encoded.tokens is None else encoded.tokens.float().cpu().numpy()  # [B, P, D]
        for row, seen in enumerate(batch.fresh):
            assert seen.picture is not None
            patches = None if tokens is None else tokens[row]
            self._encoded.append(
                NewPicture(seen.content, vectors[row], seen.picture.shape, seen.picture.thumbnail, patches)
            )
        self.counts.encoded += len(batch.fresh)

    def _commit(self) -> None:
        pictures, self._encoded = self._encoded, []
        items, self._ready = self._ready, []
        readable = self._readable(items)
        stamps = {item.name: item.stamp for item in readable if self._same(item) and self._moved_on(item)}
        born = [item for item in readable if not self._same(item)]
        for item in readable:
            self._count(item)
        texts = list(dict.fromkeys(text for item in born for text in item.captions))
        self._settle()
        there = self._writer.known_texts(texts)
        new = [text for text in texts if text not in there]
        self._advance(sum(len(item.captions) for item in items) - len(new))
        captions: dict[str, np.ndarray] = {}
        for some, vectors in self._encode_texts(new):
            captions.update(zip(some, vectors))
            if time.monotonic() > self._committed_at + SECONDS:
                # Without items yet: only so that a kill does not make them be encoded again.
                self._write(Change(pictures=pictures, captions=captions))
                pictures, captions = [], {}
        if born or stamps:
            self._write(Change(pictures=pictures, captions=captions, items=born, stamps=stamps))
        self._committed_at = time.monotonic()  # also if there was nothing to write

    def _readable(self, items: Sequence[NewItem]) -> list[NewItem]:
        """Items without captions that the model can read nothing in; these are noted."""
        texts = list(dict.fromkeys(text for item in items for text in item.captions))
        bad = unreadable_texts(texts, self._model.text_transform)
        kept = []
        for item in items:
            found = [text for text in item.captions if text in bad]
            if found:
                kind = "bad text" if invalid_text(found[0]) else "empty caption"
                self.problems[item.name] = Problem(kind, item.name, "; ".join(bad[text] for text in found)), ""
                item = replace(item, captions=tuple(text for text in item.captions if text not in bad))
            kept.append(item)
        return kept

    def _same(self, item: NewItem) -> bool:
        """Whether the index has it, but for the stamp."""
        before = self._known.get(item.name)
        wanted = (item.content, item.place, texts_hash(item.captions))
        return before is not None and (before.content, before.place, before.captions) == wanted

    def _moved_on(self, item: NewItem) -> bool:
        return self._known[item.name].stamp != item.stamp

    def _count(self, item: NewItem) -> None:
        before = self._known.get(item.name)
        if before is None and self._left[item.content] > 0:
            self._left[item.content] -= 1
            self.counts.moved += 1
            self.counts.gone -= 1
        elif before is None:
            self.counts.new += 1
        elif self._same(item):
            self.counts.unchanged += 1
        else:
            self.counts.changed += 1

    def _encode_texts(self, texts: Sequence[str]) -> Iterator[tuple[list[str], np.ndarray]]:
        """Texts and their vectors [n, D], a batch at a time."""
        if not texts:
            return
        model, tokenized = self._model, self._model.text_transform(texts)
        self.counts.cut_captions += tokenized.truncated
        for rows, encoded in encode_batches(
            model, model.encode_texts, caption_batches(model, tokenized, batch=self._size)
        ):
            self.counts.encoded_captions += len(rows)
            self._advance(len(rows))
            yield [texts[row] for row in rows], encoded.vectors.float().cpu().numpy()

    def _write(self, change: Change) -> None:
        self._settle()
        self._committing = self._thread.submit(self._writer.commit, change)
        self._committed_at = time.monotonic()

    def _settle(self) -> None:
        """Wait for the last change to be written."""
        if self._committing is not None:
            self._committing.result()
            self._committing = None


def _parts(values: Sequence[Value]) -> Iterator[Sequence[Value]]:
    """Few enough for one commit: readers wait while it is written."""
    for start in range(0, len(values), ENDED):
        yield values[start : start + ENDED]


def unreadable_texts(texts: Sequence[str], transform: TextTransform) -> dict[str, str]:
    """Texts that a model can read nothing in, or that have no UTF-8 form, and why."""
    bad = {text: why for text in texts if (why := invalid_text(text))}
    rest = [text for text in texts if text not in bad]
    try:
        transform(rest)
    except ValueError:
        for text in rest:
            try:
                transform([text])
            except ValueError as error:
                bad[text] = str(error).replace("texts[0]", "the caption")
    return bad
