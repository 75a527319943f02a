"""The architecture of the bundled model: a CLIP small enough to ship and to train on a laptop."""

from __future__ import annotations

from typing import Any

IMAGE_SIZE, PATCH = 96, 16
CONTEXT = 77
OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)


def tiny_clip(tokenizer: Any, *, scale: float = 14.3) -> Any:
    """A fresh `transformers.CLIPModel` of about 1.8 million parameters for this tokenizer, 77 tokens long."""
    from math import log

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
        logit_scale_init_value=log(scale),
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
