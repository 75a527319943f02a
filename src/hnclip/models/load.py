"""Models from and to disk: `load`, `wrap` and `save`.

Reads every supported format without executing code from it; writes plain Hugging Face directories.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch

from hnclip.data.images import ImageTransform
from hnclip.data.texts import TextTransform, clean_caption
from hnclip.models.adapters import ABOUT, CONFIG, open_adapter
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.families import Family, family_of
from hnclip.models.long_context import KEEP, stretch
from hnclip.models.model_card import read_training, warn_of_changed_weights, write_card
from hnclip.models.openai_checkpoint import Activation, load_openai_checkpoint, open_clip_transform
from hnclip.models.preprocessing import (
    default_transform,
    image_processor,
    open_tokenizer,
    openai_tokenizer,
    read_image_transform,
    silence_transformers,
)
from hnclip.util.device import find_device
from hnclip.util.files import read_json, replace_directory

BUNDLED = "bundled"
RUN_CONFIG, RUN_RESULT = "config.json", "result.json"  # of a training run
JOINED_WIDTH = 512  # D of two joined towers, as in CLIP B/16
OPEN_CLIP_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*(@[\w./-]+)?")
HUB_SETTINGS = ["*.json", "*.txt", "*.model", "*.gz"]
# The weights of the first line that a repository has are downloaded.
HUB_WEIGHTS = (
    ["model.safetensors", "model-*-of-*.safetensors", "adapter_model.safetensors"],
    ["open_clip_model.safetensors"],
    ["pytorch_model.bin", "pytorch_model-*-of-*.bin", "adapter_model.bin"],
    ["open_clip_pytorch_model.bin"],
)


def load(
    model: str | Path = BUNDLED,
    *,
    context: int | None = None,
    keep: int = KEEP,
    ratio: int | None = None,
    tokenizer: str | Path | None = None,
    activation: Activation | None = None,
    device: str | torch.device = "cpu",
) -> DualEncoder:
    """Open a model, in evaluation mode. Its `source` describes what was recognised.

    Args:
        model: one of
            `"bundled"`, the small model in this package;
            a Hugging Face directory, or a hub name `owner/model[@revision]`, of CLIP, SigLIP, SigLIP 2 or a
            `VisionTextDualEncoderModel`;
            the directory of a run, for its best epoch;
            `IMAGE+TEXT`, two such directories or names of single towers, joined by untrained projections, which are
            the same at every load;
            the directory of an adapter (LoRA, DoRA), which is merged into its base model;
            a checkpoint file in OpenAI's layout: CLIP, Long-CLIP, open_clip.
        context: the longest text in tokens. A shorter model is stretched to it (`stretch`), a longer one stays as it
            is.
        keep, ratio: arguments of `stretch`.
        tokenizer: a directory with a tokenizer to use instead of the model's own.
        activation: activation function, if a checkpoint file does not specify one (OpenAI: quick_gelu; most open_clip
            models: gelu).
        device: where the model is placed; "auto" is the accelerator of the machine if it has one.
    """
    place = find_device(device)
    (_, path), *_ = models_of(str(model))
    opened = _open(path, None if tokenizer is None else open_tokenizer(Path(tokenizer)), activation)
    opened.name = path
    if context is not None and context > opened.context:
        stretch(opened, context=context, keep=keep, ratio=ratio)
    return opened.to(place)


def models_of(path: str) -> list[tuple[str, str]]:
    """The models that `--model` names, as (name for tables, path to load).

    A run directory gives its best epoch, chosen by validation, and its last; one model if they are the same epoch.
    Anything else is one model by its own name.
    """
    run = Path(path)
    config = run / RUN_CONFIG  # models have one as well; that of a run contains its settings
    if not (config.is_file() and {"objective", "optim"} <= read_json(config).keys()):
        return [(path, path)]
    epochs = {}
    for name in ("best", "last"):
        if (run / name).is_dir():
            training = read_training(run / name)
            epochs[name] = training and training.epoch
    if not epochs:
        raise ValueError(f"{run} is a run without a model: continue it with hnclip train --resume {run}")
    if len(epochs) == 2 and epochs["best"] is not None and epochs["best"] == epochs["last"]:
        labels = {"best": "best and last"}
    else:
        labels = {name: name for name in epochs}
    state = "" if (run / RUN_RESULT).is_file() else " so far"
    return [
        (f"{run} ({label}{state}{'' if epochs[name] is None else f', epoch {epochs[name]}'})", str(run / name))
        for name, label in labels.items()
    ]


def _open(name: str, tokenizer: Any, activation: Activation | None) -> DualEncoder:
    if name == BUNDLED:
        with as_file(files("hnclip.models") / BUNDLED) as directory:
            return _open_directory(directory, tokenizer)
    path = Path(name)
    if path.is_file():
        return _open_checkpoint(path, tokenizer, activation)
    if not path.exists() and name.count("+") == 1:
        image, text = (_find_directory(part) for part in name.split("+"))
        return join_towers(image, text, tokenizer=tokenizer)
    directory = _find_directory(name)
    if (directory / CONFIG).is_file():
        return open_adapter(directory, tokenizer=tokenizer)
    if not (directory / "config.json").is_file():
        for file in OPEN_CLIP_FILES:
            if (directory / file).is_file():
                return _open_checkpoint(directory / file, tokenizer, activation)
    return _open_directory(directory, tokenizer)


def _open_checkpoint(file: Path, tokenizer: Any, activation: Activation | None) -> DualEncoder:
    backbone, origin = load_openai_checkpoint(file, activation)
    config = backbone.config
    if tokenizer is None:
        tokenizer = openai_tokenizer(file.parent, config.text_config.vocab_size)
    model = wrap(backbone, tokenizer, open_clip_transform(file, config.vision_config.image_size))
    model.source = f"{origin}: {model.source}"
    return model


def _read_family(directory: Path) -> Family:
    if not (directory / "config.json").is_file():
        raise ValueError(f"{directory} is no directory of a model: it has no config.json")
    settings = read_json(directory / "config.json")
    if "optim" in settings:
        raise ValueError(f"{directory} is a training run: use one of its models, {directory / 'best'} or last")
    return family_of(settings.get("model_type"))


def _open_directory(directory: Path, tokenizer: Any) -> DualEncoder:
    family = _read_family(directory)
    training = read_training(directory)
    warn_of_changed_weights(directory, training)
    backbone = open_backbone(directory, family.backbone_class())
    image = read_image_transform(directory, family.kind, family.image_size(backbone))
    model = wrap(backbone, tokenizer or open_tokenizer(directory), image)
    model.provenance = training
    if (about := directory / ABOUT).is_file():
        model.untrained_projections = bool(read_json(about).get("untrained_projections"))
    return model


def is_hub_name(name: str) -> bool:
    """Whether a name is looked up on the Hugging Face hub: `owner/model` or `owner/model@revision`, unless there is a
    local directory `owner`, in which a mistyped path may have been meant."""
    return HUB_NAME.fullmatch(name) is not None and not Path(name.partition("/")[0]).is_dir()


def _find_directory(name: str) -> Path:
    """The local directory of a model, downloaded from the hub if necessary."""
    if Path(name).is_dir():
        return Path(name)
    if is_hub_name(name):
        return _download(name)
    hint = "use a path, the name of a hub model (owner/model) or 'bundled'"
    if HUB_NAME.fullmatch(name):
        hint = f"it was not looked up on the hub, because there is a local directory {name.partition('/')[0]!r}"
    raise ValueError(f"model {name!r}: no such file or directory; {hint}")


def _download(name: str) -> Path:
    """The local copy of a hub model: settings and one file format of weights, no code. With HF_HUB_OFFLINE=1 the model
    must be in the local cache."""
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")
    for weights in HUB_WEIGHTS:
        try:
            copy = snapshot_download(
                repository,
                revision=revision or None,
                allow_patterns=[*HUB_SETTINGS, *weights],
                ignore_patterns=["*/*"],
            )
        except Exception as error:  # the hub client raises its own errors and those of its transport
            raise ValueError(
                f"model {name!r}: no such file or directory, and not available from the hub: {error}"
            ) from error
        if any(any(Path(copy).glob(pattern)) for pattern in weights):
            return Path(copy)
    raise ValueError(f"hub model {name!r} has no weights in a supported format (.safetensors, .bin)")


def open_backbone(directory: Path, backbone_class: Any, *, allow_unused: bool = False) -> Any:
    """The weights of a Hugging Face directory in a model of this class, in fp32, memory-mapped if possible.

    Args:
        allow_unused: accept tensors that the class does not use, such as the heads of a single tower.
    """
    with silence_transformers():
        try:
            backbone, info = backbone_class.from_pretrained(
                directory,
                local_files_only=True,
                weights_only=True,
                dtype=torch.float32,  # weights stored in half precision are trained in full
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below, together with missing tensors
            )
        except Exception as error:  # torch, safetensors and transformers raise many types; name the directory
            raise ValueError(f"the model in {directory} cannot be read: {error}") from error
    for problem in ("mismatched", "missing", "unexpected"):
        names = sorted(map(str, info[f"{problem}_keys"]))
        if problem == "unexpected":  # a second positional table, for example, must not be lost silently
            names = [] if allow_unused else [name for name in names if not name.endswith("position_ids")]
        if names:
            raise ValueError(f"{directory} is no {backbone_class.__name__}: {problem} tensors {', '.join(names[:3])} …")
    return backbone


def join_towers(image: Path, text: Path, *, width: int = JOINED_WIDTH, tokenizer: Any = None) -> DualEncoder:
    """A dual encoder from the directories of an image tower (DINOv2, ViT, …) and a text tower (MiniLM, BERT, …).

    The towers keep their weights. The two projections into the joint space are random, the same at every call, and
    marked as untrained: image and text vectors are unrelated before training.
    """
    from transformers import AutoModel, VisionTextDualEncoderConfig, VisionTextDualEncoderModel

    towers = [open_backbone(directory, AutoModel, allow_unused=True) for directory in (image, text)]
    for tower, directory, inputs in zip(towers, (image, text), ("pixel_values", "input_ids")):
        if tower.main_input_name != inputs:
            raise ValueError(f"{directory}, a {tower.config.model_type}, takes no {inputs}; the order is IMAGE+TEXT")
    # transformers resets the statistics of batch norms, not the weights, when it joins towers.
    statistics = [(buffer, buffer.clone()) for tower in towers for buffer in tower.buffers()]
    try:
        config = VisionTextDualEncoderConfig.from_vision_text_configs(
            *(tower.config for tower in towers), projection_dim=width
        )
        backbone = VisionTextDualEncoderModel(config, *towers).float().eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for buffer, before in statistics:
                buffer.copy_(before)
            for projection in (backbone.visual_projection, backbone.text_projection):
                projection.weight.normal_(std=0.02, generator=generator)  # the distribution of transformers
        family = family_of(config.model_type)
        transform = read_image_transform(image, family.kind, family.image_size(backbone))
        joined = wrap(backbone, tokenizer or open_tokenizer(text), transform)
        with torch.no_grad():  # some towers have no pooled output, which only their use shows
            joined.encode_images(torch.zeros(1, 3, transform.size, transform.size, dtype=torch.uint8))
            joined.encode_texts(joined.tokenize(["a photo"]))
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{image} and {text} cannot be joined: {error}") from error
    joined.untrained_projections = True
    return joined


def wrap(
    backbone: Any, tokenizer: Any, image_transform: ImageTransform | None = None, *, source: str | None = None
) -> DualEncoder:
    """A `DualEncoder` around a transformers model in memory. Model, configuration and tokenizer are not changed.

    Args:
        backbone: `CLIPModel`, `SiglipModel`, `Siglip2Model` or `VisionTextDualEncoderModel`.
        tokenizer: a tokenizer of transformers.
        image_transform: its image preprocessing; default: that of its family. Two towers have no default.
        source: one line that describes the model; default: its architecture.
    """
    family = family_of(backbone.config.model_type)
    image = image_transform or default_transform(family.kind, family.image_size(backbone))
    text = _text_transform(family, backbone.config.text_config, tokenizer)
    model = DualEncoder(backbone, text, image, source=source or _describe(family, backbone, text, image))
    return model.train(backbone.training)


def _text_transform(family: Family, config: Any, tokenizer: Any) -> TextTransform:
    """Texts for CLIP are cleaned, as for OpenAI's vocabulary."""
    context = getattr(config, "max_position_embeddings", tokenizer.model_max_length)
    if family.kind == "vision-text-dual-encoder":
        # Some towers have positions for pads (RoBERTa: 514 rows, 512 tokens); their tokenizer knows the true length.
        context = min(context, tokenizer.model_max_length)
    vocabulary = getattr(config, "vocab_size", len(tokenizer))  # towers that hash characters have none
    if len(tokenizer) > vocabulary:
        raise ValueError(f"the tokenizer has {len(tokenizer)} symbols, the model embeds only {vocabulary}")
    return TextTransform(tokenizer, context, *([clean_caption] if family.kind == "clip" else []))


