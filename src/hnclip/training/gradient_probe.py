"""InfoNCE and L_HN with their gradients on the batch of a step; the run is not changed by it.

What an exact zero means. A positive that leads 15 equal negatives by a gap of d in its logits has, by torch's cross
entropy, a loss of exactly 0 from d = 19 on in float32 (float64 38 or 39, bfloat16 9, float16 11): 1 + 15·exp(−d) rounds
to 1. The gradient of the positive's logit is exactly 0 from the same gap on, but those of the negatives, about exp(−d),
are 0 only from 104 on in float32 (float64 746, bfloat16 93, float16 18). So a loss of 0 does not mean a gradient of 0.
Losses are computed in at least float32 here, whatever the towers compute in, so gradients that are exactly 0 are rarer
than where logits are half-precision. Nor may the norm add zeros: in float32 the squares of entries below about 1e-23
vanish. It is taken in float64, and is 0 only if every entry is.

Losses below `SATURATED` come out of the same cross entropy that training uses. In float32 it is right to about 1e-7
absolutely, not relatively: a loss near 1e-6 has no more than a digit or two. Batches too large for one tile are exact
(`hnclip.losses.tiled`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hnclip.config import OptimConfig
from hnclip.core import Batch
from hnclip.losses import GLOBAL_LOSSES
from hnclip.models.dual_encoder import DualEncoder
from hnclip.objectives.base import GlobalTerm
from hnclip.objectives.hn_clip import HNClip
from hnclip.training.distributed import is_distributed, is_sharded, local_part
from hnclip.training.memory import PairMemory
from hnclip.training.step import SATURATED, Group, GroupLosses, backward
from hnclip.util.device import random_state, restore_random_state


def probe_gradients(
    model: DualEncoder,
    batch: Batch,
    optim: OptimConfig,
    groups: Sequence[Group] | None = None,
    memory: PairMemory | None = None,
    *,
    gamma: float = 0.5,
) -> dict[str, Any]:
    """Measure InfoNCE and L_HN, without a token term, and their gradients by all trained parameters, on one batch.

    Afterwards weights, gradients, buffers, random states and the memory are as before. Both losses see the same
    dropout masks, those of the following step. All ranks must call.

    Cost: two forward and backward passes of a step, and the memory of one more gradient.

    Args:
        model, batch, optim, groups, memory: as in `backward`.
        gamma: γ of L_HN; Ḡ is that of the live captions, without margin or center.

    Returns:
        infonce, hn: the losses, means over all pairs; the gradients are theirs.
        infonce_norm, hn_norm: lengths of the gradients.
        cosine: between the gradients; None if one of them is exactly 0.
        ratio: hn_norm / infonce_norm; None if the latter is 0.
        infonce_saturated, hn_saturated: shares of the loss evaluations (one for each micro-batch, or for the batch)
            below `SATURATED`.
        gamma, negatives, dtype (of the losses), towers ("fp32" or "bf16"): how this was computed.

    Reference:
        HN-CLIP, section 2.4 and appendix C.
    """
    # Both losses use two of a method's views; the others need not be encoded.
    images, texts = {"full": batch.images["full"]}, {"caption": batch.texts["caption"]}
    batch = replace(batch, images=images, texts=texts, present={}, parts={}, text_ids={})
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found: list[GroupLosses] = []
    gradients: list[list[Tensor | None]] = []
    for loss in (GLOBAL_LOSSES["infonce"], partial(GLOBAL_LOSSES["hn"], gamma=gamma)):
        with _unchanged(model):
            found.append(backward(model, batch, HNClip(GlobalTerm(loss)), optim, groups, deepcopy(memory)))
            gradients.append([parameter.grad for parameter in parameters])
    infonce, hn = found
    first, second, product = _inner_products(gradients[0], gradients[1], model.device).tolist()
    infonce_norm, hn_norm = math.sqrt(first), math.sqrt(second)
    cosine = product / (infonce_norm * hn_norm) if infonce_norm and hn_norm else None
    return {
        "infonce": infonce.terms["global"].item(),
        "hn": hn.terms["global"].item(),
        "infonce_norm": infonce_norm,
        "hn_norm": hn_norm,
        "cosine": None if cosine is None else max(min(cosine, 1.0), -1.0),
        "ratio": hn_norm / infonce_norm if infonce_norm else None,
        "infonce_saturated": (infonce.losses < SATURATED).double().mean().item(),
        "hn_saturated": (hn.losses < SATURATED).double().mean().item(),
        "gamma": gamma,
        "negatives": optim.negatives,
        "dtype": str(infonce.losses.dtype).removeprefix("torch."),
        "towers": "bf16" if optim.precision == "bf16" else "fp32",
    }


@torch.no_grad()
def _inner_products(first: Sequence[Tensor | None], second: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """[3]: first·first, second·second, first·second, over all parameters and ranks, in float64."""
    if device.type == "mps":  # which has no float64
        device = torch.device("cpu")
    whole, shards = torch.zeros(2, 3, dtype=torch.float64, device=device)  # [3] each
    for pair in zip(first, second):
        present = [grad for grad in pair if grad is not None]
        if not present:
            continue
        zero = torch.zeros_like(local_part(present[0]), dtype=torch.float64, device=device)
        a, b = (zero if grad is None else local_part(grad).to(device, torch.float64) for grad in pair)
        total = shards if is_sharded(present[0]) else whole
        total += torch.stack([a.square().sum(), b.square().sum(), (a * b).sum()])
    if is_distributed():
        dist.all_reduce(shards)
    return whole + shards


@contextmanager
def _unchanged(model: DualEncoder) -> Iterator[None]:
    """Gradients, buffers (statistics of batch norms) and random states are as before after the block."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    state = random_state(model.device)
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        restore_random_state(state, model.device)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
