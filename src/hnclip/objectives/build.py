"""Configuration into objective: the third seam, a global term chosen by name and injected into a framework."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from torch import Tensor

from hnclip.config import ObjectiveConfig
from hnclip.frameworks import official_switches, term_weights
from hnclip.losses import GLOBAL_LOSSES
from hnclip.objectives.choice import Choice
from hnclip.objectives.global_term import GlobalTerm
from hnclip.objectives.hn_clip import HNClip
from hnclip.objectives.objective import Objective

if TYPE_CHECKING:
    from hnclip.models.dual_encoder import DualEncoder
    from hnclip.models.readout import Readout


@dataclass(frozen=True)
class Builder:
    """How a framework is made: its objective, and the readouts that it needs inside the encoder, by view."""

    objective: Callable[[Choice], Objective]
    readouts: Callable[[Choice, DualEncoder], Mapping[str, Readout]]


def build_objective(config: ObjectiveConfig) -> Objective:
    """The objective of a configuration. Parameters that the chosen loss does not have are an error that lists those
    it has."""
    if config.framework == "hn_clip":
        loss, frozen = _global_loss(config), config.margin_source == "frozen"
        return HNClip(global_loss=loss, token_weight=config.token_weight, frozen_margin=frozen)
    return _builder(config).objective(_choice(config))


def build_readouts(config: ObjectiveConfig, model: DualEncoder) -> Mapping[str, Readout]:
    """The readouts of a configuration's framework for this model, by view, on the model's device."""
    if config.framework == "hn_clip":
        return {}
    made = _builder(config).readouts(_choice(config), model)
    return {view: readout.to(model.device, model.dtype) for view, readout in made.items()}


def _choice(config: ObjectiveConfig) -> Choice:
    term = None
    if config.global_loss != "none":
        frozen = config.margin_source == "frozen"
        term = GlobalTerm(_global_loss(config), margins=config.global_loss in ("hn", "sigmoid"), frozen=frozen)
    return Choice(term, term_weights(config), official_switches(config))


def _builder(config: ObjectiveConfig) -> Builder:
    """Of the framework's module, which has the name of the framework and is imported when it is wanted."""
    module = import_module(f"hnclip.objectives.{config.framework}")
    return Builder(module.objective, module.readouts)


def _global_loss(config: ObjectiveConfig) -> Callable[..., Tensor]:
    loss = GLOBAL_LOSSES[config.global_loss]
    if config.global_loss == "hn":
        return partial(loss, gamma=config.gamma, margin=config.margin, center=config.center)
    if config.parameters:
        common = {*inspect.signature(GLOBAL_LOSSES["infonce"]).parameters, "margin_text"}
        own = [name for name in inspect.signature(loss).parameters if name not in common]
        for name in config.parameters:
            if name not in own:
                choices = ", ".join(own) or "none"
                raise ValueError(f"objective.parameters: {config.global_loss} has no {name!r}; it has {choices}")
        return partial(loss, **config.parameters)
    return loss
