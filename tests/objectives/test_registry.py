from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import tyro

from hnclip import recipes
from hnclip.command import train_command
from hnclip.config import (
    AdaptConfig,
    Fidelity,
    GlobalLoss,
    Method,
    ObjectiveConfig,
    OptimConfig,
    ReadConfig,
    SpeedConfig,
    TrainConfig,
    from_json,
    to_json,
)
from hnclip.losses import GLOBAL_LOSSES
from hnclip.objectives.registry import (
    METHOD_CHOICES,
    METHODS,
    apply_method,
    build_objective,
    term_weights,
    with_fidelity,
)
from hnclip.options import Train

FIDELITIES: tuple[Fidelity, ...] = get_args(Fidelity)
ADAPTERS = ("lora", "dora")
# A run in which nothing is as usual.
UNUSUAL = TrainConfig(
    out=Path("runs/other"),
    model="somewhere",
    context=200,
    keep=10,
    ratio=3,
    tokenizer="words",
    activation="gelu",
    data="pairs.csv",
    validation="others.csv",
    read=ReadConfig(images="pictures", validation_share=0.2),
    fraction=0.5,
    limit=100,
    cluster=4,
    objective=ObjectiveConfig(gamma=0.3, token_weight=0.7),
    optim=OptimConfig(
        epochs=3,
        micro_batch=6,
        accumulate=5,
        negatives="batch",
        lr=1e-3,
        scale_lr=1e-4,
        readout_lr=1e-2,
        weight_decay=0.2,
        decay="all",
        beta1=0.8,
        beta2=0.9,
        warmup=3,
        schedule="wrapped",
        lr_floor=0.1,
        clip_grad=0.5,
        scale_max=50.0,
        precision="bf16",
    ),
    adapt=AdaptConfig(method="lora", rank=4, alpha=8.0, dropout=0.1, towers="text", projections=True),
    speed=SpeedConfig(recompute=True, compile=True, parallel="fsdp"),
    seed=7,
    device="cpu",
    threads=2,
    save_every=3,
    evaluate_batch=9,
    probe_gradients="every=5",
    tensorboard=True,
)


