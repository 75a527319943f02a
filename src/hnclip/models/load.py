"""Models from and to disk: plain Hugging Face directories, weights in safetensors, nothing executed on loading."""

from __future__ import annotations

import json
from importlib.resources import as_file, files
from pathlib import Path

import torch
from torch import nn

from hnclip.files import replace_directory
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.long_context import KEEP, RATIO, stretch_positions
from hnclip.models.tiny import OPENAI_MEAN, OPENAI_STD

BUNDLED = "bundled"


def load(model: str | Path = BUNDLED) -> DualEncoder:
    """Open a model: `"bundled"` for the one in this package, or the path of a Hugging Face CLIP directory."""
    if str(model) == BUNDLED:
        with as_file(files("hnclip.models") / BUNDLED) as directory:
            return _load_directory(directory)
    directory = Path(model)
    if not directory.is_dir():
        raise ValueError(
            f"model {str(model)!r} is neither {BUNDLED!r} nor a directory; give the path of a directory that "
            "CLIPModel.save_pretrained wrote"
        )
    return _load_directory(directory)


def _load_directory(directory: Path) -> DualEncoder:
    from transformers import CLIPModel, CLIPTokenizer

    config_file = directory / "config.json"
    if not config_file.is_file():
        raise ValueError(f"{directory} has no config.json: it is not a saved model")
    try:
        kind = json.loads(config_file.read_text(encoding="utf-8")).get("model_type")
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{config_file} is not valid JSON: {error}") from error
    if kind != "clip":
        raise ValueError(f"{config_file} says model_type {kind!r}; only 'clip' can be opened")
    if not (directory / "model.safetensors").is_file():
        raise ValueError(f"{directory} has no model.safetensors; weights in other formats are not read")
    try:
        clip, info = CLIPModel.from_pretrained(
            directory, use_safetensors=True, output_loading_info=True, local_files_only=True
        )
    except Exception as error:  # safetensors and transformers raise many types for a damaged file; say which file
        raise ValueError(f"{directory / 'model.safetensors'} cannot be read: {error}") from error
    if info["missing_keys"] or info["mismatched_keys"]:
        wrong = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
        raise ValueError(f"{directory / 'model.safetensors'} lacks or misfits {len(wrong)} tensors, first: {wrong[0]}")
    tokenizer = CLIPTokenizer.from_pretrained(directory, local_files_only=True)
    mean, std = _picture_statistics(directory)
    return DualEncoder(clip, tokenizer, image_mean=mean, image_std=std)


def _picture_statistics(directory: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    file = directory / "preprocessor_config.json"
    if not file.is_file():
        return OPENAI_MEAN, OPENAI_STD
    settings = json.loads(file.read_text(encoding="utf-8"))
    return tuple(settings.get("image_mean", OPENAI_MEAN)), tuple(settings.get("image_std", OPENAI_STD))


def save(model: DualEncoder, directory: str | Path) -> None:
    """Write a directory that `CLIPModel.from_pretrained` and `CLIPProcessor.from_pretrained` open without hnclip.

    The directory appears whole or not at all, and replaces one of the same name.
    """
    from transformers import CLIPImageProcessorPil

    size = model.image_size
    processor = CLIPImageProcessorPil(
        size={"shortest_edge": size},
        crop_size={"height": size, "width": size},
        image_mean=model.image_mean.flatten().tolist(),
        image_std=model.image_std.flatten().tolist(),
    )
    with replace_directory(Path(directory)) as partial:
        model.clip.save_pretrained(partial)
        model.tokenizer.model_max_length = model.context
        model.tokenizer.save_pretrained(partial)
        processor.save_pretrained(partial)


def stretch(model: DualEncoder, *, keep: int = KEEP, ratio: int = RATIO) -> DualEncoder:
    """Give a model longer captions in place: 77 tokens become 248. Refused when it is long already."""
    embeddings = model.clip.text_model.embeddings
    table = embeddings.position_embedding.weight
    stretched = stretch_positions(table.detach(), keep=keep, ratio=ratio)
    length = len(stretched)
    embeddings.position_embedding = nn.Embedding(length, table.shape[1], device=table.device, dtype=table.dtype)
    with torch.no_grad():
        embeddings.position_embedding.weight.copy_(stretched)
    embeddings.register_buffer("position_ids", torch.arange(length, device=table.device)[None], persistent=False)
    model.clip.config.text_config.max_position_embeddings = length
    model.clip.text_model.config.max_position_embeddings = length
    return model
