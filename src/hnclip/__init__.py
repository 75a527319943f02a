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

_NAMES = {
    "hnclip.analysis.diagnose": ["diagnose"],
    "hnclip.api": ["evaluate", "resume", "train"],
    "hnclip.config": ["ObjectiveConfig", "RunOptions", "TrainConfig"],
    "hnclip.evaluation": ["retrieval_ranks"],
    "hnclip.losses": ["HardNegativeLoss", "clip_loss", "hard_negative_loss", "tiled_hard_negative_loss", "token_loss"],
    "hnclip.models.dual_encoder": ["DualEncoder"],
    "hnclip.models.load": ["load", "save", "wrap"],
    "hnclip.models.long_context": ["stretch"],
    "hnclip.search.indexer": ["build_index"],
    "hnclip.search.searcher": ["open_index"],
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
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