def as_method(config, choice, fidelity):
    """Some have nothing that is official or corrected."""
    return apply_method(config, choice, None if choice in ("hn_clip", "lora", "dora") else fidelity)


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every setting by its dotted name."""
    found = {}
    for spec in fields(config):
        value = getattr(config, spec.name)
        found |= flat(value, f"{prefix}{spec.name}.") if is_dataclass(value) else {f"{prefix}{spec.name}": value}
    return found


def changed(before: TrainConfig, after: TrainConfig) -> set[str]:
    old, new = flat(before), flat(after)
    return {name for name in old if old[name] != new[name]}


def parsed(config: TrainConfig) -> TrainConfig:
    """What the command line makes of the command that does this run again."""
    _, _, *arguments = shlex.split(train_command(config))
    return tyro.cli(Train, args=arguments, default=Train(run=recipes.paper())).run


def with_global(config: TrainConfig, name: str) -> TrainConfig:
    return replace(config, objective=replace(config.objective, global_loss=name))


# What methods are ------------------------------------------------------------------------------------------


def test_every_method_is_described_once():
    assert set(METHODS) == set(get_args(Method))
    assert set(METHOD_CHOICES) == {*METHODS, *ADAPTERS}
    titles = [spec.title for spec in METHODS.values()]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("name", METHODS)
def test_weights_and_global_terms_can_be_built(name):
    spec = METHODS[name]
    assert set(spec.own_global) == set(FIDELITIES)
    assert {*spec.own_global.values()} <= {*GLOBAL_LOSSES, "none"} == set(get_args(GlobalLoss))
    assert all(weight > 0 for weight in spec.weights.values())


def test_no_heavy_import():
    code = "import sys, hnclip.objectives.registry; assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# Switches and weights -----------------------------------------------------------------------------------------


def test_weights_of_the_configuration_come_before_the_methods_own():
    goal = ObjectiveConfig(method="goal", token_weight=0.0, weights={"patch": 0.0, "local": 0.25})
    assert term_weights(goal) == {"local": 0.25, "patch": 0.0, "text": 1.0}
    assert term_weights(replace(goal, weights={})) == dict(METHODS["goal"].weights)


@pytest.mark.parametrize(
    "change",
    [
        {"method": "hn_clip", "token_weight": 0.0, "weights": {"local": 1.0}},
        {"method": "hn_clip", "token_weight": 0.0, "global_loss": "none"},
        {"method": "goal"},  # with the token term of hn_clip
        {"method": "goal", "token_weight": 0.0, "fidelity": "oficial"},
        {"global_loss": "nonsense"},
        {"method": "blip", "token_weight": 0.0},
        {"method": "goal", "token_weight": 0.0, "weights": {"local": -1.0}},
        {"method": "goal", "token_weight": 0.0, "weights": {"local": float("nan")}},
    ],
)
def test_settings_that_do_not_fit_are_refused(change):
    with pytest.raises(ValueError, match=r"objective\."):
        ObjectiveConfig(**change)


# Plugging in --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fidelity", FIDELITIES)
@pytest.mark.parametrize("choice", METHOD_CHOICES)
def test_a_method_leaves_all_other_settings_alone(choice, fidelity):
    after = as_method(UNUSUAL, choice, fidelity)
    if choice in ADAPTERS:
        own = {"optim.scale_lr"} | ({"adapt.method"} if choice != "lora" else set())
        assert (after.optim.scale_lr, after.adapt.method) == (0.0, choice)
    else:
        # Of the settings above, an official wrapped schedule is the only one that is usual to a method.
        optim = METHODS[choice].optim.get(fidelity, {})
        own = {f"optim.{name}" for name, value in optim.items() if getattr(UNUSUAL.optim, name) != value}
        assert all(getattr(after.optim, name) == value for name, value in optim.items())
    assert {name for name in changed(UNUSUAL, after) if not name.startswith("objective.")} == own


@pytest.mark.parametrize("fidelity", FIDELITIES)
@pytest.mark.parametrize("choice", METHOD_CHOICES)
def test_a_method_brings_its_terms_and_its_own_global_term(choice, fidelity):
    objective = as_method(UNUSUAL, choice, fidelity).objective
    method = "hn_clip" if choice in ADAPTERS else choice
    assert (objective.method, objective.weights) == (method, {})
    if method != "hn_clip":
        assert term_weights(objective) == dict(METHODS[method].weights)
    if choice == "hn_clip":
        assert (objective.global_loss, objective.token_weight) == ("hn", 1.0)
        return
    own = "infonce" if choice in ADAPTERS else METHODS[choice].own_global[fidelity]
    assert (objective.global_loss, objective.token_weight) == (own, 0.0)
    assert objective.gamma == UNUSUAL.objective.gamma  # for --global hn


@pytest.mark.parametrize("choice", ADAPTERS)
def test_adapters_take_the_place_of_whole_or_frozen_weights(choice):
    """An adapter freezes the rest by itself; its own settings are the package's, or those that were there."""
    for method in (AdaptConfig(), AdaptConfig(freeze_image="all")):
        assert apply_method(replace(UNUSUAL, adapt=method), choice).adapt == AdaptConfig(method=choice)
    assert apply_method(UNUSUAL, choice).adapt == replace(UNUSUAL.adapt, method=choice)


@pytest.mark.parametrize("choice", ADAPTERS)
def test_adapters_differ_from_the_papers_recipe_by_rate_and_global_term_alone(choice):
    after, recipe = apply_method(recipes.paper(), choice), recipes.RECIPES[choice]()
    assert changed(after, recipe) == {"optim.lr", "objective.global_loss"}
    assert changed(with_global(after, "hn"), recipe) == {"optim.lr"}


