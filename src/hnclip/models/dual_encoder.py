"""The interface to a model: images and texts in, normalised global and token vectors out."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from hnclip.data.batching import join_texts, pad_texts
from hnclip.data.image_sources import FileImage, is_image_name
from hnclip.data.images import ImageTransform, preprocess_image
from hnclip.data.texts import TextTransform
from hnclip.models.families import Features, Request, family_of
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
    ) -> None:
        """
        Args:
            backbone: `CLIPModel`, `SiglipModel`, `Siglip2Model` or `VisionTextDualEncoderModel`, also with adapters.
            source: one line that describes the model.
        """
        super().__init__()
        self.backbone = backbone
        self.text_transform = text_transform
        self.image_transform = image_transform
        self.source = source
        self.provenance: Training | None = None  # how the model was trained, if known
        self.name = ""  # the argument of `hnclip.load` that opened the model
        # Whether the projections are random (two joined towers). `hnclip train` sets it to False; a training loop of
        # your own has to set it before `save`.
        self.untrained_projections = False
        self.family = family_of(backbone.config.model_type)
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
        array = isinstance(inputs, np.ndarray) and inputs.dtype == np.uint8 and inputs.ndim < 4
        if array or isinstance(inputs, str | Path | Image.Image):
            raise ValueError(f"encode takes a list of texts or images, got a single {type(inputs).__name__}")
        if to not in ("numpy", "torch"):
            raise ValueError(f"to must be 'numpy' or 'torch', got {to!r}")
        self.require_trained("encoding")
        inputs = list(inputs)
        images = [not isinstance(item, str) or (is_image_name(item) and os.path.isfile(item)) for item in inputs]
        if any(images) and not all(images):
            raise ValueError(
                f"inputs[{images.index(True)}] is an image and inputs[{images.index(False)}] a text: encode them apart"
            )
        order = torch.arange(len(inputs))
        if not any(images):
            names = [text for text in inputs if is_image_name(text) and not any(map(str.isspace, text))]
            if names:  # mistyped paths
                logger.warning(
                    "%d inputs name no existing image file and are encoded as texts: %r", len(names), names[0]
                )
            ids = self.text_transform(inputs)
            # In order of length, so that short texts are not padded to long ones.
            order = torch.tensor([len(row) for row in ids], dtype=torch.long).argsort(stable=True)
        vectors = torch.empty(len(inputs), self.width)
        with self.inference():
            for rows in _track(order.split(batch_size) if inputs else (), progress):
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
        return pad_texts(self.text_transform(texts), self.text_transform.pad).to(self.device)

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
        vectors, hidden = self.family.image_states(self.backbone, pixels)
        vectors = self._unit(vectors)  # [B, D]
        if not tokens:
            return ViewEmbeddings(vectors)
        patches = self._unit(self.family.patch_vectors(self.backbone, hidden))  # [B, P, D]
        return ViewEmbeddings(vectors, patches, patches.new_ones(patches.shape[:2], dtype=torch.bool))

    def encode_texts(self, texts: TextBatch, *, tokens: bool = False) -> ViewEmbeddings:
        """Encode tokenised texts.

        Shape:
            texts: ids [B, T], lengths [B]
            returns vectors [B, D]; with `tokens` also word vectors [B, T, D] and a mask that excludes special tokens
            at either end and pads
        """
        vectors, words = self._text_features(texts, "tokens" if tokens else "global")
        vectors = self._unit(vectors)  # [B, D]
        if words is None:
            return ViewEmbeddings(vectors)
        before, after = self.text_transform.edges
        position = torch.arange(texts.ids.shape[1], device=words.device)[None]  # [1, T]
        mask = (position >= before) & (position < texts.lengths[:, None] - after)  # [B, T]
        return ViewEmbeddings(vectors, self._unit(words), mask)

    def _text_features(self, texts: TextBatch, request: Request) -> Features:
        if texts.ids.shape[1] > self.context:
            raise ValueError(f"texts have {texts.ids.shape[1]} tokens, the model takes at most {self.context}")
        return self.family.text_features(self.backbone, texts, self.text_transform, request=request)

    def _unit(self, features: Tensor) -> Tensor:
        """Length 1, computed in the dtype of the weights. Autocast returns half precision, where lengths would be off
        by some thousandths, and a similarity times 100 by as much as near-duplicates differ."""
        return F.normalize(features.to(self.dtype), dim=-1)

    @contextmanager
    def inference(self) -> Iterator[None]:
        """No gradients and no dropout inside the block; afterwards every module is in its mode again."""
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, training in modes:
                module.training = training

    def forward(self, batch: Batch, *, tokens: bool = False) -> Embeddings:
        """Encode every view of a batch in one call per tower. With `tokens`, every view has token vectors; in a model
        with readouts only the views that have one, and they are the readout's output."""
        pixels = torch.cat(list(batch.images.values()))
        texts = join_texts(list(batch.texts.values()), self.text_transform.pad)
        plain = tokens and not self.readouts
        if tokens and any(name in self.readouts for name in batch.images):
            images = self._read_out(self._image_output(pixels), batch.images, batch.parts)
        else:
            images = _split(self.encode_pixels(self.normalize_pixels(pixels), tokens=plain), batch.images)
        captions = {name: view.lengths for name, view in batch.texts.items()}
        if tokens and any(name in self.readouts for name in captions):
            words = self._read_out(self._text_output(texts), captions, batch.parts)
        else:
            # Of the class: FSDP treats the method of the instance as a forward pass of its own.
            words = _split(DualEncoder.encode_texts(self, texts, tokens=plain), captions)

        def described(side: Mapping[str, ViewEmbeddings]) -> dict[str, ViewEmbeddings]:
            return {
                name: replace(view, present=batch.present.get(name), ids=batch.text_ids.get(name))
                for name, view in side.items()
            }

        return Embeddings(
            images=described(images),
            texts=described(words),
            scale=self.scale,
            ids=batch.ids,
            margin_text=batch.margin_text,
        )

    def _image_output(self, pixels: Tensor) -> TowerOutput:
        vectors, hidden = self.family.image_states(self.backbone, self.normalize_pixels(pixels))
        inside = hidden.new_ones(hidden.shape[:2], dtype=torch.bool)
        project = partial(self.family.patch_vectors, self.backbone)
        return TowerOutput(vectors, hidden, inside, None, project, nn.Identity())

    def _text_output(self, texts: TextBatch) -> TowerOutput:
        vectors, hidden = self._text_features(texts, "hidden")
        assert hidden is not None
        inside = torch.arange(texts.ids.shape[1], device=vectors.device) < texts.lengths[:, None]  # [B, T]
        project, norm = (partial(f, self.backbone) for f in (self.family.word_vectors, self.family.text_norm))
        return TowerOutput(vectors, hidden, inside, None, project, norm)

    def _read_out(
        self, tower: TowerOutput, views: Mapping[str, Tensor], parts: Mapping[str, Tensor]
    ) -> dict[str, ViewEmbeddings]:
        """Global vectors of every view, and the output of the readouts of those that have one."""
        found, start = {}, 0
        for name, view in views.items():
            rows = slice(start, start + len(view))
            start += len(view)
            found[name] = ViewEmbeddings(self._unit(tower.vectors[rows]))
            if name in self.readouts:
                own = (tower.vectors[rows], tower.hidden[rows], tower.inside[rows], parts.get(name))
                tokens, counts = self.readouts[name](TowerOutput(*own, tower.project, tower.norm))  # [B, K, D], [B, K]
                found[name] = replace(found[name], tokens=tokens.to(self.dtype), mask=counts)
        return found


