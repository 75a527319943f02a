"""What of a model trains: all of it, its upper blocks, one tower.

Families name their layers differently, so what counts here is structure: a tower is one stack of equal blocks, with the
embeddings before it and norms, pooling and projection behind it.

SigLIP's `logit_bias` never trains. Only a sigmoid loss could use it, and this package's takes its bias from the batch
or from the configuration, so the parameter would never see a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from hnclip.models.dual_encoder import DualEncoder

Towers = Literal["both", "image", "text"]
Frozen = int | Literal["all"]

# In every family's backbone; SigLIP has no projections, its towers end in heads.
_TOWERS = {"image": "vision_model", "text": "text_model"}
_PROJECTIONS = {"image": "visual_projection", "text": "text_projection"}
_PARTS = {
    "vision_model": "image tower",
    "text_model": "text tower",
    "visual_projection": "projections",
    "text_projection": "projections",
}


def encoder_layers(tower: nn.Module) -> nn.ModuleList:
    """The blocks of a tower, first to last. Of a tower in stages (Swin, ConvNeXt) its stages."""
    return _stack(tower)[1]


def _stack(tower: nn.Module) -> tuple[str, nn.ModuleList]:
    """The longest list of modules of one class, and its name in the tower. Lists inside lists belong to a block."""
    found: list[tuple[str, nn.ModuleList]] = []
    for name, module in tower.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if isinstance(module, nn.ModuleList) and not inside and len({type(block) for block in module}) == 1:
            found.append((name, module))
    if not found:
        raise ValueError(f"a {type(tower).__name__} tower has no stack of equal blocks to freeze or to adapt")
    return max(found, key=lambda entry: len(entry[1]))


def linear_names(model: DualEncoder, towers: Towers = "both") -> list[str]:
    """The names in the backbone of all linear layers inside the blocks: in CLIP and SigLIP q_proj, k_proj, v_proj,
    out_proj, fc1 and fc2 of every block, and neither poolers nor projections.

    Layers of a packed `nn.MultiheadAttention` are left out: it reads their weights and never calls them, so an adapter
    there would do nothing.
    """
    names = []
    for which in _TOWERS if towers == "both" else (towers,):
        stack, blocks = _stack(getattr(model.backbone, _TOWERS[which]))
        packed = tuple(f"{name}." for name, part in blocks.named_modules() if isinstance(part, nn.MultiheadAttention))
        linear = [name for name, part in blocks.named_modules() if isinstance(part, nn.Linear)]
        usable = [f"{_TOWERS[which]}.{stack}.{name}" for name in linear if not name.startswith(packed)]
        if not usable:
            raise ValueError(f"the {which} tower has no linear layers in its blocks, so it takes no adapters")
        names += usable
    return names


def projection_names(model: DualEncoder) -> list[str]:
    """The names in the backbone of both projections into the joint space."""
    names = [name for name in _PROJECTIONS.values() if hasattr(model.backbone, name)]
    if not names:
        raise ValueError(f"{model.family.title} has no projections: its towers end in the joint space already")
    return names


def freeze(model: DualEncoder, *, image: Frozen = 0, text: Frozen = 0) -> None:
    """Keep parts of a model as they are, in place.

    Args:
        image, text: how much of that tower. N: its embeddings, what else stands before the blocks, and the first N
            blocks (of a tower in stages, stages). "all": the tower and its projection. 0: nothing.
    """
    for which, amount in (("image", image), ("text", text)):
        if amount == "all":
            for name in (_TOWERS[which], _PROJECTIONS[which]):
                if (part := getattr(model.backbone, name, None)) is not None:
                    part.requires_grad_(False)
        elif amount:
            _freeze_below(getattr(model.backbone, _TOWERS[which]), amount, which)
    if (bias := getattr(model.backbone, "logit_bias", None)) is not None:
        bias.requires_grad_(False)


def _freeze_below(tower: nn.Module, depth: int, which: str) -> None:
    blocks = encoder_layers(tower)
    if not 0 < depth <= len(blocks):
        raise ValueError(f'the {which} tower has {len(blocks)} blocks, so {depth} cannot be frozen; "all" freezes all')
    left = {id(parameter) for parameter in blocks[:depth].parameters()}
    for parameter in tower.parameters():  # in the order of definition, which is that of the computation
        parameter.requires_grad_(False)
        left.discard(id(parameter))
        if not left:
            return


def train_mode(model: nn.Module) -> None:
    """`model.train()`, save that a batch norm with frozen weights keeps its statistics too: they are part of what was
    frozen."""
    model.train()
    for module in model.modules():
        frozen = not any(parameter.requires_grad for parameter in module.parameters())
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and frozen:
            module.eval()


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What training changes in a model: the parameters that train, and the statistics that batch norms gather."""
    frozen = {name for name, weight in model.named_parameters(remove_duplicate=False) if not weight.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


@torch.no_grad()
def restore_trained_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `trained_tensors`; ValueError where the names or shapes are others."""
    own = trained_tensors(model)
    if difference := first_difference(tensors, own):
        raise ValueError(f"the checkpoint is of a run in which other parts or another model train: {difference}")
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


def first_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """What is wrong with the first tensor, by name, that is missing, too much or of another shape; else nothing."""
    for name in sorted({*found, *expected}):
        if name not in found:
            return f"it lacks the tensor {name}"
        if name not in expected:
            return f"it holds the tensor {name}, which has no place here"
        if found[name].shape != expected[name].shape:
            return f"its tensor {name} has shape {list(found[name].shape)}, expected {list(expected[name].shape)}"
    return ""


def describe_trainable(model: DualEncoder) -> str:
    """What trains, in one line for people."""
    total, parts = 0, dict[str, int]()
    for name, parameter in model.backbone.named_parameters():
        pieces = name.split(".")
        # Beside a projection that trains whole, peft keeps the original, which nothing uses.
        if "original_module" in pieces or pieces[-1] in ("logit_scale", "logit_bias"):
            continue
        total += parameter.numel()
        if parameter.requires_grad:
            part = next((_PARTS[piece] for piece in pieces if piece in _PARTS), "other parts")
            part = f"adapters in the {part}" if "lora_" in name else part
            parts[part] = parts.get(part, 0) + parameter.numel()
    trained = sum(parts.values())
    fixed = not model.backbone.logit_scale.requires_grad
    temperature = f"temperature fixed at {model.scale.item():.1f}" if fixed else "temperature trains"
    if added := sum(parameter.numel() for parameter in model.readouts.parameters()):
        temperature += f"; {added:,} parameters of the framework train beside them and are not part of the saved model"
    if trained == total:
        return f"all {total:,} parameters train; {temperature}"
    where = ", ".join(f"{part} {count:,}" for part, count in parts.items()) or "nothing"
    return f"{trained:,} of {total:,} parameters train ({trained / total:.2%}): {where}; {temperature}"
