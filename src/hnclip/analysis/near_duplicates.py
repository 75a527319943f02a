"""Captions with the captions nearest to them and the words that they share: what near-duplicates look like."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
    chosen = list[int]()
    queries, pairs = set[int](), set[frozenset[int]]()
    for place in distance.argsort(stable=True).tolist():
        if len(chosen) == rows:
            break
        row = int(geometry.rows[place])
        pair = frozenset((owner[row], owner[int(geometry.nearest[place])]))
        if owner[row] not in queries and pair not in pairs:
            chosen.append(row)
            queries.add(owner[row])
            pairs.add(pair)
    return _caption_rows([(row, _nearest(text, owner, row, negatives)) for row in chosen], records)


def suspect_rows(suspects: Iterable[Suspect], records: Sequence[Record]) -> list[CaptionRow]:
    """Suspected duplicates, each a caption with one other."""
    return _caption_rows([(pair.first, [(pair.second, pair.similarity)]) for pair in suspects], records)


def _nearest(text: Tensor, owner: Sequence[int], row: int, limit: int) -> list[tuple[int, float]]:
    """Rows and cosines of the nearest captions of `limit` other records."""
    similarity = text.float() @ text[row].float()  # [T]
    found, seen = list[tuple[int, float]](), {owner[row]}
    for other in similarity.argsort(descending=True, stable=True).tolist():
        if len(found) < limit and owner[other] not in seen:
            seen.add(owner[other])
            found.append((other, float(similarity[other])))
    return found


def _caption_rows(
    chosen: Sequence[tuple[int, Sequence[tuple[int, float]]]], records: Sequence[Record]
) -> list[CaptionRow]:
    captions = [(record, caption) for record in records for caption in record.captions]
    found = []
    for row, nearest in chosen:
        labels = ["", *(f"cosine {cosine:.3f}: " for _, cosine in nearest)]
        shown = [captions[number] for number in (row, *(other for other, _ in nearest))]
        passages = highlight_shared(*(caption for _, caption in shown))
        query, *others = (
            CaptionedImage(label + shorten(record.id, NAME), passage, thumbnail(record))
            for label, (record, _), passage in zip(labels, shown, passages)
        )
        found.append(CaptionRow(query, tuple(others)))
    return found


def thumbnail(record: Record) -> Image | None:
    """The image as large as it is shown; None where it is missing or damaged."""
    try:
        image = to_rgb(record.image.load())
    except (ValueError, OSError):
        return None
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    return image
