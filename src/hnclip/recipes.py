"""A run is a function that returns its whole configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hnclip.config import AdaptConfig, ObjectiveConfig, OptimConfig, TrainConfig


def paper() -> TrainConfig:
    """The paper's settings for Long-CLIP-L: AdamW 2e-6, cosine, 16 × 8, 10 epochs, γ 0.5, λ 1. What the paper does not
    state (weight decay, warm-up, clipping, precision) is this package's default."""
    return TrainConfig()


def lora() -> TrainConfig:
    """The paper's LoRA: rank 16 and lr 5e-5 on a frozen backbone, L_HN alone without the token term, all else as
    `paper`. It does not state α, the layers, or whether the temperature trains: here 32, every linear layer of every
    block, and no."""
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


def demo(global_loss: str = "hn", out: Path = Path("runs/train")) -> TrainConfig:
    """The embedded default: the bundled model on `scenes/park`, minutes on two cores.

    Same objective settings and micro-batches as the paper. The learning rate is the better of 1e-4 and 3e-4 for the
    *baseline* by validation; the epochs are what a few minutes hold.
    `infonce` is the baseline: plain CLIP fine-tuning, no margin and no token term. fp32, so that the table is the same
    on every machine.
    """
    if global_loss == "infonce":
        objective = ObjectiveConfig(global_loss="infonce", token_weight=0.0)
    else:
        objective = ObjectiveConfig(gamma=0.5, token_weight=1.0)
    return TrainConfig(out=out, objective=objective, optim=OptimConfig(epochs=4, lr=1e-4, precision="fp32"))


def tiny(out: Path = Path("runs/tiny")) -> TrainConfig:
    """The demo in a few seconds, to see that everything runs."""
    small = demo(out=out)
    return replace(small, limit=64, optim=replace(small.optim, epochs=2, micro_batch=8, accumulate=2), save_every=2)


RECIPES = {"paper": paper, "lora": lora, "dora": dora, "demo": demo, "tiny": tiny}
