"""What is trained (`TrainConfig`), and where and how it runs (`RunOptions`), as frozen dataclasses.

pydantic validates them on creation, in Python as on the command line and in JSON: a wrong type, a value out of range or
an unknown field is an error that names the field. No heavy import here: the command line builds its help from these.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import field, fields, is_dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

GlobalLoss = Literal[
    "hn",
    "infonce",
    "fixed_margin",
    "score_margin",
    "hn_nce",
    "hcl",
    "debiased",
    "max_hinge",
    "sigmoid",
    "smoothed",
    "none",
]
Method = Literal["hn_clip", "long_clip", "finelip", "goal", "smartclip", "structxlip"]
Fidelity = Literal["official", "corrected"]
Precision = Literal["auto", "fp32", "bf16"]

Count = Annotated[int, Field(ge=1)]
Number = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]

SCALE_MAX = 100.0  # CLIP's clamp of the inverse temperature
_STRICT = ConfigDict(extra="forbid", strict=True)
Config = TypeVar("Config")


@dataclass(frozen=True, config=_STRICT)
class ObjectiveConfig:
    """The loss: an exchangeable global loss and the terms of a method."""

    method: Method = "hn_clip"
    """Method whose terms are added to the global loss (hnclip docs methods)."""
    global_loss: GlobalLoss = "hn"
    """hn is the paper's loss, infonce plain CLIP, smoothed InfoNCE with label smoothing, none omits it; the others are
    rival losses (hnclip docs method)."""
    fidelity: Fidelity = "corrected"
    """Methods other than hn_clip: as their code was released, or with its errors corrected."""
    weights: dict[str, NonNegative] = field(default_factory=dict)
    """Weights of a method's terms by name, where they differ from its defaults, for example `local 0.25`."""
    crops: Annotated[int, Field(ge=1, le=3)] = 2
    """Edge crops of each image (structxlip only)."""
    gamma: NonNegative = 0.5
    """Strength of the similarity margin γ (hn only). With 0, hn is plain InfoNCE."""
    margin: NonNegative = 0.0
    """A constant margin m added to every negative (hn only). The paper has none."""
    center: float | Literal["mean"] = 0.0
    """Subtracted from caption similarities before γ: 0 as in the paper, a number, or the batch mean."""
    margin_source: Literal["live", "frozen"] = "live"
    """Encoder of the caption similarities: the one in training, or a copy frozen at the start."""
    token_weight: NonNegative = 1.0
    """Weight λ of the token term (hn_clip only). 0 disables it."""
    parameters: dict[str, float] = field(default_factory=dict)
    """Parameters of a rival loss by name, for example `beta 0.5`."""
    mask_duplicates: bool = True
    """Pairs with the same image or the same caption are no negatives of each other. The paper has no such rule."""

    def __post_init__(self) -> None:
        if self.margin_source == "frozen" and self.global_loss != "hn":
            raise ValueError(f"margin_source frozen needs global_loss hn, not {self.global_loss}")
        if self.parameters and self.global_loss == "hn":
            raise ValueError("parameters is for rival losses; hn has gamma, margin and center")
        if self.method == "hn_clip" and self.global_loss == "none":
            raise ValueError("global_loss none is for methods with terms of their own")
        if self.method == "hn_clip" and self.weights:
            raise ValueError("weights is for methods other than hn_clip, which has token_weight")
        if self.method != "hn_clip" and self.token_weight:
            raise ValueError(
                f"token_weight belongs to hn_clip: choose {self.method} by --method {self.method}, which also "
                "applies its own settings, or set the weight to 0"
            )
        if self.method != "structxlip" and self.crops != 2:
            raise ValueError(f"crops is for structxlip, not {self.method}")


