"""Captions without padding: every layer of a causal text tower except attention computes tokens only.

A padded batch [B, T] is as wide as its longest caption. Embeddings, norms, projections and MLPs treat each token
separately, so they can run on the ΣT tokens of the batch; only attention needs sequences, and pads them again. It is a
few per cent of the tower's work.

The blocks see the ΣT tokens as ΣT sequences of length 1, and an attention function registered in transformers restores
the sequences. The attention layers get a configuration of their own that names this function; the configuration of the
model is not changed. Without packed captions, the function is transformers' own (sdpa).
"""

from __future__ import annotations

from copy import copy
from functools import cache
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from hnclip.core import TextBatch

NAME = "hnclip_packed"
WORTH = 0.95  # share of positions that hold tokens; above it, gathering them costs more than the pads


def is_worth_packing(texts: TextBatch) -> bool:
    """Whether a batch has enough padding to save time. Reads shapes only, so a device need not be waited for."""
    return len(texts.positions) < WORTH * texts.ids.numel()


def use_packed_attention(text_model: Any) -> bool:
    """Let the attention layers of a CLIP text tower take packed captions. False if the tower does not use sdpa.

    The layers' results for any other caller are the same as before, to the bit.
    """
    config = text_model.config
    layers = [layer.self_attn for layer in text_model.encoder.layers]
    packed = layers[0].config is not config
    if config._attn_implementation != "sdpa":
        for attention in layers if packed else ():  # the user has chosen another attention since
            attention.config = config
        return False
    _register()
    if not packed:
        own = copy(config)
        own._attn_implementation = NAME
        for attention in layers:
            attention.config = own
    return True


@cache
def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention in the signature of transformers: sdpa, with packed captions padded before it and packed after it."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    texts = options.pop("packed", None)
    if texts is None:
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    q, k, v = (unpack(part[:, :, 0], texts).transpose(1, 2) for part in (query, key, value))  # [B, H, T, W/H]
    dropout, scale = options["dropout"], options["scaling"]
    output = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scale, is_causal=True)
    return pack(output.transpose(1, 2), texts)[:, None], None  # [ΣT, 1, H, W/H]


def pack(padded: Tensor, texts: TextBatch) -> Tensor:
    """The tokens of [B, T, …] without the pads: [ΣT, …]."""
    return padded.flatten(0, 1).index_select(0, texts.positions)


def unpack(packed: Tensor, texts: TextBatch) -> Tensor:
    """The inverse of `pack`, zeros for pads: [ΣT, …] becomes [B, T, …]."""
    count, width = texts.ids.shape
    padded = packed.new_zeros(count * width, *packed.shape[1:])
    return padded.index_copy(0, texts.positions, packed).unflatten(0, (count, width))
