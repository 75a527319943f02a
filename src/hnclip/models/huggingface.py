"""Directories in Hugging Face layout: a configuration, weights, a tokenizer and a picture processor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hnclip.data.images import ImageTransform
from hnclip.data.texts import TextTransform, clean_caption
from hnclip.files import read_settings
from hnclip.models.card import read_training
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.families import FAMILIES, Family, family_of
from hnclip.models.processors import build_processor, default_transform, processor_size, read_processor
from hnclip.models.weights import check_safetensors, read_checkpoint

ANY_SIZE = 224  # pixels, where neither the model nor its processor says a size
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.model")
_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def open_directory(directory: Path, *, tokenizer: Any = None) -> DualEncoder:
    """A directory that `save_pretrained` wrote, of any supported family."""
    family = _family(directory)
    backbone = open_backbone(directory, family.backbone_class())
    image = open_image_transform(directory, family.kind, family.image_size(backbone))
    model = wrap(backbone, tokenizer or open_tokenizer(directory), image)
    model.provenance = read_training(directory)
    return model


def wrap(
    backbone: Any, tokenizer: Any, image_transform: ImageTransform | None = None, *, source: str | None = None
) -> DualEncoder:
    """A `DualEncoder` around a model of transformers that is in memory already.

    Args:
        backbone: `CLIPModel`, `SiglipModel`, `Siglip2Model` or `VisionTextDualEncoderModel`.
        tokenizer: a tokenizer of transformers.
        image_transform: how it wants its pictures; left out, as its family does. Two towers have no way of their own.

    It trains if the backbone does; what was opened from disk does not (`eval`), as in transformers.
    """
    family = family_of(backbone.config)
    image = image_transform or default_transform(family.kind, family.image_size(backbone))
    text = _text_transform(family, backbone, tokenizer)
    model = DualEncoder(backbone, text, image, source=source or _describe(family, backbone, text, image))
    return model.train(backbone.training)


def _family(directory: Path) -> Family:
    file = directory / "config.json"
    if not file.is_file():
        raise ValueError(f"{directory} has no config.json: it is not a saved model")
    kind = read_settings(file).get("model_type")
    if kind not in FAMILIES:
        if "optim" in read_settings(file):
            raise ValueError(f"{file.parent} is a training run: name one of its models, {file.parent / 'best'} or last")
        raise ValueError(f"{file} says model_type {kind!r}; supported are {', '.join(FAMILIES)}")
    return FAMILIES[kind]


def open_backbone(directory: Path, backbone_class: Any, *, heads: bool = False) -> Any:
    """The weights of a directory in a model of this class, memory-mapped where the file allows it, in fp32.

    Args:
        heads: whether there may be tensors that the class does not use, as the heads of a single tower.
    """
    file = next((directory / name for name in _WEIGHT_FILES if (directory / name).is_file()), None)
    if file is None:
        raise ValueError(f"{directory} has no weights: looked for {', '.join(_WEIGHT_FILES)}")
    for shard in _shards(file):
        if not shard.is_file():
            raise ValueError(f"{shard} is missing, though {file.name} names it")
        if shard.suffix == ".safetensors":
            check_safetensors(shard)
        else:
            read_checkpoint(shard)  # refuses code and says what is wrong; mapped, so it costs little
    with quietly():
        try:
            backbone, info = backbone_class.from_pretrained(
                directory,
                use_safetensors=".safetensors" in file.name,
                local_files_only=True,
                weights_only=True,
                dtype=torch.float32,  # weights stored in half precision are trained in full
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # named below, together with what is missing
            )
        except Exception as error:  # torch and transformers raise many types for a damaged file; say which file
            raise ValueError(f"{file} cannot be read: {error}") from error
    for name, found, expected in sorted(info["mismatched_keys"]):
        raise ValueError(f"{file}: tensor {name} has shape {list(found)}, the configuration needs {list(expected)}")
    if missing := sorted(info["missing_keys"]):
        shape = list(backbone.state_dict()[missing[0]].shape)
        more = f", and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise ValueError(f"{file} lacks tensor {missing[0]}, expected with shape {shape}{more}")
    # A longer table of positions under another name, say, is not to be lost without a word.
    unused = sorted(name for name in info["unexpected_keys"] if not name.endswith("position_ids"))
    if unused and not heads:
        more = f", and {len(unused) - 1} others" if len(unused) > 1 else ""
        raise ValueError(f"{file} holds tensor {unused[0]}, for which {type(backbone).__name__} has no place{more}")
    return backbone


def _shards(file: Path) -> list[Path]:
    if file.suffix != ".json":
        return [file]
    names = read_settings(file).get("weight_map", {}).values()
    return [file.parent / name for name in sorted(set(names))]


def open_tokenizer(directory: Path) -> Any:
    """The tokenizer of a directory, fast where there is one."""
    from transformers import AutoTokenizer

    # Without its files transformers would quietly make up a tokenizer of two words.
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(f"{directory} has no tokenizer.json: captions cannot be read without it")
    with quietly():
        try:
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except ImportError as error:
            raise ValueError(
                f"the tokenizer in {directory} needs another package: {error}; SigLIP's needs `pip install "
                "hnclip[siglip]`"
            ) from error
        except Exception as error:  # many types for damaged files
            raise ValueError(f"the tokenizer in {directory} cannot be read: {error}") from error
    for name in ("is_local", "local_files_only"):  # how it was opened is nothing to be saved with it
        tokenizer.init_kwargs.pop(name, None)
    return tokenizer


def _text_transform(family: Family, backbone: Any, tokenizer: Any) -> TextTransform:
    """Captions for this backbone. OpenAI's vocabulary was made for cleaned texts, so CLIP's captions are cleaned."""
    config = backbone.config.text_config
    context = getattr(config, "max_position_embeddings", None)
    longest = getattr(tokenizer, "model_max_length", None)
    if family.kind == "vision-text-dual-encoder":
        # Some towers keep positions for pads (RoBERTa: 514 rows, 512 tokens); their tokenizer knows the true length.
        context = min(value for value in (context, longest) if value)
    if not context:
        raise ValueError(f"neither the {config.model_type} text tower nor its tokenizer says how long a text may be")
    vocabulary = getattr(config, "vocab_size", None)
    if vocabulary is not None and len(tokenizer) > vocabulary:
        raise ValueError(f"the tokenizer has {len(tokenizer)} symbols, the model embeds only {vocabulary}")
    if family.kind == "clip":
        return TextTransform(tokenizer, context, clean_caption)
    return TextTransform(tokenizer, context)


def open_image_transform(directory: Path, kind: str, image_size: int | None) -> ImageTransform:
    """From where an image processor or a whole processor keeps its settings, else as the family does.

    Args:
        image_size: what the model takes; None for one that takes what the processor says.
    """
    settings: dict[str, Any] = {}
    if (file := directory / "preprocessor_config.json").is_file():
        settings = read_settings(file)
    elif (file := directory / "processor_config.json").is_file():
        settings = read_settings(file).get("image_processor", {})
    try:
        if not settings:
            return default_transform(kind, image_size)
        return read_processor(settings, model_image_size=image_size or processor_size(settings) or ANY_SIZE)
    except ValueError as error:
        raise ValueError(f"{file if settings else directory}: {error}") from error


def image_processor(model: DualEncoder) -> Any:
    """The processor of transformers that gives this model its pictures."""
    patch = getattr(model.backbone.config.vision_config, "patch_size", 16)  # only SigLIP 2's processor asks
    return build_processor(model.image_transform, model.family.kind, patch_size=patch)


def _describe(family: Family, backbone: Any, text: TextTransform, image: ImageTransform) -> str:
    """What was recognised, in one line for people."""
    vision, words = backbone.config.vision_config, backbone.config.text_config
    if family.kind == "vision-text-dual-encoder":
        name = f"two towers, {vision.model_type} + {words.model_type}"
    else:
        layers = f"{vision.num_hidden_layers} + {words.num_hidden_layers} layers"
        name = f"{family.title} with patches of {vision.patch_size}, {layers}"
    millions = sum(weight.numel() for weight in backbone.parameters()) / 1e6
    return f"{name}, {millions:.1f} M parameters, {image.size} px, {text.context} tokens"


@contextmanager
def quietly() -> Iterator[None]:
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
