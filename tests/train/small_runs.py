"""Small data and, where numbers of several processes are compared, exact models for whole runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import hnclip.train.loop as loop
import hnclip.train.run_data as run_data
from hnclip.data.records import DataSet
from hnclip.models.load import load


def small_runs(data: Callable[[str], DataSet], *, double: bool) -> pytest.MonkeyPatch:
    """Runs on `data(source)`; with `double` their models are in float64 and without dropout."""
    patch = pytest.MonkeyPatch()
    patch.setattr(run_data, "open_data", lambda source, read, splits: data(source))
    if double:
        patch.setattr(loop, "load", _exact)
    return patch


def _exact(**options: object) -> object:
    model = load(**options).double()  # type: ignore[arg-type]
    for module in model.modules():
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return model
