"""The interface to a model: images and texts in, normalised global and token vectors out."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from hnclip.core import Batch, Embeddings, TextBatch, ViewEmbeddings
from hnclip.data.batches import join_texts, pad_texts
from hnclip.data.image_sources import FileImage, is_image_name
from hnclip.data.images import ImageTransform, preprocess_image
from hnclip.data.texts import TextTransform
from hnclip.models.families import Family, family_of
from hnclip.models.packing import Request
from hnclip.models.readout import TowerOutput

if TYPE_CHECKING:
    from hnclip.models.model_card import Training

logger = logging.getLogger(__name__)

ImageInput = Image.Image | np.ndarray | str | Path


class DualEncoder(nn.Module):
    """A dual encoder of transformers with its text and image preprocessing.

    `encode` takes texts and images as users have them. `encode_texts` and `encode_images` take tokens and pixels and
    give the backbone's own features, L2-normalised. Token vectors, which only training uses, are the backbone's last
    hidden states projected into the joint space by its own layers (`hnclip.models.families`). `readouts`, by view,
    belong to a training method; without them there are no parameters other than the backbone's.
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
            source: one line that describes the model.
            provenance: how it was trained, if known.
        """
        super().__init__()
        self.backbone = backbone
        self.text_transform = text_transform
        self.image_transform = image_transform
        self.source = source
        self.provenance = provenance
        self.name = ""  # the argument of `hnclip.load` that opened the model
        # Whether the projections are random (two joined towers). `hnclip train` sets it to False; a training loop of
        # your own has to do so before `save`.
        self.untrained_projections = False
        self.family: Family = family_of(backbone.config)
        self.readouts = nn.ModuleDict()
        expected = self.family.image_size(backbone)
        if expected is not None and image_transform.size != expected:
            raise ValueError(f"images of {image_transform.size} pixels do not fit a model that takes {expected}")
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
        """The longest text in tokens, special tokens included."""
        return self.text_transform.context

    @property
    def width(self) -> int:
        """D of the joint space."""
        return self.family.width(self.backbone.config)

    @property
    def device(self) -> torch.device:
        return self.backbone.logit_scale.device

    @property
    def dtype(self) -> torch.dtype:
        return self.backbone.dtype

    @property
    def has_adapters(self) -> bool:
        """Whether there are unmerged adapters (LoRA, DoRA)."""
        return hasattr(self.backbone, "peft_config")

    def require_trained(self, purpose: str) -> None:
        """Raise ValueError if the projections are random: the vectors of images and texts are then unrelated.

        Args:
            purpose: what was asked for, as the subject of a sentence: "evaluation".
        """
        if self.untrained_projections:
            raise ValueError(
                f"{purpose} needs a trained model, but the projections that join the two towers of "
                f"{self.name or self.source} are random. Align them first: "
                f"hnclip train --model {self.name or 'MODEL'} --data DATA --out RUN, then use RUN/best"
            )

    def encode(
        self,
        inputs: Sequence[Any],
        *,
        batch_size: int = 64,
        progress: bool = False,
        to: Literal["numpy", "torch"] = "numpy",
    ) -> Any:
        """Unit vectors [N, D] in float32 of texts or of images, in the order of the inputs.

        Images are PIL images, uint8 arrays [H, W, 3] or [H, W], `Path` objects, and strings that end in the suffix of
        an image file (.jpg, .png, …) and name an existing file. Every other string is a text. Texts and images cannot
        be mixed in one call.

        Args:
            inputs: a list of texts or a list of images.
            batch_size: inputs per forward pass.
            progress: show a progress bar.
            to: "numpy" for an array, "torch" for a tensor on the CPU.
        """
        if isinstance(inputs, str | Path | Image.Image):
            raise ValueError(f"encode takes a list of texts or images, got a single {type(inputs).__name__}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if to not in ("numpy", "torch"):
            raise ValueError(f'to must be "numpy" or "torch", got {to!r}')
        self.require_trained("encoding")
        inputs = list(inputs)
        images = [_is_image(item) for item in inputs]
        if any(images) and not all(images):
            raise ValueError(
                f"inputs[{images.index(True)}] is an image and inputs[{images.index(False)}] a text: encode them apart"
            )
        order = list(range(len(inputs)))
        if not any(images):
            _warn_of_file_names(inputs)
            ids = self.text_transform(inputs).ids if inputs else ()
            order.sort(key=lambda row: len(ids[row]))  # so that short texts are not padded to long ones
        vectors = torch.empty(len(inputs), self.width)
        with self._inference():
            for start in _track(range(0, len(inputs), batch_size), progress):
                rows = order[start : start + batch_size]
                if any(images):
                    found = self.encode_images(self.preprocess_images([inputs[row] for row in rows]))
                else:
                    texts = pad_texts([ids[row] for row in rows], self.text_transform.pad)
                    found = self.encode_texts(texts.to(self.device))
                vectors[rows] = found.vectors.float().cpu()
        return vectors if to == "torch" else vectors.numpy()

    def similarity(self, a: Any, b: Any) -> Any:
        """Cosine similarities of two sets of vectors.

        Shape:
            a: [N, D], b: [M, D], both arrays or both tensors; returns [N, M] of the same type
        """
        one, other = (F.normalize(torch.as_tensor(vectors).float(), dim=-1) for vectors in (a, b))
        found = one @ other.T
        return found if isinstance(a, Tensor) else found.numpy()

    def save(self, directory: str | Path) -> None:
        """`hnclip.save(model, directory)`."""
        from hnclip.models.load import save

        save(self, directory)

    def preprocess_images(self, images: Sequence[ImageInput]) -> Tensor:
        """Images as `encode_images` takes them: [B, 3, H, W] uint8, on the model's device.

        Args:
            images: PIL images, uint8 arrays [H, W, 3] or [H, W], or paths of image files.
        """
        pixels = [preprocess_image(_open_image(image), self.image_transform) for image in images]
        return torch.stack(pixels).to(self.device)

    def tokenize(self, texts: Sequence[str]) -> TextBatch:
        """Texts as `encode_texts` takes them, on the model's device; long ones are truncated to the context."""
        return pad_texts(self.text_transform(texts).ids, self.text_transform.pad).to(self.device)

    def encode_images(self, pixels: Tensor, *, tokens: bool = False) -> ViewEmbeddings:
        """Encode preprocessed images.

        Shape:
            pixels: [B, 3, H, W] uint8, as `preprocess_images` returns them
            returns vectors [B, D]; with `tokens` also patch vectors [B, P, D] without class tokens
        """
        return self.encode_pixels(self.normalize_pixels(pixels), tokens=tokens)

    def normalize_pixels(self, pixels: Tensor) -> Tensor:
        """uint8 pixels [B, 3, H, W] in the range that the backbone was trained on."""
        if pixels.dtype != torch.uint8:
            raise ValueError(
                f"pixels must be uint8 values from 0 to 255, as preprocess_images returns them, got {pixels.dtype}; "
                "pixels that are already normalised go to encode_pixels"
            )
        dtype = self.dtype
        return (pixels.to(dtype) / 255 - self.image_mean.to(dtype)) / self.image_std.to(dtype)

    def encode_pixels(self, pixels: Tensor, *, tokens: bool = False) -> ViewEmbeddings:
        """`encode_images` for pixels that are already normalised: [B, 3, H, W] floats."""
        request: Request = "tokens" if tokens else "global"
        vectors, patches = self.family.image_features(self.backbone, pixels, request=request)
        vectors = self._unit(vectors)  # [B, D]
        if patches is None:
            return ViewEmbeddings(vectors)
        mask = torch.ones(patches.shape[:2], dtype=torch.bool, device=patches.device)
        return ViewEmbeddings(vectors, self._unit(patches), mask)

    def encode_texts(self, texts: TextBatch, *, tokens: bool = False) -> ViewEmbeddings:
        """Encode tokenised texts.

        Shape:
            texts: ids [B, T], lengths [B]
            returns vectors [B, D]; with `tokens` also word vectors [B, T, D] and a mask that excludes special tokens
            at either end and pads
        """
        self._check_length(texts)
        request: Request = "tokens" if tokens else "global"
        vectors, words = self.family.text_features(self.backbone, texts, self.text_transform, request=request)
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
        """Length 1, computed in the dtype of the weights. Autocast returns half precision, where lengths would be off
        by some thousandths, and a similarity times 100 by as much as near-duplicates differ."""
        return F.normalize(features.to(self.dtype), dim=-1)

    @contextmanager
    def _inference(self) -> Iterator[None]:
        """No gradients and no dropout inside the block."""
        training = self.training
        self.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.train(training)

    def forward(self, batch: Batch, *, tokens: bool = False) -> Embeddings:
        """Encode every view of a batch in one call per tower. With `tokens`, every view has token vectors; in a model
        with readouts only the views that have one, and they are the readout's output."""
        images, texts = self._encode_image_views(batch, tokens), self._encode_text_views(batch, tokens)

        def described(side: Mapping[str, ViewEmbeddings]) -> dict[str, ViewEmbeddings]:
            return {
                name: replace(view, present=batch.present.get(name), ids=batch.text_ids.get(name))
                for name, view in side.items()
            }

        return Embeddings(
            images=described(images),
            texts=described(texts),
            scale=self.scale,
            ids=batch.ids,
            margin_text=batch.margin_text,
        )

    def _encode_image_views(self, batch: Batch, tokens: bool) -> dict[str, ViewEmbeddings]:
        sizes = {name: len(view) for name, view in batch.images.items()}
        together = torch.cat(list(batch.images.values()))
        if not (tokens and len(self.readouts)):
            return _split(self.encode_images(together, tokens=tokens), sizes)
        request: Request = "hidden" if self._reads(sizes) else "global"
        vectors, hidden = self.family.image_features(self.backbone, self.normalize_pixels(together), request=request)
        inside = None if hidden is None else torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
        project = partial(self.family.patch_vectors, self.backbone)
        return self._read_out(sizes, batch.parts, vectors, hidden, inside, project, _identity)

    def _encode_text_views(self, batch: Batch, tokens: bool) -> dict[str, ViewEmbeddings]:
        sizes = {name: len(view.lengths) for name, view in batch.texts.items()}
        together = join_texts(list(batch.texts.values()), self.text_transform.pad)
        if not (tokens and len(self.readouts)):
            return _split(self.encode_texts(together, tokens=tokens), sizes)
        self._check_length(together)
        request: Request = "hidden" if self._reads(sizes) else "global"
        vectors, hidden = self.family.text_features(self.backbone, together, self.text_transform, request=request)
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
        """Global vectors of every view, and the output of the readouts of those that have one."""
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