def _split(encoded: ViewEmbeddings, views: Mapping[str, Tensor]) -> dict[str, ViewEmbeddings]:
    """The embeddings of views that were encoded together."""
    sizes = [len(view) for view in views.values()]
    parts = [
        [None] * len(sizes) if tensor is None else tensor.split(sizes)
        for tensor in (encoded.vectors, encoded.tokens, encoded.mask)
    ]
    return {name: ViewEmbeddings(*own) for name, *own in zip(views, *parts)}


def _open_image(item: Any) -> Image.Image:
    if isinstance(item, Image.Image):
        return item
    if isinstance(item, str | Path):
        return FileImage(Path(item)).load()
    if isinstance(item, np.ndarray) and item.dtype == np.uint8 and item.shape[2:] in ((), (3,), (4,)):
        return Image.fromarray(item)
    raise ValueError(
        "an image must be a PIL image, the path of an image file, or a uint8 array [H, W, 3] or [H, W]; got "
        f"{getattr(item, 'dtype', '')} {type(item).__name__}"
    )


def _track(steps: Sequence[Tensor], progress: bool) -> Iterable[Tensor]:
    if not progress:
        return steps
    from rich.console import Console
    from rich.progress import track

    return track(steps, "encoding", console=Console(stderr=True), transient=True)
