"""SigLIP and SigLIP 2: text that attends both ways and to its pads, pictures pooled by an attention head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hnclip.data.batches import TextBatch
from hnclip.data.texts import TextTransform
from hnclip.models.families.wanted import Wanted


class Siglip:
    """SigLIP, and the SigLIP 2 checkpoints of one fixed resolution, which have the same architecture."""

    kind = "siglip"
    title = "SigLIP"
    fixed_length = True

    def image_size(self, backbone: Any) -> int:
        return backbone.config.vision_config.image_size

    def grid(self, backbone: Any, side: int) -> int:
        return side // backbone.config.vision_config.patch_size

    def image_features(self, backbone: Any, pixels: Tensor, *, want: Wanted) -> tuple[Tensor, Tensor | None]:
        output = backbone.get_image_features(**self._picture(backbone, pixels))
        if want == "vectors":
            return output.pooler_output, None
        hidden = output.last_hidden_state  # [B, P, W], behind the final norm
        return output.pooler_output, hidden if want == "hidden" else self.patch_vectors(backbone, hidden)

    def text_features(
        self, backbone: Any, texts: TextBatch, transform: TextTransform, *, want: Wanted
    ) -> tuple[Tensor, Tensor | None]:
        # The model was trained on texts padded to the full context, pads attended to, and reads the last position.
        # Trimming would change its vectors, and so would an attention mask.
        width = texts.ids.shape[1]
        at = place(texts.lengths, transform.context, left=transform.tokenizer.padding_side == "left")  # [B, C]
        inside = (at >= 0) & (at < texts.lengths[:, None])
        ids = torch.where(inside, texts.ids.gather(1, at.clamp(0, width - 1)), transform.pad)  # [B, C]
        output = backbone.get_text_features(input_ids=ids)
        if want == "vectors":
            return output.pooler_output, None
        first = (at < 0).sum(dim=1, keepdim=True)  # [B, 1], where each text begins
        back = (first + torch.arange(width, device=ids.device)).clamp(max=transform.context - 1)  # [B, T]
        hidden = output.last_hidden_state  # [B, C, W], behind the final norm
        hidden = hidden.gather(1, back[:, :, None].expand(-1, -1, hidden.shape[2]))  # [B, T, W]
        return output.pooler_output, hidden if want == "hidden" else self.word_vectors(backbone, hidden)

    def patch_vectors(self, backbone: Any, hidden: Tensor) -> Tensor:
        return look_at_each(backbone.vision_model.head, hidden)

    def word_vectors(self, backbone: Any, hidden: Tensor) -> Tensor:
        return backbone.text_model.head(hidden)

    def text_norm(self, backbone: Any, hidden: Tensor) -> Tensor:
        return hidden

    def positions(self, backbone: Any) -> Any:
        return backbone.text_model.embeddings

    def backbone_class(self) -> Any:
        from transformers import SiglipModel

        return SiglipModel

    def _picture(self, backbone: Any, pixels: Tensor) -> dict[str, Tensor]:
        return {"pixel_values": pixels}


class Siglip2(Siglip):
    """SigLIP 2 with flexible resolution (NaFlex), here always given square pictures of its largest size."""

    kind = "siglip2"
    title = "SigLIP 2 (NaFlex)"

    def image_size(self, backbone: Any) -> int:
        vision = backbone.config.vision_config
        return round(vision.num_patches**0.5) * vision.patch_size

    def backbone_class(self) -> Any:
        from transformers import Siglip2Model

        return Siglip2Model

    def _picture(self, backbone: Any, pixels: Tensor) -> dict[str, Tensor]:
        patch = backbone.config.vision_config.patch_size
        side = pixels.shape[-1] // patch
        patches = pixels.unfold(2, patch, patch).unfold(3, patch, patch)  # [B, 3, side, side, patch, patch]
        patches = patches.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)  # [B, P, patch·patch·3], colours last
        return {
            "pixel_values": patches,
            "pixel_attention_mask": torch.ones(patches.shape[:2], dtype=torch.long, device=pixels.device),
            "spatial_shapes": torch.full((pixels.shape[0], 2), side, device=pixels.device),
        }


def place(lengths: Tensor, context: int, *, left: bool) -> Tensor:
    """Which position of its text stands at each place of the padded row; outside [0, length) stands a pad.

    Shape:
        lengths: [B]; returns [B, context]
    """
    places = torch.arange(context, device=lengths.device)[None]  # [1, C]
    return places - (context - lengths[:, None]) if left else places.expand(len(lengths), -1)


def look_at_each(head: Any, patches: Tensor) -> Tensor:
    """What the pooling head would say of a picture if it looked at one patch alone, for every patch.

    Attention to a single key is that key's value, whatever the query: so this is the head with its attention left
    out, exact for a picture of one patch, and in the same space as the picture's vector.

    Shape:
        patches: [B, P, D] behind the final norm; returns [B, P, D]
    """
    attention = head.attention
    width = patches.shape[-1]
    value = nn.functional.linear(patches, attention.in_proj_weight[2 * width :], attention.in_proj_bias[2 * width :])
    seen = attention.out_proj(value)  # [B, P, D]
    return seen + head.mlp(head.layernorm(seen))
