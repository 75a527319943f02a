"""Activation checkpointing, compilation and precision. The functions change a model in place and keep the names of its
weights."""

from __future__ import annotations

from typing import Any

import torch

from hnclip.config import Precision
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.parameters import encoder_layers


def recompute_activations(model: DualEncoder) -> None:
    """Keep only the inputs of every block for the backward pass and recompute the rest (activation checkpointing).

    Memory: activations of one block instead of all. Time: about one more forward pass. In `eval()` nothing changes.
    """
    backbone: Any = model.backbone
    if not backbone.supports_gradient_checkpointing:
        raise ValueError(
            f"the blocks of a {type(backbone).__name__} do not support recomputation: omit --speed.recompute, "
            "or reduce --optim.micro-batch"
        )
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


def fast_bf16(device: torch.device) -> bool:
    """Whether the device supports bf16 in hardware; emulated, it is slower than fp32, on CPUs a hundred times.

    False for accelerators that torch cannot query.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu" or not hasattr(torch.cpu, "get_capabilities"):
        return False
    return any(there for name, there in torch.cpu.get_capabilities().items() if "bf16" in name)


def choose_precision(wanted: Precision, device: torch.device) -> Precision:
    """Resolve `auto` to fp32 or bf16."""
    if wanted != "auto":
        return wanted
    return "bf16" if fast_bf16(device) else "fp32"
