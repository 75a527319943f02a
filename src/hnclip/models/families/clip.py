"""CLIP and Long-CLIP: causal text, the end token's vector, class token and patches behind one projection."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hnclip.data.batches import TextBatch
from hnclip.data.texts import TextTransform
from hnclip.models.packing import allow_packing, packed_text_features, worth_packing


class Clip:
    kind = "clip"
    title = "CLIP"
    fixed_length = False

    def image_size(self, backbone: Any) -> int:
        return backbone.config.vision_config.image_size

    def image_features(self, backbone: Any, pixels: Tensor, *, tokens: bool) -> tuple[Tensor, Tensor | None]:
        output = backbone.get_image_features(pixel_values=pixels)
        if not tokens:
            return output.pooler_output, None  # [B, D]
        # transformers norms only the class token; patches must pass the same norm to live in the joint space.
        patches = backbone.vision_model.post_layernorm(output.last_hidden_state[:, 1:])  # [B, P, W]
        return output.pooler_output, backbone.visual_projection(patches)  # [B, D], [B, P, D]

    def text_features(
        self, backbone: Any, texts: TextBatch, transform: TextTransform, *, tokens: bool
    ) -> tuple[Tensor, Tensor | None]:
        if worth_packing(texts) and allow_packing(backbone.text_model):
            return packed_text_features(backbone, texts, tokens=tokens)
        # Attention is causal and pads follow the end token, so no attention mask is needed for what we read.
        output = backbone.get_text_features(input_ids=texts.ids)
        words = backbone.text_projection(output.last_hidden_state) if tokens else None  # [B, T, D]
        return output.pooler_output, words

    def positions(self, backbone: Any) -> Any:
        return backbone.text_model.embeddings

    def backbone_class(self) -> Any:
        from transformers import CLIPModel

        return CLIPModel
