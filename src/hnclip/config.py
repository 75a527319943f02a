"""What a run is made of: frozen dataclasses, checked on creation, saved with every run as JSON.

No heavy import here: the command line builds its help from these.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from math import inf
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

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

SCALE_MAX = 100.0  # CLIP's clamp of the inverse temperature


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _require_choices(config: Any, prefix: str = "") -> None:
    """ValueError unless every field with a fixed set of texts holds one of them, or another type that it allows."""
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        for option in (hint, *get_args(hint)):
            if get_origin(option) is Literal and value not in get_args(option):
                choices = ", ".join(get_args(option))
                _require(
                    option is not hint and not isinstance(value, str),
                    f"{prefix}{name} must be one of {choices}, got {value!r}",
                )


@dataclass(frozen=True)
class ObjectiveConfig:
    """The loss: an exchangeable global loss and the terms of a method."""

    method: Method = "hn_clip"
    """Whose terms are added to the global loss (docs/methods.md)."""
    global_loss: GlobalLoss = "hn"
    """hn is the paper's, infonce plain CLIP, smoothed the same with label smoothing, none leaves it out, the others are
    rivals (docs/method.md)."""
    fidelity: Fidelity = "corrected"
    """Methods other than hn_clip: as their code was released, or with its errors corrected."""
    weights: dict[str, float] = field(default_factory=dict)
    """Weights of a method's terms by name, where they differ from its defaults, for example `local 0.25`."""
    crops: int = 2
    """Edge crops of each image (structxlip only), at most 3."""
    gamma: float = 0.5
    """Strength of the similarity margin γ (hn only). 0 makes hn plain InfoNCE."""
    margin: float = 0.0
    """A constant margin m added to every negative (hn only). The paper has none."""
    center: float | Literal["mean"] = 0.0
    """What is subtracted from caption similarities before γ: 0 as in the paper, a number, or the batch mean."""
    margin_source: Literal["live", "frozen"] = "live"
    """Where caption similarities come from: the encoder in training, or a copy frozen at the start."""
    token_weight: float = 1.0
    """Weight λ of the token term (hn_clip only). 0 switches it off."""
    parameters: dict[str, float] = field(default_factory=dict)
    """Parameters of a rival loss by name, for example `beta 0.5`."""
    mask_duplicates: bool = True
    """Pairs with the same picture or the same caption are no negatives of each other, and share no batch. The paper has
    no such rule."""

    def __post_init__(self) -> None:
        _require_choices(self, "objective.")
        _require(self.gamma >= 0, f"objective.gamma must not be negative, got {self.gamma}")
        _require(self.margin >= 0, f"objective.margin must not be negative, got {self.margin}")
        _require(self.token_weight >= 0, f"objective.token_weight must not be negative, got {self.token_weight}")
        _require(
            self.margin_source == "live" or self.global_loss == "hn",
            f"objective.margin_source frozen needs objective.global_loss hn, not {self.global_loss}",
        )
        _require(
            not self.parameters or self.global_loss != "hn",
            "objective.parameters is for rival losses; hn has gamma, margin and center",
        )
        if self.method == "hn_clip":
            _require(self.global_loss != "none", "objective.global_loss none is for methods with terms of their own")
            _require(not self.weights, "objective.weights is for methods other than hn_clip; it has token_weight")
        else:
            _require(
                self.token_weight == 0,
                f"objective.token_weight belongs to hn_clip: choose {self.method} by --objective {self.method}, which "
                "also applies its own settings, or set the weight to 0",
            )
        _require(1 <= self.crops <= 3, f"objective.crops must be 1, 2 or 3, got {self.crops}")
        _require(
            self.crops == 2 or self.method == "structxlip", f"objective.crops is for structxlip, not {self.method}"
        )
        for name, weight in self.weights.items():
            _require(0 <= weight < inf, f"objective.weights: {name} must be a number of at least 0, got {weight}")


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with warm-up and cosine decay, over micro-batches."""

    epochs: int = 10
    micro_batch: int = 16
    """Pairs encoded at once."""
    accumulate: int = 8
    """Micro-batches per optimiser step: 16 × 8 is the paper's effective batch of 128."""
    negatives: Literal["micro", "batch"] = "micro"
    """micro: each loss sees only its micro-batch (plain accumulation, as the paper's 16 × 8). batch: gradient
    caching, every pair is compared with the whole batch, exact gradients."""
    lr: float = 2e-6
    """Highest learning rate, after the warm-up."""
    scale: float | None = None
    """Scale (inverse temperature) at the start; the model's own when left out. With scale_lr 0 it stays."""
    scale_lr: float | None = None
    """Learning rate of the scale; the same as lr when left out, 0 to keep it fixed."""
    readout_lr: float | None = None
    """Learning rate of the modules that a method adds; the same as lr if not given."""
    weight_decay: float = 0.01
    decay: Literal["matrices", "all"] = "matrices"
    """What is decayed: matrices alone, or all that trains, biases, norms and the temperature too."""
    beta1: float = 0.9
    beta2: float = 0.98
    warmup: float = 0.05
    """Steps with a rising learning rate: below 1 a share of all steps, from 1 on their number."""
    schedule: Literal["cosine", "open_cosine", "wrapped"] = "cosine"
    """How the rate falls after the warm-up: cosine reaches its floor at the last step, open_cosine would reach it one
    step later (Long-CLIP, GOAL and StructXLIP as released), wrapped counts micro-batches instead of steps, so that with
    accumulation the cosine falls and rises again (FineLIP as released)."""
    lr_floor: float = 0.01
    """Share of the learning rate that is left at the last step."""
    clip_grad: float = 1.0
    """Largest gradient norm; 0 switches clipping off."""
    scale_max: float | None = SCALE_MAX
    """Largest inverse temperature s, as CLIP's clamp; None for no clamp."""
    precision: Precision = "auto"
    """bf16 runs the towers under autocast; losses are always computed in fp32. auto takes bf16 where the device has it
    in hardware."""

    def __post_init__(self) -> None:
        _require_choices(self, "optim.")
        _require(self.epochs >= 1, f"optim.epochs must be at least 1, got {self.epochs}")
        _require(self.micro_batch >= 2, f"optim.micro_batch must be at least 2, got {self.micro_batch}")
        _require(self.accumulate >= 1, f"optim.accumulate must be at least 1, got {self.accumulate}")
        _require(self.lr > 0, f"optim.lr must be positive, got {self.lr}")
        _require(self.scale is None or 1 <= self.scale < inf, f"optim.scale must be at least 1, got {self.scale}")
        _require(
            self.scale_lr is None or self.scale_lr >= 0, f"optim.scale_lr must not be negative, got {self.scale_lr}"
        )
        _require(self.weight_decay >= 0, f"optim.weight_decay must not be negative, got {self.weight_decay}")
        _require(
            self.readout_lr is None or self.readout_lr > 0, f"optim.readout_lr must be positive, got {self.readout_lr}"
        )
        _require(
            0 <= self.warmup < 1 or (self.warmup >= 1 and float(self.warmup).is_integer()),
            f"optim.warmup must be a share in [0, 1) or a whole number of steps, got {self.warmup}",
        )
        _require(0 <= self.lr_floor <= 1, f"optim.lr_floor must be in [0, 1], got {self.lr_floor}")
        _require(self.clip_grad >= 0, f"optim.clip_grad must not be negative, got {self.clip_grad}")
        _require(self.scale_max is None or self.scale_max > 1, f"optim.scale_max must be above 1, got {self.scale_max}")


