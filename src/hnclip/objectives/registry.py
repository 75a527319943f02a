"""The methods that L_HN is compared with and injected into, as data, and the objective of a configuration.

Imports no torch: the command line builds its help from these names. The terms are in the file of each method.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, get_args

from hnclip.config import SCALE_MAX, AdaptConfig, Fidelity, GlobalLoss, Method, ObjectiveConfig, TrainConfig

if TYPE_CHECKING:
    from hnclip.models.dual_encoder import DualEncoder
    from hnclip.models.readout import Readout
    from hnclip.objectives.base import GlobalTerm, Objective

MethodChoice = Literal[Method, "lora", "dora"]
METHOD_CHOICES: tuple[MethodChoice, ...] = get_args(MethodChoice)


@dataclass(frozen=True)
class MethodSpec:
    """A method's own settings.

    Args:
        title: its name in tables.
        objective: name of the class in `hnclip.objectives.<method>`.
        own_global: the global loss that it comes with, by fidelity.
        weights: default weights of its other terms.
        optim: fields of the optimiser's configuration that belong to the method, by fidelity.
    """

    title: str
    objective: str
    own_global: Mapping[Fidelity, GlobalLoss]
    weights: Mapping[str, float] = field(default_factory=dict)
    optim: Mapping[Fidelity, Mapping[str, Any]] = field(default_factory=dict)


def _both(value: Any) -> dict[Fidelity, Any]:
    return {"official": value, "corrected": value}


# What official and corrected mean for each method is in hnclip docs methods.
METHODS: dict[Method, MethodSpec] = {
    "hn_clip": MethodSpec("HN-CLIP", "HNClip", _both("hn")),
    "long_clip": MethodSpec("Long-CLIP", "LongClip", _both("smoothed"), {"short": 1.0}),
    "finelip": MethodSpec(
        "FineLIP",
        "FineLip",
        {"official": "none", "corrected": "infonce"},
        {"fine": 1.0},
        {
            "official": {"schedule": "wrapped", "readout_lr": 2e-4},
            "corrected": {"schedule": "cosine", "readout_lr": 2e-4},
        },
    ),
    "goal": MethodSpec("GOAL", "Goal", _both("infonce"), {"local": 0.5, "patch": 1.0, "text": 1.0}),
    # At the rate of the towers the mask would stay as it was initialised.
    "smartclip": MethodSpec("SmartCLIP", "SmartClip", _both("infonce"), {"sparsity": 0.1}, _both({"readout_lr": 1e-3})),
    "structxlip": MethodSpec(
        "StructXLIP",
        "StructXlip",
        _both("infonce"),
        {"structure": 0.25, "consistency": 0.001, "chunks": 0.001},
        {"official": {"scale_max": 33.115}, "corrected": {"scale_max": SCALE_MAX}},  # released: clamped to e^3.5
    ),
}


def build_objective(config: ObjectiveConfig) -> Objective:
    """The objective of a configuration; ValueError lists the valid names of unknown weights or loss parameters."""
    spec, weights, term = METHODS[config.method], term_weights(config), _global_term(config)
    # SmartCLIP's sparsity alone would close every mask.
    if term is None and (config.method == "smartclip" or not any(weights.values())):
        raise ValueError(f"{spec.title} needs a global loss with these weights, for example infonce")
    objective = getattr(import_module(f"hnclip.objectives.{config.method}"), spec.objective)
    options = {"crops": config.crops} if config.method == "structxlip" else {}
    return objective(term, weights, config.fidelity == "official", **options)


def build_readouts(objective: Objective, model: DualEncoder) -> dict[str, Readout]:
    """The readouts of an objective for this model, by view, on the device of the model."""
    return {view: readout.to(model.device, model.dtype) for view, readout in objective.readouts(model).items()}


def term_weights(config: ObjectiveConfig) -> dict[str, float]:
    """The weights of a method's own terms: its defaults, overridden by the configuration."""
    if config.method == "hn_clip":
        return {"token": config.token_weight}
    spec = METHODS[config.method]
    for name in config.weights:
        if name not in spec.weights:
            raise ValueError(f"objective.weights: {spec.title} has no term {name!r}; it has {', '.join(spec.weights)}")
    return {**spec.weights, **config.weights}