@dataclass(frozen=True, config=_STRICT)
class OptimConfig:
    """AdamW with warm-up and cosine decay, over micro-batches."""

    epochs: Count = 10
    micro_batch: Annotated[int, Field(ge=2)] = 16
    """Pairs encoded at once."""
    accumulate: Count = 8
    """Micro-batches per optimiser step: 16 × 8 is the paper's effective batch of 128."""
    negatives: Literal["micro", "batch", "memory"] = "micro"
    """micro: each loss sees only its micro-batch (plain accumulation, as the paper's 16 × 8). batch: every pair is
    compared with the whole batch, by gradient caching with exact gradients. memory: the global loss also compares every
    pair with the stored embeddings of the --optim.memory pairs seen last."""
    memory: Number = 0
    """Pairs in memory (negatives memory only); at most all training pairs are kept."""
    lr: Positive = 2e-6
    """Highest learning rate, after the warm-up."""
    scale: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """Scale (inverse temperature) at the start; the model's own if not given. With scale_lr 0 it is fixed."""
    scale_lr: NonNegative | None = None
    """Learning rate of the scale, 0 to keep it fixed; the same as lr if not given."""
    readout_lr: Positive | None = None
    """Learning rate of the modules that a method adds; the same as lr if not given."""
    weight_decay: NonNegative = 0.01
    decay: Literal["matrices", "all"] = "matrices"
    """Parameters with weight decay: matrices only, or all trained ones including biases, norms and the scale."""
    beta1: Share = 0.9
    beta2: Share = 0.98
    warmup: NonNegative = 0.05
    """Steps with a rising learning rate: below 1 a share of all steps, from 1 on their number."""
    schedule: Literal["cosine", "open_cosine", "wrapped"] = "cosine"
    """Decay after the warm-up: cosine reaches its floor at the last step, open_cosine would reach it one step later
    (Long-CLIP, GOAL and StructXLIP as released), wrapped counts micro-batches instead of steps, so that with
    accumulation the cosine falls and rises again (FineLIP as released)."""
    lr_floor: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of the learning rate that remains at the last step."""
    clip_grad: NonNegative = 1.0
    """Largest gradient norm; 0 disables clipping."""
    scale_max: Annotated[float, Field(gt=1)] | None = SCALE_MAX
    """Largest scale, as CLIP's clamp; None for no clamp."""
    precision: Precision = "auto"
    """bf16 runs the towers under autocast; losses are always computed in fp32. auto is bf16 where the device supports
    it in hardware."""

    def __post_init__(self) -> None:
        if self.warmup >= 1 and not float(self.warmup).is_integer():
            raise ValueError(f"warmup must be a share in [0, 1) or a whole number of steps, got {self.warmup}")
        if self.memory and self.negatives != "memory":
            raise ValueError("memory is for negatives memory: set both")


@dataclass(frozen=True, config=_STRICT)
class AdaptConfig:
    """Which parameters train: all, those that are not frozen, or adapters (hnclip docs adapters)."""

    method: Literal["full", "lora", "dora"] = "full"
    """full trains the weights themselves; lora and dora train adapters on frozen weights."""
    rank: Count = 16
    """Rank r of the adapters."""
    alpha: Positive = 32.0
    """Strength of the adapters: their output is multiplied by alpha/rank."""
    dropout: Share = 0.0
    """Dropout on the input of the adapters."""
    towers: Literal["both", "image", "text"] = "both"
    """Towers that get adapters; the other one is frozen."""
    projections: bool = False
    """Also train both projections in full."""
    freeze_image: Number | Literal["all"] = 0
    """Freeze the embeddings and the first N blocks of the image tower, or all of it with its projection."""
    freeze_text: Number | Literal["all"] = 0
    """The same for the text tower."""
    freeze_positions: Number = 0
    """Freeze the first N positions of the text tower (20 in Long-CLIP's and FineLIP's trainers)."""

    def __post_init__(self) -> None:
        if self.freeze_image == "all" and self.freeze_text == "all":
            raise ValueError("both towers are frozen, so there is nothing to train: freeze one of them, or blocks")
        frozen = ("freeze_image", "freeze_text", "freeze_positions")
        for spec in fields(self):
            if getattr(self, spec.name) == spec.default or spec.name == "method":
                continue
            if self.method == "full" and spec.name not in frozen:
                raise ValueError(f"{spec.name} is for adapters: set method to lora or dora")
            if self.method != "full" and spec.name in frozen:
                raise ValueError(
                    f"{spec.name} is for method full: {self.method} freezes everything but the adapters; choose the "
                    "towers that get them with towers"
                )


