"""Models from and to disk: any supported layout in, plain Hugging Face directories out, nothing executed on loading."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from hnclip.files import replace_directory
from hnclip.models.adapters import has_adapters, open_adapter
from hnclip.models.card import write_card
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.hub import fetch_model, looks_like_hub_name
from hnclip.models.huggingface import image_processor, open_directory, open_tokenizer, quietly, wrap
from hnclip.models.long_context import KEEP, stretch_positions, stretched_length
from hnclip.models.open_clip_settings import OpenClipSettings
from hnclip.models.openai_layout import build_clip, is_openai_layout
from hnclip.models.sentence_transformers_files import sentence_transformers_files
from hnclip.models.tokenizer import openai_tokenizer
from hnclip.models.towers import join_towers
from hnclip.models.weights import read_checkpoint

BUNDLED = "bundled"
_OPEN_CLIP_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")


def load(
    model: str | Path = BUNDLED,
    *,
    context: int | None = None,
    keep: int = KEEP,
    ratio: int | None = None,
    tokenizer: str | Path | None = None,
    activation: Literal["quick_gelu", "gelu"] | None = None,
) -> DualEncoder:
    """Open a model. What was recognised is in its `source`.

    Args:
        model: one of
            `"bundled"`, the small model in this package;
            a Hugging Face directory, or a hub name `owner/model[@revision]`, of CLIP, SigLIP, SigLIP 2 or a
            `VisionTextDualEncoderModel`;
            `IMAGE+TEXT`, two such directories or names of single towers, joined by fresh projections;
            the directory of an adapter (LoRA, DoRA), which is merged into its base model;
            a file of weights in OpenAI's layout: CLIP, Long-CLIP, open_clip.
        context: the longest caption in tokens. A shorter model is stretched to it (`stretch`), a longer one is left
            as it is.
        keep, ratio: how it is stretched.
        tokenizer: a directory to take the tokenizer from instead of the model's own.
        activation: of a file of weights that does not say it: quick_gelu for OpenAI's, gelu for most of open_clip's.
    """
    opened = _open(str(model), None if tokenizer is None else open_tokenizer(Path(tokenizer)), activation)
    if context is not None and context > opened.context:
        stretch(opened, context=context, keep=keep, ratio=ratio)
    return opened


def _open(name: str, tokenizer: Any, activation: Any) -> DualEncoder:
    if name == BUNDLED:
        with as_file(files("hnclip.models") / BUNDLED) as directory:
            return open_directory(directory, tokenizer=tokenizer)
    path = Path(name)
    if path.is_file():
        return open_weights(path, tokenizer=tokenizer, activation=activation)
    if not path.exists() and name.count("+") == 1:
        image, text = (_directory(part) for part in name.split("+"))
        return join_towers(image, text, tokenizer=tokenizer)
    directory = _directory(name)
    if (directory / "adapter_config.json").is_file():
        return open_adapter(directory, tokenizer=tokenizer)
    if not (directory / "config.json").is_file():
        for file in _OPEN_CLIP_FILES:
            if (directory / file).is_file():
                return open_weights(directory / file, tokenizer=tokenizer, activation=activation)
    return open_directory(directory, tokenizer=tokenizer)


def _directory(name: str) -> Path:
    if Path(name).is_dir():
        return Path(name)
    if looks_like_hub_name(name):
        return fetch_model(name)
    raise ValueError(
        f"model {name!r} is neither {BUNDLED!r} nor a file or directory here; give a Hugging Face directory, a file of "
        "weights in OpenAI's layout, or the name of a hub model"
    )


def open_weights(file: Path, *, tokenizer: Any = None, activation: Any = None) -> DualEncoder:
    """A file of weights in OpenAI's layout: original CLIP, Long-CLIP, open_clip."""
    checkpoint = read_checkpoint(file)
    if not is_openai_layout(checkpoint.tensors):
        first = ", ".join(sorted(checkpoint.tensors)[:3])
        raise ValueError(
            f"{file} is not in OpenAI's layout (its tensors begin with {first}); a Hugging Face model is opened by its "
            "directory, not by its file of weights"
        )
    backbone, source = build_clip(checkpoint, activation=activation)
    image = OpenClipSettings.beside(file).image_transform(backbone.config.vision_config.image_size)
    return wrap(backbone, tokenizer or openai_tokenizer(file.parent), image, source=source)


def save(model: DualEncoder, directory: str | Path) -> None:
    """Write a directory that transformers and sentence-transformers open without hnclip, with a model card.

    The directory appears whole or not at all, and replaces one of the same name.
    """
    if has_adapters(model):
        raise ValueError("the model has adapters: merge_adapters first, or save_adapter to write them alone")
    with quietly(), replace_directory(Path(directory)) as partial:
        model.backbone.save_pretrained(partial)
        model.tokenizer.model_max_length = model.context
        model.tokenizer.save_pretrained(partial)
        image_processor(model).save_pretrained(partial)
        write_card(model, partial)
        for name, content in sentence_transformers_files(model).items():
            (partial / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def stretch(model: DualEncoder, *, context: int = 248, keep: int = KEEP, ratio: int | None = None) -> DualEncoder:
    """Give a model longer captions in place: 77 tokens become 248, the first 20 positions as they were.

    Args:
        context: the new length.
        keep: leading positions left as they are.
        ratio: how many new positions each later step becomes; the smallest that reaches `context` when left out.
            Rows beyond `context` are cut off.

    Refused for a model that is as long already, or that has been stretched before.
    """
    if has_adapters(model):
        raise ValueError("the model has adapters, which belong to it as it is: stretch it before they are added")
    holder = model.family.positions(model.backbone)
    table = holder.position_embedding.weight
    length = len(table)
    if context <= length:
        raise ValueError(f"the model takes {length} tokens already: stretching it to {context} would corrupt it")
    if ratio is None:
        ratio = math.ceil((context - keep) / max(1, length - keep))
    if (reach := stretched_length(length, keep=keep, ratio=ratio)) < context:
        raise ValueError(f"keep {keep} and ratio {ratio} stretch {length} positions to {reach}, not to {context}")
    stretched = stretch_positions(table.detach(), keep=keep, ratio=ratio)[:context]
    holder.position_embedding = nn.Embedding.from_pretrained(stretched.clone(), freeze=not table.requires_grad)
    holder.register_buffer("position_ids", torch.arange(context, device=table.device)[None], persistent=False)
    model.backbone.config.text_config.max_position_embeddings = context
    model.text_transform = replace(model.text_transform, context=context)
    model.source += f", stretched from {length} to {context} tokens (keep {keep}, ratio {ratio})"
    return model
