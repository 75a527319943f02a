"""Pairs that training would push apart although they belong together: the same text, the same image, or nearly so."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from hnclip.analysis.caption_pairs import CaptionPairs, caption_pairs
from hnclip.analysis.geometry import SEARCH_UP_TO
from hnclip.util.console import Iterate

Group = tuple[int, ...]


@dataclass(frozen=True)
class Suspect:
    """Two captions of different pictures that are nearly the same to the encoder, by row, the earlier first."""

    first: int
    second: int
    similarity: float


@dataclass(frozen=True)
class FalseNegatives:
    """What a margin must not push apart.

    Attributes:
        same_text: rows of captions that are the same to the model, of at least two records.
        same_image: records whose pictures are the same to the model; None where pictures were not at hand.
        threshold: similarity from which two other captions are suspected.
        suspected_count: how many pairs are; None if there are too many captions to compare all.
        suspects: the most similar of them, falling.
    """

    same_text: tuple[Group, ...]
    same_image: tuple[Group, ...] | None
    threshold: float
    suspected_count: int | None
    suspects: tuple[Suspect, ...]


def find_false_negatives(
    text: Tensor,
    owner: Tensor,
    caption_ids: Tensor,
    image_ids: Tensor | None,
    *,
    threshold: float = 0.98,
    limit: int = 1000,
    search_up_to: int = SEARCH_UP_TO,
    chunk: int = 1024,
    progress: Iterate = iter,
) -> FalseNegatives:
    """Exact doubles by identity, and suspects by similarity.

    Training takes care of exact doubles itself: `deal_batches` keeps records with the same image or the same drawn
    caption out of each other's batch, and where they meet all the same, `ids` takes them out of each other's negatives
    in the loss. Of suspects it knows nothing: L_HN gives them the largest margins of all. So it is suspects that should
    be looked at, and merged or removed if they are the same thing.

    Args:
        text: caption embeddings, L2-normalised by the caller.
        owner: the record each caption belongs to.
        caption_ids, image_ids: equal numbers mean the same to the model (`PairData`).
        threshold: suspected are captions of different records from this cosine on that are no exact doubles, neither
            they nor their images.
        limit: suspects to keep; the count is of all.
        search_up_to: with more pairs of captions than this, suspects are not looked for.
        chunk: side of a tile.
        progress: walks through the tiles.

    Shape:
        text [T, D]; owner [T], from 0 to N - 1; caption_ids [T]; image_ids [N]. Memory is O(chunk²) beside them.
    """
    if not -1 <= threshold <= 1:
        raise ValueError(f"threshold must be a cosine, from -1 to 1, got {threshold}")
    if limit < 0:
        raise ValueError(f"limit must be at least 0, got {limit}")
    pairs = caption_pairs(text, owner)
    _check_ids("caption_ids", caption_ids, len(pairs))
    images = None
    if image_ids is not None:
        if owner.is_floating_point() or int(owner.min()) < 0 or int(owner.max()) >= len(image_ids):
            raise ValueError(f"owner must hold records from 0 to {len(image_ids) - 1}, the {len(image_ids)} image_ids")
        _check_ids("image_ids", image_ids, len(image_ids))
        images = image_ids.to(owner.device)[owner]  # [T]
    count: int | None = None
    suspects: tuple[Suspect, ...] = ()
    if pairs.count <= search_up_to:
        known = [caption_ids] if images is None else [caption_ids, images]
        ids = torch.stack([column.to(pairs.text.device) for column in known], dim=1)  # [T, K]
        count, suspects = _suspects(pairs, ids, threshold, limit, chunk, progress)
    return FalseNegatives(
        same_text=_groups(caption_ids.tolist(), owner.tolist()),
        same_image=None if image_ids is None else _groups(image_ids.tolist(), list(range(len(image_ids)))),
        threshold=threshold,
        suspected_count=count,
        suspects=suspects,
    )


def _suspects(
    pairs: CaptionPairs, ids: Tensor, threshold: float, limit: int, chunk: int, progress: Iterate
) -> tuple[int, tuple[Suspect, ...]]:
    """How many pairs from `threshold` on agree in none of their ids [T, K], and the most similar of them."""
    count = 0
    kept = pairs.text.new_empty(0)  # [k] similarities, falling; the earlier tile first where they are equal
    places = ids.new_empty(0, 2)  # [k, 2] rows
    for tile in pairs.tiles(chunk, progress):
        if tile.similarity.amax() < threshold:
            continue
        rows, columns = (tile.similarity >= threshold).nonzero().T  # [n] each
        found = torch.stack([rows + tile.rows.start, columns + tile.columns.start], dim=1)  # [n, 2]
        new = (ids[found[:, 0]] != ids[found[:, 1]]).all(1)  # [n]
        values = tile.similarity[rows, columns]  # [n]
        count += int(new.sum())
        if len(kept) == limit:  # from here on only what is better than the last one kept has to be sorted
            new &= values > (kept[-1] if limit else torch.inf)
        kept, order = torch.cat([kept, values[new]]).sort(descending=True, stable=True)
        kept, places = kept[:limit], torch.cat([places, found[new]])[order[:limit]]
    return count, tuple(
        Suspect(first, second, similarity) for (first, second), similarity in zip(places.tolist(), kept.tolist())
    )


def _groups(ids: list[int], records: list[int]) -> tuple[Group, ...]:
    """Places of equal ids, in order, where they belong to more than one record."""
    places: dict[int, list[int]] = defaultdict(list)
    for place, number in enumerate(ids):
        places[number].append(place)
    return tuple(tuple(group) for group in places.values() if len({records[place] for place in group}) > 1)


def _check_ids(name: str, ids: Tensor, count: int) -> None:
    if ids.shape != (count,) or ids.is_floating_point():
        raise ValueError(f"{name} must be [{count}] integers, got {tuple(ids.shape)} {ids.dtype}")