@dataclass(frozen=True)
class SpeedConfig:
    """How the same numbers are computed: faster, in less memory, on several devices (docs/performance.md)."""

    recompute: bool = False
    """Keep only the inputs of each block for the backward pass and compute the rest again: less memory, more time."""
    compile: bool = False
    """Compile the towers with torch.compile: minutes at the start, faster steps afterwards."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun: ddp keeps a whole model in every process, fsdp shards weights, gradients and optimiser state."""

    def __post_init__(self) -> None:
        _require_choices(self, "speed.")


@dataclass(frozen=True)
class AdaptConfig:
    """What of the model trains: all of it, what is left unfrozen, or adapters (docs/adapt.md)."""

    method: Literal["full", "lora", "dora"] = "full"
    """full trains the weights themselves; lora and dora train adapters beside frozen weights."""
    rank: int = 16
    """Width r of the adapters."""
    alpha: float = 32.0
    """Strength of the adapters; what they add counts alpha/rank times."""
    dropout: float = 0.0
    """On the input of the adapters."""
    towers: Literal["both", "image", "text"] = "both"
    """Which towers get adapters; the other one is frozen."""
    projections: bool = False
    """Beside adapters train both projections whole."""
    freeze_image: int | Literal["all"] = 0
    """Of the image tower keep the embeddings and so many blocks as they are, or all of it with its projection."""
    freeze_text: int | Literal["all"] = 0
    """The same of the text tower."""
    freeze_positions: int = 0
    """Keep the first so many positions of the text tower as they are (20 in Long-CLIP's and FineLIP's trainers)."""

    def __post_init__(self) -> None:
        _require_choices(self, "adapt.")
        _require(self.rank >= 1, f"adapt.rank must be at least 1, got {self.rank}")
        _require(self.alpha > 0, f"adapt.alpha must be positive, got {self.alpha}")
        _require(0 <= self.dropout < 1, f"adapt.dropout must be in [0, 1), got {self.dropout}")
        for name in ("freeze_image", "freeze_text", "freeze_positions"):
            amount = getattr(self, name)
            _require(amount == "all" or amount >= 0, f"adapt.{name} must not be negative, got {amount}")
            _require(
                self.method == "full" or amount == 0,
                f"adapt.{name} is for adapt.method full: {self.method} freezes everything but the adapters; choose the "
                "towers that get them with adapt.towers",
            )
        for spec in fields(self):
            if spec.name in ("rank", "alpha", "dropout", "towers", "projections"):
                _require(
                    self.method != "full" or getattr(self, spec.name) == spec.default,
                    f"adapt.{spec.name} is for adapters: set adapt.method to lora or dora",
                )


