"""Models from and to disk: plain Hugging Face directories, weights in safetensors, nothing executed on loading."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hnclip.files import replace_directory
from hnclip.models.dual_encoder import OPENAI_MEAN, OPENAI_STD, DualEncoder
from hnclip.models.long_context import KEEP, RATIO, stretch_positions

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

    config_file, weights_file = directory / "config.json", directory / "model.safetensors"
    if not config_file.is_file():
        raise ValueError(f"{directory} has no config.json: it is not a saved model")
    kind = _read_settings(config_file).get("model_type")
    if kind != "clip":
        raise ValueError(f"{config_file} says model_type {kind!r}; only 'clip' can be opened")
    if not weights_file.is_file():
        raise ValueError(f"{directory} has no model.safetensors; weights in other formats are not read")
    # Without its files transformers would quietly make up a tokenizer of two words.
    if not any((directory / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        raise ValueError(f"{directory} has no tokenizer.json: captions cannot be read without it")
    with _quietly():
        try:
            clip, info = CLIPModel.from_pretrained(
                directory,
                use_safetensors=True,
                local_files_only=True,
                dtype=torch.float32,  # weights stored in half precision are trained in full
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # named below, together with what is missing
            )
        except Exception as error:  # safetensors and transformers raise many types for a damaged file; say which file
            raise ValueError(f"{weights_file} cannot be read: {error}") from error
        if wrong := sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}):
            raise ValueError(f"{weights_file} lacks or misfits {len(wrong)} tensors, first: {wrong[0]}")
        tokenizer = CLIPTokenizer.from_pretrained(directory, local_files_only=True)
    mean, std = _picture_statistics(directory)
    return DualEncoder(clip, tokenizer, image_mean=mean, image_std=std)


def _picture_statistics(directory: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation from where an image processor or a whole processor keeps them, else OpenAI's."""
    settings: dict[str, Any] = {}
    if (file := directory / "preprocessor_config.json").is_file():
        settings = _read_settings(file)
    elif (file := directory / "processor_config.json").is_file():
        settings = _read_settings(file).get("image_processor", {})
    return tuple(settings.get("image_mean", OPENAI_MEAN)), tuple(settings.get("image_std", OPENAI_STD))


def _read_settings(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{file} holds {type(settings).__name__}, not an object of settings")
    return settings


@contextmanager
def _quietly() -> Iterator[None]:
    """No progress bars and load reports from transformers; its own settings come back afterwards."""
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


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
    with _quietly(), replace_directory(Path(directory)) as partial:
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
    return model
