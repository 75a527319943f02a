from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_a_round_trip(name: str) -> None:
    config = RECIPES[name]()
    assert from_json(TrainConfig, to_json(config)) == config


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(
            limit=10,
            fraction=0.2,
            probe_gradients=5,
            objective=ObjectiveConfig(global_loss="hcl", token_weight=0.0, parameters={"beta": 0.5}),
            optim=OptimConfig(scale_lr=0.0, negatives="batch", precision="bf16", scale_max=None),
        ),
        TrainConfig(
            context=248,
            keep=10,
            ratio=5,
            tokenizer="words",
            activation="gelu",
            objective=ObjectiveConfig(center="mean"),
            adapt=AdaptConfig(method="dora", rank=4, alpha=8.0, dropout=0.1, towers="text", projections=True),
        ),
        TrainConfig(adapt=AdaptConfig(freeze_image="all", freeze_text=3)),
        RunOptions(out=Path("somewhere"), threads=2, speed=SpeedConfig(parallel="fsdp"), tensorboard=True),
    ],
)
def test_round_trip_keeps_what_was_changed(config: TrainConfig | RunOptions) -> None:
    assert from_json(type(config), to_json(config)) == config


WRONG_FILES = [
    ({"sead": 1}, "sead"),
    ({"seed": "one"}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"objective": {"gama": 0.5}}, "objective.gama"),
    ({"objective": {"global_loss": "triplet"}}, "objective.global_loss"),
    ({"objective": {"weights": {"local": -1}}}, "objective.weights.local"),
    ({"objective": {"mask_duplicates": 1}}, "objective.mask_duplicates"),
    ({"objective": 3}, "objective"),
    ({"optim": {"lr": None}}, "optim.lr"),
    ({"context": 77.0}, "context"),
    ({"activation": "relu"}, "activation"),
    ({"adapt": {"method": "ia3"}}, "adapt.method"),
    ({"adapt": {"freeze_image": "half"}}, "adapt.freeze_image"),
    ({"adapt": {"freeze_text": True}}, "adapt.freeze_text"),
]


