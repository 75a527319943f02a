"""The one interface to a model: pictures and captions in, normalised global and token vectors out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from hnclip.core import Embeddings, ViewEmbeddings
from hnclip.data.batches import Batch, TextBatch, join_texts, pad_texts
from hnclip.data.images import ImageTransform, preprocess_image
from hnclip.data.texts import TextTransform
from hnclip.models.card import Training
from hnclip.models.families import Family, family_of
from hnclip.models.families.wanted import Wanted
from hnclip.models.readout import TowerOutput


class DualEncoder(nn.Module):
    """A dual encoder of transformers, and how it wants its pictures and captions.

    It changes nothing of the backbone's inference: `encode_*` are the backbone's own features, L2-normalised. Token
    vectors, which only training uses, are the backbone's last hidden states brought into the joint space by its own
    layers (`hnclip.models.families`). `readouts`, by view, are a framework's, for the time of training; without them
    there are no parameters beside the backbone's.
    """

    image_mean: Tensor  # [1, 3, 1, 1]
    image_std: Tensor  # [1, 3, 1, 1]

    def __init__(
        self,
        backbone: Any,
        text_transform: TextTransform,
        image_transform: ImageTransform,
        *,
        source: str = "",
        provenance: Training | None = None,
    ) -> None:
        """
        Args:
            backbone: `CLIPModel`, `SiglipModel`, `Siglip2Model` or `VisionTextDualEncoderModel`, also with adapters.
            source: what the model was made from, one line for people.
            provenance: how it was trained, if that is known.
        """
        super().__init__()
        self.backbone = backbone
        self.text_transform = text_transform
        self.image_transform = image_transform
        self.source = source
        self.provenance = provenance
        self.family: Family = family_of(backbone.config)
        self.readouts = nn.ModuleDict()
        expected = self.family.image_size(backbone)
        if expected is not None and image_transform.size != expected:
            raise ValueError(f"pictures of {image_transform.size} pixels do not fit a model that takes {expected}")
        self.register_buffer("image_mean", torch.tensor(image_transform.mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("image_std", torch.tensor(image_transform.std).view(1, 3, 1, 1), persistent=False)

    @property
    def scale(self) -> Tensor:
        """The inverse temperature s = exp(logit_scale), with its gradient."""
        return self.backbone.logit_scale.exp().reshape(())

    @property
    def image_size(self) -> int:
        return self.image_transform.size

    @property
    def tokenizer(self) -> Any:
        return self.text_transform.tokenizer

    @property
    def context(self) -> int:
        """The longest caption in tokens, special tokens included."""
        return self.text_transform.context

    @cached_property
    def width(self) -> int:
        """D of the joint space: families of models name it differently, so a text is encoded."""
        with torch.no_grad():
            return self.encode_texts(self.tokenize(["a photo"])).vectors.shape[1]

    @property
    def device(self) -> torch.device:
        return self.backbone.logit_scale.device

    @property
    def dtype(self) -> torch.dtype:
        return self.backbone.dtype

    def preprocess_images(self, images: Sequence[Image.Image]) -> Tensor:
        """Pictures as `encode_images` takes them: [B, 3, H, W] uint8, on the model's device."""
        return torch.stack([preprocess_image(image, self.image_transform) for image in images]).to(self.device)

    def tokenize(self, texts: Sequence[str]) -> TextBatch:
        """Captions as `encode_texts` takes them, on the model's device; too long ones are cut at the context."""
        return pad_texts(self.text_transform(texts).ids, self.text_transform.pad).to(self.device)

    def encode_images(self, pixels: Tensor, *, tokens: bool = False) -> ViewEmbeddings:
        """Encode pictures.

        Shape:
            pixels: [B, 3, H, W] uint8, as `preprocess_image` makes them
            returns vectors [B, D]; with `tokens` also patch vectors [B, P, D] without class tokens
        """
        return self.encode_pixels(self.normalize_pixels(pixels), tokens=tokens)

    def normalize_pixels(self, pixels: Tensor) -> Tensor:
        """Bytes into what the backbone was trained on: [B, 3, H, W] of mean about 0 and deviation about 1."""
        dtype = self.dtype
        return (pixels.to(dtype) / 255 - self.image_mean.to(dtype)) / self.image_std.to(dtype)

    def encode_pixels(self, pixels: Tensor, *, tokens: bool = False) -> ViewEmbeddings:
        """`encode_images` for pictures that are normalised already: [B, 3, H, W] floats."""
        vectors, patches = self.family.image_features(self.backbone, pixels, want="tokens" if tokens else "vectors")
        vectors = self._unit(vectors)  # [B, D]
        if patches is None:
            return ViewEmbeddings(vectors)
        mask = torch.ones(patches.shape[:2], dtype=torch.bool, device=patches.device)
        return ViewEmbeddings(vectors, self._unit(patches), mask)

    def encode_texts(self, texts: TextBatch, *, tokens: bool = False) -> ViewEmbeddings:
        """Encode captions.

        Shape:
            texts: ids [B, T], lengths [B]
            returns vectors [B, D]; with `tokens` also word vectors [B, T, D], masked to what stands between the
            special tokens at either end
        """
        self._check_length(texts)
        want: Wanted = "tokens" if tokens else "vectors"
        vectors, words = self.family.text_features(self.backbone, texts, self.text_transform, want=want)
        vectors = self._unit(vectors)  # [B, D]
        if words is None:
            return ViewEmbeddings(vectors)
        before, after = self.text_transform.edges
        position = torch.arange(texts.ids.shape[1], device=words.device)[None]  # [1, T]
        mask = (position >= before) & (position < texts.lengths[:, None] - after)  # [B, T]
        return ViewEmbeddings(vectors, self._unit(words), mask)

    def _check_length(self, texts: TextBatch) -> None:
        if texts.ids.shape[1] > self.context:
            raise ValueError(f"texts have {texts.ids.shape[1]} tokens, the model takes at most {self.context}")

    def _unit(self, features: Tensor) -> Tensor:
        """Length 1 in the type of the weights: autocast leaves features in half precision, where lengths would be off
        by a few thousandths, and a similarity times 100 by as much as near-duplicates differ."""
        return F.normalize(features.to(self.dtype), dim=-1)

    def forward(self, batch: Batch, *, tokens: bool = False) -> Embeddings:
        """Encode every view of a batch, in one call per tower. With `tokens` every view has token vectors; but of a
        model with readouts only the views that have one, and what it makes of them."""
        images, texts = self._encode_image_views(batch, tokens), self._encode_text_views(batch, tokens)

        def noted(side: Mapping[str, ViewEmbeddings]) -> dict[str, ViewEmbeddings]:
            return {name: replace(view, present=batch.present.get(name)) for name, view in side.items()}

        return Embeddings(
            images=noted(images),
            texts=noted(texts),
            scale=self.scale,
            ids=batch.ids,
            margin_text=batch.margin_text,
        )

    def _encode_image_views(self, batch: Batch, tokens: bool) -> dict[str, ViewEmbeddings]:
        sizes = {name: len(view) for name, view in batch.images.items()}
        together = torch.cat(list(batch.images.values()))
        if not (tokens and len(self.readouts)):
            return _split(self.encode_images(together, tokens=tokens), sizes)
        want: Wanted = "hidden" if self._reads(sizes) else "vectors"
        vectors, hidden = self.family.image_features(self.backbone, self.normalize_pixels(together), want=want)
        inside = None if hidden is None else torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
        project = partial(self.family.patch_vectors, self.backbone)
        return self._read_out(sizes, batch.parts, vectors, hidden, inside, project, _as_it_is)

    def _encode_text_views(self, batch: Batch, tokens: bool) -> dict[str, ViewEmbeddings]:
        sizes = {name: len(view.lengths) for name, view in batch.texts.items()}
        together = join_texts(list(batch.texts.values()), self.text_transform.pad)
        if not (tokens and len(self.readouts)):
            return _split(self.encode_texts(together, tokens=tokens), sizes)
        self._check_length(together)
        want: Wanted = "hidden" if self._reads(sizes) else "vectors"
        vectors, hidden = self.family.text_features(self.backbone, together, self.text_transform, want=want)
        position = torch.arange(together.ids.shape[1], device=vectors.device)[None]  # [1, T]
        inside = position < together.lengths[:, None]  # [B, T]
        project = partial(self.family.word_vectors, self.backbone)
        norm = partial(self.family.text_norm, self.backbone)
        return self._read_out(sizes, batch.parts, vectors, hidden, inside, project, norm)

    def _reads(self, names: Iterable[str]) -> bool:
        return any(name in self.readouts for name in names)

    def _read_out(
        self,
        sizes: Mapping[str, int],
        parts: Mapping[str, Tensor],
        vectors: Tensor,
        hidden: Tensor | None,
        inside: Tensor | None,
        project: Callable[[Tensor], Tensor],
        norm: Callable[[Tensor], Tensor],
    ) -> dict[str, ViewEmbeddings]:
        """Vectors of every view, and what readouts make of those that have one."""
        found, start = {}, 0
        for name, size in sizes.items():
            rows = slice(start, start + size)
            start += size
            found[name] = ViewEmbeddings(self._unit(vectors[rows]))
            if name in self.readouts and hidden is not None and inside is not None:
                tower = TowerOutput(vectors[rows], hidden[rows], inside[rows], parts.get(name), project, norm)
                tokens, counts = self.readouts[name](tower)  # [B, K, D], [B, K]
                found[name] = replace(found[name], tokens=tokens.to(self.dtype), mask=counts)
        return found


def _as_it_is(hidden: Tensor) -> Tensor:
    return hidden


def _split(encoded: ViewEmbeddings, sizes: Mapping[str, int]) -> dict[str, ViewEmbeddings]:
    if len(sizes) == 1:
        return dict.fromkeys(sizes, encoded)
    vectors = encoded.vectors.split(list(sizes.values()))
    tokens = [None] * len(sizes) if encoded.tokens is None else encoded.tokens.split(list(sizes.values()))
    masks = [None] * len(sizes) if encoded.mask is None else encoded.mask.split(list(sizes.values()))
    return {name: ViewEmbeddings(v, t, m) for name, v, t, m in zip(sizes, vectors, tokens, masks)}
