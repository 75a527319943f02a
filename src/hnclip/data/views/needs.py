"""Packages that only regions and edges need."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def needs(module: str, what: str) -> Any:
    """Import a module of the extra `views`, or say how to get it."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ValueError(f"{what} needs the package {package}: pip install 'hnclip[views]'") from error
