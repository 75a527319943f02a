"""The frameworks that L_HN is plugged into, as data: their own settings, and where released code and paper differ.

No heavy import here: the command line builds its help from these. The terms are in `hnclip.objectives`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from hnclip.config import (
    SCALE_MAX,
    AdaptConfig,
    Fidelity,
    Framework,
    GlobalLoss,
    ObjectiveConfig,
    OptimConfig,
    TrainConfig,
)

Plug = Literal["hn_clip", "long_clip", "finelip", "goal", "smartclip", "structxlip", "lora", "dora"]


@dataclass(frozen=True)
class Switch:
    """One difference between what a framework's released code does and what it should.

    Args:
        name: in `objective.switches`; or, of a difference that an option of its own makes, that option.
        official, corrected: what each does, in a few words.
    """

    name: str
    official: str
    corrected: str


@dataclass(frozen=True)
class FrameworkSpec:
    """A framework's own settings.

    Args:
        own_global: the global term that it comes with.
        weights: of its other terms, by name.
        optim: fields of the optimiser's configuration that belong to the framework, by fidelity.
    """

    title: str
    own_global: Mapping[Fidelity, GlobalLoss]
    weights: Mapping[str, float] = field(default_factory=dict)
    switches: tuple[Switch, ...] = ()
    optim: Mapping[Fidelity, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def named_switches(self) -> tuple[str, ...]:
        """Those that `objective.switches` takes."""
        return tuple(switch.name for switch in self.switches if "." not in switch.name)


def _both(name: GlobalLoss) -> dict[Fidelity, GlobalLoss]:
    return {"official": name, "corrected": name}


FRAMEWORKS: dict[Framework, FrameworkSpec] = {
    "hn_clip": FrameworkSpec("HN-CLIP", _both("hn")),
    "long_clip": FrameworkSpec("Long-CLIP", _both("smoothed"), weights={"short": 1.0}),
    "finelip": FrameworkSpec(
        "FineLIP",
        {"official": "none", "corrected": "infonce"},
        weights={"fine": 1.0},
        switches=(
            Switch("objective.global_loss", "none: the fine-grained term replaces the global one", "infonce beside it"),
            Switch("finelip_patch_count", "tokens kept by 196 patches, whatever the model has", "by the model's own"),
            Switch("optim.schedule", "wrapped: micro-batches counted as steps, the rate swings", "cosine"),
        ),
        optim={
            "official": {"schedule": "wrapped", "readout_lr": 2e-4},
            "corrected": {"schedule": "cosine", "readout_lr": 2e-4},
        },
    ),
    "goal": FrameworkSpec(
        "GOAL",
        _both("infonce"),
        weights={"local": 0.5, "patch": 1.0, "text": 1.0},
        switches=(
            Switch("goal_patch_size", "a grid of 16-pixel patches for every model", "the model's own grid"),
            Switch(
                "goal_box_scale",
                "boxes scaled as if the region's size were the picture's, no crop, clamped to the edge",
                "resize and centre crop followed, regions cropped away left out",
            ),
            Switch(
                "goal_late_span",
                "a sentence's tokens counted with a start and an end too many: one token late, never left out",
                "by character offsets, left out if cut off",
            ),
        ),
    ),
    "smartclip": FrameworkSpec(
        "SmartCLIP",
        _both("infonce"),
        weights={"sparsity": 0.1},
        # At the rate of the towers the mask stays as it began.
        optim={"official": {"readout_lr": 1e-3}, "corrected": {"readout_lr": 1e-3}},
    ),
    "structxlip": FrameworkSpec(
        "StructXLIP",
        _both("infonce"),
        weights={"structure": 0.25, "consistency": 0.001, "chunks": 0.001},
        switches=(
            Switch("optim.scale_max", "33.115: the inverse temperature is clamped to e^3.5", f"{SCALE_MAX:g}"),
            Switch("structxlip_double_norm", "chunks pooled behind the final norm, normed again", "normed once"),
            Switch(
                "structxlip_misaligned_spans",
                "spans counted in the filtered caption, read from the whole one",
                "read from the filtered caption",
            ),
            Switch(
                "structxlip_blunt_filter",
                "colours alone, removed as they stand: articles and hyphens dangle",
                "colours, materials and textures, with care for grammar",
            ),
            Switch(
                "structxlip_local_scale",
                "min(s / 0.07, 100), where no gradient passes",
                "s, without gradient",
            ),
        ),
        optim={"official": {"scale_max": 33.115}, "corrected": {"scale_max": SCALE_MAX}},
    ),
}


def official_switches(config: ObjectiveConfig) -> frozenset[str]:
    """The named switches of a configuration that stand at official."""
    spec = FRAMEWORKS[config.framework]
    for name in config.switches:
        if name not in spec.named_switches:
            known = ", ".join(spec.named_switches) or "none"
            raise ValueError(f"objective.switches: {spec.title} has no switch {name!r}; it has {known}")
    return frozenset(name for name in spec.named_switches if config.switches.get(name, config.fidelity) == "official")


def term_weights(config: ObjectiveConfig) -> dict[str, float]:
    """The weights of a framework's terms, those of the configuration before its own."""
    spec = FRAMEWORKS[config.framework]
    for name in config.weights:
        if name not in spec.weights:
            known = ", ".join(spec.weights) or "none beside the global one"
            raise ValueError(f"objective.weights: {spec.title} has no term {name!r}; it has {known}")
    return {**spec.weights, **config.weights}