def _describe(family: Family, backbone: Any, text: TextTransform, image: ImageTransform) -> str:
    vision, words = backbone.config.vision_config, backbone.config.text_config
    if family.kind == "vision-text-dual-encoder":
        name = f"two towers, {vision.model_type} + {words.model_type}"
    else:
        layers = f"{vision.num_hidden_layers} + {words.num_hidden_layers} layers"
        name = f"{family.title} with patches of {vision.patch_size}, {layers}"
    millions = sum(weight.numel() for weight in backbone.parameters()) / 1e6
    return f"{name}, {millions:.1f} M parameters, {image.size} px, {text.context} tokens"


def save(model: DualEncoder, directory: str | Path, *, weights: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write a directory that transformers and sentence-transformers open without hnclip, with a model card.

    The directory is written atomically and replaces an existing one.

    Args:
        weights: the `state_dict` of the backbone, if the model itself holds only shards of it.
    """
    if model.has_adapters:
        raise ValueError("the model has adapters: merge_adapters first, or save_adapter to write them alone")
    with silence_transformers(), replace_directory(Path(directory)) as partial:
        config = model.backbone.config
        model.backbone.config = deepcopy(config)  # save_pretrained sets its dtype and architectures
        try:
            model.backbone.save_pretrained(partial, state_dict=weights)
        finally:
            model.backbone.config = config
        model.tokenizer.save_pretrained(partial)
        image_processor(model.image_transform, config).save_pretrained(partial)
        write_card(model, partial)
        contents = _sentence_transformers_files(model)
        # In the file, not in the user's tokenizer.
        contents["tokenizer_config.json"] = {
            **read_json(partial / "tokenizer_config.json"),
            "model_max_length": model.context,
        }
        if model.untrained_projections:
            contents[ABOUT] = {"format": 1, "untrained_projections": True}
        for name, content in contents.items():
            (partial / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sentence_transformers_files(model: DualEncoder) -> dict[str, Any]:
    """Files for sentence-transformers (5.4 and later), for families that it would read wrongly by itself.

    It pads texts to the longest of a batch and masks the pads; SigLIP reads the last position of texts that are padded
    to its context, with pads attended to. NaFlex's number of patches is taken from defaults, not from the processor.
    """
    if not model.family.fixed_length:
        return {}
    processing: dict[str, Any] = {"text": {"padding": "max_length", "return_attention_mask": False}}
    if model.family.kind == "siglip2":
        vision = model.backbone.config.vision_config
        processing["image"] = {"max_num_patches": vision.num_patches, "patch_size": vision.patch_size}

    def features(of: str) -> dict[str, str]:
        return {"method": f"get_{of}_features", "method_output_name": "pooler_output"}

    # The module with `modality_config`; its older name, sentence_transformers.models.Transformer, still resolves to it,
    # but versions before 5.4 have a text-only module under that name.
    transformer = "sentence_transformers.base.modules.transformer.Transformer"
    return {
        "modules.json": [{"idx": 0, "name": "0", "path": "", "type": transformer}],
        "sentence_bert_config.json": {
            "transformer_task": "feature-extraction",
            "modality_config": {"text": features("text"), "image": features("image")},
            "module_output_name": "sentence_embedding",
            "processing_kwargs": processing,
        },
    }