@dataclass(frozen=True, config=_STRICT)
class ReadConfig:
    """How data are read, where the source does not declare it (hnclip docs data)."""

    images: str | None = None
    """Directory or tar file of the images, if they are not stored with the captions."""
    match: Literal["path", "name"] = "path"
    """How a table names its images: `path`, relative to --read.images or to the table; `name` also searches both for a
    file of the same name."""
    image_column: str | None = None
    """Column or key that names or holds the image; guessed if not given."""
    caption_column: str | None = None
    """Column or key of the caption, several separated by commas; guessed if not given."""
    id_column: str | None = None
    """Column or key of the record's id; the path of its image if not given."""
    split_column: str | None = None
    """Column or key of the split; guessed if not given."""
    short_column: str | None = None
    """Column or key of a short caption, for objectives that need one; guessed if not given."""
    group_column: str | None = None
    """Column or key that names groups of near-duplicates: a group stays in one split, and bootstrap intervals resample
    whole groups."""
    splits: bool = True
    """Use the splits that the source declares; otherwise all records are training records."""
    validation_share: Share = 0.05
    """Share of the training records held out for validation if the source has no validation split."""
    max_bad: Share = 0.01
    """Largest share of invalid records that is skipped; more is an error."""
    cache: str | None = None
    """Directory for decoded images; $HNCLIP_CACHE or ~/.cache/hnclip if not given."""
    prepared: str | None = None
    """Directory of the manifests of `hnclip prepare`; one in the cache directory if not given."""


@dataclass(frozen=True, config=_STRICT)
class Opening:
    """How a model is opened."""

    context: Count | None = None
    """Longest caption in tokens; a shorter context is stretched to it, a longer one stays."""
    keep: Number = 20
    """Leading positions that stretching does not change."""
    ratio: Count | None = None
    """New positions for each old one after them; the smallest number that reaches the context if not given."""
    tokenizer: str | None = None
    """Directory of a tokenizer to use instead of the model's own."""
    activation: Literal["quick_gelu", "gelu"] | None = None
    """Activation function, if the checkpoint does not specify one (OpenAI: quick_gelu; most open_clip models: gelu)."""


@dataclass(frozen=True, config=_STRICT)
class Selection:
    """Which pairs are trained and validated on, in which order, and what is measured during training."""

    validation: str | None = None
    """Other data to validate on, instead of the validation split of the training data."""
    watch: str | None = None
    """Other data whose test split, or all of it, is evaluated after every epoch. It selects nothing."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Use only this share of the training pairs, chosen by a hash of their ids: smaller shares are subsets of larger
    ones, for every seed and objective."""
    limit: Annotated[int, Field(ge=2)] | None = None
    """Use only the first N training pairs, after --fraction."""
    cluster: Number = 0
    """Group N similar captions into each batch (0: random batches, as in the paper)."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """Seed of the order of pairs, the choice among an image's captions, and dropout."""
    probe_gradients: Number = 0
    """Measure both losses and their gradients on the batch of every N-th step; training is not affected
    (hnclip docs runs). 0 disables it."""


