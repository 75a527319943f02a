"""Families of dual encoders: the differences between CLIP, SigLIP, SigLIP 2 and any two joined towers.

A family has no state; the weights live in the backbone, a model of transformers. Every backbone has the attributes
`vision_model`, `text_model` and `logit_scale`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn

from hnclip.core import TextBatch
from hnclip.data.texts import TextTransform
from hnclip.models.packing import is_worth_packing, pack, unpack, use_packed_attention
from hnclip.util.optional import large_import

Request: TypeAlias = Literal["global", "tokens", "hidden"]
"""What a text tower returns: global vectors alone, with token vectors, or with its last hidden states."""
Features: TypeAlias = tuple[Tensor, Tensor | None]


class Family(ABC):
    """How features are computed from a backbone of one architecture, before normalisation.

    Global vectors are in the joint space. `patch_vectors` and `word_vectors` project last hidden states into it.
    """

    kind: ClassVar[str]
    """The `model_type` in the backbone's config.json."""
    title: ClassVar[str]
    """The name in messages."""
    backbone_name: ClassVar[str]
    """The class of transformers that reads and writes this family."""
    fixed_length: ClassVar[bool] = False
    """Whether texts are always padded to the context, and the pads attended to."""

    def width(self, config: Any) -> int:
        """D of the joint space."""
        return config.projection_dim

    def image_size(self, backbone: Any) -> int | None:
        """Side of the square images that the backbone takes; None if it takes any."""
        return backbone.config.vision_config.image_size

    def grid(self, backbone: Any, side: int) -> int | None:
        """Patches along each side of an image of `side` pixels; None if unknown."""
        return side // backbone.config.vision_config.patch_size

    @abstractmethod
    def image_states(self, backbone: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Global vectors [B, D] and the last hidden states of the patches [B, P, W], of normalised pixels
        [B, 3, H, W]."""

    @abstractmethod
    def text_features(self, backbone: Any, texts: TextBatch, transform: TextTransform, *, request: Request) -> Features:
        """Global vectors [B, D]; for the request "tokens" also a vector for each position [B, T, D], for "hidden" its
        last hidden state [B, T, W]."""

    @abstractmethod
    def patch_vectors(self, backbone: Any, hidden: Tensor) -> Tensor:
        """Hidden states of images [..., W] in the joint space [..., D]."""

    @abstractmethod
    def word_vectors(self, backbone: Any, hidden: Tensor) -> Tensor:
        """Hidden states of texts [..., W] in the joint space [..., D]."""

    def text_norm(self, backbone: Any, hidden: Tensor) -> Tensor:
        """The final norm of the text tower, where `word_vectors` applies one; otherwise the identity."""
        return hidden

    def positions(self, backbone: Any) -> Any:
        """The module that holds the text tower's learnt `position_embedding` and its `position_ids`."""
        return backbone.text_model.embeddings

    def backbone_class(self) -> Any:
        with large_import():
            import transformers

            return getattr(transformers, self.backbone_name)


class Clip(Family):
    """CLIP and Long-CLIP: causal text, read at the end token; one projection for class token and patches."""

    kind = "clip"
    title = "CLIP"
    backbone_name = "CLIPModel"

    def image_states(self, backbone: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
        output = backbone.get_image_features(pixel_values=pixels)
        return output.pooler_output, output.last_hidden_state[:, 1:]

    def text_features(self, backbone: Any, texts: TextBatch, transform: TextTransform, *, request: Request) -> Features:
        if is_worth_packing(texts) and use_packed_attention(backbone.text_model):
            return self.packed_text_features(backbone, texts, request=request)
        # Attention is causal and pads follow the end token, so no attention mask is needed.
        if request == "hidden":
            with _inputs_of(backbone.text_model.final_layer_norm) as inputs:
                output = backbone.get_text_features(input_ids=texts.ids)
            return output.pooler_output, inputs[0]  # [B, D], [B, T, W]
        output = backbone.get_text_features(input_ids=texts.ids)
        words = backbone.text_projection(output.last_hidden_state) if request == "tokens" else None  # [B, T, D]
        return output.pooler_output, words

    def packed_text_features(self, backbone: Any, texts: TextBatch, *, request: Request) -> Features:
        """`text_features` without work for pads, whose features are zeros. Needs `use_packed_attention`."""
        tower, width = backbone.text_model, texts.ids.shape[1]
        # Sequences of length 1: the embedding layer checks lengths against its positions.
        ids, positions = pack(texts.ids, texts)[:, None], (texts.positions % width)[:, None]  # [ΣT, 1]
        hidden = tower.embeddings(input_ids=ids, position_ids=positions)  # [ΣT, 1, W]
        last = tower.encoder(inputs_embeds=hidden, attention_mask=None, packed=texts).last_hidden_state[:, 0]  # [ΣT, W]
        normed = tower.final_layer_norm(last)  # [ΣT, W]
        # transformers pools at the first end token; old configurations (2) mean the highest id.
        is_end = texts.ids if tower.eos_token_id == 2 else (texts.ids == tower.eos_token_id).int()
        end = is_end.argmax(1).minimum(texts.lengths - 1)  # [B]; a pad may have the id of the end token
        first = texts.lengths.cumsum(0) - texts.lengths  # [B]
        vectors = backbone.text_projection(normed[first + end])  # [B, D]
        if request == "global":
            return vectors, None
        return vectors, unpack(last if request == "hidden" else backbone.text_projection(normed), texts)

    def patch_vectors(self, backbone: Any, hidden: Tensor) -> Tensor:
        # transformers applies the norm to the class token only; in the joint space, patches need it as well.
        return backbone.visual_projection(backbone.vision_model.post_layernorm(hidden))

    def word_vectors(self, backbone: Any, hidden: Tensor) -> Tensor:
        return backbone.text_projection(self.text_norm(backbone, hidden))

    def text_norm(self, backbone: Any, hidden: Tensor) -> Tensor:
        return backbone.text_model.final_layer_norm(hidden)


class Siglip(Family):
    """SigLIP, and SigLIP 2 with a fixed resolution: text attends in both directions and to its pads; images are pooled
    by an attention head."""

    kind = "siglip"
    title = "SigLIP"
    backbone_name = "SiglipModel"
    fixed_length = True

    def width(self, config: Any) -> int:
        return config.text_config.projection_size

    def image_states(self, backbone: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
        output = backbone.get_image_features(**self.image_inputs(backbone, pixels))
        return output.pooler_output, output.last_hidden_state  # after the final norm

    def image_inputs(self, backbone: Any, pixels: Tensor) -> dict[str, Tensor]:
        """Arguments of `get_image_features` for normalised pixels [B, 3, H, W]."""
        return {"pixel_values": pixels}

    def text_features(self, backbone: Any, texts: TextBatch, transform: TextTransform, *, request: Request) -> Features:
        # SigLIP was trained on texts padded to the full context without an attention mask, and reads the last position.
        # Trimming or masking the pads would change its vectors.
        (count, width), context, device = texts.ids.shape, transform.context, texts.ids.device
        left = transform.tokenizer.padding_side == "left"
        first = (context - texts.lengths)[:, None] if left else torch.zeros(count, 1, dtype=torch.long, device=device)
        source = torch.arange(context, device=device) - first  # [B, C], positions in the text
        inside = (source >= 0) & (source < texts.lengths[:, None])
        ids = torch.where(inside, texts.ids.gather(1, source.clamp(0, width - 1)), transform.pad)  # [B, C]
        output = backbone.get_text_features(input_ids=ids)
        if request == "global":
            return output.pooler_output, None
        back = (first + torch.arange(width, device=device)).clamp(max=context - 1)  # [B, T]
        hidden = output.last_hidden_state  # [B, C, W], after the final norm
        hidden = hidden.gather(1, back[:, :, None].expand(-1, -1, hidden.shape[2]))  # [B, T, W]
        return output.pooler_output, hidden if request == "hidden" else self.word_vectors(backbone, hidden)

    def patch_vectors(self, backbone: Any, hidden: Tensor) -> Tensor:
        return pool_each_patch(backbone.vision_model.head, hidden)

    def word_vectors(self, backbone: Any, hidden: Tensor) -> Tensor:
        return backbone.text_model.head(hidden)


class Siglip2(Siglip):
    """SigLIP 2 with flexible resolution (NaFlex), used here with square images of its largest size."""

    kind = "siglip2"
    title = "SigLIP 2 (NaFlex)"
    backbone_name = "Siglip2Model"

    def image_size(self, backbone: Any) -> int:
        vision = backbone.config.vision_config
        return round(vision.num_patches**0.5) * vision.patch_size

    def image_inputs(self, backbone: Any, pixels: Tensor) -> dict[str, Tensor]:
        patch = backbone.config.vision_config.patch_size
        side = pixels.shape[-1] // patch
        patches = pixels.unfold(2, patch, patch).unfold(3, patch, patch)  # [B, 3, side, side, patch, patch]
        patches = patches.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)  # [B, P, patch·patch·3], channels last
        return {
            "pixel_values": patches,
            "pixel_attention_mask": torch.ones(patches.shape[:2], dtype=torch.long, device=pixels.device),
            "spatial_shapes": torch.full((pixels.shape[0], 2), side, device=pixels.device),
        }


class TwoTowers(Family):
    """Any image tower and any text tower of transformers, joined by two projections."""

    kind = "vision-text-dual-encoder"
    title = "two towers"
    backbone_name = "VisionTextDualEncoderModel"

    def image_size(self, backbone: Any) -> int | None:
        vision = backbone.config.vision_config
        if vision.model_type.startswith("dino"):
            return None  # DINO interpolates its positions: trained on 518 pixels, DINOv2 is used with 224
        size = getattr(vision, "image_size", None)  # convolutional towers have none
        return size[0] if isinstance(size, list | tuple) else size

    def grid(self, backbone: Any, side: int) -> int | None:
        vision = backbone.config.vision_config
        patch = getattr(vision, "patch_size", None)
        in_stages = hasattr(vision, "depths")  # Swin, ConvNeXt: patches are merged from stage to stage
        return side // patch if isinstance(patch, int) and not in_stages else None

    def image_states(self, backbone: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
        output = backbone.vision_model(pixel_values=pixels)
        vectors = backbone.visual_projection(output.pooler_output.flatten(1))  # [B, D]; some poolers keep [B, W, 1, 1]
        return vectors, self._patches(backbone, output.last_hidden_state, pixels.shape[-1])

    def text_features(self, backbone: Any, texts: TextBatch, transform: TextTransform, *, request: Request) -> Features:
        position = torch.arange(texts.ids.shape[1], device=texts.ids.device)[None]  # [1, T]
        mask = (position < texts.lengths[:, None]).long()  # [B, T]
        output = backbone.get_text_features(input_ids=texts.ids, attention_mask=mask)
        if request == "global":
            return output.pooler_output, None
        hidden = output.last_hidden_state  # [B, T, W]
        return output.pooler_output, hidden if request == "hidden" else self.word_vectors(backbone, hidden)

    def patch_vectors(self, backbone: Any, hidden: Tensor) -> Tensor:
        return backbone.visual_projection(hidden)

    def word_vectors(self, backbone: Any, hidden: Tensor) -> Tensor:
        return backbone.text_projection(hidden)

    def positions(self, backbone: Any) -> Any:
        kind = backbone.config.text_config.model_type
        raise ValueError(f"the positions of a {kind} text tower cannot be stretched; choose one with a longer context")

    def _patches(self, backbone: Any, hidden: Tensor, side: int) -> Tensor:
        """Without class and register tokens, which precede the patches; maps [B, W, h, w] become [B, h·w, W]."""
        if hidden.ndim == 4:
            return hidden.flatten(2).transpose(1, 2)
        count = hidden.shape[1] if (grid := self.grid(backbone, side)) is None else grid**2
        return hidden[:, -count:] if hidden.shape[1] > count else hidden


_ALL: tuple[Family, ...] = (Clip(), Siglip(), Siglip2(), TwoTowers())
FAMILIES = {family.kind: family for family in _ALL}


def family_of(kind: str | None) -> Family:
    """The family of a `model_type`."""
    if kind not in FAMILIES:
        raise ValueError(f"model_type {kind!r} is not supported; supported are {', '.join(FAMILIES)}")
    return FAMILIES[kind]


def pool_each_patch(head: Any, patches: Tensor) -> Tensor:
    """The output of SigLIP's pooling head for each patch alone.

    Attention to a single key returns its value for every query, so this is the head without attention weights. It is
    exact for an image of one patch and lies in the space of the image's vector.

    Shape:
        patches: [B, P, D] after the final norm; returns [B, P, D]
    """
    attention, width = head.attention, patches.shape[-1]
    value = nn.functional.linear(patches, attention.in_proj_weight[2 * width :], attention.in_proj_bias[2 * width :])
    pooled = attention.out_proj(value)  # [B, P, D]
    return pooled + head.mlp(head.layernorm(pooled))


@contextmanager
def _inputs_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """The first input of each call of a module inside the block. transformers' own `output_hidden_states` keeps those
    of all blocks and adds hooks that prevent compilation."""
    inputs: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    try:
        yield inputs
    finally:
        hook.remove()
