"""Captions with the captions nearest to them and the words that they share: what near-duplicates look like."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from PIL.Image import Image
from torch import Tensor

from hnclip.analysis.captions import CaptionGeometry, Suspect
from hnclip.core import Record
from hnclip.data.images import to_rgb
from hnclip.report.document import CaptionedImage, CaptionRow
from hnclip.util.text import highlight_shared, shorten

THUMBNAIL = 480  # pixels of the longer side, as large as a page or a figure shows an image
NAME = 60  # characters of a record's id


def near_duplicate_rows(
    text: Tensor,
    records: Sequence[Record],
    geometry: CaptionGeometry,
    *,
    quantile: float = 0.9,
    rows: int = 4,
    negatives: int = 3,
) -> list[CaptionRow]:
    """Captions whose hardest negative is about as similar as this quantile of all, with their nearest negatives.

    The paper's 0.9 is striking but not extreme; 1 gives the most similar pairs. No record is a query twice, and no two
    rows show the same query and hardest negative the other way round. The negatives of a row are of different records.

    Args:
        text: unit vectors of all captions of the records, in their order; `geometry` is theirs.

    Shape:
        text [T, D]

    Reference:
        HN-CLIP, appendix A, figures "Near-duplicate caption pairs".
    """
    owner = [number for number, record in enumerate(records) for _ in record.captions]
    distance = (geometry.similarity - geometry.hardest.quantile(quantile)).abs()  # [S]
    found = list[CaptionRow]()
    queries, pairs = set[int](), set[frozenset[int]]()
    for place in distance.argsort(stable=True).tolist():
        if len(found) == rows:
            break
        row = int(geometry.rows[place])
        pair = frozenset((owner[row], owner[int(geometry.nearest[place])]))
        if owner[row] in queries or pair in pairs:
            continue
        queries.add(owner[row])
        pairs.add(pair)
        found.append(_caption_row(row, list(_nearest(text, owner, row, negatives)), records, owner))
    return found


def suspect_rows(suspects: Iterable[Suspect], records: Sequence[Record]) -> list[CaptionRow]:
    """Suspected duplicates, each a caption with one other."""
    owner = [number for number, record in enumerate(records) for _ in record.captions]
    return [_caption_row(pair.first, [(pair.second, pair.similarity)], records, owner) for pair in suspects]


def _nearest(text: Tensor, owner: Sequence[int], row: int, limit: int) -> Iterator[tuple[int, float]]:
    """Rows and cosines of the nearest captions of `limit` other records."""
    similarity = text.float() @ text[row].float()  # [T]
    seen = {owner[row]}
    for other in similarity.argsort(descending=True, stable=True).tolist():
        if len(seen) > limit:
            return
        if owner[other] not in seen:
            seen.add(owner[other])
            yield other, float(similarity[other])


def _caption_row(
    row: int, nearest: Sequence[tuple[int, float]], records: Sequence[Record], owner: Sequence[int]
) -> CaptionRow:
    rows = [row, *(other for other, _ in nearest)]
    chosen = [records[owner[number]] for number in rows]
    first = [owner.index(owner[number]) for number in rows]  # row of each record's first caption
    captions = [record.captions[number - start] for record, number, start in zip(chosen, rows, first)]
    names = [shorten(record.id, NAME) for record in chosen]
    labels = names[:1] + [f"cosine {cosine:.3f}: {name}" for (_, cosine), name in zip(nearest, names[1:])]
    query, *others = (
        CaptionedImage(label, passage, thumbnail(record))
        for label, passage, record in zip(labels, highlight_shared(*captions), chosen)
    )
    return CaptionRow(query, tuple(others))


def thumbnail(record: Record) -> Image | None:
    """The image as large as it is shown; None where it is missing or damaged."""
    try:
        image = to_rgb(record.image.load())
    except (ValueError, OSError):
        return None
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    return image
