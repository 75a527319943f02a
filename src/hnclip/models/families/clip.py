"""CLIP and Long-CLIP: causal text, the end token's vector, class token and patches behind one projection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hnclip.data.batches import TextBatch
from hnclip.data.texts import TextTransform
from hnclip.models.families.wanted import Wanted
from hnclip.models.packing import allow_packing, packed_text_features, worth_packing


@contextmanager
def _given_to(module: nn.Module) -> Iterator[list[Tensor]]:
    """What a module is called with inside the block."""
    given: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    try:
        yield given
    finally:
        hook.remove()


class Clip:
    kind = "clip"
    title = "CLIP"
    fixed_length = False

    def image_size(self, backbone: Any) -> int:
        return backbone.config.vision_config.image_size

    def grid(self, backbone: Any, side: int) -> int:
        return side // backbone.config.vision_config.patch_size

    def image_features(self, backbone: Any, pixels: Tensor, *, want: Wanted) -> tuple[Tensor, Tensor | None]:
        output = backbone.get_image_features(pixel_values=pixels)
        if want == "vectors":
            return output.pooler_output, None  # [B, D]
        hidden = output.last_hidden_state[:, 1:]  # [B, P, W]
        return output.pooler_output, hidden if want == "hidden" else self.patch_vectors(backbone, hidden)

    def text_features(
        self, backbone: Any, texts: TextBatch, transform: TextTransform, *, want: Wanted
    ) -> tuple[Tensor, Tensor | None]:
        if worth_packing(texts) and allow_packing(backbone.text_model):
            return packed_text_features(backbone, texts, want=want)
        # Attention is causal and pads follow the end token, so no attention mask is needed for what we read.
        if want == "hidden":
            # Asked for hidden states, transformers would keep those of all blocks, and hooks that compiling stops at.
            with _given_to(backbone.text_model.final_layer_norm) as given:
                output = backbone.get_text_features(input_ids=texts.ids)
            return output.pooler_output, given[0]  # [B, D], [B, T, W]
        output = backbone.get_text_features(input_ids=texts.ids)
        words = backbone.text_projection(output.last_hidden_state) if want == "tokens" else None  # [B, T, D]
        return output.pooler_output, words

    def patch_vectors(self, backbone: Any, hidden: Tensor) -> Tensor:
        # transformers norms only the class token; patches must pass the same norm to live in the joint space.
        return backbone.visual_projection(backbone.vision_model.post_layernorm(hidden))

    def word_vectors(self, backbone: Any, hidden: Tensor) -> Tensor:
        return backbone.text_projection(self.text_norm(backbone, hidden))

    def text_norm(self, backbone: Any, hidden: Tensor) -> Tensor:
        return backbone.text_model.final_layer_norm(hidden)

    def positions(self, backbone: Any) -> Any:
        return backbone.text_model.embeddings

    def backbone_class(self) -> Any:
        from transformers import CLIPModel

        return CLIPModel
