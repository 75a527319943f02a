"""The exchangeable term: one of `GLOBAL_LOSSES` on whole pictures and captions. The third seam of the house."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hnclip.objectives.embeddings import Embeddings


@dataclass(frozen=True)
class GlobalTerm:
    """A global loss and where its margins come from.

    Args:
        loss: one of `GLOBAL_LOSSES`, with its own parameters bound by `functools.partial`.
        margins: whether the loss has margins that are built from captions (L_HN, and the sigmoid loss with γ).
        frozen: build them from the batch's `margin_text` and not from the live captions.
    """

    loss: Callable[..., Tensor]
    margins: bool = False
    frozen: bool = False

    def __call__(self, embeddings: Embeddings, text: Tensor | None = None) -> Tensor:
        """The term on view `full` and view `caption`.

        Args:
            text: vectors [N, D] to compare pictures with instead of the captions' own. Margins stay those of the whole
                captions.
        """
        options: dict[str, Any] = {}
        captions = embeddings.texts["caption"].vectors  # [N, D]
        if self.frozen:
            if embeddings.margin_text is None:
                raise ValueError("a frozen margin needs batches with margin_text, this one has none")
            options["margin_text"] = embeddings.margin_text
        elif self.margins and text is not None:
            options["margin_text"] = captions
        compared = captions if text is None else text
        image = embeddings.images["full"].vectors
        return self.loss(image, compared, embeddings.scale, **options, **queries(embeddings))


def queries(embeddings: Embeddings) -> dict[str, Any]:
    """The queries of a batch and its duplicates, as every loss takes them."""
    return {"offset": embeddings.offset, "rows": embeddings.rows, "ids": embeddings.ids}
