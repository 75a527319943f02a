"""The registry of methods: what a method changes in a run, and configurations through files and commands."""

from __future__ import annotations

import shlex
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args

import pytest

from hnclip import recipes
from hnclip.cli import positional_data
from hnclip.cli.train import Train
from hnclip.config import (
    AdaptConfig,
    Fidelity,
    Method,
    ObjectiveConfig,
    OptimConfig,
    TrainConfig,
    from_json,
    to_json,
    train_command,
)
from hnclip.objectives.registry import (
    METHOD_CHOICES,
    METHODS,
    apply_method,
    build_objective,
    term_weights,
    with_fidelity,
)

FIDELITIES = get_args(Fidelity)
ADAPTERS = ("lora", "dora")
# A run without defaults in the settings that methods change.
OPTIM = {"accumulate": 5, "negatives": "batch", "lr": 1e-3, "scale_lr": 1e-4, "readout_lr": 1e-2, "decay": "all"}
UNUSUAL = TrainConfig(
    context=200,
    data="pairs.csv",
    limit=100,
    objective=ObjectiveConfig(gamma=0.3, token_weight=0.7),
    optim=OptimConfig(**OPTIM, schedule="wrapped", lr_floor=0.1, scale_max=50.0),
    adapt=AdaptConfig(method="lora", rank=4, alpha=8.0, dropout=0.1, towers="text", projections=True),
)


def as_method(config, choice, fidelity):
    """With a fidelity, if the method has two."""
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
    return Train.parse(positional_data(arguments)).config()


def with_global(config: TrainConfig, name: str) -> TrainConfig:
    return replace(config, objective=replace(config.objective, global_loss=name))


def test_every_method_is_described_once():
    assert set(METHODS) == set(get_args(Method))
    assert set(METHOD_CHOICES) == {*METHODS, *ADAPTERS}
    for choice in METHOD_CHOICES:
        for fidelity in FIDELITIES:
            build_objective(as_method(recipes.demo(), choice, fidelity).objective)


def test_weights_of_the_configuration_come_before_the_methods_own():
    goal = ObjectiveConfig(method="goal", token_weight=0.0, weights={"patch": 0.0, "local": 0.25})
    assert term_weights(goal) == {"local": 0.25, "patch": 0.0, "text": 1.0}
    assert term_weights(replace(goal, weights={})) == dict(METHODS["goal"].weights)
    with pytest.raises(ValueError, match="local, patch, text"):
        build_objective(replace(goal, weights={"locl": 1.0}))


@pytest.mark.parametrize("fidelity", FIDELITIES)
@pytest.mark.parametrize("choice", METHOD_CHOICES)
def test_a_method_brings_its_terms_and_leaves_all_other_settings_alone(choice, fidelity):
    after = as_method(UNUSUAL, choice, fidelity)
    objective = after.objective
    if choice in ADAPTERS:
        own = {"optim.scale_lr"} | ({"adapt.method"} if choice != "lora" else set())
        assert (after.optim.scale_lr, after.adapt.method) == (0.0, choice)
        assert (objective.method, objective.global_loss, objective.token_weight) == ("hn_clip", "infonce", 0.0)
    else:
        # Of the settings above, an official wrapped schedule is the only one that is usual to a method.
        optim = METHODS[choice].optim.get(fidelity, {})
        own = {f"optim.{name}" for name, value in optim.items() if getattr(UNUSUAL.optim, name) != value}
        assert all(getattr(after.optim, name) == value for name, value in optim.items())
        if choice == "hn_clip":
            assert (objective.global_loss, objective.token_weight) == ("hn", 1.0)
        else:
            assert term_weights(objective) == dict(METHODS[choice].weights)
            assert (objective.global_loss, objective.token_weight) == (METHODS[choice].own_global[fidelity], 0.0)
    assert {name for name in changed(UNUSUAL, after) if not name.startswith("objective.")} == own


@pytest.mark.parametrize("name", [name for name in METHODS if name != "hn_clip"])
def test_fidelity_can_be_changed_afterwards(name):
    """What is the method's own follows, what was chosen stays."""
    official, corrected = (as_method(TrainConfig(), name, fidelity) for fidelity in FIDELITIES)
    assert with_fidelity(official, "corrected") == corrected
    assert with_fidelity(corrected, "official") == official
    chosen = with_fidelity(with_global(corrected, "hn"), "official")
    assert chosen == with_global(official, "hn")


ROUND_TRIPS = {
    **{f"{choice} with hn": with_global(apply_method(recipes.paper(), choice), "hn") for choice in METHOD_CHOICES},
    **{f"recipe {name}": recipe() for name, recipe in recipes.RECIPES.items()},
    "unusual": UNUSUAL,
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_configurations_survive_a_file_and_the_command_line(name):
    config = ROUND_TRIPS[name]
    assert from_json(TrainConfig, to_json(config)) == parsed(config) == config
