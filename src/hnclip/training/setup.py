"""A model made ready for training: trained parameters, readouts, activation checkpointing, compilation, precision.

The functions change a model in place and keep the names of its weights.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

from hnclip.config import Precision, RunOptions, SpeedConfig, TrainConfig
from hnclip.models.adapters import add_adapters
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.parameters import describe_trainable, encoder_layers, freeze
from hnclip.objectives.base import Objective
from hnclip.objectives.registry import METHODS, build_objective, build_readouts, term_weights
from hnclip.training.distributed import is_distributed, world_size

log = logging.getLogger(__name__)


def prepare_model(config: TrainConfig, speed: SpeedConfig, model: DualEncoder) -> Objective:
    """Set the initial scale, freeze what a run leaves as it is or add its adapters, add the readouts of the method, and
    apply `speed`; returns the objective."""
    adapt, scale_trains = config.adapt, config.optim.scale_lr != 0
    if config.optim.scale is not None:
        with torch.no_grad():
            model.backbone.logit_scale.fill_(math.log(config.optim.scale))
    if adapt.method == "full":
        freeze(model, image=adapt.freeze_image, text=adapt.freeze_text)
        model.backbone.logit_scale.requires_grad_(scale_trains)
    else:
        add_adapters(
            model,
            method=adapt.method,
            rank=adapt.rank,
            alpha=adapt.alpha,
            dropout=adapt.dropout,
            towers=adapt.towers,
            projections=adapt.projections,
            train_scale=scale_trains,
        )
    objective = build_objective(config.objective)
    model.readouts.update(build_readouts(objective, model))
    if speed.recompute:
        recompute_activations(model)
    if speed.compile:
        compile_blocks(model)
    return objective


def check_processes(config: TrainConfig, options: RunOptions) -> None:
    optim, processes = config.optim, world_size()
    if optim.negatives != "batch" and optim.micro_batch < processes:
        raise ValueError(
            f"{processes} processes cannot share micro-batches of {optim.micro_batch} pairs: set --optim.micro-batch "
            f"to {processes} or a multiple of it, or --optim.negatives batch, or use fewer processes"
        )
    if config.adapt.freeze_positions and is_distributed() and options.speed.parallel == "fsdp":
        raise ValueError("adapt.freeze_positions needs whole parameters: use --speed.parallel ddp")


def log_model(config: TrainConfig, options: RunOptions, model: DualEncoder, objective: Objective) -> None:
    log.info(f"model: {model.source}")
    log.info(describe_trainable(model))
    chosen, optim = config.objective, config.optim
    if chosen.method != "hn_clip":
        weights = ", ".join(f"{name} {weight:g}" for name, weight in term_weights(chosen).items())
        title = METHODS[chosen.method].title
        log.info(f"{title}, {chosen.fidelity}: global loss {chosen.global_loss}, terms {weights}")
    highest, trains = optim.scale_max, model.backbone.logit_scale.requires_grad
    if trains and highest is not None and model.scale.item() > highest * 1.01:
        log.warning(
            f"the scale {model.scale.item():.1f} will be clamped to {highest:g}; raise --optim.scale-max or set it to "
            "None to keep it, or fix it with --optim.scale-lr 0"
        )
    if "short" in objective.text_views:
        from hnclip.objectives.long_clip import principal_note

        pairs = optim.micro_batch * (optim.accumulate if optim.negatives == "batch" else 1)
        if note := principal_note(pairs):
            log.info(note)
    if optim.precision != "fp32":
        log.info(f"the towers compute in {optim.precision}")
    if is_distributed():
        log.info(f"{world_size()} processes, {options.speed.parallel}; each batch is shared among them")


def recompute_activations(model: DualEncoder) -> None:
    """Keep only the inputs of every block for the backward pass and recompute the rest (activation checkpointing).

    Memory: activations of one block instead of all. Time: about one more forward pass. In `eval()` nothing changes.
    """
    backbone: Any = model.backbone
    # Reentrant checkpointing requires inputs with gradients, which the first block of a tower does not have.
    backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # transformers makes inputs require gradients for it, which would include frozen towers in the graph.
    backbone.disable_input_require_grads()


def compile_blocks(model: DualEncoder, *, backend: str = "inductor") -> None:
    """Compile the blocks of both towers: one compilation for the equal blocks of a tower, during the first steps.

    Compiling a whole tower takes much longer and gains little. Captions differ in length; from the second length on,
    the compiled code takes any.
    """
    for tower in (model.backbone.vision_model, model.backbone.text_model):
        for block in encoder_layers(tower):
            block.compile(backend=backend)


def choose_precision(wanted: Precision, device: torch.device) -> Precision:
    """Resolve `auto`: bf16 if the device supports it in hardware; emulated, it is slower than fp32, on CPUs a hundred
    times. fp32 on accelerators that torch cannot query."""
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "cpu" and hasattr(torch.cpu, "get_capabilities"):
        fast = any(there for name, there in torch.cpu.get_capabilities().items() if "bf16" in name)
    else:
        fast = False
    return "bf16" if fast else "fp32"
