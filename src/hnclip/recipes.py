"""Recipes: functions that return a complete configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, get_args

from hnclip.config import AdaptConfig, Fidelity, GlobalLoss, ObjectiveConfig, OptimConfig, TrainConfig
from hnclip.objectives.registry import METHOD_CHOICES, MethodChoice, apply_method, with_fidelity, with_global


def paper() -> TrainConfig:
    """The paper's settings for Long-CLIP-L: AdamW 2e-6, cosine, 16 × 8, 10 epochs, γ 0.5, λ 1. What the paper does not
    state (weight decay, warm-up, clipping, precision) is this package's default."""
    return TrainConfig()


def _paper_on(data: str) -> TrainConfig:
    return replace(paper(), model="longclip-L.pt", context=248, data=data)


def paper_docci() -> TrainConfig:
    """`paper` with Long-CLIP-L's released file and its 248 tokens, on DOCCI."""
    return _paper_on("docci")


def paper_dci() -> TrainConfig:
    """`paper/docci` on DCI. These models are also tested on Long-DCI."""
    return _paper_on("dci")


def paper_urban_1k() -> TrainConfig:
    """`paper/docci` on paragraphs of Visual Genome. These models are tested on Urban-1K, which has no training
    pairs."""
    return _paper_on("vg-paragraphs")


# Learning rates of methods in the paper's comparison (its appendix on the training setup) that differ from 2e-6. For
# FineLIP it is that of the backbone; the learning rate of its own modules is in `METHODS`.
PAPER_RATES: dict[MethodChoice, float] = {"finelip": 1e-6, "goal": 5e-6, "structxlip": 5e-6, "lora": 5e-5, "dora": 5e-5}

# Test data in the paper for models trained on each domain.
PAPER_GALLERIES: dict[str, tuple[str, ...]] = {
    "docci": ("docci",),
    "dci": ("dci", "long-dci"),
    "vg-paragraphs": ("urban-1k",),
}


def lora() -> TrainConfig:
    """The paper's LoRA: rank 16 and lr 5e-5 on a frozen backbone, L_HN without the token term, otherwise as `paper`.
    The paper does not state α, the layers, or whether the scale is trained: here 32, every linear layer of every block,
    and no."""
    whole = paper()
    return replace(
        whole,
        objective=replace(whole.objective, token_weight=0.0),
        optim=replace(whole.optim, lr=5e-5, scale_lr=0.0),
        adapt=AdaptConfig(method="lora", rank=16, alpha=32.0),
    )


def dora() -> TrainConfig:
    """The paper's DoRA: `lora` with a trained magnitude for every output."""
    adapted = lora()
    return replace(adapted, adapt=replace(adapted.adapt, method="dora"))


def _released(method: MethodChoice, **optim: Any) -> TrainConfig:
    """A method as released: AdamW with torch's default betas, weight decay on all parameters, no clipping of gradients
    or of the scale, a cosine schedule that would reach 0 one step after the last, captions of 248 tokens."""
    common: dict[str, Any] = {
        "beta2": 0.999,
        "decay": "all",
        "clip_grad": 0.0,
        "scale_max": None,
        "warmup": 0.0,
        "lr_floor": 0.0,
        "schedule": "open_cosine",
    }
    base = replace(paper(), context=248, optim=replace(paper().optim, **{**common, **optim}))
    return apply_method(base, method, "official")


def long_clip() -> TrainConfig:
    """Long-CLIP's released trainer: batches of 2048 pairs with in-batch negatives, lr 1e-6, 200 steps of warm-up. Its
    16 processes of 128 pairs are 16 chunks here, its fp16 is `auto`."""
    config = _released(
        "long_clip", lr=1e-6, weight_decay=1e-2, warmup=200, epochs=6, micro_batch=128, accumulate=16, negatives="batch"
    )
    return replace(config, adapt=AdaptConfig(freeze_positions=20))


def finelip() -> TrainConfig:
    """FineLIP's released trainer: 128 × 4, lr 1e-6 and 2e-4 for its own modules, no global loss, and a schedule that
    wraps around."""
    config = _released(
        "finelip", lr=1e-6, readout_lr=2e-4, weight_decay=1e-2, warmup=200, epochs=6, micro_batch=128, accumulate=4
    )
    adapt = AdaptConfig(freeze_positions=20)
    return replace(config, seed=71, optim=replace(config.optim, precision="fp32"), adapt=adapt)


def goal() -> TrainConfig:
    """GOAL's released trainer: batches of 16 without accumulation, lr 5e-6, no warm-up, 10 epochs."""
    return replace(_released("goal", lr=5e-6, weight_decay=0.05, accumulate=1), seed=1337)


