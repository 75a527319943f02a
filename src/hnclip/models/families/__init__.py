"""Families of dual encoders: what differs between CLIP, SigLIP and any two towers, and nothing else.

A family is stateless; the weights live in the backbone, a model of transformers. All of them have the attributes
`vision_model`, `text_model` and `logit_scale`.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from hnclip.data.batches import TextBatch
from hnclip.data.texts import TextTransform
from hnclip.models.families.clip import Clip
from hnclip.models.families.dual_tower import DualTower
from hnclip.models.families.siglip import Siglip, Siglip2
from hnclip.models.families.wanted import Wanted


class Family(Protocol):
    """Features before normalisation, in the joint space. Vectors [B, D]; if tokens are wanted also one vector per patch
    [B, P, D] or per position of the text [B, T, D], whatever that position holds. If hidden states are, the tower's
    last ones of the same places, [B, P, W] and [B, T, W]: `patch_vectors` and `word_vectors` make tokens of them."""

    kind: str
    """The `model_type` in the backbone's config.json."""
    title: str
    """The name for people."""
    fixed_length: bool
    """Whether texts are always padded to the context, and the pads read."""

    def image_size(self, backbone: Any) -> int | None:
        """Side of the square pictures that the backbone takes; None if it takes any."""
        ...

    def grid(self, backbone: Any, side: int) -> int | None:
        """Patches along each side of a picture of `side` pixels; None if the tower does not say."""
        ...

    def image_features(self, backbone: Any, pixels: Tensor, *, want: Wanted) -> tuple[Tensor, Tensor | None]: ...

    def text_features(
        self, backbone: Any, texts: TextBatch, transform: TextTransform, *, want: Wanted
    ) -> tuple[Tensor, Tensor | None]: ...

    def patch_vectors(self, backbone: Any, hidden: Tensor) -> Tensor:
        """Hidden states of pictures [..., W] in the joint space [..., D]."""
        ...

    def word_vectors(self, backbone: Any, hidden: Tensor) -> Tensor:
        """Hidden states of texts [..., W] in the joint space [..., D]."""
        ...

    def text_norm(self, backbone: Any, hidden: Tensor) -> Tensor:
        """The first thing that `word_vectors` does, where it is a norm; else nothing."""
        ...

    def positions(self, backbone: Any) -> Any:
        """The module that holds the text tower's learnt `position_embedding` and its `position_ids`."""
        ...

    def backbone_class(self) -> Any:
        """The class of transformers that opens and writes this family."""
        ...


_ALL: tuple[Family, ...] = (Clip(), Siglip(), Siglip2(), DualTower())
FAMILIES = {family.kind: family for family in _ALL}


def family_of(config: Any) -> Family:
    """The family of a backbone, by the `model_type` of its configuration."""
    if config.model_type not in FAMILIES:
        raise ValueError(f"model_type {config.model_type!r} is not supported; supported are {', '.join(FAMILIES)}")
    return FAMILIES[config.model_type]
