"""The architecture of the bundled model: a CLIP small enough to ship and to train on a laptop."""

from __future__ import annotations

from math import log
from typing import Any

IMAGE_SIZE, PATCH = 96, 16
CONTEXT = 77
SCALE = 14.3  # where CLIP's temperature starts, 1 / 0.07


def tiny_clip(tokenizer: Any) -> Any:
    """A fresh `transformers.CLIPModel` of about 1.9 million parameters for this tokenizer, 77 tokens long."""
    from transformers import CLIPConfig, CLIPModel

    def tower(width: int) -> dict[str, Any]:
        return {
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_hidden_layers": 4,
            "num_attention_heads": width // 32,
            "hidden_act": "quick_gelu",
            "layer_norm_eps": 1e-5,
        }

    config = CLIPConfig(
        projection_dim=128,
        logit_scale_init_value=log(SCALE),
        text_config={
            **tower(128),
            "vocab_size": len(tokenizer),
            "max_position_embeddings": CONTEXT,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={**tower(128), "image_size": IMAGE_SIZE, "patch_size": PATCH},
    )
    return CLIPModel(config)
