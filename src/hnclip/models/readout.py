"""What a method reads from a tower in addition to global vectors: parts of an image, chunks of a caption, mixtures.

A readout belongs to one view and turns the hidden states of its tower into vectors that replace the tokens of the view.
It runs inside the encoder, so that gradient caching, gathering and sharding treat its output and its parameters like
all others; objectives see vectors and a mask. The parameters of readouts exist in training only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class TowerOutput:
    """The output of a tower for one view of B pairs, before any normalisation.

    Shape:
        vectors: [B, D], global vectors in the joint space (CLIP: of the class token, of the end token).
        hidden: [B, T, W], last hidden states of the patches, or of every position of the text; for CLIP before the
            final norm.
        inside: [B, T] bool, False for padding.
        parts: parts of this view, if the objective needs them: [B, K, P] bool, the patches of each part of an
            image; [B, K, 2], start and stop of each part of a text. A part without a patch or token is absent.
        project: hidden states [..., W] to the joint space [..., D], through the final norm of the tower.
        norm: the final norm of a text tower alone, [..., W] to [..., W]; the identity for images and for towers
            without one.
    """

    vectors: Tensor
    hidden: Tensor
    inside: Tensor
    parts: Tensor | None
    project: Callable[[Tensor], Tensor]
    norm: Callable[[Tensor], Tensor]

    def require_parts(self) -> Tensor:
        """The parts of this view; ValueError if the batch has none."""
        if self.parts is None:
            raise ValueError("this readout pools parts of its view, and the batch has none: see Objective.parts")
        return self.parts


class Readout(nn.Module, ABC):
    """`forward(tower) -> (tokens [B, K, D], mask [B, K] bool)`; the readout normalises what must have length 1."""

    @abstractmethod
    def forward(self, tower: TowerOutput) -> tuple[Tensor, Tensor]: ...
