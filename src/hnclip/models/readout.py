"""What a framework reads of a tower beside global vectors: parts of a picture, chunks of a caption, learnt mixtures.

A readout belongs to one view and turns what the tower made of it into a set of vectors that take the place of the
view's tokens. It runs inside the encoder, so gradient caching, gathering and sharding treat what it makes, and its
parameters, as they treat all others; objectives see vectors and a mask, and know nothing of it. The parameters of
readouts are training's alone: a saved model has none of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Seen:
    """What a tower made of one view of B pairs, before any normalisation.

    Shape:
        vectors: [B, D], global vectors in the joint space: of CLIP those of the class token, of the end token.
        hidden: [B, T, W], the tower's last hidden states of patches, or of every position of the text. Of CLIP they
            stand before the final norm.
        inside: [B, T] bool, True for patches and all tokens; False for pads.
        parts: what the batch says of this view, if the objective asked for it: of a picture [B, K, P] bool, the patches
            of each part; of a text [B, K, 2], where each part starts and stops. None of either is an absent part.
        project: hidden states [..., W] into the joint space [..., D], through the tower's final norm.
        norm: the final norm of a text tower alone, [..., W] to [..., W]; of a tower without one, and of pictures,
            nothing.
    """

    vectors: Tensor
    hidden: Tensor
    inside: Tensor
    parts: Tensor | None
    project: Callable[[Tensor], Tensor]
    norm: Callable[[Tensor], Tensor]


class Readout(nn.Module, ABC):
    """`forward(seen) -> (tokens [B, K, D], mask [B, K] bool)`. Whatever is to be of length 1, the readout makes so."""

    @abstractmethod
    def forward(self, seen: Seen) -> tuple[Tensor, Tensor]: ...


def require_parts(seen: Seen) -> Tensor:
    """The parts that this view's readout cannot do without."""
    if seen.parts is None:
        raise ValueError("this readout pools parts of its view, and the batch has none: see Objective.parts")
    return seen.parts
