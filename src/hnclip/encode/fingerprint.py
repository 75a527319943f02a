"""Short names for what embeddings depend on: a model, records, and the state of their images.

None of them depends on the version of a library, on where files are, or on how a library prints or serialises things.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hnclip.core import InvalidImage, Record
from hnclip.data.image_cache import cache_directory
from hnclip.data.texts import clean_caption
from hnclip.util.files import read_json, replace_file

if TYPE_CHECKING:
    from torch import Tensor

    from hnclip.models.dual_encoder import DualEncoder

FORMAT = 1  # raise it when the same model is to have another fingerprint
MEMORY, REMEMBERED = "weights.json", 200  # file in the cache directory, and the models that it holds
SMALL = 2**18  # elements of a tensor that is compared even if the weights are remembered, as are all positions
# Settings of a tower that change its output and that its weights do not show.
TOWER = (
    "model_type",
    "hidden_act",
    "num_attention_heads",
    "layer_norm_eps",
    "image_size",
    "patch_size",
    "eos_token_id",
)
# Tokenised to compare normalisation, splitting and merges of tokenizers, whose files are written in several ways.
PROBES = (
    "A photo of 2 (red) ÉCLAIRS, isn't it?",
    "naïve  façade\t№ 3.5m—東京 🙂",
    "<|startoftext|>unbelievably</s>[SEP]",
)
_CLEANING = {clean_caption: "openai", str: "none"}


def model_fingerprint(model: DualEncoder, loaded_from: str | Path | None = None) -> str:
    """The weights of a model, its geometry, and its preprocessing of images and texts.

    Args:
        loaded_from: the path that `load` was given, if the weights have not changed since. Their hash is then
            remembered by path, size and time of the files, in the cache directory.
    """
    tokenizer, text, config = model.tokenizer, model.text_transform, model.backbone.config
    probes = [tokenizer(probe, verbose=False)["input_ids"] for probe in PROBES]
    geometry = {
        "format": FORMAT,
        "family": model.family.kind,
        "towers": [
            [getattr(tower, name, None) for name in TOWER] for tower in (config.vision_config, config.text_config)
        ],
        "image": astuple(model.image_transform),
        "text": [text.context, text.pad, _CLEANING.get(text.clean, getattr(text.clean, "__qualname__", "other"))],
        "vocabulary": _digest(sorted(tokenizer.get_vocab().items())),
        "probes": probes,
    }
    return _digest([geometry, _weights(model.backbone.state_dict(), loaded_from)])


def records_fingerprint(records: Sequence[Record]) -> str:
    """Ids and captions in their order; `images_fingerprint` is for the images."""
    return _digest([[record.id, record.captions] for record in records])


def images_fingerprint(records: Sequence[Record]) -> str:
    """Changes when an image may have changed, appeared or gone: of a file its size and time. Images are not read."""

    def stamp(record: Record) -> str:
        try:
            return record.image.stamp()
        except InvalidImage as error:
            return error.kind

    return _digest([stamp(record) for record in records])


def _weights(tensors: dict[str, Tensor], loaded_from: str | Path | None) -> str:
    """A hash of all floating-point tensors by content: libraries rename them from time to time."""
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    files = list(_weight_files(Path(loaded_from))) if loaded_from else []
    if not files:
        return _digest(sorted(map(_tensor_digest, tensors.values())))
    # Positions tell a model that was stretched when it was loaded from the one in the file.
    kept = [tensor for name, tensor in tensors.items() if tensor.numel() <= SMALL or "position" in name]
    small = sorted(map(_tensor_digest, kept))
    key = _digest([FORMAT, files, small])
    file = cache_directory(None) / MEMORY
    known: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        known = read_json(file)
    found = str(known.get(key, ""))[:32]
    if known.get(key) == _sealed(key, found):
        return found
    found = _digest(sorted(map(_tensor_digest, tensors.values())))
    with suppress(OSError), replace_file(file) as partial:  # a directory that cannot be written costs time only
        recent = dict([*known.items()][1 - REMEMBERED :])
        partial.write_text(json.dumps({**recent, key: _sealed(key, found)}, indent=1), encoding="utf-8")
    return found


def _weight_files(path: Path) -> Iterator[tuple[str, int, int]]:
    """Path, size and time of the files that hold all weights of a model; none if some of them may be elsewhere."""
    if (path / "adapter_config.json").exists():
        return
    for file in [path] if path.is_file() else sorted(path.glob("*")):
        if path.is_file() or re.search(r"\.(safetensors|bin)$", file.name):
            status = file.stat()
            yield str(file.resolve()), status.st_size, status.st_mtime_ns


def _sealed(key: str, weights: str) -> str:
    return weights + _digest([key, weights])[:8]


def _tensor_digest(tensor: Tensor) -> str:
    content = sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    content.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return content.hexdigest()


def _digest(content: Any) -> str:
    return sha256(json.dumps(content, default=str).encode()).hexdigest()[:32]  # ASCII, also of lone surrogates
