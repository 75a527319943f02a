"""Any picture tower and any text tower of transformers, joined by two projections."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hnclip.data.batches import TextBatch
from hnclip.data.texts import TextTransform


class DualTower:
    kind = "vision-text-dual-encoder"
    title = "two towers"
    fixed_length = False

    def image_size(self, backbone: Any) -> int | None:
        vision = backbone.config.vision_config
        if vision.model_type.startswith("dino"):
            return None  # positions are stretched to the picture: trained on 518 pixels, DINOv2 is used with 224
        size = getattr(vision, "image_size", None)  # convolutional towers state none
        if isinstance(size, list | tuple):
            if len(set(size)) > 1:
                raise ValueError(f"the picture tower takes {tuple(size)} pixels; only square pictures are supported")
            size = size[0]
        return size

    def image_features(self, backbone: Any, pixels: Tensor, *, tokens: bool) -> tuple[Tensor, Tensor | None]:
        output = backbone.vision_model(pixel_values=pixels)
        vectors = backbone.visual_projection(output.pooler_output.flatten(1))  # [B, D]; some poolers keep [B, W, 1, 1]
        if not tokens:
            return vectors, None
        patches = self._patches(backbone, output.last_hidden_state, pixels.shape[-1])  # [B, P, W]
        return vectors, backbone.visual_projection(patches)

    def text_features(
        self, backbone: Any, texts: TextBatch, transform: TextTransform, *, tokens: bool
    ) -> tuple[Tensor, Tensor | None]:
        position = torch.arange(texts.ids.shape[1], device=texts.ids.device)[None]  # [1, T]
        mask = (position < texts.lengths[:, None]).long()  # [B, T]
        output = backbone.get_text_features(input_ids=texts.ids, attention_mask=mask)
        words = backbone.text_projection(output.last_hidden_state) if tokens else None  # [B, T, D]
        return output.pooler_output, words

    def positions(self, backbone: Any) -> Any:
        kind = backbone.config.text_config.model_type
        raise ValueError(f"the positions of a {kind} text tower cannot be stretched; choose one with a longer context")

    def backbone_class(self) -> Any:
        from transformers import VisionTextDualEncoderModel

        return VisionTextDualEncoderModel

    def _patches(self, backbone: Any, hidden: Tensor, side: int) -> Tensor:
        """Without the class and register tokens, which stand before the patches; maps [B, W, h, w] become rows."""
        if hidden.ndim == 4:
            return hidden.flatten(2).transpose(1, 2)  # [B, h·w, W]
        patch = getattr(backbone.config.vision_config, "patch_size", None)
        count = (side // patch) ** 2 if isinstance(patch, int) else hidden.shape[1]
        return hidden[:, -count:] if hidden.shape[1] > count else hidden
