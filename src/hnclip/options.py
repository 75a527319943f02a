"""The options of every command, as dataclasses that the command line is made from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from hnclip.config import TrainConfig


@dataclass(frozen=True)
class Train:
    """Fine-tune a model on image–caption pairs. Every field of the configuration is an option here."""

    run: Annotated[TrainConfig, tyro.conf.arg(name="")]
    recipe: Literal["demo", "paper", "tiny"] = "demo"
    """Settings to start from; other options change them."""
    config: Path | None = None
    """Start from a configuration file instead, for example the config.json of an earlier run."""
    resume: Path | None = None
    """Continue the run in this directory from its last checkpoint; its own configuration counts."""
    json: bool = False
    """Print the result as JSON."""
    quiet: bool = False
    """No progress."""


@dataclass(frozen=True)
class Eval:
    """Retrieval metrics of a model, both directions, with bootstrap intervals."""

    model: str = "bundled"
    """`bundled`, or the path of a Hugging Face CLIP directory."""
    data: str = "scenes/park"
    """`scenes/park` or `scenes/shelf`."""
    split: Literal["test", "validation", "train"] = "test"
    out: Path | None = None
    """Also write metrics and the rank of every query to this JSON file."""
    batch: int = 128
    device: str = "auto"
    json: bool = False
    """Print the metrics as JSON."""
    quiet: bool = False
    """No progress."""


@dataclass(frozen=True)
class Demo:
    """Fine-tune the bundled model on generated scenes with InfoNCE and with HN-CLIP, compare them on the test split,
    and write a report. A few minutes on two cores; a stopped demo continues where it was."""

    out: Path = Path("runs/demo")
    """Where both runs and the report are written."""
    seed: int = 42
    json: bool = False
    """Print the results as JSON."""
    quiet: bool = False
    """No progress."""


@dataclass(frozen=True)
class Pretrain:
    """Make the bundled model anew: short captions, stretched positions, long captions. About an hour on two cores;
    started again with the same --out it continues."""

    out: Path = Path("runs/pretrain")
    seed: int = 0
    brief: int = 0
    """A trial of so many steps per stage instead of the whole recipe."""
