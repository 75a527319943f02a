"""Two models on the same queries: who finds more, by how much, and whether that is more than chance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hnclip.evaluate.bootstrap import PairedDifference, paired_bootstrap
from hnclip.evaluate.metrics import recall_at
from hnclip.evaluate.queries import Query
from hnclip.evaluate.ranks import Ranks
from hnclip.evaluate.table import ARROWS


@dataclass(frozen=True)
class Comparison:
    """Model a against model b in one direction, counting the right answers among the first k.

    Attributes:
        recall_a, recall_b: R@k of each, in percent.
        difference: recall_a - recall_b in points, with its paired interval and p-value.
        both, only_a, only_b, neither: numbers of queries by who answers them.
    """

    direction: str
    k: int
    recall_a: float
    recall_b: float
    difference: PairedDifference
    both: int
    only_a: int
    only_b: int
    neither: int

    @property
    def clear(self) -> bool:
        """A difference counts only if its interval excludes zero."""
        return not self.difference.low <= 0 <= self.difference.high

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "difference": self.difference._asdict(), "clear": self.clear}

    def sentence(self, a: str, b: str) -> str:
        """What was found, with the models' names."""
        found = self.difference
        interval = f"{found.mean:+.1f} points of R@{self.k} [{found.low:+.1f}, {found.high:+.1f}]"
        verdict = f"{a if found.mean > 0 else b} is better" if self.clear else "no clear difference"
        return f"{self.direction.replace('_to_', '→')}: {a} minus {b} {interval}: {verdict}"


def compare_ranks(
    a: Ranks,
    b: Ranks,
    *,
    groups: Tensor | None = None,
    ks: Sequence[int] = (1,),
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> list[Comparison]:
    """Compare two models on one gallery, in both directions at every K.

    Args:
        a, b: ranks of both models, of the same captions and pictures in the same order.
        groups: label per image, for example `group_numbers(records)`; images of one label are drawn together, always
            with all their captions. Without it every image is its own group.
        ks: lengths of the result list.
        level, resamples, seed: as in `paired_bootstrap`.

    Shape:
        groups [I].

    Relations:
        Swapping a and b flips the sign of every difference and keeps every verdict.
    """
    if not ks:
        raise ValueError("ks must name at least one K")
    if not torch.equal(a.owner, b.owner):
        raise ValueError(
            f"a and b are not of the same gallery: {len(a.owner)} captions of {len(a.image_to_text)} pictures against "
            f"{len(b.owner)} of {len(b.image_to_text)}, or in another order"
        )
    images = len(a.image_to_text)
    if groups is None:
        groups = torch.arange(images)  # [I]
    elif groups.shape != (images,):
        raise ValueError(f"groups must have one label per image, [{images}], got {tuple(groups.shape)}")
    labels = {"text_to_image": groups[a.owner], "image_to_text": groups}  # [T], [I]
    return [
        _compare(direction, k, getattr(a, direction), getattr(b, direction), labels[direction], level, resamples, seed)
        for direction in ARROWS
        for k in ks
    ]


def compare_queries(
    a: Sequence[Query],
    b: Sequence[Query],
    *,
    ks: Sequence[int] = (1,),
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> list[Comparison]:
    """Compare two models by the queries that `read_queries` gives; their order may differ, the queries may not.

    Relations:
        The same as `compare_ranks` of the evaluations that were written, with the records' families as groups.
    """
    other = _paired(a, b)
    pictures = [query for query in a if query.direction == "image_to_text"]
    captions = [query for query in a if query.direction == "text_to_image"]
    numbers = {query.record: number for number, query in enumerate(pictures)}
    lonely = [query.record for query in captions if query.record not in numbers]
    if lonely or not captions or len({query.record for query in captions}) < len(pictures):
        raise ValueError(
            f"a and b must hold both directions of a whole gallery, got {len(captions)} captions and {len(pictures)} "
            "pictures that do not belong together"
        )
    owner = torch.tensor([numbers[query.record] for query in captions])  # [T]
    families: dict[str, int] = {}
    groups = [families.setdefault(query.group or f"\0{query.record}", len(families)) for query in pictures]

    def ranks(of: Iterable[Query]) -> Tensor:
        return torch.tensor([query.rank for query in of])

    return compare_ranks(
        Ranks(ranks(captions), ranks(pictures), owner),
        Ranks(ranks(other[_key(query)] for query in captions), ranks(other[_key(query)] for query in pictures), owner),
        groups=torch.tensor(groups),
        ks=ks,
        level=level,
        resamples=resamples,
        seed=seed,
    )


def _compare(
    direction: str, k: int, a: Tensor, b: Tensor, groups: Tensor, level: float, resamples: int, seed: int
) -> Comparison:
    first, second = a <= k, b <= k  # [n], [n]
    difference = paired_bootstrap(
        100.0 * first, 100.0 * second, groups=groups, level=level, resamples=resamples, seed=seed
    )
    return Comparison(
        direction=direction,
        k=k,
        recall_a=recall_at(a, k),
        recall_b=recall_at(b, k),
        difference=difference,
        both=int((first & second).sum()),
        only_a=int((first & ~second).sum()),
        only_b=int((second & ~first).sum()),
        neither=int((~first & ~second).sum()),
    )


_Key = tuple[str, str, int | None]


def _key(query: Query) -> _Key:
    return query.direction, query.record, query.caption


def _paired(a: Sequence[Query], b: Sequence[Query]) -> dict[_Key, Query]:
    """The queries of b by their keys. Refuses what cannot be paired: another gallery, or other families in it."""
    first, second = {_key(query): query for query in a}, {_key(query): query for query in b}
    for name, queries, distinct in (("a", a, first), ("b", b, second)):
        if len(distinct) < len(queries):
            raise ValueError(f"{name} holds {len(queries) - len(distinct)} queries more than once")
    for name, only in (("a", first.keys() - second.keys()), ("b", second.keys() - first.keys())):
        if only:
            direction, record, caption = min(only, key=str)
            what = f"picture {record!r}" if caption is None else f"caption {caption} of {record!r}"
            raise ValueError(
                f"a and b cannot be compared: {len(only)} queries are only in {name}, for example {direction} of "
                f"{what}; evaluate both models on the same data"
            )
    for key, query in first.items():
        if query.group != second[key].group:
            raise ValueError(
                f"a and b cannot be compared: {query.record!r} is in group {query.group!r} and {second[key].group!r}"
            )
    return second
