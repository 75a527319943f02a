"""A row of a study: what it changes of a run, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hnclip.config import GlobalLoss, TrainConfig, with_fields
from hnclip.objectives.registry import MethodChoice, apply_method, with_global


@dataclass(frozen=True)
class Variant:
    """One row of a study's table.

    Args:
        name: of the row.
        method: as `--objective` of `hnclip train`; None leaves that of the recipe.
        global_loss: the global loss, as `--global`; None leaves the method's own.
        set: fields of the configuration by their dotted names, `{"objective.gamma": 0.25}`.
        trained: False for the model as it comes, which has no run.
        matched: a fixed margin γ·mean(Ḡ), with the mean over the training captions of the initial encoder.
        against: rows whose difference from this one the study asks for.
        series, x: the curve that the row is a point of, and where on it.
        published: how the paper names the row, method and setting.
    """

    name: str
    method: MethodChoice | None = None
    global_loss: GlobalLoss | None = None
    set: Mapping[str, Any] = field(default_factory=dict)
    trained: bool = True
    matched: bool = False
    against: tuple[str, ...] = ()
    series: str | None = None
    x: float | None = None
    published: tuple[str, str] | None = None


def resolve(base: TrainConfig, variant: Variant) -> TrainConfig:
    """The configuration of a row: the recipe's, with the row's method, global loss and fields, in this order."""
    config = base
    if variant.method is not None:
        config = apply_method(config, variant.method)
    if variant.global_loss is not None:
        config = with_global(config, variant.global_loss)
    return with_fields(config, variant.set)
