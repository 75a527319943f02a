"""Parts of views by name: which patches of a picture, which tokens of a caption a readout pools.

Parts are found once, when data are prepared, and travel with the batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from hnclip.data.images import ImageTransform
from hnclip.data.records import Record
from hnclip.data.texts import TextTransform


@dataclass(frozen=True)
class Material:
    """What parts are found in.

    Args:
        records: N of them.
        texts: of a text view its texts, a row for each caption or record; None where there is none.
        owner: the record, by number, that each of these rows belongs to.
        grid: patches along each side of the model's picture; None if the model does not say.
    """

    records: Sequence[Record]
    texts: Sequence[str | None]
    owner: Sequence[int]
    text_transform: TextTransform
    image_transform: ImageTransform
    grid: int | None


@dataclass(frozen=True)
class Part:
    """Parts of one view: [N, K, P] bool of an image view, [rows, K, 2] int64 of a text view (start, stop)."""

    view: str
    find: Callable[[Material], Tensor]


PARTS: dict[str, Part] = {}
