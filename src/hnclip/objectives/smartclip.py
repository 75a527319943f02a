"""SmartCLIP: every caption is compared in those dimensions alone that it speaks of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from hnclip.losses.hard_negative import at_least_float32, check_non_negative
from hnclip.objectives.choice import Choice
from hnclip.objectives.embeddings import Embeddings
from hnclip.objectives.global_term import GlobalTerm
from hnclip.objectives.objective import Moment

if TYPE_CHECKING:
    from hnclip.models.dual_encoder import DualEncoder
    from hnclip.models.readout import Readout


@dataclass(frozen=True)
class SmartClip:
    """L = L_global on A + λ·‖m‖₁/D, with A_ij = ⟨v_i ⊙ m_j, t_j⟩ and m_j ∈ {0, 1}^D the mask of caption j.

    A = V·(M ⊙ T)ᵀ, so the global term needs no more than masked captions. Both directions take the mask of the pair's
    caption: an image is compared with every caption under that caption's mask, a caption with every image under its
    own. Margins are those of whole captions. Masks are training's alone, retrieval is by plain cosine.

    Args:
        global_term: what is injected; SmartCLIP's own is InfoNCE.
        sparsity_weight: λ. 0 leaves the term out, and then nothing but the global term closes a dimension.

    Relations:
        With all dimensions open this is the global term itself. The sources do not say what λ is, nor whether and where
        vectors are normalised after masking. Here the penalty is the mean share of open dimensions, so that λ does not
        depend on D; its default is this package's own; and nothing is normalised again.

    Reference:
        SmartCLIP, modular contrast and sparsity.
    """

    image_views: ClassVar[tuple[str, ...]] = ("full",)
    text_views: ClassVar[tuple[str, ...]] = ("caption",)
    parts: ClassVar[tuple[str, ...]] = ()
    tokens: ClassVar[bool] = True

    global_term: GlobalTerm
    sparsity_weight: float

    def __post_init__(self) -> None:
        check_non_negative("the weight of SmartCLIP's sparsity", self.sparsity_weight)

    def at(self, moment: Moment) -> SmartClip:
        return self

    def __call__(self, embeddings: Embeddings) -> dict[str, Tensor]:
        text, masks = embeddings.texts["caption"].vectors, _masks(embeddings)  # [N, D] each
        terms = {"global": self.global_term(embeddings, text=masks * text)}
        if self.sparsity_weight > 0:
            # A mean of the masks and not of their absolute values, whose gradient would end where one is 0.
            terms["sparsity"] = self.sparsity_weight * masks[embeddings.own].mean()
        return terms


def _masks(embeddings: Embeddings) -> Tensor:
    caption = embeddings.texts["caption"]
    if caption.tokens is None or caption.tokens.shape != caption.vectors[:, None].shape:
        raise ValueError("SmartCLIP needs one mask for each caption: put its readout CaptionMask on the view caption")
    masks = caption.tokens[:, 0]  # [N, D]
    return masks.to(at_least_float32(masks))


def objective(choice: Choice) -> SmartClip:
    """SmartCLIP's objective for `hnclip.objectives.build`."""
    if choice.global_term is None:
        raise ValueError(
            "smartclip without a global term would learn nothing: sparsity alone closes every dimension; choose a "
            "global loss, for example infonce or hn"
        )
    return SmartClip(choice.global_term, choice.weights["sparsity"])


def readouts(choice: Choice, model: DualEncoder) -> Mapping[str, Readout]:
    """SmartCLIP's mask network, on the view `caption`."""
    from hnclip.models.readouts.mask import CaptionMask

    return {"caption": CaptionMask(model.width)}