@pytest.mark.parametrize(("change", "named"), WRONG_FILES)
def test_a_wrong_file_names_the_field(change: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        from_json(TrainConfig, json.dumps(change))


def test_all_problems_of_a_file_are_named_together() -> None:
    with pytest.raises(ValueError, match=r"(?s)(?=.*seed)(?=.*optim\.lr).*objective\.gama"):
        from_json(TrainConfig, '{"seed": 1.5, "optim": {"lr": 0}, "objective": {"gama": 1}}')


def test_text_that_is_not_json() -> None:
    with pytest.raises(ValueError, match="Invalid JSON"):
        from_json(TrainConfig, "seed: 1")


def test_dotted_fields() -> None:
    changed = with_fields(TrainConfig(), {"optim.lr": 1e-4, "objective.center": "mean", "context": 77})
    assert (changed.optim.lr, changed.objective.center, changed.context) == (1e-4, "mean", 77)
    assert replace(changed, optim=OptimConfig(), objective=ObjectiveConfig(), context=None) == TrainConfig()
    for name in ("optim.lrr", "optimm.lr", "sed", "seed.x", "", "."):
        with pytest.raises(ValueError, match=f"no field {name}"):
            with_fields(TrainConfig(), {name: 1})
    with pytest.raises(ValueError, match=r"optim\.epochs"):
        with_fields(TrainConfig(), {"optim.epochs": 0})


IMPOSSIBLE = [
    (ObjectiveConfig, {"gamma": -0.1}),
    (ObjectiveConfig, {"gamma": float("nan")}),
    (ObjectiveConfig, {"margin": -0.1}),
    (ObjectiveConfig, {"token_weight": -1.0}),
    (ObjectiveConfig, {"global_loss": "nonsense"}),
    (ObjectiveConfig, {"center": "median"}),
    (ObjectiveConfig, {"margin_source": "frozen", "global_loss": "infonce"}),
    (ObjectiveConfig, {"parameters": {"beta": 1.0}}),
    (ObjectiveConfig, {"weights": {"local": 1.0}}),
    (ObjectiveConfig, {"crops": 3}),  # structxlip only
    (ObjectiveConfig, {"token_weight": 1.0, "method": "goal"}),
    (OptimConfig, {"epochs": 0}),
    (OptimConfig, {"epochs": 1.5}),
    (OptimConfig, {"micro_batch": 1}),
    (OptimConfig, {"accumulate": 0}),
    (OptimConfig, {"lr": 0.0}),
    (OptimConfig, {"lr": "fast"}),
    (OptimConfig, {"scale_lr": -1.0}),
    (OptimConfig, {"scale": 0.5}),
    (OptimConfig, {"scale": float("inf")}),
    (OptimConfig, {"weight_decay": -1.0}),
    (OptimConfig, {"beta2": 1.0}),
    (OptimConfig, {"warmup": -0.1}),
    (OptimConfig, {"warmup": 1.5}),
    (OptimConfig, {"readout_lr": 0.0}),
    (OptimConfig, {"lr_floor": 2.0}),
    (OptimConfig, {"clip_grad": -1.0}),
    (OptimConfig, {"scale_max": 1.0}),
    (OptimConfig, {"negatives": "all"}),
    (OptimConfig, {"precision": 16}),
    (OptimConfig, {"learning_rate": 1e-3}),
    (AdaptConfig, {"rank": 0, "method": "lora"}),
    (AdaptConfig, {"alpha": 0.0, "method": "lora"}),
    (AdaptConfig, {"dropout": 1.0, "method": "lora"}),
    (AdaptConfig, {"freeze_image": -1}),
    (AdaptConfig, {"freeze_text": "some"}),
    (AdaptConfig, {"freeze_image": 1, "method": "lora"}),
    (AdaptConfig, {"freeze_text": "all", "method": "dora"}),
    (AdaptConfig, {"rank": 8}),  # without a method it would do nothing
    (AdaptConfig, {"towers": "text"}),
    (AdaptConfig, {"projections": True}),
    (ReadConfig, {"validation_share": 1.0}),
    (ReadConfig, {"max_bad": -0.1}),
    (TrainConfig, {"context": 0}),
    (TrainConfig, {"keep": -1}),
    (TrainConfig, {"ratio": 0}),
    (TrainConfig, {"seed": -1}),
    (TrainConfig, {"seed": 2**32}),
    (TrainConfig, {"limit": 1}),
    (TrainConfig, {"fraction": 0.0}),
    (TrainConfig, {"fraction": 1.1}),
    (TrainConfig, {"fraction": float("nan")}),
    (TrainConfig, {"probe_gradients": -1}),
    (TrainConfig, {"activation": "relu"}),
    (TrainConfig, {"out": Path("runs")}),  # where it runs is not part of what is trained
    (RunOptions, {"save_minutes": -1}),
    (RunOptions, {"threads": -1}),
    (RunOptions, {"evaluate_batch": 0}),
    (SpeedConfig, {"parallel": "dp"}),
]


@pytest.mark.parametrize(("kind", "change"), IMPOSSIBLE)
def test_impossible_values_name_the_field(kind: type, change: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        kind(**change)


def test_changing_a_field_validates_too() -> None:
    with pytest.raises(ValueError, match="gamma"):
        replace(ObjectiveConfig(), gamma=-1.0)


@pytest.mark.parametrize("name", ["lora", "dora"])
def test_the_adapter_recipes_are_the_papers(name: str) -> None:
    """They differ from the paper's recipe in what the paper states for adapters, and in a fixed scale."""
    paper, adapted = RECIPES["paper"](), RECIPES[name]()
    assert (adapted.adapt.method, adapted.adapt.rank, adapted.adapt.towers) == (name, 16, "both")
    assert (adapted.optim.lr, adapted.optim.scale_lr) == (5e-5, 0.0)
    assert (adapted.optim.micro_batch, adapted.optim.accumulate, adapted.optim.epochs) == (16, 8, 10)
    assert adapted.objective == replace(paper.objective, token_weight=0.0)
    same = replace(adapted, adapt=paper.adapt, optim=replace(adapted.optim, lr=paper.optim.lr, scale_lr=None))
    assert replace(same, objective=paper.objective) == paper


@pytest.mark.parametrize("name", GLOBAL_LOSSES)
def test_every_loss_can_be_chosen(name: str) -> None:
    objective = build_objective(ObjectiveConfig(global_loss=name))  # type: ignore[arg-type]
    loss = objective.global_term.loss  # type: ignore[union-attr]
    inner = getattr(loss, "func", loss)
    assert inner is GLOBAL_LOSSES[name]


def test_parameters_reach_the_rival_and_strangers_are_refused() -> None:
    objective = build_objective(ObjectiveConfig(global_loss="hcl", parameters={"beta": 0.25}))
    assert objective.global_term.loss.keywords == {"beta": 0.25}  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"hcl has no 'bta'; it has beta, tau_plus"):
        build_objective(ObjectiveConfig(global_loss="hcl", parameters={"bta": 0.25}))
    with pytest.raises(ValueError, match="infonce has no 'offset'"):
        build_objective(ObjectiveConfig(global_loss="infonce", parameters={"offset": 1.0}))


def test_the_margin_family_reaches_the_loss() -> None:
    objective = build_objective(ObjectiveConfig(gamma=0.3, margin=0.1, center="mean", margin_source="frozen"))
    term = objective.global_term
    assert term.loss.keywords == {"gamma": 0.3, "margin": 0.1, "center": "mean"}  # type: ignore[union-attr]
    assert term.frozen  # type: ignore[union-attr]
