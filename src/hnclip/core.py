"""The types that packages share: records of data, batches of views, and their embeddings.

Readers make records, `hnclip.data` batches of them, the encoder embeddings of those; an objective sees embeddings and
returns scalar terms. torch is imported where it is called: data can be read without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from torch import Tensor

Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels; right and bottom exclusive
ORIENTATION = 0x0112  # the EXIF tag


class InvalidImage(ValueError):
    """An image that cannot be used. `kind` is the kind of problem, one of `hnclip.data.validate`."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class ImageSource(ABC):
    """Where an image is read from. Two records with the same `key` have the same image."""

    __slots__ = ()

    @property
    @abstractmethod
    def key(self) -> str: ...

    @abstractmethod
    def stamp(self) -> str:
        """A text that changes when the image may have changed, such as size and time of its file, found without
        reading it. Raises InvalidImage if there is no image."""

    @abstractmethod
    def read(self) -> bytes:
        """The bytes that the image is decoded from; equal bytes are equal images."""

    @abstractmethod
    def decode(self, content: bytes) -> Image.Image:
        """The image in these bytes, fully decoded. Raises InvalidImage if they are damaged."""

    def load(self) -> Image.Image:
        return self.decode(self.read())


def orientation(image: Image.Image) -> int:
    """The EXIF orientation: 1 is upright, 2 to 8 are rotated or mirrored; from 5 on, width and height are swapped."""
    try:
        found = image.getexif().get(ORIENTATION)
    except (SyntaxError, ValueError):  # what Pillow raises for invalid EXIF data
        return 1
    return next((turn for turn in range(2, 9) if turn == found), 1)


def upright_shape(image: Image.Image) -> tuple[int, int]:
    """Width and height after the EXIF orientation is applied."""
    return image.size if orientation(image) < 5 else (image.height, image.width)


@dataclass(frozen=True, slots=True)
class Region:
    """A box of the image, in pixels of the upright image, and the sentence that describes it.

    `score` is their similarity to the model that matched them, None if the source declares the region.
    """

    box: Box
    sentence: str
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One image with its captions.

    `id` is unique in its data set and does not depend on where the data are stored. `split` is "train", "validation",
    "test", another name that the source uses, or None if it declares none. `group` names a group of near-duplicates, if
    the source declares them: they stay in one split, and bootstrap intervals resample whole groups.

    The rest is for objectives with further views: a short caption, `regions` (best first), and `filtered`, each caption
    without its words of appearance; empty where they were not prepared.
    """

    id: str
    image: ImageSource
    captions: tuple[str, ...]
    split: str | None
    short: str | None = None
    regions: tuple[Region, ...] = ()
    group: str | None = None
    filtered: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with the data: its kind (`hnclip.data.validate`), where it is (file and line, or the record's
    id), and what was found."""

    kind: str
    where: str
    detail: str


@dataclass(frozen=True)
class TextBatch:
    """Token ids padded to the longest text of the batch, and each text's length with start and end token.

    Shape:
        ids: [B, T] int64
        lengths: [B] int64
        positions: [ΣT], the tokens that are not padding, as positions in the flattened [B·T]. They are found when the
            batch is created, on the host: on an accelerator it would have to wait for their number.
    """

    ids: Tensor
    lengths: Tensor
    positions: Tensor = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.positions is None:
            import torch

            column = torch.arange(self.ids.shape[1], device=self.ids.device)[None]  # [1, T]
            positions = (column < self.lengths[:, None]).flatten().nonzero().flatten()
            object.__setattr__(self, "positions", positions)

    def __getitem__(self, rows: slice) -> TextBatch:
        lengths = self.lengths[rows]
        # Causal attention makes everything after the end token irrelevant, so trimming is exact.
        return TextBatch(self.ids[rows, : int(lengths.max())], lengths)

    def to(self, device: torch.device) -> TextBatch:
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> TextBatch:
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, change: Callable[[Tensor], Tensor]) -> TextBatch:
        return TextBatch(change(self.ids), change(self.lengths), change(self.positions))


