"""hnclip: image–text retrieval when captions are long and nearly alike.

The names a user imports. They are loaded when first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "HardNegativeLoss": "hnclip.losses",
    "clip_loss": "hnclip.losses",
    "hard_negative_loss": "hnclip.losses",
    "tiled_hard_negative_loss": "hnclip.losses",
    "token_loss": "hnclip.losses",
    "DualEncoder": "hnclip.models.dual_encoder",
    "load": "hnclip.models.load",
    "save": "hnclip.models.load",
    "stretch": "hnclip.models.long_context",
    "wrap": "hnclip.models.load",
    "ObjectiveConfig": "hnclip.config",
    "TrainConfig": "hnclip.config",
    "retrieval_ranks": "hnclip.evaluation",
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hnclip' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
