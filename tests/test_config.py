from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hnclip.config import AdaptConfig, ObjectiveConfig, OptimConfig, SpeedConfig, TrainConfig, from_json, to_json
from hnclip.losses import GLOBAL_LOSSES
from hnclip.objectives.registry import build_objective
from hnclip.recipes import RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_a_round_trip(name: str) -> None:
    config = RECIPES[name]()
    assert from_json(TrainConfig, to_json(config)) == config


def test_round_trip_keeps_what_was_changed() -> None:
    objective = ObjectiveConfig(global_loss="hcl", token_weight=0.0, parameters={"beta": 0.5})
    optim = OptimConfig(scale_lr=0.0, negatives="batch", precision="bf16")
    config = TrainConfig(out=Path("somewhere"), limit=10, objective=objective, optim=optim)
    assert from_json(TrainConfig, to_json(config)) == config
    adapted = TrainConfig(
        context=248,
        keep=10,
        ratio=5,
        tokenizer="words",
        activation="gelu",
        adapt=AdaptConfig(method="dora", rank=4, alpha=8.0, dropout=0.1, towers="text", projections=True),
    )
    assert from_json(TrainConfig, to_json(adapted)) == adapted
    frozen = TrainConfig(adapt=AdaptConfig(freeze_image="all", freeze_text=3))
    assert from_json(TrainConfig, to_json(frozen)) == frozen
    probed = TrainConfig(probe_gradients="every=5", fraction=0.2)
    assert from_json(TrainConfig, to_json(probed)) == probed
    centred = TrainConfig(objective=ObjectiveConfig(center="mean"))
    assert from_json(TrainConfig, to_json(centred)) == centred


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sead": 1}, "sead"),
        ({"seed": "one"}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"tensorboard": 1}, "tensorboard"),
        ({"objective": {"gama": 0.5}}, "objective.gama"),
        ({"objective": {"global_loss": "triplet"}}, "objective.global_loss"),
        ({"objective": 3}, "objective"),
        ({"optim": {"lr": None}}, "optim.lr"),
        ({"context": 77.0}, "context"),
        ({"activation": "relu"}, "activation"),
        ({"adapt": {"method": "ia3"}}, "adapt.method"),
        ({"adapt": {"freeze_image": "half"}}, "adapt.freeze_image"),
        ({"adapt": {"freeze_text": True}}, "adapt.freeze_text"),
    ],
)
def test_a_wrong_file_names_the_field(change: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        from_json(TrainConfig, json.dumps(change))


def test_text_that_is_not_json() -> None:
    with pytest.raises(ValueError, match="not valid JSON"):
        from_json(TrainConfig, "seed: 1")


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (ObjectiveConfig, {"gamma": -0.1}),
        (ObjectiveConfig, {"margin": -0.1}),
        (ObjectiveConfig, {"token_weight": -1.0}),
        (ObjectiveConfig, {"margin_source": "frozen", "global_loss": "infonce"}),
        (ObjectiveConfig, {"parameters": {"beta": 1.0}}),
        (OptimConfig, {"epochs": 0}),
        (OptimConfig, {"micro_batch": 1}),
        (OptimConfig, {"accumulate": 0}),
        (OptimConfig, {"lr": 0.0}),
        (OptimConfig, {"scale_lr": -1.0}),
        (OptimConfig, {"scale": 0.5}),
        (OptimConfig, {"scale": float("inf")}),
        (OptimConfig, {"weight_decay": -1.0}),
        (OptimConfig, {"warmup": -0.1}),
        (OptimConfig, {"warmup": 1.5}),
        (OptimConfig, {"readout_lr": 0.0}),
        (OptimConfig, {"lr_floor": 2.0}),
        (OptimConfig, {"clip_grad": -1.0}),
        (OptimConfig, {"scale_max": 1.0}),
        (AdaptConfig, {"rank": 0, "method": "lora"}),
        (AdaptConfig, {"alpha": 0.0, "method": "lora"}),
        (AdaptConfig, {"dropout": 1.0, "method": "lora"}),
        (AdaptConfig, {"freeze_image": -1}),
        (AdaptConfig, {"freeze_image": 1, "method": "lora"}),
        (AdaptConfig, {"freeze_text": "all", "method": "dora"}),
        (AdaptConfig, {"rank": 8}),  # without a method it would do nothing
        (AdaptConfig, {"towers": "text"}),
        (AdaptConfig, {"projections": True}),
        (TrainConfig, {"context": 0}),
        (TrainConfig, {"keep": -1}),
        (TrainConfig, {"ratio": 0}),
        (TrainConfig, {"save_every": 0}),
        (TrainConfig, {"seed": -1}),
        (TrainConfig, {"seed": 2**32}),
        (TrainConfig, {"limit": 1}),
        (TrainConfig, {"fraction": 0.0}),
        (TrainConfig, {"fraction": 1.1}),
        (TrainConfig, {"fraction": float("nan")}),
        *[
            (TrainConfig, {"probe_gradients": text})
            for text in ("", "every", "every=", "every=0", "-5", "5 steps", "²")
        ],
        (TrainConfig, {"threads": -1}),
        (TrainConfig, {"evaluate_batch": 0}),
    ],
)
def test_impossible_values_name_the_field(kind: type, change: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        kind(**change)


@pytest.mark.parametrize(("text", "every"), [(None, None), ("every=5", 5), ("5", 5), ("every=120", 120)])
def test_how_often_gradients_are_measured(text: str | None, every: int | None) -> None:
    assert TrainConfig(probe_gradients=text).probe_every == every


def test_an_unclear_interval_shows_a_clear_one() -> None:
    with pytest.raises(ValueError, match="for example every=5, got 'often'"):
        TrainConfig(probe_gradients="often")


def test_files_of_older_versions_load() -> None:
    older = json.loads(to_json(TrainConfig(limit=10)))
    del older["fraction"], older["probe_gradients"]
    assert from_json(TrainConfig, json.dumps(older)) == TrainConfig(limit=10)


@pytest.mark.parametrize("name", ["lora", "dora"])
def test_the_adapter_recipes_are_the_papers(name: str) -> None:
    """What the paper states for adapters, and nothing else beside its own recipe; the temperature fixed in so many
    words."""
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


@pytest.mark.parametrize(
    ("kind", "values", "named"),
    [
        (ObjectiveConfig, {"global_loss": "nonsense"}, r"objective\.global_loss must be one of hn, infonce"),
        (ObjectiveConfig, {"center": "median"}, r"objective\.center"),
        (OptimConfig, {"negatives": "all"}, r"optim\.negatives"),
        (OptimConfig, {"precision": 16}, r"optim\.precision"),
        (SpeedConfig, {"parallel": "dp"}, r"speed\.parallel"),
        (AdaptConfig, {"freeze_text": "some"}, r"adapt\.freeze_text"),
        (TrainConfig, {"activation": "relu"}, "activation"),
    ],
)
def test_unknown_choices_are_errors_that_name_the_field(kind: type, values: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        kind(**values)
