"""Rows into records: captions of one picture together, nothing left out unsaid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hnclip.core import ImageSource, Problem, Record, Region
from hnclip.data.readers.cells import bad_text
from hnclip.data.readers.segments import best_first, without_pictures

SHOWN = 5  # problems that an error message shows


@dataclass(frozen=True)
class Found:
    """What a reader made of its files."""

    records: tuple[Record, ...]
    problems: tuple[Problem, ...]


@dataclass(slots=True)
class _Entry:
    """A record in the making. `name` is its id if the guessed ids turn out not to be unique."""

    id: str
    name: str
    image: ImageSource
    captions: list[str]
    split: str | None
    short: str | None = None
    group: str | None = None
    regions: tuple[Region, ...] = ()
    edges: ImageSource | None = None

    def record(self, id: str) -> Record:
        captions = tuple(dict.fromkeys(self.captions))
        regions = best_first(list(dict.fromkeys(self.regions)))
        return Record(id, self.image, captions, self.split, self.short, regions, self.group, self.edges)


class Gather:
    """Collects records in the order in which their pictures first appear.

    Args:
        own_ids: the user named where ids are, so two pictures of one id are a problem. Guessed ids that are not unique
            are not meant as ids: then every record is called by its picture's name instead.
    """

    def __init__(self, *, own_ids: bool = False) -> None:
        self.problems: list[Problem] = []
        self._own_ids = own_ids
        self._entries: dict[str, _Entry] = {}

    def problem(self, kind: str, where: str, detail: str) -> None:
        self.problems.append(Problem(kind, _printable(where), _printable(detail)))

    def add(
        self,
        where: str,
        image: ImageSource,
        captions: Sequence[str],
        *,
        name: str,
        id: str = "",
        split: str | None = None,
        short: str = "",
        group: str = "",
        key: str | None = None,
        regions: Sequence[Region] = (),
        edges: ImageSource | None = None,
    ) -> None:
        """Take in what one row says of a picture; the same picture may come again.

        Args:
            where: the row, for messages.
            captions: as written; white space around them is cut off here.
            name: of the picture, unique, and the same on every machine.
            id: another name for it; "" for none, as for `short` and `group`.
            key: what is the same for the same picture, if `image.key` cannot tell.
        """
        bad = bad_text(name)
        if bad:
            self.problem("bad text", where, f"the picture's name cannot be used: {bad}")
            return
        if not captions:
            self.problem("no caption", where, "there is a picture but no caption")
        texts = [text for caption in captions if self._usable(text := caption.strip(), where)]
        if not texts:
            return
        key = key or image.key
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(id or name, name, image, [], split)
        elif entry.split != split:
            detail = f"{name} is in split {split} here, but in {entry.split} before: this row is left out"
            self.problem("shared image", where, detail)
            return
        entry.captions += texts
        entry.group = entry.group or group or None
        entry.regions += tuple(regions)
        entry.edges = entry.edges or edges
        short = short.strip()
        if entry.short is None and short and self._usable(short, where):
            entry.short = short

    def finish(self, looked_for: str) -> Found:
        """The records. None at all is an error that says what was looked for, and what was found instead."""
        entries, self._entries = self._entries, {}
        ids = [entry.id for entry in entries.values()]
        if not self._own_ids and len(set(ids)) < len(ids):
            ids = [entry.name for entry in entries.values()]
        records: dict[str, Record] = {}
        for key, id in zip(list(entries), ids):
            entry = entries.pop(key)
            if id in records:
                self.problem("repeated id", id, f"{entry.name} has the id of another picture and is left out")
            else:
                records[id] = entry.record(id)
        if not records:
            shown = "".join(f"\n  {found.kind}: {found.where}: {found.detail}" for found in self.problems[:SHOWN])
            more = f"\n  and {len(self.problems) - SHOWN} more" if len(self.problems) > SHOWN else ""
            raise ValueError(f"no record found; looked for {looked_for}{':' if shown else ''}{shown}{more}")
        return Found(tuple(without_pictures(records.values())), tuple(self.problems))

    def _usable(self, text: str, where: str) -> bool:
        if not text:
            self.problem("empty caption", where, "the caption has no text")
            return False
        bad = bad_text(text)
        if bad:
            self.problem("bad text", where, f"the caption cannot be used: {bad}")
        return bad is None


def _printable(text: str) -> str:
    """Text that can be written as UTF-8, even if it tells of a name that cannot."""
    return text.encode(errors="backslashreplace").decode()
