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
    recipe: Literal["demo", "paper", "tiny", "lora", "dora"] = "demo"
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
class Opening:
    """How a model is opened."""

    context: int | None = None
    """Longest caption in tokens: a shorter model is stretched to it, a longer one is left as it is."""
    keep: int = 20
    """Leading positions that stretching leaves as they are."""
    ratio: int | None = None
    """New positions for each step of the others; the smallest that reaches the context when left out."""
    tokenizer: Path | None = None
    """Directory of another tokenizer than the model's own."""
    activation: Literal["quick_gelu", "gelu"] | None = None
    """Of a file of weights that does not say it: quick_gelu for OpenAI's, gelu for most of open_clip's."""


@dataclass(frozen=True)
class Eval:
    """Retrieval metrics of a model, both directions, with bootstrap intervals."""

    opening: Annotated[Opening, tyro.conf.arg(name="")]
    model: str = "bundled"
    """`bundled`, a Hugging Face directory or hub name, IMAGE+TEXT towers, an adapter, or a file of weights in OpenAI's
    layout (docs/models.md)."""
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
class Convert:
    """Open a model in any supported layout, say what was recognised, and write it in another."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """`bundled`, a Hugging Face directory or hub name, IMAGE+TEXT towers, an adapter (it is merged), or a file of
    weights in OpenAI's layout (docs/models.md)."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """Directory to write; one that exists is refused unless --replace."""
    opening: Annotated[Opening, tyro.conf.arg(name="")]
    to: Literal["hf", "onnx", "immich"] = "hf"
    """hf: Hugging Face directory for transformers and sentence-transformers. onnx: both towers as ONNX. immich: the
    same in the layout of the immich photo app."""
    replace: bool = False
    """Replace what is in the directory."""
    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True)
class Interpolate:
    """Weights between a base model and what fine-tuning made of it (WiSE-FT): (1 − α)·base + α·tuned.

    One --alpha and --out: write that model. Several: evaluate each on the validation split of every --data, print the
    tables, and with --out write the one with the best mean R@1."""

    base: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="BASE")]
    """The model before fine-tuning."""
    tuned: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TUNED")]
    """The model after it."""
    opening: Annotated[Opening, tyro.conf.arg(name="")]
    alpha: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    """0 is the base, 1 the tuned model."""
    data: tuple[str, ...] = ("scenes/park",)
    """Data sets to evaluate on: what was tuned for, and what must not be forgotten."""
    out: Path | None = None
    """Directory to write; one that exists is refused unless --replace."""
    replace: bool = False
    """Replace what is in the directory."""
    batch: int = 128
    device: str = "auto"
    json: bool = False
    """Print the results as JSON."""
    quiet: bool = False
    """No progress."""

    def __post_init__(self) -> None:
        if not self.alpha or not all(0 <= alpha <= 1 for alpha in self.alpha):
            raise ValueError(f"--alpha takes numbers between 0 (the base) and 1 (the tuned model), got {self.alpha}")
        if not self.data:
            raise ValueError("--data needs the name of at least one data set")


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
