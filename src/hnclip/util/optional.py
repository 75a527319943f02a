"""Imports of optional and of large packages."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def large_import() -> Iterator[None]:
    """No garbage collection inside the block: importing torch and transformers creates a million lasting objects, and
    traversing them again and again takes a fifth of its time."""
    if not gc.isenabled() or gc.get_freeze_count():  # a program that manages the collector itself
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()  # both together: all objects count as old, so that the next collection does not traverse them
        gc.enable()
