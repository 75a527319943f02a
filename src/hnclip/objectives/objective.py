"""What training asks of an objective: the views it needs, and terms made from their embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hnclip.objectives.embeddings import Embeddings


@dataclass(frozen=True)
class Moment:
    """A time in a run: after `step` optimiser steps, of `epoch_steps` in each of `epochs` epochs."""

    step: int
    epoch_steps: int
    epochs: int

    @property
    def epoch(self) -> int:
        """Epochs that are finished."""
        return self.step // self.epoch_steps

    @property
    def within(self) -> float:
        """Share of the present epoch that is done in the middle of the step to come, so that an epoch of one step is
        not all beginning."""
        return (self.step % self.epoch_steps + 0.5) / self.epoch_steps


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
    def parts(self) -> tuple[str, ...]:
        """Names of the parts of views that the readouts of its framework pool (`hnclip.data.views.parts`)."""

    @property
    def tokens(self) -> bool:
        """Whether it reads token vectors, or what readouts put in their place."""

    def at(self, moment: Moment) -> Objective:
        """The objective of this moment: weights may follow a schedule."""

    def __call__(self, embeddings: Embeddings) -> dict[str, Tensor]:
        """Scalar terms by name, weights applied: their sum is the loss, a mean over the query rows."""