def smartclip() -> TrainConfig:
    """SmartCLIP's published settings: batches of 1024, lr 1e-6 and 1e-3 for the mask network. Weight decay, warm-up and
    epochs are not published and are those of Long-CLIP, whose code it builds on."""
    return _released(
        "smartclip",
        lr=1e-6,
        readout_lr=1e-3,
        weight_decay=1e-2,
        warmup=200,
        epochs=6,
        micro_batch=128,
        accumulate=8,
        negatives="batch",
    )


def structxlip() -> TrainConfig:
    """StructXLIP's released trainer with the weights of its DOCCI script: as GOAL's, but the scale is clamped to
    e^3.5."""
    return _released("structxlip", lr=5e-6, weight_decay=0.05, accumulate=1)


def demo(global_loss: Literal["hn", "infonce"] = "hn") -> TrainConfig:
    """The default: the bundled model on `scenes/park`, a few minutes on two cores.

    Objective settings and micro-batches as in the paper. The number of epochs fits a few minutes; the learning rate is
    the best for InfoNCE on the validation splits (hnclip docs scenes). `infonce` is the baseline: plain CLIP
    fine-tuning without margin and token term. fp32, so that results are the same on every machine.
    """
    if global_loss == "infonce":
        objective = ObjectiveConfig(global_loss="infonce", token_weight=0.0)
    else:
        objective = ObjectiveConfig(gamma=0.5, token_weight=1.0)
    return TrainConfig(objective=objective, optim=OptimConfig(epochs=4, lr=3e-4, precision="fp32"))


def results() -> TrainConfig:
    """The settings of hnclip docs results (`make results`): those of the demo."""
    return demo()


# Adapters start from zero and train at a higher rate: of 3e-4, 1e-3, 3e-3 and 1e-2 the best for LoRA with InfoNCE on
# the validation splits of small scenes.
RESULTS_RATES: dict[MethodChoice, float] = {"lora": 1e-3, "dora": 1e-3}


def tiny() -> TrainConfig:
    """The demo in a few seconds, to test an installation."""
    small = demo()
    return replace(small, limit=64, optim=replace(small.optim, epochs=2, micro_batch=8, accumulate=2))


RECIPES: dict[str, Callable[[], TrainConfig]] = {
    "demo": demo,
    "paper": paper,
    "paper/docci": paper_docci,
    "paper/dci": paper_dci,
    "paper/urban-1k": paper_urban_1k,
    "tiny": tiny,
    "results": results,
    "lora": lora,
    "dora": dora,
    "long_clip": long_clip,
    "finelip": finelip,
    "goal": goal,
    "smartclip": smartclip,
    "structxlip": structxlip,
}


NEEDS_MODEL = (
    "your own data need a model (--model): a directory or hub name of CLIP, Long-CLIP, SigLIP …, or a checkpoint file "
    "(hnclip docs models); bundled is the small model of the demo, for trials"
)


def make_config(
    recipe: str | None = None,
    model: str | None = None,
    method: MethodChoice | None = None,
    global_loss: GlobalLoss | None = None,
    fidelity: Fidelity | None = None,
    *,
    adapt: str | None = None,
) -> TrainConfig:
    """The configuration of a recipe with another method or global loss.

    Args:
        recipe: demo for the bundled model and paper for any other if not given, or that of the adapter `adapt`.
        method: replaces that of the recipe, with its own global loss; `global_loss` replaces the latter.

    Raises:
        ValueError: there is no such recipe, or it cannot be combined with the method.
    """
    usual = "demo" if model in (None, "bundled") else "paper"
    name = recipe or (adapt if adapt in ("lora", "dora") else usual)
    if name not in RECIPES:
        raise ValueError(f"there is no recipe {name!r}: choose one of {', '.join(RECIPES)}")
    return change_method(RECIPES[name](), method, global_loss, fidelity)


def change_method(
    config: TrainConfig, method: MethodChoice | None, global_loss: GlobalLoss | None, fidelity: Fidelity | None
) -> TrainConfig:
    """The configuration with another method, variant or global loss, each unchanged if None."""
    for name, given, known in (
        ("method", method, METHOD_CHOICES),
        ("global loss", global_loss, get_args(GlobalLoss)),
        ("fidelity", fidelity, get_args(Fidelity)),
    ):
        if given is not None and given not in known:
            raise ValueError(f"there is no {name} {given!r}: choose one of {', '.join(known)}")
    source = config.objective.margin_source
    if method is not None:
        config = apply_method(config, method, fidelity)
    elif fidelity is not None:
        config = with_fidelity(config, fidelity)
    return config if global_loss is None else with_global(config, global_loss, margin_source=source)
