"""Configuration into objective: the third seam, a global term chosen by name and injected."""

from __future__ import annotations

import inspect
from functools import partial

from hnclip.config import ObjectiveConfig
from hnclip.losses import GLOBAL_LOSSES
from hnclip.objectives.hn_clip import HNClip


def build_objective(config: ObjectiveConfig) -> HNClip:
    """The objective of a configuration. Parameters that the chosen loss does not have are an error that lists those
    it has."""
    loss = GLOBAL_LOSSES[config.global_loss]
    if config.global_loss == "hn":
        loss = partial(loss, gamma=config.gamma, margin=config.margin, center=config.center)
    elif config.parameters:
        common = set(inspect.signature(GLOBAL_LOSSES["infonce"]).parameters)
        own = [name for name in inspect.signature(loss).parameters if name not in common]
        for name in config.parameters:
            if name not in own:
                choices = ", ".join(own) or "none"
                raise ValueError(f"objective.parameters: {config.global_loss} has no {name!r}; it has {choices}")
        loss = partial(loss, **config.parameters)
    return HNClip(global_loss=loss, token_weight=config.token_weight, frozen_margin=config.margin_source == "frozen")
