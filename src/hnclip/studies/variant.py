"""A row of a study: what it changes of a run, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, get_type_hints

from hnclip.config import GlobalLoss, TrainConfig, convert
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
    return set_fields(config, variant.set)


def set_fields(config: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """The configuration with fields of these dotted names.

    >>> set_fields(TrainConfig(), {"optim.lr": 1e-4, "seed": 7}).optim.lr
    0.0001
    """
    nested: dict[str, Any] = {}
    for name, value in values.items():
        place = nested
        *groups, last = name.split(".")
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = value
    return _replaced(config, nested, "")


def _replaced(config: Any, values: Mapping[str, Any], prefix: str) -> Any:
    hints = get_type_hints(type(config))
    names = {spec.name for spec in fields(config)}
    changed = {}
    for name, value in values.items():
        if name not in names:
            raise ValueError(
                f"there is no setting {prefix}{name}; there are {', '.join(prefix + n for n in sorted(names))}"
            )
        old = getattr(config, name)
        if is_dataclass(old):
            if not isinstance(value, Mapping):
                raise ValueError(f"{prefix}{name} is a group of settings: name one of them, {prefix}{name}.NAME")
            changed[name] = _replaced(old, value, f"{prefix}{name}.")
        else:
            changed[name] = convert(hints[name], value, f"{prefix}{name}")
    return replace(config, **changed)
