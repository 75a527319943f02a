"""Models as ONNX graphs, one per tower, each checked against torch before anything appears on disk."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hnclip.core import TextBatch
from hnclip.data.batching import pad_texts
from hnclip.data.texts import TextTransform
from hnclip.export import graph
from hnclip.export.layouts import Contract, Layout, contract_of, immich_advice, write_immich_settings, write_settings
from hnclip.export.tokenizer_files import write_tokenizer
from hnclip.models.adapters import merge_adapters
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.preprocessing import silence_transformers
from hnclip.util.files import replace_directory

log = logging.getLogger(__name__)

BATCHES = (1, 2, 5)
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


@dataclass(frozen=True)
class ExportCheck:
    """The largest difference between the normalised vectors of onnxruntime and of torch, over batches of several
    sizes and captions of several lengths."""

    image_error: float
    text_error: float


def export_onnx(model: DualEncoder, directory: str | Path, *, layout: Layout = "onnx") -> ExportCheck:
    """Write both towers of a model as ONNX, for programs without torch.

    The directory appears whole or not at all, and replaces one of the same name. The graphs are fp32, made on the CPU
    from a copy with its adapters merged: the model itself stays as it is.

    Args:
        layout: onnx, or immich; see `hnclip.export.layouts` for the files.

    Raises:
        ValueError: a tower has no ONNX form or differs from torch by more than `graph.TOLERANCE`, the layout cannot
            hold this model, or packages are missing.
    """
    if layout not in get_args(Layout):
        raise ValueError(f"layout must be one of {', '.join(get_args(Layout))}, got {layout!r}")
    _check_packages()
    model.require_trained("an ONNX export")
    contract = contract_of(model, layout)
    twin = _twin(model)
    pictures, texts = _sample_pictures(twin), _sample_texts(twin.text_transform)
    with torch.no_grad():
        image_vectors = [twin.encode_pixels(batch).vectors for batch in pictures]  # [B, D]
        text_vectors = [twin.encode_texts(batch).vectors for batch in texts]  # [B, D]
    dimension = image_vectors[0].shape[1]
    image_feeds = [{contract.image: batch} for batch in pictures]
    text_feeds = [_text_feed(twin.text_transform, batch, contract) for batch in texts]
    if model.family.kind == "siglip2":
        _fix_picture_size(twin.backbone)

    with replace_directory(Path(directory)) as partial, silence_transformers():
        if layout == "immich":
            write_immich_settings(twin, partial, dimension)
        else:
            write_settings(twin, partial, contract, dimension)
        file = partial / contract.image_file
        graph.write_graph("image", _ImageTower(twin), image_feeds[-1], file)
        image_error = graph.compare("image", file, image_feeds, image_vectors)
        log.info(f"image tower: differs from torch by at most {image_error:.1e}")

        file = partial / contract.text_file
        graph.write_graph("text", _TextTower(twin.backbone), text_feeds[-1], file, length=_length(twin, contract))
        text_error = graph.compare("text", file, text_feeds, text_vectors)
        log.info(f"text tower: differs from torch by at most {text_error:.1e}")
    if layout == "immich":
        for line in immich_advice(model, dimension):
            log.info(line)
    return ExportCheck(image_error, text_error)


def export_text_tower(model: DualEncoder, directory: Path) -> dict[str, Any]:
    """Write the text tower of a model in the layout onnx: text.onnx and the tokenizer. The directory exists.

    Returns:
        what `hnclip.json` says about texts, and the names of the inputs.

    Raises:
        ValueError: the tower or its tokenizer cannot be exported, or packages are missing.
    """
    _check_packages()
    contract, twin = contract_of(model, "onnx"), _twin(model)
    texts = _sample_texts(twin.text_transform)
    with torch.no_grad():
        vectors = [twin.encode_texts(batch).vectors for batch in texts]  # [B, D]
    feeds = [_text_feed(twin.text_transform, batch, contract) for batch in texts]
    with silence_transformers():
        write_tokenizer(twin.text_transform, directory)
        if not (directory / "tokenizer.json").is_file():
            raise ValueError(f"a {type(model.tokenizer).__name__} cannot be written as tokenizer.json")
        file = directory / contract.text_file
        graph.write_graph("text", _TextTower(twin.backbone), feeds[-1], file, length=_length(twin, contract))
        graph.compare("text", file, feeds, vectors)
    return {"inputs": list(contract.text), "fixed": contract.fixed, "left": contract.left}


class _ImageTower(nn.Module):
    def __init__(self, model: DualEncoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        return self.model.encode_pixels(pixels).vectors


class _TextTower(nn.Module):
    """Ids that are padded already, as every family of transformers takes them."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = None if mask is None else mask.long()
        output = self.backbone.get_text_features(input_ids=ids.long(), attention_mask=mask)
        return F.normalize(output.pooler_output, dim=-1)