@dataclass(frozen=True, config=_STRICT)
class TrainConfig(Selection, Opening):
    """What is trained: model, data, objective, optimiser. Two runs with equal configurations have equal results."""

    model: str = "bundled"
    """`bundled`, a Hugging Face directory or hub name, IMAGE+TEXT towers, an adapter, a checkpoint file in OpenAI's
    layout, or a run (hnclip docs models)."""
    data: str = "scenes/park"
    """A folder of images with captions, a CSV, TSV, JSON, JSONL or Parquet file, Karpathy's JSON, WebDataset shards,
    a Hugging Face data set, a benchmark as NAME=FOLDER, or generated `scenes/park`, `scenes/shelf`
    (hnclip docs data)."""
    read: ReadConfig = field(default_factory=ReadConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    adapt: AdaptConfig = field(default_factory=AdaptConfig)

    def __post_init__(self) -> None:
        if self.optim.negatives == "memory" and self.objective.global_loss == "none":
            raise ValueError("negatives memory needs a global loss: the terms of a method use the micro-batch alone")
        if self.optim.negatives == "memory" and self.objective.method == "smartclip":
            raise ValueError("negatives memory cannot be used with smartclip, whose captions are masked for each image")


@dataclass(frozen=True, config=_STRICT)
class SpeedConfig:
    """Activation checkpointing, compilation and parallelism (hnclip docs performance)."""

    recompute: bool = False
    """Activation checkpointing: keep only the inputs of each block and recompute the rest in the backward pass."""
    compile: bool = False
    """Compile the towers with torch.compile: minutes at the start, faster steps afterwards."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun: ddp keeps a whole model in every process, fsdp shards weights, gradients and optimiser state."""


@dataclass(frozen=True, config=_STRICT)
class RunOptions:
    """Where and how a run is executed. They may change when it is resumed."""

    out: Annotated[Path, Field(strict=False)] = Path("runs/train")
    """Directory of the run: configuration, metrics, checkpoint, best and last model."""
    device: str = "auto"
    """auto uses an accelerator if there is one; or cpu, cuda, mps …"""
    threads: Number = 0
    """CPU threads; 0 leaves the choice to torch. Results are bit-identical only for the same number."""
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    save_minutes: NonNegative = 5.0
    """Minutes between checkpoints; every epoch ends with one as well. 0 saves after every step."""
    evaluate_batch: Count = 128
    """Images or captions encoded at once in evaluation."""
    tensorboard: bool = False
    """Also write TensorBoard events (pip install 'hnclip[track]')."""


def train_command(config: TrainConfig) -> str:
    """`hnclip train …` for this configuration, quoted for a shell."""
    usual = TrainConfig(model=config.model)  # always named: own data need it
    return shlex.join(["hnclip", "train", "--recipe", "paper", "--model", config.model, *option_words(config, usual)])


def option_words(config: Any, default: Any, prefix: str = "") -> list[str]:
    """The command-line options that turn the default into this configuration, with `prefix` before their names.

    Args:
        config, default: dataclasses of one type.
    """
    words: list[str] = []
    for spec in fields(config):
        value, usual = getattr(config, spec.name), getattr(default, spec.name)
        flag = prefix + spec.name.replace("_", "-")
        if is_dataclass(value):
            words += option_words(value, usual, f"{flag}.")
        elif value == usual:
            continue
        elif isinstance(value, bool):
            group, dot, name = flag.rpartition(".")
            words.append(f"--{flag}" if value else f"--{group}{dot}no-{name}")
        elif isinstance(value, dict):
            words += [f"--{flag}", *(str(item) for pair in value.items() for item in pair)]
        else:
            words += [f"--{flag}", str(value)]
    return words


def to_json(config: Any) -> str:
    return TypeAdapter(type(config)).dump_json(config, indent=2).decode() + "\n"


def from_json(kind: type[Config], text: str) -> Config:
    """The inverse of `to_json`; ValueError names all wrong fields in one line."""
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        raise ValueError(one_line(error)) from error


def with_fields(config: Config, values: Mapping[str, Any]) -> Config:
    """The configuration with these values of dotted fields, validated as from JSON.

    >>> with_fields(TrainConfig(), {"optim.lr": 1e-4, "seed": 7}).optim.lr
    0.0001
    """
    content = json.loads(to_json(config))
    for name, value in values.items():
        *groups, last = name.split(".")
        try:
            reduce(getitem, groups, content)[last] = value
        except (KeyError, TypeError) as error:
            raise ValueError(f"there is no field {name}") from error
    return from_json(type(config), json.dumps(content))


def read_config(kind: type[Config], path: Path) -> Config:
    """A configuration from a JSON file."""
    try:
        return from_json(kind, path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def one_line(error: ValidationError, prefix: str = "") -> str:
    """The fields that are wrong, and why; with the `prefix` of their options as these.

    >>> with_fields(TrainConfig(), {"optim.epochs": 0, "sed": 1})
    Traceback (most recent call last):
    ValueError: optim.epochs: Input should be greater than or equal to 1, got 0; sed: there is no such field
    """
    problems = []
    for found in error.errors(include_url=False):
        name = ".".join(part for part in found["loc"] if isinstance(part, str))
        message = found["msg"].removeprefix("Value error, ")
        if name and prefix:
            name = prefix + name.replace("_", "-")
        if found["type"] == "unexpected_keyword_argument":
            message = "there is no such field"
        elif isinstance(found["input"], str | int | float) and found["type"] != "json_invalid":
            message += f", got {found['input']!r}"
        problems.append(f"{name}: {message}" if name else message)
    return "; ".join(problems)
