"""hnclip: image–text retrieval when captions are long and nearly identical.

The names a user imports. They are loaded when first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hnclip.analysis.diagnose import diagnose
    from hnclip.api import evaluate, resume, train
    from hnclip.config import ObjectiveConfig, RunOptions, TrainConfig
    from hnclip.evaluation import retrieval_ranks
    from hnclip.losses import HardNegativeLoss, clip_loss, hard_negative_loss, tiled_hard_negative_loss, token_loss
    from hnclip.models.dual_encoder import DualEncoder
    from hnclip.models.load import load, save, wrap
    from hnclip.models.long_context import stretch
    from hnclip.search.indexer import build_index
    from hnclip.search.searcher import open_index

__version__ = "0.2.0"

_MODULES = {
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
    "RunOptions": "hnclip.config",
    "TrainConfig": "hnclip.config",
    "train": "hnclip.api",
    "resume": "hnclip.api",
    "evaluate": "hnclip.api",
    "retrieval_ranks": "hnclip.evaluation",
    "diagnose": "hnclip.analysis.diagnose",
    "build_index": "hnclip.search.indexer",
    "open_index": "hnclip.search.searcher",
}
__all__ = [  # the names of _MODULES, spelled out for type checkers
    "DualEncoder",
    "HardNegativeLoss",
    "ObjectiveConfig",
    "RunOptions",
    "TrainConfig",
    "__version__",
    "build_index",
    "clip_loss",
    "diagnose",
    "evaluate",
    "hard_negative_loss",
    "load",
    "open_index",
    "resume",
    "retrieval_ranks",
    "save",
    "stretch",
    "tiled_hard_negative_loss",
    "token_loss",
    "train",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'hnclip' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
