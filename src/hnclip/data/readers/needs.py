"""Packages that only some readers need."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def needs(module: str, what: str) -> Any:
    """Import a module of the extra `data`, or say how to get it."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ValueError(f"{what} need the package {package}: pip install 'hnclip[data]'") from error
