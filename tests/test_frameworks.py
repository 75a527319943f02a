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
    Framework,
    GlobalLoss,
    ObjectiveConfig,
    OptimConfig,
    ReadConfig,
    SpeedConfig,
    TrainConfig,
    from_json,
    to_json,
)
from hnclip.frameworks import FRAMEWORKS, PLUGS, official_switches, plugged, term_weights, with_fidelity
from hnclip.losses import GLOBAL_LOSSES
from hnclip.objectives.build import build_objective
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


def as_plug(config, plug, fidelity):
    """Some have nothing that is official or corrected."""
    return plugged(config, plug, None if plug in ("hn_clip", "lora", "dora") else fidelity)


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


# What frameworks are ------------------------------------------------------------------------------------------


def test_every_framework_is_described_once():
    assert set(FRAMEWORKS) == set(get_args(Framework))
    assert set(PLUGS) == {*FRAMEWORKS, *ADAPTERS}
    titles = [spec.title for spec in FRAMEWORKS.values()]
    assert len(set(titles)) == len(titles)
    names = [switch.name for spec in FRAMEWORKS.values() for switch in spec.switches if "." not in switch.name]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_switch_says_what_both_do(name):
    for switch in FRAMEWORKS[name].switches:
        assert switch.official.strip()
        assert switch.corrected.strip()
        assert switch.official != switch.corrected
        assert "." in switch.name or switch.name.startswith(f"{name}_")


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_switch_named_after_an_option_turns_that_option(name):
    """And no option differs between both without a switch that says so."""
    spec = FRAMEWORKS[name]
    official, corrected = (flat(as_plug(TrainConfig(), name, fidelity)) for fidelity in FIDELITIES)
    different = {option for option in official if official[option] != corrected[option]} - {"objective.fidelity"}
    assert different == {switch.name for switch in spec.switches if "." in switch.name}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_weights_and_global_terms_can_be_built(name):
    spec = FRAMEWORKS[name]
    assert set(spec.own_global) == set(FIDELITIES)
    assert {*spec.own_global.values()} <= {*GLOBAL_LOSSES, "none"} == set(get_args(GlobalLoss))
    assert all(weight > 0 for weight in spec.weights.values())


def test_no_heavy_import():
    code = "import sys, hnclip.frameworks; assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# Switches and weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in FRAMEWORKS if name != "hn_clip"])
def test_fidelity_turns_all_switches_and_each_can_be_turned_alone(name):
    named = FRAMEWORKS[name].named_switches
    plain = ObjectiveConfig(framework=name, token_weight=0.0)
    assert official_switches(plain) == frozenset()
    assert official_switches(replace(plain, fidelity="official")) == frozenset(named)
    for switch in named:
        assert official_switches(replace(plain, switches={switch: "official"})) == {switch}
        mended = replace(plain, fidelity="official", switches={switch: "corrected"})
        assert official_switches(mended) == frozenset(named) - {switch}


def test_unknown_switches_and_weights_are_errors_that_list_the_known():
    goal = ObjectiveConfig(framework="goal", token_weight=0.0)
    with pytest.raises(ValueError, match="GOAL has no switch 'patch'; it has goal_patch_size, goal_box_scale"):
        official_switches(replace(goal, switches={"patch": "official"}))
    with pytest.raises(ValueError, match="GOAL has no term 'locl'; it has local, patch, text"):
        term_weights(replace(goal, weights={"locl": 1.0}))
    smart = replace(goal, framework="smartclip")
    with pytest.raises(ValueError, match="SmartCLIP has no switch 'goal_patch_size'; it has none"):
        official_switches(replace(smart, switches={"goal_patch_size": "official"}))
    # A difference that an option of its own makes is no switch by name.
    with pytest.raises(ValueError, match=r"StructXLIP has no switch 'optim\.scale_max'"):
        official_switches(replace(goal, framework="structxlip", switches={"optim.scale_max": "official"}))
    for wrong in ({"switches": {"patch": "official"}}, {"weights": {"locl": 1.0}}):
        with pytest.raises(ValueError, match=f"objective.{next(iter(wrong))}: GOAL has no"):
            build_objective(replace(goal, **wrong))