def _identity(hidden: Tensor) -> Tensor:
    return hidden


def _split(encoded: ViewEmbeddings, sizes: Mapping[str, int]) -> dict[str, ViewEmbeddings]:
    if len(sizes) == 1:
        return dict.fromkeys(sizes, encoded)
    vectors = encoded.vectors.split(list(sizes.values()))
    tokens = [None] * len(sizes) if encoded.tokens is None else encoded.tokens.split(list(sizes.values()))
    masks = [None] * len(sizes) if encoded.mask is None else encoded.mask.split(list(sizes.values()))
    return {name: ViewEmbeddings(v, t, m) for name, v, t, m in zip(sizes, vectors, tokens, masks)}


def _is_image(item: Any) -> bool:
    if isinstance(item, str):
        return is_image_name(item) and os.path.isfile(item)  # False for any text that cannot be a path
    return True


def _open_image(item: Any) -> Image.Image:
    if isinstance(item, Image.Image):
        return item
    if isinstance(item, str | Path):
        return FileImage(Path(item)).load()
    if isinstance(item, np.ndarray) and item.dtype == np.uint8 and (item.ndim == 2 or item.shape[2:] in ((3,), (4,))):
        return Image.fromarray(item)
    kind = f"{item.dtype} {type(item).__name__}" if hasattr(item, "dtype") else type(item).__name__
    raise ValueError(
        f"an image must be a PIL image, the path of an image file, or a uint8 array [H, W, 3] or [H, W]; got {kind}"
    )


def _warn_of_file_names(texts: Sequence[Any]) -> None:
    """A mistyped path would be encoded as a text without notice."""
    names = [text for text in texts if is_image_name(text) and not any(map(str.isspace, text))]
    if names:
        logger.warning("%r is no existing image file and is encoded as a text (%d such inputs)", names[0], len(names))


def _track(steps: range, progress: bool) -> Iterable[int]:
    if not progress:
        return steps
    from rich.console import Console
    from rich.progress import track

    return track(steps, "encoding", console=Console(stderr=True), transient=True)
