"""Command lines that reproduce a configuration: the options in which it differs from the paper's recipe."""

from __future__ import annotations

import shlex
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hnclip import recipes
from hnclip.config import ReadConfig, TrainConfig


def train_command(config: TrainConfig) -> str:
    """`hnclip train …` for this configuration, quoted for a shell."""
    words = ["hnclip", "train", "--recipe", "paper", *differences(config, recipes.paper(), "")]
    return shlex.join(words)


def eval_command(config: TrainConfig, out: Path, *, split: str | None) -> str:
    """`hnclip eval …` for the models of a run, on the data that it was trained on."""
    words = ["hnclip", "eval", "--model", str(out), "--data", config.data, *(("--split", split) if split else ())]
    return shlex.join([*words, *differences(config.read, ReadConfig(), "read.")])


def differences(config: Any, default: Any, prefix: str) -> list[str]:
    """The options that turn the default into this configuration, with `prefix` before their names."""
    words: list[str] = []
    for spec in fields(config):
        value, usual = getattr(config, spec.name), getattr(default, spec.name)
        flag = f"{prefix}{spec.name.replace('_', '-')}"
        if is_dataclass(value):
            words += differences(value, usual, f"{flag}.")
        elif value != usual:
            words += _option(flag, value)
    return words


def _option(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        front, _, name = flag.rpartition(".")
        return [f"--{flag}"] if value else [f"--{front}{'.' if front else ''}no-{name}"]
    if isinstance(value, dict):
        return [f"--{flag}", *(str(item) for pair in value.items() for item in pair)]
    return [f"--{flag}", str(value)]
