"""The one interface to a model: pictures and captions in, normalised global and token vectors out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hnclip.data.batches import Batch, TextBatch
from hnclip.objectives.embeddings import Embeddings, ViewEmbeddings

# Mean and deviation of the pictures that OpenAI's CLIP was trained on, by colour.
OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)


class DualEncoder(nn.Module):
    """A `transformers.CLIPModel` with its tokenizer and picture statistics.

    It adds no parameters and changes nothing of the backbone's inference: `encode_*` are the backbone's own projected
    features, L2-normalised. Token vectors, which only training uses, are the backbone's last hidden states through
    its own final norm and projection.
    """

    image_mean: Tensor  # [1, 3, 1, 1]
    image_std: Tensor  # [1, 3, 1, 1]

    def __init__(
        self,
        clip: Any,
        tokenizer: Any,
        *,
        image_mean: tuple[float, ...] = OPENAI_MEAN,
        image_std: tuple[float, ...] = OPENAI_STD,
    ) -> None:
        super().__init__()
        self.clip = clip
        self.tokenizer = tokenizer
        self.register_buffer("image_mean", torch.tensor(image_mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("image_std", torch.tensor(image_std).view(1, 3, 1, 1), persistent=False)

    @property
    def scale(self) -> Tensor:
        """The inverse temperature s = exp(logit_scale), with its gradient."""
        return self.clip.logit_scale.exp()

    @property
    def image_size(self) -> int:
        return self.clip.config.vision_config.image_size

    @property
    def context(self) -> int:
        """The longest caption in tokens, start and end token included."""
        return self.clip.config.text_config.max_position_embeddings

    @property
    def device(self) -> torch.device:
        return self.clip.logit_scale.device

    def encode_images(self, pixels: Tensor, *, tokens: bool = False) -> ViewEmbeddings:
        """Encode pictures.

        Shape:
            pixels: [B, 3, H, W] uint8, as `preprocess_image` makes them
            returns vectors [B, D]; with `tokens` also patch vectors [B, P, D] without the class token
        """
        weight = self.clip.vision_model.embeddings.patch_embedding.weight
        scaled = pixels.to(weight.dtype) / 255  # [B, 3, H, W]
        normalised = (scaled - self.image_mean.to(weight.dtype)) / self.image_std.to(weight.dtype)
        output = self.clip.get_image_features(pixel_values=normalised)
        vectors = F.normalize(output.pooler_output, dim=-1)  # [B, D]
        if not tokens:
            return ViewEmbeddings(vectors)
        # transformers norms only the class token; patches must pass the same norm to live in the joint space.
        patches = self.clip.vision_model.post_layernorm(output.last_hidden_state[:, 1:])  # [B, P, W]
        patches = F.normalize(self.clip.visual_projection(patches), dim=-1)  # [B, P, D]
        mask = torch.ones(patches.shape[:2], dtype=torch.bool, device=patches.device)
        return ViewEmbeddings(vectors, patches, mask)

    def encode_texts(self, texts: TextBatch, *, tokens: bool = False) -> ViewEmbeddings:
        """Encode captions.

        Shape:
            texts: ids [B, T], lengths [B]
            returns vectors [B, D]; with `tokens` also word vectors [B, T, D], masked to what stands between the
            start and the end token
        """
        if texts.ids.shape[1] > self.context:
            raise ValueError(f"texts have {texts.ids.shape[1]} tokens, the model takes at most {self.context}")
        # Attention is causal and pads follow the end token, so no attention mask is needed for what we read.
        output = self.clip.get_text_features(input_ids=texts.ids)
        vectors = F.normalize(output.pooler_output, dim=-1)  # [B, D]
        if not tokens:
            return ViewEmbeddings(vectors)
        words = F.normalize(self.clip.text_projection(output.last_hidden_state), dim=-1)  # [B, T, D]
        position = torch.arange(texts.ids.shape[1], device=words.device)[None]  # [1, T]
        mask = (position >= 1) & (position < texts.lengths[:, None] - 1)  # [B, T]
        return ViewEmbeddings(vectors, words, mask)

    def forward(self, batch: Batch, *, tokens: bool = False) -> Embeddings:
        """Encode every view of a batch, in one call per tower."""
        return Embeddings(
            images=self._encode_image_views(batch.images, tokens),
            texts=self._encode_text_views(batch.texts, tokens),
            scale=self.scale,
            ids=batch.ids,
            margin_text=batch.margin_text,
        )

    def _encode_image_views(self, views: Mapping[str, Tensor], tokens: bool) -> dict[str, ViewEmbeddings]:
        encoded = self.encode_images(torch.cat(list(views.values())), tokens=tokens)
        return _split(encoded, {name: len(view) for name, view in views.items()})

    def _encode_text_views(self, views: Mapping[str, TextBatch], tokens: bool) -> dict[str, ViewEmbeddings]:
        width = max(view.ids.shape[1] for view in views.values())
        pad = self.tokenizer.pad_token_id
        ids = [F.pad(view.ids, (0, width - view.ids.shape[1]), value=pad) for view in views.values()]
        together = TextBatch(torch.cat(ids), torch.cat([view.lengths for view in views.values()]))
        encoded = self.encode_texts(together, tokens=tokens)
        return _split(encoded, {name: len(view.lengths) for name, view in views.items()})


def _split(encoded: ViewEmbeddings, sizes: Mapping[str, int]) -> dict[str, ViewEmbeddings]:
    if len(sizes) == 1:
        return dict.fromkeys(sizes, encoded)
    vectors = encoded.vectors.split(list(sizes.values()))
    tokens = [None] * len(sizes) if encoded.tokens is None else encoded.tokens.split(list(sizes.values()))
    masks = [None] * len(sizes) if encoded.mask is None else encoded.mask.split(list(sizes.values()))
    return {name: ViewEmbeddings(v, t, m) for name, v, t, m in zip(sizes, vectors, tokens, masks)}