def _check_packages() -> None:
    for package in _PACKAGES:
        if find_spec(package) is None:
            raise ValueError(f"ONNX export needs the package {package}: pip install 'hnclip[onnx]'")


def _length(model: DualEncoder, contract: Contract) -> int | None:
    """The longest text, if texts may be shorter."""
    return None if contract.fixed else model.context


def _twin(model: DualEncoder) -> DualEncoder:
    """A copy on the CPU in fp32, ready for inference; only the tokenizer is shared."""
    memo: dict[int, Any] = {id(model.text_transform): model.text_transform}
    for weight in model.parameters():
        memo[id(weight)] = nn.Parameter(weight.detach().to("cpu", torch.float32, copy=True), requires_grad=False)
    for buffer in model.buffers():
        dtype = torch.float32 if buffer.is_floating_point() else buffer.dtype
        memo[id(buffer)] = buffer.detach().to("cpu", dtype, copy=True)
    twin = copy.deepcopy(model, memo)
    if twin.has_adapters:
        merge_adapters(twin)
    return twin.requires_grad_(False).eval()


def _fix_picture_size(backbone: Any) -> None:
    """SigLIP 2 resizes its table of positions for every picture, in a loop that no graph can hold. All pictures are of
    the table's own size here, so resizing changes nothing and is left out."""
    embeddings = backbone.vision_model.embeddings
    embeddings.resize_positional_embeddings = lambda table, *args, **kwargs: table.flatten(0, 1)[None]  # [1, P, W]


def _sample_pictures(model: DualEncoder) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    size = model.image_size
    return [torch.randn(batch, 3, size, size, generator=generator) for batch in BATCHES]


def _sample_texts(transform: TextTransform) -> list[TextBatch]:
    """Captions of random words, so that any tokenizer will do; the last batch reaches from one word to the context."""
    generator = torch.Generator().manual_seed(0)
    tokenizer, (before, after) = transform.tokenizer, transform.edges
    whole = tokenizer("a photo", truncation=False, padding=False)["input_ids"]
    start, end = whole[:before], whole[len(whole) - after :]
    words = torch.tensor(sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids)))
    least = before + after + 1
    widths = (least, (least + transform.context) // 2, transform.context)
    batches = []
    for batch, width in zip(BATCHES, widths):
        lengths = np.linspace(least, width, batch).round().astype(int)
        drawn = [words[torch.randint(len(words), (n - before - after,), generator=generator)] for n in lengths]
        batches.append(pad_texts([[*start, *row.tolist(), *end] for row in drawn], transform.pad))
    return batches


def _text_feed(transform: TextTransform, texts: TextBatch, contract: Contract) -> dict[str, Tensor]:
    """The inputs of a text tower, named: ids and, where it has one, the mask of what is not padding."""
    ids = texts.ids  # [B, T]
    if contract.fixed:
        ids = F.pad(ids, (0, transform.context - ids.shape[1]), value=transform.pad)  # [B, C]
    if contract.left:
        ids = torch.stack([row.roll(len(row) - int(length)) for row, length in zip(ids, texts.lengths)])
    mask = torch.arange(ids.shape[1])[None] < texts.lengths[:, None]  # [B, T]
    return {name: tensor.to(contract.integer) for name, tensor in zip(contract.text, (ids, mask))}