@dataclass(frozen=True)
class ReadConfig:
    """How data are read, where the source does not say it by itself (docs/data.md)."""

    images: str | None = None
    """Directory or tar file that holds the pictures, if they do not lie beside the captions."""
    match: Literal["path", "name"] = "path"
    """How a table names its images: `path`, relative to --read.images or to the table; `name` also searches both for a
    file of the same name."""
    image_column: str | None = None
    """Column or key that names the picture, or holds it; guessed when left out."""
    caption_column: str | None = None
    """Column or key of the caption, several separated by commas; guessed when left out."""
    id_column: str | None = None
    """Column or key with a name for each picture; the picture's own path when left out."""
    split_column: str | None = None
    """Column or key of the split; guessed when left out."""
    short_column: str | None = None
    """Column or key of a short caption, for objectives that need one; guessed when left out."""
    group_column: str | None = None
    """Column or key that names families of near-duplicates: they stay in one split, intervals resample them whole."""
    splits: bool = True
    """Keep to the splits that the source declares; otherwise all of it is training material."""
    validation_share: float = 0.05
    """Share of the training pictures held out for validation where the source has no validation split."""
    max_bad: float = 0.01
    """Largest share of records that may be left out because they cannot be used; more is an error."""
    cache: str | None = None
    """Directory for decoded pictures; $HNCLIP_CACHE or ~/.cache/hnclip when left out."""
    prepared: str | None = None
    """Manifest of `hnclip prepare`; the one beside the picture cache when left out."""

    def __post_init__(self) -> None:
        _require(
            0 <= self.validation_share < 1, f"read.validation_share must be in [0, 1), got {self.validation_share}"
        )
        _require(self.match in ("path", "name"), f"read.match must be path or name, got {self.match!r}")
        _require(0 <= self.max_bad < 1, f"read.max_bad must be in [0, 1), got {self.max_bad}")