def test_weights_of_the_configuration_come_before_the_frameworks_own():
    goal = ObjectiveConfig(framework="goal", token_weight=0.0, weights={"patch": 0.0, "local": 0.25})
    assert term_weights(goal) == {"local": 0.25, "patch": 0.0, "text": 1.0}
    assert term_weights(replace(goal, weights={})) == dict(FRAMEWORKS["goal"].weights)


@pytest.mark.parametrize(
    "change",
    [
        {"framework": "hn_clip", "token_weight": 0.0, "switches": {"goal_patch_size": "official"}},
        {"framework": "hn_clip", "token_weight": 0.0, "weights": {"local": 1.0}},
        {"framework": "hn_clip", "token_weight": 0.0, "global_loss": "none"},
        {"framework": "goal"},  # with the token term of hn_clip
        {"framework": "goal", "token_weight": 0.0, "switches": {"goal_patch_size": "oficial"}},
        {"framework": "goal", "token_weight": 0.0, "weights": {"local": -1.0}},
        {"framework": "goal", "token_weight": 0.0, "weights": {"local": float("nan")}},
    ],
)
def test_settings_that_do_not_fit_are_refused(change):
    with pytest.raises(ValueError, match=r"objective\."):
        ObjectiveConfig(**change)


# Plugging in --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fidelity", FIDELITIES)
@pytest.mark.parametrize("plug", PLUGS)
def test_plugging_leaves_all_other_settings_alone(plug, fidelity):
    after = as_plug(UNUSUAL, plug, fidelity)
    if plug in ADAPTERS:
        own = {"optim.scale_lr"} | ({"adapt.method"} if plug != "lora" else set())
        assert (after.optim.scale_lr, after.adapt.method) == (0.0, plug)
    else:
        # Of the settings above, an official wrapped schedule is the only one that is usual to a framework.
        optim = FRAMEWORKS[plug].optim.get(fidelity, {})
        own = {f"optim.{name}" for name, value in optim.items() if getattr(UNUSUAL.optim, name) != value}
        assert all(getattr(after.optim, name) == value for name, value in optim.items())
    assert {name for name in changed(UNUSUAL, after) if not name.startswith("objective.")} == own


@pytest.mark.parametrize("fidelity", FIDELITIES)
@pytest.mark.parametrize("plug", PLUGS)
def test_plugging_brings_the_frameworks_terms_and_its_own_global_term(plug, fidelity):
    objective = as_plug(UNUSUAL, plug, fidelity).objective
    framework = "hn_clip" if plug in ADAPTERS else plug
    assert objective.framework == framework
    assert (objective.weights, objective.switches) == ({}, {})
    assert term_weights(objective) == dict(FRAMEWORKS[framework].weights)
    if plug == "hn_clip":
        assert (objective.global_loss, objective.token_weight) == ("hn", 1.0)
        return
    own = "infonce" if plug in ADAPTERS else FRAMEWORKS[plug].own_global[fidelity]
    assert (objective.global_loss, objective.token_weight) == (own, 0.0)
    assert objective.gamma == UNUSUAL.objective.gamma  # for --global hn
    if plug not in ADAPTERS:
        expected = FRAMEWORKS[plug].named_switches if fidelity == "official" else ()
        assert official_switches(objective) == frozenset(expected)


@pytest.mark.parametrize("plug", ADAPTERS)
def test_adapters_take_the_place_of_whole_or_frozen_weights(plug):
    """An adapter freezes the rest by itself; its own settings are the package's, or those that were there."""
    for method in (AdaptConfig(), AdaptConfig(freeze_image="all")):
        assert plugged(replace(UNUSUAL, adapt=method), plug).adapt == AdaptConfig(method=plug)
    assert plugged(UNUSUAL, plug).adapt == replace(UNUSUAL.adapt, method=plug)


