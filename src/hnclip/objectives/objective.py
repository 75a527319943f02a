"""What training asks of an objective: the views it needs, and terms made from their embeddings."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from hnclip.objectives.embeddings import Embeddings


class Objective(Protocol):
    """A function of embeddings that says beforehand what it wants to see.

    It knows no model and no process, so it works unchanged on plain batches, cached ones and gathered ones.
    """

    @property
    def image_views(self) -> tuple[str, ...]:
        """Names of the image views it reads."""

    @property
    def text_views(self) -> tuple[str, ...]:
        """Names of the text views it reads."""

    @property
    def tokens(self) -> bool:
        """Whether it reads token vectors."""

    def __call__(self, embeddings: Embeddings) -> dict[str, Tensor]:
        """Scalar terms by name, weights applied: their sum is the loss, a mean over the query rows."""