@dataclass(frozen=True)
class TrainConfig:
    """Fine-tune a model on image–caption pairs."""

    out: Path = Path("runs/train")
    """Where the run is written: config, metrics, checkpoint, best and last model."""
    model: str = "bundled"
    """`bundled`, a Hugging Face directory or hub name, IMAGE+TEXT towers, an adapter, or a file of weights in OpenAI's
    layout (docs/models.md)."""
    context: int | None = None
    """Longest caption in tokens; a shorter model is stretched to it, a longer one left as it is."""
    keep: int = 20
    """Leading positions that stretching leaves as they are."""
    ratio: int | None = None
    """How many positions stretching makes of each later one; the smallest that reaches the context when left out."""
    tokenizer: str | None = None
    """A directory to take the tokenizer from instead of the model's own."""
    activation: Literal["quick_gelu", "gelu"] | None = None
    """Of a file of weights that does not say it: quick_gelu for OpenAI's, gelu for most of open_clip's."""
    data: str = "scenes/park"
    """A folder of pictures with captions, a CSV, TSV, JSON, JSONL or Parquet file, Karpathy's JSON, WebDataset shards,
    a Hugging Face data set, a benchmark as NAME=FOLDER, or generated `scenes/park`, `scenes/shelf` (docs/data.md)."""
    validation: str | None = None
    """Another such source to validate on, instead of the validation split of --data."""
    watch: str | None = None
    """Another such source whose test split, or all of it, is evaluated after every epoch. It chooses nothing."""
    read: ReadConfig = field(default_factory=ReadConfig)
    fraction: float = 1.0
    """Use only this share of the training pairs, chosen by a hash of their ids: smaller shares lie inside larger ones,
    whatever the seed and objective."""
    limit: int | None = None
    """Use only the first so many training pairs, of those that --fraction leaves."""
    cluster: int = 0
    """Let near-duplicates meet: make batches of clusters of so many captions that are alike to the initial encoder.
    0 for random batches, as in the paper."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    adapt: AdaptConfig = field(default_factory=AdaptConfig)
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    seed: int = 42
    """Of the order of pairs, which caption a picture shows, and dropout."""
    device: str = "auto"
    """auto takes an accelerator if there is one; or cpu, cuda, mps …"""
    threads: int = 0
    """Processor threads; 0 leaves torch's choice. Results are bit-identical only for the same number."""
    save_every: int = 25
    """Optimiser steps between checkpoints; every epoch ends with one as well."""
    evaluate_batch: int = 128
    """Pictures or captions encoded at once in evaluation."""
    probe_gradients: str | None = None
    """Measure both losses and their gradients on the batch of every so many steps, for example `every=5`; training is
    the same as without (docs/runs.md)."""
    tensorboard: bool = False
    """Also write TensorBoard events (needs `pip install hnclip[track]`)."""

    def __post_init__(self) -> None:
        _require_choices(self)
        _require(0 <= self.seed < 2**32, f"seed must be in [0, 2**32), got {self.seed}")
        _require(self.save_every >= 1, f"save_every must be at least 1, got {self.save_every}")
        _require(self.context is None or self.context >= 1, f"context must be at least 1, got {self.context}")
        _require(self.keep >= 0, f"keep must not be negative, got {self.keep}")
        _require(self.ratio is None or self.ratio >= 1, f"ratio must be at least 1, got {self.ratio}")
        _require(0 < self.fraction <= 1, f"fraction must be above 0 and at most 1, got {self.fraction}")
        _require(self.limit is None or self.limit >= 2, f"limit must be at least 2, got {self.limit}")
        _require(self.cluster >= 0, f"cluster must not be negative, got {self.cluster}")
        _require(self.threads >= 0, f"threads must not be negative, got {self.threads}")
        _require(self.evaluate_batch >= 1, f"evaluate_batch must be at least 1, got {self.evaluate_batch}")
        _require(
            self.probe_gradients is None or self.probe_every is not None,
            f"probe_gradients takes a number of steps, for example every=5, got {self.probe_gradients!r}",
        )

    @property
    def probe_every(self) -> int | None:
        """Optimiser steps between measurements of the gradients; None for no measurements."""
        written = re.fullmatch(r"(?:every=)?([0-9]+)", self.probe_gradients or "")
        return (int(written[1]) or None) if written else None


def to_json(config: Any) -> str:
    return json.dumps(asdict(config), indent=2, default=str) + "\n"


def from_json(kind: type, text: str) -> Any:
    """The inverse of `to_json`. Unknown, missing or mistyped fields are errors that name the field."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the configuration is not valid JSON: {error}") from error
    return _build(kind, values, "")


def _build(kind: type, values: Any, prefix: str) -> Any:
    _require(isinstance(values, dict), f"configuration {prefix or 'file'} must be a JSON object")
    hints = get_type_hints(kind)
    names = {spec.name for spec in fields(kind)}
    for name in values:
        _require(name in names, f"configuration has an unknown field {prefix}{name}")
    built = {name: convert(hints[name], value, f"{prefix}{name}") for name, value in values.items()}
    return kind(**built)


def convert(hint: Any, value: Any, name: str) -> Any:
    if is_dataclass(hint):
        return _build(hint, value, f"{name}.")  # type: ignore[arg-type]
    if hint is Path:
        return Path(value)
    origin = get_origin(hint)
    options = get_args(hint) if origin in (Union, UnionType) else (hint,)
    for option in options:
        if get_origin(option) is Literal:
            if value in get_args(option):
                return value
        elif get_origin(option) is dict:
            if isinstance(value, dict):
                kind = get_args(option)[1]
                return {key: convert(kind, item, f"{name}.{key}") for key, item in value.items()}
        elif option is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        elif option in (int, str, bool, type(None)) and type(value) is option:
            return value
    raise ValueError(f"configuration field {name} cannot be {value!r}")
