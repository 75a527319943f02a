"""A data set of records, its splits, and shares of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from hnclip.core import Problem, Record

# Other spellings that data sources use. COCO's "restval" is training material in every retrieval paper.
SPLIT_NAMES = {"training": "train", "restval": "train", "val": "validation", "valid": "validation", "dev": "validation"}


@dataclass(frozen=True)
class DataSet:
    """What a data source holds: records, and the problems of rows that no record could be made of.

    `name` is what messages and tables call it. `exact` says that its counts are part of a published protocol, so that
    no record may be left out of an evaluation. `absent` names splits that the source has but not here, and why.
    """

    name: str
    records: tuple[Record, ...]
    problems: tuple[Problem, ...] = ()
    exact: bool = False
    absent: Mapping[str, str] = field(default_factory=dict)

    def splits(self) -> dict[str, int]:
        """Declared splits with their numbers of records, in the order of their first record."""
        counts: dict[str, int] = {}
        for record in self.records:
            if record.split is not None:
                counts[record.split] = counts.get(record.split, 0) + 1
        return counts

    def part(self, split: str, *, validation_share: float = 0.05) -> tuple[Record, ...]:
        """The records of a split; "all" is every record.

        Where the source declares no validation split, one is taken out of the training records: the share of them whose
        hashed ids come first, families together. It depends on the ids alone, so it is the same in every run and on
        every machine. A share of 0 holds nothing out. A source without any splits counts as training records.
        """
        if split == "all":
            return self.records
        declared = self.splits()
        # A validation split that lies elsewhere is not made up out of the training records either.
        if split in declared and not (split == "train" and "validation" not in {*declared, *self.absent}):
            return tuple(record for record in self.records if record.split == split)
        why = self.absent.get(split) or (self.absent.get("train") if split == "validation" else None)
        if why:
            raise ValueError(f"{self.name} has no split {split!r} here: {why}")
        if split not in ("train", "validation") or (declared and "train" not in declared):
            have = (
                f"it has {', '.join(declared)} (--read.no-splits sets them aside)"
                if declared
                else "it declares none: use train, validation or all"
            )
            raise ValueError(f"{self.name} has no split {split!r}; {have}")
        training = [record for record in self.records if not declared or record.split == "train"]
        held_out = _held_out(training, validation_share)
        return tuple(record for record in training if (_family(record) in held_out) == (split == "validation"))


def normal_split(name: str) -> str:
    """A split's name as the rest of the house spells it."""
    name = name.strip().lower()
    return SPLIT_NAMES.get(name, name)


def fraction_of(records: Sequence[Record], fraction: float) -> tuple[Record, ...]:
    """This share of the records, rounded, in the order they have: those whose hashed ids come first.

    The ids alone decide, so it is the same share in every run, and a smaller share is a part of every larger one.

    Reference:
        HN-CLIP, section 3 and appendix C: 5, 20, 50 and 100 % of the training pairs.
    """
    if fraction == 1:
        return tuple(records)
    count = round(fraction * len(records))
    if count < 2:
        raise ValueError(
            f"{100 * fraction:g} % of {len(records)} training pairs are {count}, but training needs at least 2: raise "
            "--fraction"
        )
    # Not the hash that holds validation records out: whoever comes last there would come last here.
    ids = sorted((record.id for record in records), key=lambda name: _digest(f"fraction\0{name}"))
    chosen = set(ids[:count])
    return tuple(record for record in records if record.id in chosen)


def _digest(text: str) -> bytes:
    return sha256(text.encode("utf-8", "surrogatepass")).digest()


def _family(record: Record) -> str:
    return record.group or f"\0{record.id}"


def _held_out(records: Sequence[Record], share: float) -> set[str]:
    """Families whose records make up at least this share, in the order of their hashes."""
    if not 0 <= share < 1:
        raise ValueError(f"validation_share must be in [0, 1), got {share}")
    if share == 0:
        return set()
    wanted = max(2, round(share * len(records)))
    sizes: dict[str, int] = {}
    for record in records:
        sizes[_family(record)] = sizes.get(_family(record), 0) + 1
    if len(records) < 4 or len(sizes) < 2:
        raise ValueError(
            f"{len(records)} training records are too few to take a validation split from: name one with --validation"
        )
    held_out: set[str] = set()
    count = 0
    for family in sorted(sizes, key=lambda name: sha256(name.encode()).digest()):
        if count >= wanted or len(held_out) == len(sizes) - 1:
            break
        held_out.add(family)
        count += sizes[family]
    return held_out
