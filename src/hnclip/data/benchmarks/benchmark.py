"""What a named benchmark is: its splits, how many records each must have, and the files they are read from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from hnclip.core import Problem, Record
from hnclip.data.benchmarks.folder import Folder, NeededFile

# Reads one split of a benchmark; rows that no record can be made of come out as problems.
Reader = Callable[[Folder, str], Iterable[Record | Problem]]


@dataclass(frozen=True)
class Way:
    """One way to come by a split: the files that it takes, and what reads them."""

    files: tuple[NeededFile, ...]
    read: Reader


@dataclass(frozen=True)
class Split:
    """How many records a split must have, and the ways to read it, the best first.

    `numbered` says that its ids are running numbers, so that a wrong count can name the missing ones.
    """

    count: int
    ways: tuple[Way, ...]
    numbered: bool = False


@dataclass(frozen=True)
class Benchmark:
    """A published set of pictures and captions with fixed splits.

    Args:
        name: as `--data` spells it.
        title: as tables spell it.
        licence: of the captions, and of the pictures where it differs.
        page: the data set's own page.
        splits: by name, in the order of their records.
        images: names under which the pictures may lie in the folder; the folder itself if there is none of them.
        folders: names of its folder in $HNCLIP_DATA, the first that exists.
        optional: files that add something but are not needed.
        groups: reads families of near-duplicates from an optional file, by record id.
        absent: splits that it never has, and what to use instead.
        held_out: how the ids of those records begin that no training split of the same source contains, where not all
            records are such.
    """

    name: str
    title: str
    licence: str
    page: str
    splits: Mapping[str, Split]
    images: tuple[str, ...]
    folders: tuple[str, ...]
    optional: tuple[NeededFile, ...] = ()
    groups: Callable[[Folder], Mapping[str, str]] | None = None
    absent: Mapping[str, str] = field(default_factory=dict)
    held_out: str | None = None

    @property
    def files(self) -> tuple[NeededFile, ...]:
        """Every file that any way to any split takes, once, and the optional ones."""
        needed = [file for split in self.splits.values() for way in split.ways for file in way.files]
        return tuple(dict.fromkeys([*needed, *self.optional]))

    @property
    def counts(self) -> dict[str, int]:
        """The number of records of each split."""
        return {name: split.count for name, split in self.splits.items()}