def plugged(config: TrainConfig, plug: Plug, fidelity: Fidelity | None = None) -> TrainConfig:
    """The same run with another framework, as `--objective` of `hnclip train`: its terms with their weights, its own
    global term, and nothing else changed but what belongs to a framework itself, the one before or the new one. LoRA
    and DoRA have no terms beside the global one: they train adapters, with everything else and the temperature frozen.

    Args:
        fidelity: when left out that of the run if it has this framework already, else corrected.
    """
    if plug == "hn_clip" or plug == "lora" or plug == "dora":
        if fidelity is not None:
            raise ValueError(f"{plug} has nothing that is official or corrected: leave the fidelity out")
        plain = _unplugged(config)
        if plug == "hn_clip":
            usual = ObjectiveConfig()
            terms = replace(plain.objective, global_loss=usual.global_loss, token_weight=usual.token_weight)
            return replace(plain, objective=terms)
        adapt = plain.adapt if plain.adapt.method != "full" else AdaptConfig(method=plug)
        return replace(plain, optim=replace(plain.optim, scale_lr=0.0), adapt=replace(adapt, method=plug))
    if fidelity is None:
        fidelity = config.objective.fidelity if config.objective.framework == plug else "corrected"
    spec, plain = FRAMEWORKS[plug], _unplugged(config)
    objective = replace(plain.objective, framework=plug, global_loss=spec.own_global[fidelity], fidelity=fidelity)
    return replace(plain, objective=objective, optim=replace(plain.optim, **spec.optim.get(fidelity, {})))


def _unplugged(config: TrainConfig) -> TrainConfig:
    """Plain fine-tuning: InfoNCE alone, and none of the optimiser's settings that the framework had brought along. γ,
    margin and centre stay, for whoever plugs L_HN in."""
    old = config.objective
    objective = ObjectiveConfig(
        global_loss="infonce", token_weight=0.0, gamma=old.gamma, margin=old.margin, center=old.center
    )
    usual = OptimConfig()
    brought = FRAMEWORKS[old.framework].optim.get(old.fidelity, {})
    back = {name: getattr(usual, name) for name, value in brought.items() if getattr(config.optim, name) == value}
    return replace(config, objective=objective, optim=replace(config.optim, **back))


def with_fidelity(config: TrainConfig, fidelity: Fidelity) -> TrainConfig:
    """The same run of the same framework as it was released, or with its mistakes mended. What is not as the framework
    would have it, a global term or a rate of the user's own, stays."""
    spec, objective = FRAMEWORKS[config.objective.framework], config.objective
    if objective.framework == "hn_clip":
        raise ValueError("hn_clip has nothing that is official or corrected: leave the fidelity out")
    own = objective.global_loss == spec.own_global[objective.fidelity]
    chosen = spec.own_global[fidelity] if own else objective.global_loss
    before, after = (spec.optim.get(which, {}) for which in (objective.fidelity, fidelity))
    changed = {name: value for name, value in after.items() if getattr(config.optim, name) == before[name]}
    return replace(
        config,
        objective=replace(objective, fidelity=fidelity, global_loss=chosen),
        optim=replace(config.optim, **changed),
    )


def with_global(
    config: TrainConfig, chosen: GlobalLoss, *, margin_source: Literal["live", "frozen"] | None = None
) -> TrainConfig:
    """The same run with another global term. Parameters of the term before go with it.

    Args:
        margin_source: of L_HN, if that is chosen; as it is when left out.
    """
    old = config.objective
    source = (margin_source or old.margin_source) if chosen == "hn" else "live"
    parameters = old.parameters if chosen == old.global_loss else {}
    objective = replace(old, global_loss=chosen, margin_source=source, parameters=parameters)
    return replace(config, objective=objective)


PLUGS: tuple[Plug, ...] = get_args(Plug)
