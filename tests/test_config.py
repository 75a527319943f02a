from __future__ import annotations

import doctest
import json
from dataclasses import replace
from pathlib import Path

import pytest

from hnclip import api, config
from hnclip.config import (
    AdaptConfig,
    ObjectiveConfig,
    OptimConfig,
    ReadConfig,
    RunOptions,
    SpeedConfig,
    TrainConfig,
    from_json,
    to_json,
    with_fields,
)
from hnclip.losses import GLOBAL_LOSSES
from hnclip.objectives.registry import build_objective
from hnclip.recipes import RECIPES

CHANGED = [
    TrainConfig(
        limit=10,
        fraction=0.2,
        objective=ObjectiveConfig(global_loss="hcl", token_weight=0.0, parameters={"beta": 0.5}),
        optim=OptimConfig(scale_lr=0.0, negatives="batch", precision="bf16", scale_max=None),
        adapt=AdaptConfig(method="dora", rank=4, alpha=8.0, dropout=0.1, towers="text", projections=True),
    ),
    TrainConfig(context=248, objective=ObjectiveConfig(center="mean"), adapt=AdaptConfig(freeze_image="all")),
    RunOptions(out=Path("somewhere"), threads=2, speed=SpeedConfig(parallel="fsdp"), tensorboard=True),
]


@pytest.mark.parametrize("config", [*(recipe() for recipe in RECIPES.values()), *CHANGED])
def test_a_round_trip_keeps_every_field(config) -> None:
    assert from_json(type(config), to_json(config)) == config


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sead": 1}, "sead"),
        ({"seed": 1.5}, "seed"),
        ({"objective": {"gama": 0.5}}, "objective.gama"),
        ({"objective": {"weights": {"local": -1}}}, "objective.weights.local"),
        ({"objective": 3}, "objective"),
        ({"adapt": {"freeze_text": True}}, "adapt.freeze_text"),
        (
            {"seed": 1.5, "optim": {"lr": 0}, "objective": {"gama": 1}},
            r"(?s)(?=.*seed)(?=.*optim\.lr).*objective\.gama",
        ),
    ],
)
def test_a_wrong_file_names_all_wrong_fields(change, named) -> None:
    with pytest.raises(ValueError, match=named):
        from_json(TrainConfig, json.dumps(change))


def test_dotted_fields() -> None:
    changed = with_fields(TrainConfig(), {"optim.lr": 1e-4, "objective.center": "mean", "context": 77})
    assert (changed.optim.lr, changed.objective.center, changed.context) == (1e-4, "mean", 77)
    assert replace(changed, optim=OptimConfig(), objective=ObjectiveConfig(), context=None) == TrainConfig()
    for name in ("optim.lrr", "sed", "seed.x", ""):
        with pytest.raises(ValueError, match=name or "no such field"):
            with_fields(TrainConfig(), {name: 1})
    with pytest.raises(ValueError, match=r"optim\.epochs"):
        with_fields(TrainConfig(), {"optim.epochs": 0})


# One value beyond each kind of limit, and fields that contradict each other.
IMPOSSIBLE = [
    (ObjectiveConfig, {"gamma": float("nan")}),
    (ObjectiveConfig, {"center": "median"}),
    (ObjectiveConfig, {"margin_source": "frozen", "global_loss": "infonce"}),
    (ObjectiveConfig, {"parameters": {"beta": 1.0}}),
    (ObjectiveConfig, {"weights": {"local": 1.0}}),
    (ObjectiveConfig, {"crops": 3}),  # structxlip only
    (ObjectiveConfig, {"token_weight": 1.0, "method": "goal"}),
    (OptimConfig, {"epochs": 0}),
    (OptimConfig, {"micro_batch": 1}),
    (OptimConfig, {"lr": 0.0}),
    (OptimConfig, {"scale": float("inf")}),
    (OptimConfig, {"warmup": 1.5}),
    (OptimConfig, {"negatives": "all"}),
    (OptimConfig, {"learning_rate": 1e-3}),
    (AdaptConfig, {"freeze_image": -1}),
    (AdaptConfig, {"freeze_image": 1, "method": "lora"}),
    (AdaptConfig, {"rank": 8}),  # without a method it would do nothing
    (ReadConfig, {"validation_share": 1.0}),
    (TrainConfig, {"seed": 2**32}),
    (TrainConfig, {"fraction": 1.1}),
    (TrainConfig, {"out": Path("runs")}),  # where it runs is not part of what is trained
    (RunOptions, {"save_minutes": -1}),
]


@pytest.mark.parametrize(("kind", "change"), IMPOSSIBLE)
def test_impossible_values_name_the_field(kind, change) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        kind(**change)


@pytest.mark.parametrize("name", ["lora", "dora"])
def test_the_adapter_recipes_are_the_papers(name) -> None:
    """They differ from the paper's recipe in what the paper states for adapters, and in a fixed scale."""
    paper, adapted = RECIPES["paper"](), RECIPES[name]()
    assert (adapted.adapt.method, adapted.adapt.rank, adapted.adapt.towers) == (name, 16, "both")
    assert (adapted.optim.lr, adapted.optim.scale_lr) == (5e-5, 0.0)
    assert (adapted.optim.micro_batch, adapted.optim.accumulate, adapted.optim.epochs) == (16, 8, 10)
    same = replace(adapted, adapt=paper.adapt, optim=replace(adapted.optim, lr=paper.optim.lr, scale_lr=None))
    assert replace(same, objective=replace(adapted.objective, token_weight=paper.objective.token_weight)) == paper


def test_parameters_reach_every_loss() -> None:
    for name, expected in GLOBAL_LOSSES.items():
        loss = build_objective(ObjectiveConfig(global_loss=name)).global_term.loss
        assert getattr(loss, "func", loss) is expected
    term = build_objective(ObjectiveConfig(gamma=0.3, margin=0.1, center="mean", margin_source="frozen")).global_term
    assert (term.loss.keywords, term.frozen) == ({"gamma": 0.3, "margin": 0.1, "center": "mean"}, True)
    term = build_objective(ObjectiveConfig(global_loss="hcl", parameters={"beta": 0.25})).global_term
    assert term.loss.keywords == {"beta": 0.25}
    for name, parameter in (("hcl", "bta"), ("infonce", "offset")):
        with pytest.raises(ValueError, match=f"{name} has no '{parameter}'"):
            build_objective(ObjectiveConfig(global_loss=name, parameters={parameter: 0.25}))


@pytest.mark.parametrize("module", [config, api])
def test_docstring_examples(module) -> None:
    assert doctest.testmod(module).failed == 0
