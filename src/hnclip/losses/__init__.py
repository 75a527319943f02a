"""Losses as pure functions of tensors. Every global loss has one signature, so that a configuration value selects one:

loss(image, text, scale, *, offset=0, rows=None, ids=None, …) -> scalar
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hnclip.losses.contrastive import (
    clip_loss,
    debiased_loss,
    fixed_margin_loss,
    hcl_loss,
    hn_nce_loss,
    max_hinge_loss,
    score_margin_loss,
    sigmoid_loss,
    smoothed_loss,
)
from hnclip.losses.hard_negative import HardNegativeLoss, hard_negative_loss
from hnclip.losses.tiled import tiled_hard_negative_loss
from hnclip.losses.tokens import token_loss

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
    "sigmoid": sigmoid_loss,
}

__all__ = [
    "GLOBAL_LOSSES",
    "HardNegativeLoss",
    "clip_loss",
    "debiased_loss",
    "fixed_margin_loss",
    "hard_negative_loss",
    "hcl_loss",
    "hn_nce_loss",
    "max_hinge_loss",
    "score_margin_loss",
    "sigmoid_loss",
    "smoothed_loss",
    "tiled_hard_negative_loss",
    "token_loss",
]
