"""Captions without their padding: every layer of a causal text tower but attention works on the tokens alone.

Captions of a batch differ in length, and a padded batch [B, T] is as wide as its longest. Embeddings, norms,
projections and MLPs treat each token by itself, so they can run on the ΣT tokens there are; only attention sees
sequences, and gets them padded again. Attention is a few per cent of such a tower, so what padding still costs is a few
per cent of a few per cent.

The tower sees the ΣT tokens as ΣT sequences of length 1; its attention function, which transformers lets one register,
puts them together. Without packing that function is the usual one.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from hnclip.data.batches import TextBatch
from hnclip.models.families.wanted import Wanted

NAME = "hnclip_packed"
WORTH = 0.95  # of all places hold tokens: beyond it, gathering them costs more than the pads


def worth_packing(texts: TextBatch) -> bool:
    """Whether a batch has so much padding that leaving it out saves time. Asks for shapes alone, not for numbers."""
    return len(texts.places) < WORTH * texts.ids.numel()


def allow_packing(text_model: Any) -> bool:
    """Teach the attention of a text tower to take packed captions, if it is the one that is known here.

    For everybody who does not pack, the tower stays what it was. Only a tower that is pickled whole keeps the name of
    the function, and is opened where this was called before; what transformers saves does not.
    """
    config = text_model.config
    if config._attn_implementation not in ("sdpa", NAME):
        return False
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if NAME not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
    config._attn_implementation = NAME
    return True


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """What transformers calls: sdpa, with packed captions unpacked before it and packed again behind it."""
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
    return padded.flatten(0, 1).index_select(0, texts.places)


def unpack(packed: Tensor, texts: TextBatch) -> Tensor:
    """The inverse of `pack`, zeros for pads: [ΣT, …] becomes [B, T, …]."""
    count, width = texts.ids.shape
    padded = packed.new_zeros(count * width, *packed.shape[1:])
    return padded.index_copy(0, texts.places, packed).unflatten(0, (count, width))


def packed_text_features(backbone: Any, texts: TextBatch, *, want: Wanted) -> tuple[Tensor, Tensor | None]:
    """`Family.text_features` of CLIP for a tower that `allow_packing` has prepared.

    Shape:
        vectors [B, D]; if wanted words [B, T, D] or hidden states [B, T, W], zeros for pads.
    """
    tower = backbone.text_model
    places = texts.places  # [ΣT]
    # Sequences of length 1: the embedding layer checks lengths against its positions.
    ids, positions = pack(texts.ids, texts)[:, None], (places % texts.ids.shape[1])[:, None]  # [ΣT, 1]
    hidden = tower.embeddings(input_ids=ids, position_ids=positions)  # [ΣT, 1, W]
    last = tower.encoder(inputs_embeds=hidden, attention_mask=None, packed=texts).last_hidden_state  # [ΣT, 1, W]
    hidden = tower.final_layer_norm(last)[:, 0]  # [ΣT, W]
    first = texts.lengths.cumsum(0) - texts.lengths  # [B]
    end = _end(tower, texts.ids).minimum(texts.lengths - 1)  # [B]; a pad may look like an end
    vectors = backbone.text_projection(hidden[first + end])  # [B, D]
    if want == "vectors":
        return vectors, None
    return vectors, unpack(last[:, 0] if want == "hidden" else backbone.text_projection(hidden), texts)


def _end(tower: Any, ids: Tensor) -> Tensor:
    """Where transformers pools: at the first end token, which old configurations know only as the highest number."""
    return ids.argmax(1) if tower.eos_token_id == 2 else (ids == tower.eos_token_id).int().argmax(1)
