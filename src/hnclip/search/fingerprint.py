"""What embeddings depend on, as short names: the same model and the same records have the same ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hnclip.models.dual_encoder import DualEncoder

# Settings that change nothing of what a model computes: where it lies, and by which kernels it works.
from hnclip.core import InvalidImage, Record

_NO_MATTER = {"_name_or_path", "transformers_version", "_attn_implementation", "attn_implementation"}


def model_fingerprint(model: DualEncoder) -> str:
    """Weights, architecture, tokenizer, and what is done to pictures and captions; not where the model lies."""
    tokenizer, text = model.tokenizer, model.text_transform
    words = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items())
    content = sha256()
    for part in (
        json.dumps(_settings(model.backbone.config.to_dict()), sort_keys=True, default=str),
        repr(model.image_transform),
        repr((text.context, text.pad, text.clean.__qualname__)),
        repr(words),
    ):
        content.update(part.encode("utf-8", "surrogatepass"))
    for name, tensor in sorted(model.backbone.state_dict().items()):
        content.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        content.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return content.hexdigest()[:32]


def records_fingerprint(records: Sequence[Record]) -> str:
    """Ids and captions in their order; pictures have `pictures_fingerprint`."""
    content = sha256()
    for record in records:
        content.update(repr((record.id, record.captions)).encode("utf-8", "surrogatepass"))
    return content.hexdigest()[:32]


def pictures_fingerprint(records: Sequence[Record]) -> str:
    """What changes when a picture may have changed, appeared or gone, without reading it: of a file size and time."""
    content = sha256()
    for record in records:
        try:
            stamp = record.image.stamp()
        except InvalidImage as error:
            stamp = error.kind
        content.update(repr(stamp).encode("utf-8", "surrogatepass"))
    return content.hexdigest()[:32]


def _settings(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: _settings(value) for key, value in found.items() if key not in _NO_MATTER}
    return found
