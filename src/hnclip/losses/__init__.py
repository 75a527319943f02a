"""Losses as pure functions of tensors. Every global loss has one signature, so a config value picks one:

loss(image, text, scale, *, offset=0, rows=None, ids=None, check_values=True, …) -> scalar
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hnclip.losses.hard_negative import HardNegativeLoss, hard_negative_loss
from hnclip.losses.infonce import clip_loss, fixed_margin_loss
from hnclip.losses.reweighted import debiased_floor_rows, debiased_loss, hcl_loss, hn_nce_loss
from hnclip.losses.rivals import max_hinge_loss, score_margin_loss, siglip_loss
from hnclip.losses.smoothed import smoothed_loss
from hnclip.losses.tiled import tiled_hard_negative_loss
from hnclip.losses.token import token_loss

GLOBAL_LOSSES: dict[str, Callable[..., Tensor]] = {
    "hn": tiled_hard_negative_loss,
    "infonce": clip_loss,
    "smoothed": smoothed_loss,
    "fixed_margin": fixed_margin_loss,
    "score_margin": score_margin_loss,
    "hn_nce": hn_nce_loss,
    "hcl": hcl_loss,
    "debiased": debiased_loss,
    "max_hinge": max_hinge_loss,
    "siglip": siglip_loss,
}

__all__ = [
    "GLOBAL_LOSSES",
    "HardNegativeLoss",
    "clip_loss",
    "debiased_floor_rows",
    "debiased_loss",
    "fixed_margin_loss",
    "hard_negative_loss",
    "hcl_loss",
    "hn_nce_loss",
    "max_hinge_loss",
    "score_margin_loss",
    "siglip_loss",
    "smoothed_loss",
    "tiled_hard_negative_loss",
    "token_loss",
]
