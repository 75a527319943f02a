"""A data set of records, its splits, and fractions of them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import accumulate

from hnclip.core import Problem, Record

SPLITS = ("train", "validation", "test")

# Other spellings that data sources use. COCO's "restval" is training data in every retrieval paper.
SPLIT_NAMES = {"training": "train", "restval": "train", "val": "validation", "valid": "validation", "dev": "validation"}
# COCO's files and folders.
SPLIT_NAMES |= {
    f"{name}{year}": SPLIT_NAMES.get(name, name) for name in ("train", "val", "test") for year in (2014, 2017)
}


@dataclass(frozen=True)
class DataSet:
    """The records of a data source.

    Args:
        name: as messages and tables spell it.
        records: in the order of the source.
        problems: of rows that no record could be made of.
        exact: the counts are part of a published protocol: no record may be left out of an evaluation.
        absent: splits that the source has, but not here, and why.
        warnings: what a user should know about how the source was read; no record is lost by it.
    """

    name: str
    records: tuple[Record, ...]
    problems: tuple[Problem, ...] = ()
    exact: bool = False
    absent: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[Problem, ...] = ()

    def splits(self) -> dict[str, int]:
        """Declared splits with their numbers of records, in the order of their first record."""
        return dict(Counter(record.split for record in self.records if record.split is not None))

    def part(self, split: str, *, validation_share: float = 0.05) -> tuple[Record, ...]:
        """The records of a split; "all" is every record.

        Where the source declares no validation split, one is taken out of the training records: the share of them whose
        hashed ids come first, groups together. It depends on the ids alone, so it is the same in every run and on
        every machine. A share of 0 holds nothing out. A source without any splits counts as training records.
        """
        if split == "all":
            return self.records
        declared = self.splits()
        # A validation split that is absent here is not taken out of the training records either.
        if split in declared and not (split == "train" and "validation" not in {*declared, *self.absent}):
            return tuple(record for record in self.records if record.split == split)
        why = self.absent.get(split) or (self.absent.get("train") if split == "validation" else None)
        if why:
            raise ValueError(f"{self.name} has no split {split!r} here: {why}")
        if split not in ("train", "validation") or (declared and "train" not in declared):
            have = f"it has {', '.join(declared)}" if declared else "it declares none: use train, validation or all"
            raise ValueError(f"{self.name} has no split {split!r}: {have} (--read.no-splits ignores splits)")
        training = [record for record in self.records if not declared or record.split == "train"]
        held_out = _held_out(training, validation_share)
        return tuple(record for record in training if (_group(record) in held_out) == (split == "validation"))


class RowError(ValueError):
    """Why no record can be made of a row. `kind` is one of `hnclip.data.validate`."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


@dataclass
class ReadLog:
    """What a reader has to report: rows that became no record, and warnings."""

    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)

    def problem(self, kind: str, where: str, detail: str) -> None:
        self.problems.append(Problem(kind, printable(where), printable(detail)))

    def warn(self, kind: str, where: str, detail: str) -> None:
        self.warnings.append(Problem(kind, printable(where), printable(detail)))


def printable(text: str) -> str:
    """The text with lone surrogates, which have no UTF-8 form, escaped."""
    return text.encode(errors="backslashreplace").decode()


def normal_split(name: str) -> str:
    """A split's name as hnclip spells it. Interned: a million records share one string."""
    name = name.strip().lower()
    return sys.intern(SPLIT_NAMES.get(name, name))


def fraction_of(records: Sequence[Record], fraction: float) -> tuple[Record, ...]:
    """This fraction of the records, rounded, in their order: those whose hashed ids come first.

    The ids alone decide, so it is the same in every run, and a smaller fraction is a part of every larger one.

    Reference:
        HN-CLIP, section 3 and appendix C: 5, 20, 50 and 100 % of the training pairs.
    """
    if fraction == 1:
        return tuple(records)
    count = round(fraction * len(records))
    if count < 2:
        raise ValueError(f"{100 * fraction:g} % of {len(records)} training pairs are only {count}: raise --fraction")
    # Not the hash that holds out validation records: then both would choose the same records first.
    chosen = set(_by_hash((record.id for record in records), "fraction\0")[:count])
    return tuple(record for record in records if record.id in chosen)


def _by_hash(names: Iterable[str], salt: str = "") -> list[str]:
    return sorted(names, key=lambda name: sha256(f"{salt}{name}".encode("utf-8", "surrogatepass")).digest())


def _group(record: Record) -> str:
    return record.group or f"\0{record.id}"


def _held_out(records: Sequence[Record], share: float) -> set[str]:
    """Groups whose records make up at least this share, in the order of their hashes."""
    if not 0 <= share < 1:
        raise ValueError(f"validation_share must be in [0, 1), got {share}")
    if share == 0:
        return set()
    sizes = Counter(map(_group, records))
    if len(records) < 4 or len(sizes) < 2:
        raise ValueError(f"{len(records)} training records are too few to hold out some: name others with --validation")
    wanted = max(2, round(share * len(records)))
    groups = _by_hash(sizes)[:-1]
    before = accumulate((sizes[group] for group in groups), initial=0)
    return {group for group, count in zip(groups, before) if count < wanted}
