"""Optional dependencies."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def import_extra(module: str, feature: str, extra: str) -> Any:
    """Import a module of an optional dependency, or raise ValueError with the command that installs it.

    Args:
        feature: what needs it, in the plural, for example "edge maps".
        extra: as in `pip install 'hnclip[extra]'`.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ValueError(f"{feature} need the package {package}: pip install 'hnclip[{extra}]'") from error