@dataclass(frozen=True)
class Batch:
    """All views of B pairs, on one device.

    Shape:
        images: per view [B, 3, H, W] uint8
        texts: per view a TextBatch
        ids: [B, 2] int64, equal for equal images (column 0) and equal captions (column 1)
        margin_text: [B, D] or None, frozen caption embeddings for Ḡ
        present: per view [B] bool, False where a pair has no such view and its row is filler; views that all pairs of
            the data have are not listed
        parts: per view what readouts pool, as in `hnclip.models.readout.TowerOutput`: [B, K, P] bool or [B, K, 2]
        text_ids: per text view other than the caption [B] int64, equal for equal texts
    """

    images: Mapping[str, Tensor]
    texts: Mapping[str, TextBatch]
    ids: Tensor
    margin_text: Tensor | None = None
    present: Mapping[str, Tensor] = field(default_factory=dict)
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    text_ids: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: slice) -> Batch:
        return self._map(lambda tensor: tensor[rows], lambda text: text[rows])

    def to(self, device: torch.device) -> Batch:
        return self._map(lambda tensor: tensor.to(device, non_blocking=True), lambda text: text.to(device))

    def pinned(self) -> Batch:
        """The batch in page-locked memory, from which CUDA copies asynchronously."""
        return self._map(lambda tensor: tensor.pin_memory(), TextBatch.pinned)

    def _map(self, change: Callable[[Tensor], Tensor], change_text: Callable[[TextBatch], TextBatch]) -> Batch:
        def every(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: change(tensor) for name, tensor in tensors.items()}

        return Batch(
            every(self.images),
            {name: change_text(text) for name, text in self.texts.items()},
            change(self.ids),
            None if self.margin_text is None else change(self.margin_text),
            every(self.present),
            every(self.parts),
            every(self.text_ids),
        )


@dataclass(frozen=True)
class ViewEmbeddings:
    """One view of the batch after its tower.

    Shape:
        vectors: [N, D], L2-normalised global vectors.
        tokens: [N, T, D], L2-normalised token vectors (words or patches), or the output of a method's readout for this
            view (`hnclip.models.readout`), or None if the objective does not read tokens.
        mask: [N, T] bool, True where a token counts (no start, end, padding or class token); None without `tokens`.
        present: [N] bool, False where a pair lacks this view and its row is filler; None if all pairs have it.
        ids: [N] integers, equal for equal texts of this view; None for images, and for captions, whose ids are those
            of the pairs.
    """

    vectors: Tensor
    tokens: Tensor | None = None
    mask: Tensor | None = None
    present: Tensor | None = None
    ids: Tensor | None = None


@dataclass(frozen=True)
class NegativePairs:
    """M pairs that are only negatives: constants of the global loss, without gradient.

    Shape:
        image, text: [M, D], L2-normalised global vectors.
        ids: [M, K], as in `Embeddings`.
        margin_text: [M, D'], as in `Embeddings`.
    """

    image: Tensor
    text: Tensor
    ids: Tensor
    margin_text: Tensor | None = None


@dataclass(frozen=True)
class Embeddings:
    """All views of N pairs. Row i of every view belongs to pair i.

    With several processes N counts the pairs of all of them.

    Shape:
        scale: scalar tensor, the inverse temperature s (already exponentiated), with its gradient.
        ids: [N, K] integers, or None. Two pairs that agree in any column are duplicates (column 0: image, column 1:
            caption) and not negatives of each other.
        margin_text: [N, D'] embeddings that Ḡ is computed from instead of the live captions (frozen-encoder ablation).
        memory: further negatives of the global loss, or None.
    """

    images: Mapping[str, ViewEmbeddings]
    texts: Mapping[str, ViewEmbeddings]
    scale: Tensor
    ids: Tensor | None = None
    margin_text: Tensor | None = None
    memory: NegativePairs | None = None


def join_embeddings(parts: Sequence[Embeddings]) -> Embeddings:
    """Consecutive parts of a batch as one, with gradient. The scale is that of the first part: it counts once."""
    first = parts[0]
    return Embeddings(
        images={name: _join_views([part.images[name] for part in parts]) for name in first.images},
        texts={name: _join_views([part.texts[name] for part in parts]) for name in first.texts},
        scale=first.scale,
        ids=_join([part.ids for part in parts]),
        margin_text=_join([part.margin_text for part in parts]),
    )


def pad_tokens(view: ViewEmbeddings, length: int) -> ViewEmbeddings:
    """The view padded to `length` token places, which are masked."""
    if view.tokens is None or view.mask is None or view.tokens.shape[1] == length:
        return view
    import torch.nn.functional as F

    missing = length - view.tokens.shape[1]
    tokens, mask = F.pad(view.tokens, (0, 0, 0, missing)), F.pad(view.mask, (0, missing))  # [N, T, D], [N, T]
    return replace(view, tokens=tokens, mask=mask)


def _join_views(parts: Sequence[ViewEmbeddings]) -> ViewEmbeddings:
    import torch

    length = max(0 if part.tokens is None else part.tokens.shape[1] for part in parts)
    padded = [pad_tokens(part, length) for part in parts]
    return ViewEmbeddings(
        torch.cat([part.vectors for part in padded]),  # [N, D]
        _join([part.tokens for part in padded]),  # [N, T, D]
        _join([part.mask for part in padded]),  # [N, T]
        _join([part.present for part in padded]),  # [N]
        _join([part.ids for part in padded]),  # [N]
    )


def _join(parts: Sequence[Tensor | None]) -> Tensor | None:
    import torch

    tensors = [part for part in parts if part is not None]
    return torch.cat(tensors) if tensors else None
