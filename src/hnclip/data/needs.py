"""Packages that only some readers, or only regions and edges, need."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal


def needs(module: str, who: str, extra: Literal["data", "views"]) -> Any:
    """Import a module of an extra, or say how to get it.

    Args:
        who: and that it needs it, as "Canny needs".
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ValueError(f"{who} the package {package}: pip install 'hnclip[{extra}]'") from error
