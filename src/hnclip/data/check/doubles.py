"""Records that repeat each other: the same or nearly the same picture or caption, in one split or in several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hnclip.core import Problem, Record
from hnclip.data.check.captions import Caption
from hnclip.data.check.fingerprint import similar_fingerprints
from hnclip.data.check.pictures import Picture
from hnclip.data.check.shingles import similar_texts

_NAMED = 2  # records that the description of a group names beside the first
_SHOWN = 50  # letters of a caption in it
_IN_TWO_SPLITS = {"same image": "shared image", "same caption": "shared caption"}


@dataclass(frozen=True)
class Group:
    """Records that repeat each other, by id, in the order of the data.

    `splits` are the declared splits they are in. `example` is one of the captions, if it is captions that are alike.
    """

    kind: str
    ids: tuple[str, ...]
    splits: tuple[str, ...]
    example: str | None = None

    def problem(self) -> Problem:
        """The group in one line."""
        first, *others = self.ids
        said = "" if self.example is None else f"“{_start(self.example)}” "
        named = ", ".join(others[:_NAMED])
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        splits = f" ({', '.join(self.splits)})" if len(self.splits) > 1 else ""
        return Problem(self.kind, first, f"{said}like {named}{more}{splits}")


@dataclass(frozen=True)
class Doubles:
    """Groups, those of several splits first, then large ones before small ones. Where `complete` is False there may be
    more similar ones: so much is alike that not everything was compared."""

    groups: list[Group]
    complete: bool


def identities(keys: Sequence[str], pictures: Mapping[str, Picture]) -> list[bytes | str]:
    """The same for the same picture, whatever its name. One that cannot be decoded is known by its key alone."""
    return [pictures[key].content if key in pictures else key for key in keys]


def image_doubles(
    records: Sequence[Record], keys: Sequence[str], pictures: Mapping[str, Picture], bits: int
) -> Doubles:
    """Records of one picture in two splits or under two names, and of pictures that look alike.

    Args:
        keys: of the records' pictures.
        pictures: by key, those that can be decoded.
        bits: the most in which the fingerprints of pictures that look alike differ.
    """
    by_picture: dict[bytes | str, list[int]] = {}
    for index, picture in enumerate(identities(keys, pictures)):
        by_picture.setdefault(picture, []).append(index)
    prints = {picture.content: picture.fingerprint for picture in pictures.values() if picture.fingerprint is not None}
    linked = similar_fingerprints(list(prints.values()), bits)
    contents = list(prints)
    same, similar = [], []
    for members in by_picture.values():
        group = _group("same image", members, records)
        if len(group.splits) > 1 or len({keys[index] for index in members}) > 1:
            same.append(group)
    for numbers in linked.groups:
        members = [index for number in numbers for index in by_picture[contents[number]]]
        if not _is_family(members, records):
            similar.append(_group("similar image", members, records))
    return Doubles([*_ranked(same), *_ranked(similar)], linked.complete)


def caption_doubles(
    records: Sequence[Record], shown: Sequence[bytes | str], captions: Sequence[Caption], threshold: float
) -> Doubles:
    """Records of different pictures with the same caption, or with captions that share nearly all their words.

    Args:
        shown: the identity of each record's picture.
        captions: those that can be read; case and white space do not count.
        threshold: the least Jaccard similarity of similar ones.
    """
    by_text: dict[str, list[Caption]] = {}
    for caption in captions:
        by_text.setdefault(" ".join(caption.text.split()).casefold(), []).append(caption)
    linked = similar_texts(list(by_text), threshold)
    said = list(by_text.values())
    same, similar = [], []
    for found in said:
        members = {caption.record for caption in found}
        if len({shown[index] for index in members}) > 1:
            same.append(_group("same caption", members, records, found[0].text))
    for numbers in linked.groups:
        members = {caption.record for number in numbers for caption in said[number]}
        if len({shown[index] for index in members}) > 1 and not _is_family(members, records):
            similar.append(_group("similar caption", members, records, said[numbers[0]][0].text))
    return Doubles([*_ranked(same), *_ranked(similar)], linked.complete)


def _is_family(members: Iterable[int], records: Sequence[Record]) -> bool:
    """Whether the source itself calls them similar."""
    groups = {records[index].group for index in members}
    return len(groups) == 1 and None not in groups


def _group(kind: str, members: Iterable[int], records: Sequence[Record], example: str | None = None) -> Group:
    found = [records[index] for index in sorted(members)]
    splits = tuple(dict.fromkeys(record.split for record in found if record.split is not None))
    if len(splits) > 1:
        kind = _IN_TWO_SPLITS.get(kind, kind)
    return Group(kind, tuple(record.id for record in found), splits, example)


def _ranked(groups: Iterable[Group]) -> list[Group]:
    """Groups of one size stay in the order of the data."""
    return sorted(groups, key=lambda group: (len(group.splits) < 2, -len(group.ids)))


def _start(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