@pytest.mark.parametrize("plug", ADAPTERS)
def test_plugged_adapters_differ_from_the_papers_recipe_by_rate_and_global_term_alone(plug):
    after, recipe = plugged(recipes.paper(), plug), recipes.RECIPES[plug]()
    assert changed(after, recipe) == {"optim.lr", "objective.global_loss"}
    assert changed(with_global(after, "hn"), recipe) == {"optim.lr"}


@pytest.mark.parametrize("name", GLOBAL_LOSSES)
@pytest.mark.parametrize("plug", PLUGS)
def test_every_plug_builds_with_every_global_loss(plug, name):
    """And in the objective that is built nothing but the global term is another."""
    own = plugged(recipes.demo(), plug)
    built = build_objective(with_global(own, name).objective)
    usual = build_objective(with_global(own, "infonce").objective)
    assert type(built) is type(usual)
    differ = [spec.name for spec in fields(built) if getattr(built, spec.name) != getattr(usual, spec.name)]
    assert len(differ) == (name != "infonce")
    views = ("image_views", "text_views", "parts", "tokens")
    assert [getattr(built, view) for view in views] == [getattr(usual, view) for view in views]


@pytest.mark.parametrize("fidelity", FIDELITIES)
@pytest.mark.parametrize("plug", PLUGS)
def test_every_plug_builds_as_it_comes(plug, fidelity):
    build_objective(as_plug(recipes.demo(), plug, fidelity).objective)


@pytest.mark.parametrize("plug", ["hn_clip", *ADAPTERS])
def test_where_the_global_term_is_the_only_one_it_cannot_be_left_out(plug):
    with pytest.raises(ValueError, match="none is for frameworks with terms of their own"):
        with_global(plugged(recipes.demo(), plug), "none")


@pytest.mark.parametrize("name", [name for name in FRAMEWORKS if name != "hn_clip"])
def test_fidelity_can_be_changed_afterwards(name):
    """What is the framework's own follows, what was chosen stays."""
    official, corrected = (as_plug(TrainConfig(), name, fidelity) for fidelity in FIDELITIES)
    assert with_fidelity(official, "corrected") == corrected
    assert with_fidelity(corrected, "official") == official
    chosen = with_fidelity(with_global(corrected, "hn"), "official")
    assert chosen == with_global(official, "hn")


# Files and commands -------------------------------------------------------------------------------------------

ROUND_TRIPS = {
    **{f"{plug} {fidelity}": as_plug(recipes.demo(), plug, fidelity) for plug in PLUGS for fidelity in FIDELITIES},
    **{f"{plug} with hn": with_global(plugged(recipes.paper(), plug), "hn") for plug in PLUGS},
    **{f"recipe {name}": recipe() for name, recipe in recipes.RECIPES.items()},
    "unusual": UNUSUAL,
    "switches and weights": TrainConfig(
        objective=ObjectiveConfig(
            framework="goal",
            token_weight=0.0,
            fidelity="official",
            switches={"goal_patch_size": "corrected", "goal_late_span": "official"},
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


def test_files_from_before_frameworks_load():
    older = json.loads(to_json(TrainConfig()))
    for name in ("framework", "fidelity", "switches", "weights"):
        del older["objective"][name]
    for name in ("readout_lr", "decay", "schedule"):
        del older["optim"][name]
    del older["read"]["prepared"]
    assert from_json(TrainConfig, json.dumps(older)) == TrainConfig()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"objective": {"framework": "blip"}}, "objective.framework"),
        ({"objective": {"fidelity": "exact"}}, "objective.fidelity"),
        ({"objective": {"switches": "official"}}, "objective.switches"),
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