def _global_term(config: ObjectiveConfig) -> GlobalTerm | None:
    from hnclip.losses import GLOBAL_LOSSES
    from hnclip.objectives.base import GlobalTerm

    if config.global_loss == "none":
        return None
    loss, parameters = GLOBAL_LOSSES[config.global_loss], dict[str, Any](config.parameters)
    if config.global_loss == "hn":
        parameters = {"gamma": config.gamma, "margin": config.margin, "center": config.center}
    else:
        shared = {*inspect.signature(GLOBAL_LOSSES["infonce"]).parameters, "margin_text"}
        own = [name for name in inspect.signature(loss).parameters if name not in shared]
        for name in parameters:
            if name not in own:
                choices = ", ".join(own) or "none"
                raise ValueError(f"objective.parameters: {config.global_loss} has no {name!r}; it has {choices}")
    margins, frozen = config.global_loss in ("hn", "sigmoid"), config.margin_source == "frozen"
    return GlobalTerm(partial(loss, **parameters) if parameters else loss, margins=margins, frozen=frozen)


def apply_method(config: TrainConfig, method: MethodChoice, fidelity: Fidelity | None = None) -> TrainConfig:
    """The run with another method, as `--method` of `hnclip train`: its terms and weights, its own global loss, its
    optimiser settings. γ, margin and center stay. LoRA and DoRA have no terms of their own: they train adapters with
    everything else and the scale frozen, and InfoNCE as the global loss.

    Args:
        fidelity: corrected if not given, or that of the run if it has this method already.

    Raises:
        ValueError: the run has another method: its settings would stay in the run.
    """
    old = config.objective
    if old.method not in ("hn_clip", method):
        raise ValueError(
            f"the recipe is already that of {old.method}: choose {method} by --method with another recipe, or use "
            f"--recipe {method}"
        )
    if method in ("hn_clip", "lora", "dora") and fidelity is not None:
        raise ValueError(f"{method} has no official and corrected variant: leave out the fidelity")
    if old.method == method and fidelity is not None:
        config = with_fidelity(config, fidelity)
    kept = {name: getattr(old, name) for name in ("gamma", "margin", "center", "mask_duplicates")}
    if method == "hn_clip":
        return replace(config, objective=ObjectiveConfig(**kept))
    if method == "lora" or method == "dora":
        objective = ObjectiveConfig(global_loss="infonce", token_weight=0.0, **kept)
        adapt = config.adapt if config.adapt.method != "full" else AdaptConfig(method=method)
        optim = replace(config.optim, scale_lr=0.0)
        return replace(config, objective=objective, optim=optim, adapt=replace(adapt, method=method))
    fidelity = fidelity or (old.fidelity if old.method == method else "corrected")
    spec = METHODS[method]
    objective = ObjectiveConfig(
        method=method, fidelity=fidelity, global_loss=spec.own_global[fidelity], token_weight=0.0, **kept
    )
    return replace(config, objective=objective, optim=replace(config.optim, **spec.optim.get(fidelity, {})))


def with_fidelity(config: TrainConfig, fidelity: Fidelity) -> TrainConfig:
    """The same run of the same method, as released or corrected.

    A global loss or an optimiser setting that is not the method's default stays, except `open_cosine`: the released
    recipes have it, and `corrected` replaces it by `cosine`.
    """
    objective = config.objective
    if objective.method == "hn_clip":
        raise ValueError("hn_clip has no official and corrected variant: leave out the fidelity")
    spec = METHODS[objective.method]
    default_global = objective.global_loss == spec.own_global[objective.fidelity]
    global_loss = spec.own_global[fidelity] if default_global else objective.global_loss
    before, after = (spec.optim.get(variant, {}) for variant in (objective.fidelity, fidelity))
    changed = {name: value for name, value in after.items() if getattr(config.optim, name) == before[name]}
    if fidelity == "corrected" and config.optim.schedule == "open_cosine":
        changed["schedule"] = "cosine"
    objective = replace(objective, fidelity=fidelity, global_loss=global_loss)
    return replace(config, objective=objective, optim=replace(config.optim, **changed))


def with_global(
    config: TrainConfig, global_loss: GlobalLoss, *, margin_source: Literal["live", "frozen"] | None = None
) -> TrainConfig:
    """The same run with another global loss, without the parameters of the loss before.

    Args:
        margin_source: of L_HN; unchanged if not given.
    """
    old = config.objective
    source = (margin_source or old.margin_source) if global_loss == "hn" else "live"
    parameters = old.parameters if global_loss == old.global_loss else {}
    objective = replace(old, global_loss=global_loss, margin_source=source, parameters=parameters)
    return replace(config, objective=objective)
