"""Weights between a model and what fine-tuning made of it: much of the gain kept, much of the forgetting undone."""

from __future__ import annotations

import torch

from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import stretch


def match_base(base: DualEncoder, tuned: DualEncoder) -> None:
    """Make sure that `base` is what `tuned` was tuned from, as far as shapes can tell. A base with shorter captions is
    stretched in place, as it must have been before fine-tuning."""
    if base.family.kind == tuned.family.kind and base.context < tuned.context:
        stretch(base, context=tuned.context)
    before, after = (dict(model.backbone.named_parameters()) for model in (base, tuned))
    for name in sorted({*before, *after}):
        if name not in before or name not in after:
            which = "the base" if name not in before else "the tuned model"
            raise ValueError(f"the models are of different make: {which} has no tensor {name}")
        if before[name].shape != after[name].shape:
            shapes = f"{list(before[name].shape)} in the base, {list(after[name].shape)} in the tuned model"
            raise ValueError(f"the models are of different make: tensor {name} is {shapes}")


@torch.no_grad()
def interpolate(into: DualEncoder, base: DualEncoder, tuned: DualEncoder, alpha: float) -> DualEncoder:
    """Set every weight of `into` to (1 − α)·base + α·tuned, and return it.

    Relations: α 0 is the base, α 1 the tuned model, both exactly. `into` may be one of the two.

    Reference: WiSE-FT (Wortsman et al. 2022), equation 1.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be between 0 (the base) and 1 (the tuned model), got {alpha}")
    before, after = (dict(model.backbone.named_parameters()) for model in (base, tuned))
    for name, weight in into.backbone.named_parameters():
        weight.copy_(torch.lerp(before[name], after[name].to(before[name].device), alpha))
    into.source = f"{1 - alpha:g} × ({base.source}) + {alpha:g} × ({tuned.source})"
    into.provenance = None  # neither model's own any more
    return into
