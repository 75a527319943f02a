"""The parameters of a model: its blocks, which of them train, and weights between two models.

Families name their layers differently, so this file relies on structure: a tower is one stack of equal blocks, with
embeddings before it and norms, pooling and projection after it.

SigLIP's `logit_bias` never trains: only a sigmoid loss could use it, and the one in this package takes its bias from
the batch or from the configuration, so the parameter would never have a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.long_context import stretch

Towers = Literal["both", "image", "text"]
Frozen = int | Literal["all"]

# Attributes of every backbone; SigLIP has no projections, its towers end in heads.
_TOWERS = {"image": "vision_model", "text": "text_model"}
_PROJECTIONS = {"image": "visual_projection", "text": "text_projection"}
_PARTS = {
    "vision_model": "image tower",
    "text_model": "text tower",
    "visual_projection": "projections",
    "text_projection": "projections",
}


def encoder_layers(tower: nn.Module) -> nn.ModuleList:
    """The blocks of a tower, first to last; for a tower in stages (Swin, ConvNeXt), its stages."""
    return _stack(tower)[1]


def _stack(tower: nn.Module) -> tuple[str, nn.ModuleList]:
    """The longest list of modules of one class, and its name in the tower. Lists inside a list belong to a block."""
    found: list[tuple[str, nn.ModuleList]] = []
    for name, module in tower.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if isinstance(module, nn.ModuleList) and not inside and len({type(block) for block in module}) == 1:
            found.append((name, module))
    if not found:
        raise ValueError(f"a {type(tower).__name__} tower has no stack of equal blocks")
    return max(found, key=lambda entry: len(entry[1]))


def linear_names(model: DualEncoder, towers: Towers = "both") -> list[str]:
    """The names in the backbone of all linear layers inside the blocks: in CLIP and SigLIP q_proj, k_proj, v_proj,
    out_proj, fc1 and fc2 of every block, and neither poolers nor projections."""
    names: list[str] = []
    for which in _TOWERS if towers == "both" else (towers,):
        stack, blocks = _stack(getattr(model.backbone, _TOWERS[which]))
        linear = [name for name, part in blocks.named_modules() if isinstance(part, nn.Linear)]
        if not linear:
            raise ValueError(f"the {which} tower has no linear layers in its blocks, so adapters cannot be added")
        names += [f"{_TOWERS[which]}.{stack}.{name}" for name in linear]
    return names


def projection_names(model: DualEncoder) -> list[str]:
    """The names in the backbone of both projections into the joint space."""
    names = [name for name in _PROJECTIONS.values() if hasattr(model.backbone, name)]
    if not names:
        raise ValueError(f"{model.family.title} has no projections: its towers end in the joint space")
    return names


def freeze(model: DualEncoder, *, image: Frozen = 0, text: Frozen = 0) -> None:
    """Freeze parts of a model, in place.

    Args:
        image, text: how much of that tower. N: everything before the blocks and the first N blocks (or stages). "all":
            the tower and its projection. 0: nothing.
    """
    for which, amount in (("image", image), ("text", text)):
        tower = getattr(model.backbone, _TOWERS[which])
        if amount == "all":
            tower.requires_grad_(False)
            if (projection := getattr(model.backbone, _PROJECTIONS[which], None)) is not None:
                projection.requires_grad_(False)
        elif amount:
            blocks = encoder_layers(tower)
            if not 0 < amount <= len(blocks):
                raise ValueError(f"the {which} tower has {len(blocks)} blocks, so {amount} cannot be frozen")
            remaining = {id(parameter) for parameter in blocks[:amount].parameters()}
            for parameter in tower.parameters():  # in the order of definition, which is that of the computation
                if remaining:
                    parameter.requires_grad_(False)
                    remaining.discard(id(parameter))
    if (bias := getattr(model.backbone, "logit_bias", None)) is not None:
        bias.requires_grad_(False)


def train_mode(model: nn.Module) -> None:
    """`model.train()`, except that batch norms with frozen weights keep their statistics."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm):
            module.train(any(parameter.requires_grad for parameter in module.parameters()))


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that training changes: parameters that train, and statistics of batch norms."""
    frozen = {name for name, weight in model.named_parameters(remove_duplicate=False) if not weight.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


@torch.no_grad()
def restore_trained_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `trained_tensors`; ValueError if names or shapes differ."""
    own = trained_tensors(model)
    if difference := first_difference(tensors, own):
        raise ValueError(
            f"the checkpoint belongs to another model, or to a run in which other parts train: {difference}"
        )
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


def first_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """A description of the first tensor, by name, that is absent from one side or of another shape; empty if none."""
    for name in sorted({*found, *expected}):
        one, other = (list(side[name].shape) if name in side else "absent" for side in (found, expected))
        if one != other:
            return f"tensor {name} is {one}, expected {other}"
    return ""


def describe_trainable(model: DualEncoder) -> str:
    """One line about which parameters train."""
    total, parts = 0, dict[str, int]()
    for name, parameter in model.backbone.named_parameters():
        pieces = name.split(".")
        # peft keeps the original of a projection that trains in full; it is not used.
        if "original_module" in pieces or pieces[-1] in ("logit_scale", "logit_bias"):
            continue
        total += parameter.numel()
        if parameter.requires_grad:
            part = next((_PARTS[piece] for piece in pieces if piece in _PARTS), "other parts")
            part = f"adapters in the {part}" if "lora_" in name else part
            parts[part] = parts.get(part, 0) + parameter.numel()
    trained = sum(parts.values())
    fixed = not model.backbone.logit_scale.requires_grad
    scale = f"scale fixed at {model.scale.item():.1f}" if fixed else "scale trains"
    if added := sum(parameter.numel() for parameter in model.readouts.parameters()):
        scale += f"; {added:,} parameters of the training method also train and are not saved with the model"
    if trained == total:
        return f"all {total:,} parameters train; {scale}"
    where = ", ".join(f"{part} {count:,}" for part, count in parts.items()) or "nothing"
    return f"{trained:,} of {total:,} parameters train ({trained / total:.2%}): {where}; {scale}"


def match_base(base: DualEncoder, tuned: DualEncoder) -> None:
    """Raise ValueError if the parameters of two models have different names or shapes. A base with a shorter context is
    stretched in place first, as it was before fine-tuning."""
    if base.family.kind == tuned.family.kind and base.context < tuned.context:
        stretch(base, context=tuned.context)
    before, after = (dict(model.backbone.named_parameters()) for model in (base, tuned))
    if difference := first_difference(before, after):
        raise ValueError(f"the models have different architectures: in the base, {difference}")


@torch.no_grad()
def interpolate(into: DualEncoder, base: DualEncoder, tuned: DualEncoder, alpha: float) -> DualEncoder:
    """Set every weight of `into`, and every statistic of a batch norm, to (1 − α)·base + α·tuned, and return it.

    Relations: α 0 is the base, α 1 the tuned model, both exactly. `into` may be one of the two.

    Reference: WiSE-FT (Wortsman et al. 2022), equation 1.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be between 0 (the base) and 1 (the tuned model), got {alpha}")
    before, after = base.backbone.state_dict(), tuned.backbone.state_dict()
    for name, tensor in into.backbone.state_dict().items():
        if tensor.is_floating_point():  # not the counters of batch norms
            tensor.copy_(torch.lerp(before[name], after[name].to(before[name].device), alpha))
    into.source = f"{1 - alpha:g} × ({base.source}) + {alpha:g} × ({tuned.source})"
    into.provenance = None
    return into
