"""Any picture tower and any text tower of transformers, joined by two projections."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hnclip.data.batches import TextBatch
from hnclip.data.texts import TextTransform
from hnclip.models.families.wanted import Wanted


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

    def grid(self, backbone: Any, side: int) -> int | None:
        vision = backbone.config.vision_config
        patch = getattr(vision, "patch_size", None)
        in_stages = hasattr(vision, "depths")  # Swin, ConvNeXt: their patches grow from stage to stage
        return side // patch if isinstance(patch, int) and not in_stages else None

    def image_features(self, backbone: Any, pixels: Tensor, *, want: Wanted) -> tuple[Tensor, Tensor | None]:
        output = backbone.vision_model(pixel_values=pixels)
        vectors = backbone.visual_projection(output.pooler_output.flatten(1))  # [B, D]; some poolers keep [B, W, 1, 1]
        if want == "vectors":
            return vectors, None
        hidden = self._patches(backbone, output.last_hidden_state, pixels.shape[-1])  # [B, P, W]
        return vectors, hidden if want == "hidden" else self.patch_vectors(backbone, hidden)

    def text_features(
        self, backbone: Any, texts: TextBatch, transform: TextTransform, *, want: Wanted
    ) -> tuple[Tensor, Tensor | None]:
        position = torch.arange(texts.ids.shape[1], device=texts.ids.device)[None]  # [1, T]
        mask = (position < texts.lengths[:, None]).long()  # [B, T]
        output = backbone.get_text_features(input_ids=texts.ids, attention_mask=mask)
        if want == "vectors":
            return output.pooler_output, None
        hidden = output.last_hidden_state  # [B, T, W]
        return output.pooler_output, hidden if want == "hidden" else self.word_vectors(backbone, hidden)

    def patch_vectors(self, backbone: Any, hidden: Tensor) -> Tensor:
        return backbone.visual_projection(hidden)

    def word_vectors(self, backbone: Any, hidden: Tensor) -> Tensor:
        return backbone.text_projection(hidden)

    def text_norm(self, backbone: Any, hidden: Tensor) -> Tensor:
        return hidden

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
        count = hidden.shape[1] if (grid := self.grid(backbone, side)) is None else grid**2
        return hidden[:, -count:] if hidden.shape[1] > count else hidden