@pytest.mark.parametrize("name", GLOBAL_LOSSES)
@pytest.mark.parametrize("choice", METHOD_CHOICES)
def test_every_method_builds_with_every_global_loss(choice, name):
    """And in the objective that is built nothing but the global term is another."""
    own = apply_method(recipes.demo(), choice)
    built = build_objective(with_global(own, name).objective)
    usual = build_objective(with_global(own, "infonce").objective)
    assert type(built) is type(usual)
    differ = [spec.name for spec in fields(built) if getattr(built, spec.name) != getattr(usual, spec.name)]
    assert len(differ) == (name != "infonce")
    views = ("image_views", "text_views", "parts", "tokens")
    assert [getattr(built, view) for view in views] == [getattr(usual, view) for view in views]


@pytest.mark.parametrize("fidelity", FIDELITIES)
@pytest.mark.parametrize("choice", METHOD_CHOICES)
def test_every_method_builds_as_it_comes(choice, fidelity):
    build_objective(as_method(recipes.demo(), choice, fidelity).objective)


@pytest.mark.parametrize("choice", ["hn_clip", *ADAPTERS])
def test_where_the_global_term_is_the_only_one_it_cannot_be_left_out(choice):
    with pytest.raises(ValueError, match="none is for methods with terms of their own"):
        with_global(apply_method(recipes.demo(), choice), "none")


@pytest.mark.parametrize("name", [name for name in METHODS if name != "hn_clip"])
def test_fidelity_can_be_changed_afterwards(name):
    """What is the method's own follows, what was chosen stays."""
    official, corrected = (as_method(TrainConfig(), name, fidelity) for fidelity in FIDELITIES)
    assert with_fidelity(official, "corrected") == corrected
    assert with_fidelity(corrected, "official") == official
    chosen = with_fidelity(with_global(corrected, "hn"), "official")
    assert chosen == with_global(official, "hn")


# Files and commands -------------------------------------------------------------------------------------------

ROUND_TRIPS = {
    **{
        f"{choice} {fidelity}": as_method(recipes.demo(), choice, fidelity)
        for choice in METHOD_CHOICES
        for fidelity in FIDELITIES
    },
    **{f"{choice} with hn": with_global(apply_method(recipes.paper(), choice), "hn") for choice in METHOD_CHOICES},
    **{f"recipe {name}": recipe() for name, recipe in recipes.RECIPES.items()},
    "unusual": UNUSUAL,
    "weights": TrainConfig(
        objective=ObjectiveConfig(
            method="goal",
            token_weight=0.0,
            fidelity="official",
            weights={"local": 0.25, "text": 0.0},
        )
    ),
    "no clamp": TrainConfig(optim=OptimConfig(scale_max=None, readout_lr=1e-3)),
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_configurations_survive_a_file(name):
    config = ROUND_TRIPS[name]
    assert from_json(TrainConfig, to_json(config)) == config


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_configurations_survive_the_command_line(name):
    assert parsed(ROUND_TRIPS[name]) == ROUND_TRIPS[name]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"objective": {"method": "blip"}}, "objective.method"),
        ({"objective": {"fidelity": "exact"}}, "objective.fidelity"),
        ({"objective": {"weights": [1.0]}}, "objective.weights"),
        ({"optim": {"scale_max": "none"}}, "optim.scale_max"),
        ({"optim": {"readout_lr": 0.0}}, "optim.readout_lr"),
        ({"optim": {"schedule": "linear"}}, "optim.schedule"),
        ({"optim": {"decay": "some"}}, "optim.decay"),
    ],
)
def test_a_wrong_file_names_the_field(change, named):
    with pytest.raises(ValueError, match=named):
        from_json(TrainConfig, json.dumps(change))


def test_unknown_weights_and_parameters_list_the_known():
    goal = ObjectiveConfig(method="goal", token_weight=0.0)
    with pytest.raises(ValueError, match="local, patch, text"):
        build_objective(replace(goal, weights={"locl": 1.0}))
    with pytest.raises(ValueError, match="alpha, beta"):
        build_objective(replace(goal, global_loss="hn_nce", parameters={"gamma": 1.0}))


@pytest.mark.parametrize("method", ["finelip", "structxlip"])
def test_a_method_is_never_applied_on_top_of_another(method):
    with pytest.raises(ValueError, match="goal"):
        apply_method(recipes.goal(), method)
    assert apply_method(recipes.goal(), "goal") == recipes.goal()
