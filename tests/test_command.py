from __future__ import annotations

import shlex
from dataclasses import replace

import pytest
import tyro

from hnclip import recipes
from hnclip.config import AdaptConfig, ObjectiveConfig, OptimConfig, RunOptions, TrainConfig, train_command
from hnclip.options import Train

CONFIGS = {
    "paper": recipes.paper(),
    "demo": recipes.demo("infonce"),
    "tiny": recipes.tiny(),
    "lora": recipes.lora(),
    "dora": recipes.dora(),
    "rival": TrainConfig(objective=ObjectiveConfig(global_loss="hn_nce", parameters={"beta": 0.5, "alpha": 0.9})),
    "mean": replace(recipes.paper(), objective=ObjectiveConfig(center="mean")),
    "frozen": replace(recipes.paper(), adapt=AdaptConfig(freeze_image="all", freeze_text=3), context=248, limit=100),
    "scale": replace(recipes.paper(), optim=OptimConfig(scale_lr=0.0, precision="bf16"), model="it's + here"),
    "probed": replace(recipes.paper(), probe_gradients=5, fraction=0.05),
    "projections": replace(recipes.paper(), adapt=AdaptConfig(method="lora", projections=True)),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_command_line_parses_back_to_the_configuration(name):
    program, command, *arguments = shlex.split(train_command(CONFIGS[name]))
    assert (program, command) == ("hnclip", "train")
    default = Train(training=recipes.paper(), run=RunOptions())
    parsed = tyro.cli(Train, args=arguments, default=default)
    assert (parsed.training, parsed.run) == (CONFIGS[name], RunOptions())


def test_only_what_differs_is_said():
    assert train_command(recipes.paper()) == "hnclip train --recipe paper"
    assert train_command(replace(recipes.paper(), seed=7)) == "hnclip train --recipe paper --seed 7"
