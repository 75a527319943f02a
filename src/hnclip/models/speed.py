"""The same numbers, computed otherwise: in less memory, or by compiled code. All of it changes a model in place and
leaves the names of its weights alone."""

from __future__ import annotations

from typing import Any

import torch

from hnclip.config import Precision
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.parameters import encoder_layers


def recompute_activations(model: DualEncoder) -> None:
    """Keep only the inputs of every block for the backward pass and compute the rest again when it is needed.

    Memory: activations of one block instead of all. Time: about one more forward pass. In `eval()` nothing changes.
    """
    backbone: Any = model.backbone
    if not backbone.supports_gradient_checkpointing:
        raise ValueError(
            f"the blocks of a {type(backbone).__name__} cannot be computed again: leave --speed.recompute out, or "
            "make --optim.micro-batch smaller"
        )
    # The other kind looks only at inputs that need gradient, and the first block of a tower has none.
    backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # transformers makes inputs need gradient for that other kind, which would draw frozen towers into the graph.
    backbone.disable_input_require_grads()


def compile_blocks(model: DualEncoder, *, backend: str = "inductor") -> None:
    """Compile the blocks of both towers, at the first steps: once for all blocks of a tower, which are alike.

    What lies between blocks is little, and a whole tower would compile for far longer to the same code. Captions differ
    in length; from the second length on the code takes any.
    """
    for tower in (model.backbone.vision_model, model.backbone.text_model):
        for block in encoder_layers(tower):
            block.compile(backend=backend)


def fast_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bf16 in hardware; emulated, it is slower than fp32, on processors a hundred times.

    Of accelerators that torch cannot ask, the answer is no.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu" or not hasattr(torch.cpu, "get_capabilities"):
        return False
    return any(there for name, there in torch.cpu.get_capabilities().items() if "bf16" in name)


def choose_precision(wanted: Precision, device: torch.device) -> Precision:
    """`auto` into fp32 or bf16; any other as it is."""
    if wanted != "auto":
        return wanted
    return "bf16" if fast_bf16(device) else "fp32"
