"""FineLIP's objective: a hinge on token-by-token scores, and beside it the injected global term, if there is one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from hnclip.losses.hard_negative import check_non_negative
from hnclip.losses.tokens import late_interaction_scores, triplet_loss
from hnclip.objectives.choice import Choice
from hnclip.objectives.embeddings import Embeddings
from hnclip.objectives.global_term import GlobalTerm
from hnclip.objectives.objective import Moment

if TYPE_CHECKING:
    from hnclip.models.dual_encoder import DualEncoder
    from hnclip.models.readout import Readout

OFFICIAL_PATCHES = 196  # the released code's default, whatever the model
RATIOS = (0.4, 0.5)  # of patches: what is aggregated, and what is kept of that


@dataclass(frozen=True)
class FineLip:
    """L = L_global(picture, caption) + w·α·L_fine, where L_fine is the sum of hinges on late-interaction scores of the
    token sets that `hnclip.models.readouts.aggregate` makes, and α rises from 0 to 1 in the first epoch.

    Args:
        global_term: None is FineLIP as released, which has no global term; InfoNCE or L_HN are added to it.
        fine_weight: w. 0 leaves the term out and asks for no tokens.
        rise: α.

    Relations:
        The fine term does not depend on the global one.

    Reference:
        FineLIP, Asokan et al. 2025.
    """

    image_views: ClassVar[tuple[str, ...]] = ("full",)
    text_views: ClassVar[tuple[str, ...]] = ("caption",)
    parts: ClassVar[tuple[str, ...]] = ()

    global_term: GlobalTerm | None
    fine_weight: float = 1.0
    rise: float = 1.0

    def __post_init__(self) -> None:
        check_non_negative("fine_weight", self.fine_weight)
        if self.global_term is None and self.fine_weight == 0:
            raise ValueError("FineLIP needs a term: choose a global loss, or a weight above 0 for 'fine'")

    @property
    def tokens(self) -> bool:
        return self.fine_weight > 0

    def at(self, moment: Moment) -> FineLip:
        return replace(self, rise=moment.within if moment.epoch == 0 else 1.0)

    def __call__(self, embeddings: Embeddings) -> dict[str, Tensor]:
        terms = {}
        if self.global_term is not None:
            terms["global"] = self.global_term(embeddings)
        if self.fine_weight > 0:
            terms["fine"] = self.fine_weight * self.rise * self._fine(embeddings)
        return terms

    def _fine(self, embeddings: Embeddings) -> Tensor:
        image, text = embeddings.images["full"], embeddings.texts["caption"]
        if image.tokens is None or image.mask is None or text.tokens is None or text.mask is None:
            raise ValueError("FineLIP's fine term needs the tokens of its readouts and their masks, of both views")
        offset = embeddings.offset
        scores = late_interaction_scores(
            image.tokens, text.tokens, image.mask, text.mask, offset=offset, rows=embeddings.rows
        )  # [R, N] twice
        return triplet_loss(*scores, ids=embeddings.ids, offset=offset)


def objective(choice: Choice) -> FineLip:
    """FineLIP as configured."""
    return FineLip(choice.global_term, choice.weights["fine"])


def readouts(choice: Choice, model: DualEncoder) -> Mapping[str, Readout]:
    """The aggregators of both views, where the fine term is wanted."""
    if choice.weights["fine"] == 0:
        return {}
    from hnclip.models.readouts.aggregate import AggregateImage, AggregateText

    patches = OFFICIAL_PATCHES if "finelip_patch_count" in choice.official else _patches(model)
    keep = kept_tokens(patches)
    return {"full": AggregateImage(model.width, keep), "caption": AggregateText(model.width, keep)}


def kept_tokens(patches: int) -> int:
    """Mixtures that the patches of a picture become; as many of a caption's tokens."""
    aggregated, kept = RATIOS
    return max(1, int(patches * aggregated * kept))


def _patches(model: DualEncoder) -> int:
    side = model.family.grid(model.backbone, model.image_size)
    if side is None:
        raise ValueError(
            "FineLIP keeps a share of a picture's patches, and this model does not say how many it has: set "
            "objective.switches finelip_patch_count to official, which counts with 196"
        )
    return side * side
