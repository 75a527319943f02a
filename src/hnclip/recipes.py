"""A run is a function that returns its whole configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hnclip.config import ObjectiveConfig, OptimConfig, TrainConfig


def paper() -> TrainConfig:
    """The paper's settings for Long-CLIP-L: AdamW 2e-6, cosine, 16 × 8, 10 epochs, γ 0.5, λ 1. What the paper does not
    state (weight decay, warm-up, clipping, precision) is this package's default."""
    return TrainConfig()


def demo(global_loss: str = "hn", out: Path = Path("runs/train")) -> TrainConfig:
    """The embedded default: the bundled model on `scenes/park`, minutes on two cores.

    Same objective settings and micro-batches as the paper. The learning rate is the better of 1e-4 and 3e-4 for the
    *baseline* by validation; the epochs are what a few minutes hold.
    `infonce` is the baseline: plain CLIP fine-tuning, no margin and no token term.
    """
    if global_loss == "infonce":
        objective = ObjectiveConfig(global_loss="infonce", token_weight=0.0)
    else:
        objective = ObjectiveConfig(gamma=0.5, token_weight=1.0)
    return TrainConfig(out=out, objective=objective, optim=OptimConfig(epochs=4, lr=1e-4))


def tiny(out: Path = Path("runs/tiny")) -> TrainConfig:
    """The demo in a few seconds, to see that everything runs."""
    small = demo(out=out)
    return replace(small, limit=64, optim=replace(small.optim, epochs=2, micro_batch=8, accumulate=2), save_every=2)


RECIPES = {"paper": paper, "demo": demo, "tiny": tiny}
