"""How long a training step takes here, measured: the real model, objective and optimiser on a batch of the real data,
or on what is as large where a machine has neither."""

from __future__ import annotations

import gc
import logging
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hnclip.config import RunOptions, TrainConfig
from hnclip.core import Batch, TextBatch
from hnclip.data.batching import pad_texts, prepare
from hnclip.data.parts import PARTS
from hnclip.measure import machine, rise, synchronize, threads, time_ways
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load
from hnclip.models.parameters import train_mode
from hnclip.objectives.base import Objective
from hnclip.objectives.registry import build_objective, build_readouts
from hnclip.studies.identity import Trained
from hnclip.studies.matched import open_start
from hnclip.train.data import add_views
from hnclip.train.distributed import clip_gradients
from hnclip.train.optimizer import build_optimizer
from hnclip.train.setup import choose_precision, choose_trainable, compile_blocks, recompute_activations
from hnclip.train.step import TrainStep
from hnclip.util.device import find_device

log = logging.getLogger(__name__)

Source = Literal["real data", "synthetic batch", "random weights, synthetic batch"]

TOGETHER = 4 << 30
"""Bytes of weights, gradients and AdamW's state up to which several configurations take turns; above, one is measured
after the other."""

SENTENCE = 22  # tokens of a view that is a sentence, with start and end
CHUNKS = 64  # most spans of a caption in StructXLIP
_BYTES = 16  # of a parameter that trains, its gradient and AdamW's two means


class Shape(NamedTuple):
    """What of a model decides over the time of a step. Towers are width, layers, heads."""

    image: tuple[int, int, int]
    text: tuple[int, int, int]
    picture: int
    patch: int
    joint: int
    context: int
    words: int


LONG_CLIP_L = Shape((1024, 24, 16), (768, 12, 12), picture=224, patch=14, joint=768, context=248, words=49_408)


