"""What both towers of a model make of a data set, before its projections: encoded once, kept on disk.

    OUT/MODEL/KEY.safetensors       one for every `PART` records of a split

A part is named by what it depends on, the model, the records and their pictures, and appears whole or not at all. So a
killed process loses the part that it was working on, and parts of several models and data sets share a directory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hnclip.analysis.heads import TowerFeatures
from hnclip.core import Record
from hnclip.data.batching import numbers, pad_texts
from hnclip.data.image_cache import load_images
from hnclip.data.texts import Tokens
from hnclip.data.validate import check_share, drop_unreadable
from hnclip.encode.fingerprint import images_fingerprint, model_fingerprint, records_fingerprint
from hnclip.evaluate.retrieval import group_numbers
from hnclip.models.dual_encoder import DualEncoder
from hnclip.util.console import progress
from hnclip.util.files import replace_file

TextPool = Literal["own", "mean"]
PART = 256  # records that a kill costs
_LAYOUT = 1  # of a part's file


@dataclass(frozen=True)
class Encoding:
    """How features are made: `text` own is what the text tower hands to its projection, mean the mean of its last
    hidden states over all tokens of a caption, which is what sentence encoders are trained for."""

    text: TextPool = "own"
    batch: int = 64
    """Pictures or captions encoded at once."""

    def __post_init__(self) -> None:
        if self.text not in ("own", "mean"):
            raise ValueError(f'text must be "own" or "mean", got {self.text!r}')
        if self.batch < 1:
            raise ValueError(f"batch must be at least 1, got {self.batch}")


def frozen_features(
    model: DualEncoder,
    records: Sequence[Record],
    out: Path,
    *,
    encoding: Encoding = Encoding(),  # noqa: B008, frozen
    name: str = "the data",
    max_bad: float = 0.0,
) -> TowerFeatures:
    """The features of these records, those of them that can be used; encoded only where no part holds them yet.

    Args:
        out: directory of the parts.
        name: of the data, for messages.
        max_bad: largest share of records that may be left out.

    Relations:
        A model of two joined towers has fresh projections, which its fingerprint would see: open it under a fixed
        random state.
    """
    if not records:
        raise ValueError(f"{name} has no records to encode")
    directory = out / f"{model_fingerprint(model)[:16]}-{encoding.text}"
    parts = [records[start : start + PART] for start in range(0, len(records), PART)]
    files = [directory / f"{_key(part, encoding)}.safetensors" for part in parts]
    missing = [number for number, file in enumerate(files) if not file.is_file()]
    done = len(records) - sum(len(parts[number]) for number in missing)
    with progress(f"encoding {name}, records", len(records), done) as bar:
        for number in missing:
            tensors = encode_part(parts[number], model, encoding)
            with replace_file(files[number]) as partial:
                save_file(tensors, partial)
            bar.advance(len(parts[number]))
    return _joined(parts, [load_file(file) for file in files], name, max_bad)


@torch.no_grad()
def encode_part(records: Sequence[Record], model: DualEncoder, encoding: Encoding) -> dict[str, Tensor]:
    """The tensors of a part.

    Shape:
        kept [n]: rows of the records that can be used; counts [n]: their captions.
        image [n, W], text [t, V] in fp32; pictures [n], captions [t]: hashes of what the model sees of each.
    """
    readable, _ = drop_unreadable(records, model.text_transform)
    loaded = load_images([record.image for record in readable], model.image_transform, cache=None)
    kept = [readable[index] for index in loaded.kept]
    places = {record.id: row for row, record in enumerate(records)}
    if not kept:
        return {"kept": torch.zeros(0, dtype=torch.int64)}
    tokens = model.text_transform([caption for record in kept for caption in record.captions])
    model.eval()
    return {
        "kept": torch.tensor([places[record.id] for record in kept]),
        "counts": torch.tensor([len(record.captions) for record in kept]),
        "image": _image_features(model, loaded.pixels[:], encoding.batch),
        "text": _text_features(model, tokens, encoding),
        "pictures": torch.tensor([_hash(picture.numpy().tobytes()) for picture in loaded.pixels[:]]),
        "captions": torch.tensor([_hash(repr(row.tolist()).encode()) for row in tokens]),
    }


def _image_features(model: DualEncoder, pixels: Tensor, batch: int) -> Tensor:
    """[n, W]"""
    found = []
    for start in range(0, len(pixels), batch):
        normal = model.normalize_pixels(pixels[start : start + batch].to(model.device))
        with _before(model, "visual_projection") as given:
            vectors, _ = model.family.image_features(model.backbone, normal, request="global")
        found.append((given[0] if given else vectors).float().cpu())
    return torch.cat(found)


def _text_features(model: DualEncoder, tokens: Sequence[Tokens], encoding: Encoding) -> Tensor:
    """[t, V]. Captions of like length are encoded together, so that short ones are not padded to long ones."""
    order = sorted(range(len(tokens)), key=lambda row: len(tokens[row]))
    found = []
    for start in range(0, len(order), encoding.batch):
        rows = [tokens[row] for row in order[start : start + encoding.batch]]
        texts = pad_texts(rows, model.text_transform.pad).to(model.device)
        with _before(model, "text_projection") as given:
            vectors, hidden = model.family.text_features(
                model.backbone, texts, model.text_transform, request="global" if encoding.text == "own" else "hidden"
            )
        if hidden is None:
            vectors = given[0] if given else vectors  # [b, V]
        else:
            position = torch.arange(hidden.shape[1], device=hidden.device)[None]  # [1, T]
            inside = (position < texts.lengths[:, None])[..., None]  # [b, T, 1]
            vectors = (hidden.float() * inside).sum(1) / inside.sum(1)  # [b, V]
        found.append(vectors.float().cpu())
    encoded = torch.cat(found)  # [t, V], shortest first
    text = torch.empty_like(encoded)
    text[torch.tensor(order)] = encoded
    return text


@contextmanager
def _before(model: DualEncoder, projection: str) -> Iterator[list[Tensor]]:
    """What is given to a projection inside the block; nothing if the model has none, as SigLIP, whose towers end in
    heads."""
    given: list[Tensor] = []
    layer = getattr(model.backbone, projection, None)
    if layer is None:
        yield given
        return
    hook = layer.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    try:
        yield given
    finally:
        hook.remove()


def _joined(
    parts: Sequence[Sequence[Record]], found: Sequence[dict[str, Tensor]], name: str, max_bad: float
) -> TowerFeatures:
    records = [part[row] for part, tensors in zip(parts, found) for row in tensors["kept"].tolist()]
    total = sum(map(len, parts))
    check_share(total - len(records), total, [], what="records", largest=max_bad, name=name)
    if not records:
        raise ValueError(f"no record of {name} can be used: see why with: hnclip data check {name}")
    used = [tensors for tensors in found if len(tensors["kept"])]

    def whole(key: str) -> Tensor:
        return torch.cat([tensors[key] for tensors in used])

    return TowerFeatures(
        image=whole("image"),
        text=whole("text"),
        owner=torch.arange(len(records)).repeat_interleave(whole("counts")),
        image_ids=numbers(whole("pictures").tolist()),
        caption_ids=numbers(whole("captions").tolist()),
        groups=group_numbers(records),
    )


def _key(records: Sequence[Record], encoding: Encoding) -> str:
    """Sums of a batch of another size may differ in their last digits, so its size is part of the name."""
    parts: Any = (_LAYOUT, records_fingerprint(records), images_fingerprint(records), encoding.batch)
    return sha256(repr(parts).encode()).hexdigest()[:32]


def _hash(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "big", signed=True)