@dataclass(frozen=True)
class StepTime:
    """The time of one optimiser step of a configuration.

    Args:
        seconds_per_step: of a whole step, the median of the turns.
        step_pairs: pairs of a whole step.
        measured_pairs: pairs that were timed; where they are fewer, forward and backward pass count as often as they
            fit into the step, and the optimiser's part once.
        turns: seconds of a whole step by every turn.
        memory: bytes that the first step took beside weights and batch, on a device that keeps count of them.
        source: what was measured.
        machine: `hnclip.measure.machine`.
    """

    seconds_per_step: float
    step_pairs: int
    measured_pairs: int
    turns: tuple[float, ...]
    precision: str
    memory: int | None
    source: Source
    machine: Mapping[str, Any]

    @property
    def pairs_per_second(self) -> float:
        return self.step_pairs / self.seconds_per_step

    @property
    def is_scaled(self) -> bool:
        return self.measured_pairs < self.step_pairs

    def times(self, peer: StepTime) -> float:
        """How long a pair takes in units of the peer's: the median over the turns, which both took one after the other
        if they were measured together."""
        own, other = ([turn / found.step_pairs for turn in found.turns] for found in (self, peer))
        return statistics.median(one / two for one, two in zip(own, other, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**asdict(self), "turns": list(self.turns), "machine": dict(self.machine)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepTime:
        return cls(**{**values, "turns": tuple(values["turns"])})


def measure_step(
    config: TrainConfig, options: RunOptions | None = None, *, pairs: int | None = None, turns: int = 3
) -> StepTime:
    """Time optimiser steps of a configuration, after one that does not count. Nothing is written, not even pictures
    into the cache, and neither random numbers nor threads are others afterwards.

    Args:
        pairs: time so many instead of all of a step. With the negatives of the batch the losses, which grow with its
            square, are then too cheap.
        turns: repetitions.

    Raises:
        ValueError: the model cannot be opened, and nothing is known that is as large.
    """
    return measure_steps({"": config}, options, pairs=pairs, turns=turns)[""]


def measure_steps(
    configs: Mapping[str, TrainConfig],
    options: RunOptions | None = None,
    *,
    pairs: int | None = None,
    turns: int = 3,
    synthetic: bool = False,
) -> dict[str, StepTime]:
    """The same of several, which take turns if all of them fit into memory.

    Args:
        synthetic: do not look for data, so that all have captions of the same length.
    """
    if pairs is not None and pairs < 2:
        raise ValueError(f"a step of {pairs} pairs has no negatives: time at least 2")
    options = options or RunOptions()
    found: dict[str, StepTime] = {}
    with torch.random.fork_rng(), threads(options.threads or torch.get_num_threads()):
        waiting: dict[str, _Way] = {}
        used = 0
        for name, config in configs.items():
            way = _Way(config, options, pairs, synthetic)
            if waiting and used + way.size > TOGETHER:
                found |= _timed(waiting, turns)
                waiting, used = {}, 0
                gc.collect()  # a model and its modules point to each other
            waiting[name] = way
            used += way.size
            del way
        found |= _timed(waiting, turns)
    return found


class _Way:
    """A configuration, ready to take steps."""

    def __init__(self, config: TrainConfig, options: RunOptions, pairs: int | None, synthetic: bool) -> None:
        torch.manual_seed(config.seed)
        self.speed = options.speed
        self.model, here = _model(config, options.device)
        device = self.model.device
        choose_trainable(config, self.model)
        objective = build_objective(config.objective)
        self.model.readouts.update(build_readouts(objective, self.model))
        if self.speed.recompute:
            recompute_activations(self.model)
        if self.speed.compile:
            compile_blocks(self.model)
        train_mode(self.model)
        optim = replace(config.optim, precision=choose_precision(config.optim.precision, device))
        self.step_pairs = optim.micro_batch * optim.accumulate
        wanted = min(pairs or self.step_pairs, self.step_pairs)
        self.batch, self.source = _batch(config, self.model, objective, wanted, here and not synthetic)
        if not here:
            self.source = "random weights, synthetic batch"
        optimizer = build_optimizer(self.model, optim)
        # Somewhere in the middle of a run, where a method that changes its terms on the way has all of them.
        self.stepper = TrainStep(self.model, objective, optimizer, optim, total=100)

    @property
    def size(self) -> int:
        """Bytes of weights, gradients and the optimiser's state."""
        return sum(weight.numel() * (_BYTES if weight.requires_grad else 4) for weight in self.model.parameters())

    def step(self) -> None:
        self.stepper(self.batch, 50).read()

    def update(self) -> None:
        """The part of a step that does not grow with its pairs."""
        clip_gradients(self.model, self.stepper.optim.clip_grad or float("inf"))
        self.stepper.optimizer.step()


def _timed(ways: Mapping[str, _Way], turns: int) -> dict[str, StepTime]:
    device = next(iter(ways.values())).model.device
    memory = {name: _first_step(way) for name, way in ways.items()}
    steps = time_ways({name: way.step for name, way in ways.items()}, turns=turns, warmup=0, device=device)
    # On the gradients of the last step.
    updates = time_ways({name: way.update for name, way in ways.items()}, turns=turns, warmup=0, device=device)
    found = {}
    for name, way in ways.items():
        times, once = way.step_pairs / len(way.batch), updates[name].median
        seconds = tuple(max(turn, times * (turn - once) + once) for turn in steps[name].seconds)
        found[name] = StepTime(
            seconds_per_step=statistics.median(seconds),
            step_pairs=way.step_pairs,
            measured_pairs=len(way.batch),
            turns=seconds,
            precision=way.stepper.optim.precision,
            memory=memory[name],
            source=way.source,
            machine=machine(device),
        )
    return found


def _first_step(way: _Way) -> int | None:
    """Let a way take the steps that do not count; the memory of the first, of a device that can be asked."""
    device = way.model.device
    memory = None
    if device.type == "cuda":
        memory = rise(way.step, device)
    else:
        way.step()
    if way.speed.compile:  # the second length of captions compiles once more
        way.step()
    synchronize(device)
    return memory


def _model(config: TrainConfig, device: str) -> tuple[DualEncoder, bool]:
    """The model that a run would start from; where it is not here, one of its shape, if that is known."""
    try:
        return open_start(config, device), True
    except (ValueError, OSError) as error:
        if "longclipl" not in "".join(letter for letter in config.model.lower() if letter.isalnum()):
            raise
        log.info(f"{_first(error)}; a model of the shape of Long-CLIP-L with random weights stands in for it")
        return _random_model(LONG_CLIP_L).to(find_device(device)), False


def _first(error: Exception) -> str:
    """The first sentence of a message."""
    return str(error).partition(". ")[0]


def _random_model(shape: Shape) -> DualEncoder:
    """CLIP of a shape with random weights, and the bundled model's tokenizer."""
    from transformers import CLIPModel

    from hnclip.models.load import wrap

    tokenizer = load("bundled").tokenizer
    return wrap(CLIPModel(_settings(shape, tokenizer)), tokenizer)


def _settings(shape: Shape, tokenizer: Any) -> Any:
    """The `CLIPConfig` of a shape."""
    from transformers import CLIPConfig

    def tower(width: int, layers: int, heads: int) -> dict[str, int]:
        inside = {"hidden_size": width, "intermediate_size": 4 * width}
        return {**inside, "num_hidden_layers": layers, "num_attention_heads": heads}

    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text = {"vocab_size": shape.words, "max_position_embeddings": shape.context, **special}
    return CLIPConfig(
        projection_dim=shape.joint,
        text_config={**tower(*shape.text), **text},
        vision_config={**tower(*shape.image), "image_size": shape.picture, "patch_size": shape.patch},
    )


def _batch(
    config: TrainConfig,
    model: DualEncoder,
    objective: Objective,
    pairs: int,
    real: bool,
) -> tuple[Batch, Source]:
    if real:
        try:
            return _with_margin_text(config, _real_batch(config, model, objective, pairs), model), "real data"
        except (ValueError, OSError) as error:
            log.info(f"{_first(error)}; random pixels and captions of {model.context} tokens stand in for the data")
    batch = _with_margin_text(config, _synthetic_batch(model, objective, pairs), model)
    return batch, "synthetic batch"


def _real_batch(config: TrainConfig, model: DualEncoder, objective: Objective, pairs: int) -> Batch:
    """Training pairs from all over the data, in memory."""
    records = Trained.by(config).records()
    chosen = add_views(config, records[:: max(1, len(records) // pairs)][:pairs], objective)
    data = prepare(
        chosen,
        model.text_transform,
        model.image_transform,
        image_views=objective.image_views,
        text_views=objective.text_views,
        parts=objective.parts,
        grid=model.family.grid(model.backbone, model.image_size),
    )
    return data.batch(range(len(data)))


def _synthetic_batch(model: DualEncoder, objective: Objective, pairs: int) -> Batch:
    """The views and parts that an objective asks for: random pixels, captions as long as the model takes them."""
    side = model.image_size

    def text(view: str) -> TextBatch:
        words = SENTENCE - 2 if view in ("short", "sentence") else model.context
        # Digits are one token each, or more.
        rows = [" ".join(str((row + place) % 10) for place in range(words)) for row in range(pairs)]
        return pad_texts(model.text_transform(rows), model.text_transform.pad)

    def part(view: str) -> Tensor:
        if view in objective.image_views:
            grid = model.family.grid(model.backbone, side)
            if grid is None:
                raise ValueError("parts of pictures are patches, and this model has no grid of them: use a ViT")
            patches = torch.zeros(pairs, 1, grid, grid, dtype=torch.bool)
            patches[:, :, : -(-grid // 2), : -(-grid // 2)] = True  # a quarter of the picture
            return patches.flatten(2)
        several = any(name.startswith("chunk") for name in objective.parts)
        starts = torch.arange(1, CHUNKS + 1 if several else 2)
        return torch.stack([starts, starts + 4], 1).expand(pairs, -1, -1).clone()

    number = torch.arange(pairs)
    return Batch(
        images={
            view: torch.randint(0, 256, (pairs, 3, side, side), dtype=torch.uint8) for view in objective.image_views
        },
        texts={view: text(view) for view in objective.text_views},
        ids=torch.stack([number, number], 1),
        parts={PARTS[name].view: part(PARTS[name].view) for name in objective.parts},
    )


def _with_margin_text(config: TrainConfig, batch: Batch, model: DualEncoder) -> Batch:
    """With frozen caption similarities also vectors to compute them from; their values take no time."""
    if config.objective.margin_source == "live":
        return batch
    return replace(batch, margin_text=F.normalize(torch.randn(len(batch), model.width), dim=-1))
