"""Checkpoints in OpenAI's layout (CLIP, Long-CLIP, open_clip) as a `transformers.CLIPModel`.

Supported files: safetensors, and `torch.save` of a state dict or of a trainer's dictionary that contains one. Tensors
are memory-mapped, pickles are read with `weights_only=True`, and no code is executed. Architecture sizes come from
tensor shapes; the activation, unusual head widths and the image preprocessing come from an `open_clip_config.json` next
to the file.

The official CPU loaders of CLIP and Long-CLIP round linear weights through fp16; this one does not, so vectors may
differ from theirs in the fourth digit.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from hnclip.data.images import OPENAI_MEAN, OPENAI_STD, ImageTransform
from hnclip.models.long_context import KEEP
from hnclip.util.files import read_json

if TYPE_CHECKING:
    from transformers import CLIPModel

Activation = Literal["quick_gelu", "gelu"]

CONTAINERS = ("state_dict", "model_state_dict", "model")  # keys of trainers' dictionaries
RENAMES = {
    r"^visual\.class_embedding$": "vision_model.embeddings.class_embedding",
    r"^visual\.conv1\.": "vision_model.embeddings.patch_embedding.",
    r"^visual\.positional_embedding$": "vision_model.embeddings.position_embedding.weight",
    r"^visual\.ln_pre\.": "vision_model.pre_layrnorm.",
    r"^visual\.ln_post\.": "vision_model.post_layernorm.",
    r"^visual\.proj$": "visual_projection.weight",
    r"^visual\.transformer\.resblocks\.": "vision_model.encoder.layers.",
    r"^token_embedding\.": "text_model.embeddings.token_embedding.",
    r"^positional_embedding$": "text_model.embeddings.position_embedding.weight",
    r"^ln_final\.": "text_model.final_layer_norm.",
    r"^text_projection$": "text_projection.weight",
    r"^transformer\.resblocks\.": "text_model.encoder.layers.",
    r"\.ln_([12])\.": r".layer_norm\1.",
    r"\.mlp\.c_fc\.": ".mlp.fc1.",
    r"\.mlp\.c_proj\.": ".mlp.fc2.",
    r"\.attn\.": ".self_attn.",
}
# No meaning in a CLIPModel: attention masks, OpenAI's records of sizes, the bias of a sigmoid loss.
IGNORED = re.compile(r"(.*\.)?attn_mask|mask[12]|input_resolution|context_length|vocab_size|logit_bias")
# Settings of open_clip that change the model but no tensor, with the value of OpenAI's CLIP.
PLAIN: dict[str, dict[str, Any]] = {
    "vision_cfg": {"pool_type": "tok", "act_kwargs": None},
    "text_cfg": {"pool_type": "argmax", "act_kwargs": None, "no_causal_mask": False},
}
# OpenAI's TorchScript files, and the hub models with the same weights.
HUB_NAMES = {
    "ViT-B-32": "openai/clip-vit-base-patch32",
    "ViT-B-16": "openai/clip-vit-base-patch16",
    "ViT-L-14": "openai/clip-vit-large-patch14",
    "ViT-L-14-336px": "openai/clip-vit-large-patch14-336",
}


def _read_checkpoint(file: Path) -> tuple[dict[str, Tensor], set[str]]:
    """The tensors by name, memory-mapped, without the prefixes `module.` and `_orig_mod.`, and the keys of the
    trainer's dictionary around them. No code in the file is executed."""
    with file.open("rb") as handle:
        is_zip = handle.read(2) == b"PK" and zipfile.is_zipfile(handle)
    if is_zip:
        with zipfile.ZipFile(file) as archive:
            if any(name.endswith("/constants.pkl") for name in archive.namelist()):
                same = HUB_NAMES.get(file.stem.replace("@", "-"), " or ".join(HUB_NAMES.values()))
                raise ValueError(
                    f"{file} is a TorchScript archive, which contains code and is not opened. OpenAI's weights are on "
                    f"the hub: use --model {same}"
                )
    try:
        if file.suffix == ".safetensors":
            content = load_file(file)
        else:
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # many types; torch would advise to execute the code
        raise ValueError(
            f"{file} cannot be read: it is damaged, or it contains objects other than tensors, which would execute "
            "code. Save the state dict alone, preferably as safetensors"
        ) from error
    keys = set(content)
    for key in CONTAINERS:
        content = content[key] if isinstance(content.get(key), Mapping) else content
    prefixes = re.compile(r"^(module\.|_orig_mod\.)+|(?<=\.)_orig_mod\.")
    return {prefixes.sub("", name): value for name, value in content.items() if isinstance(value, Tensor)}, keys


def load_openai_checkpoint(file: Path, activation: Activation | None = None) -> tuple[CLIPModel, str]:
    """A `CLIPModel` in fp32 with the weights of `file`, and where they come from.

    Tensors in fp32 are used where the file is mapped, so opening takes little memory; training never changes the file.
    Long-CLIP's two positional tables become one: the first 20 rows of `positional_embedding`, the other rows of
    `positional_embedding_res`. Missing, unknown and mis-shaped tensors are errors.

    Args:
        activation: default: as in open_clip_config.json; without one QuickGELU, except for open_clip's own checkpoints,
            for which it must be given.

    Reference:
        Radford et al. 2021 (CLIP); Zhang et al. 2024 (Long-CLIP).
    """
    from transformers import CLIPConfig, CLIPModel

    (tensors, keys), settings = _read_checkpoint(file), open_clip_settings(file)
    from_open_clip = (
        bool(settings)
        or "text.token_embedding.weight" in tensors
        or file.name.startswith("open_clip")
        or {"epoch", "name"} <= keys  # the dictionary of open_clip's trainer
    )
    if activation is None:
        if from_open_clip and not settings:
            raise ValueError(
                f"{file} is a checkpoint of open_clip that does not specify its activation: pass activation gelu (most "
                "models of open_clip) or quick_gelu (trained from OpenAI's weights, or *-quickgelu), or add its "
                "open_clip_config.json"
            )
        activation = "gelu" if settings and not settings["model_cfg"].get("quick_gelu") else "quick_gelu"
    tensors = {name.removeprefix("text."): value for name, value in tensors.items()}
    residual = tensors.pop("positional_embedding_res", None)
    try:
        config = CLIPConfig(**_config(tensors, settings.get("model_cfg", {}), activation))
        if residual is not None:
            tensors["positional_embedding"] = torch.cat([tensors["positional_embedding"][:KEEP], residual[KEEP:]])
        with torch.device("meta"):  # no memory for weights that are replaced at once
            model = CLIPModel(config)
        model.load_state_dict(_convert(tensors), assign=True)
    except (KeyError, TypeError, RuntimeError, ValueError) as error:  # they name the tensors and shapes
        raise ValueError(f"{file} is no CLIP with ViT towers in OpenAI's layout: {error}") from error
    for embeddings in (model.text_model.embeddings, model.vision_model.embeddings):  # not part of the state dict
        embeddings.position_ids = torch.arange(len(embeddings.position_embedding.weight))[None]
    origin = "Long-CLIP" if residual is not None else "open_clip" if from_open_clip else "OpenAI"
    return model.eval(), f"{origin} checkpoint, {activation}"


def open_clip_settings(file: Path) -> dict[str, Any]:
    """The content of an `open_clip_config.json` next to a checkpoint; empty if there is none."""
    config = file.parent / "open_clip_config.json"
    if not config.is_file():
        return {}
    settings = read_json(config)
    for part, expected in PLAIN.items():
        found = settings["model_cfg"].get(part) if isinstance(settings.get("model_cfg"), dict) else None
        if not isinstance(found, dict):
            raise ValueError(f"{config} has no model_cfg.{part}")
        for key, value in expected.items():
            if found.get(key, value) != value:
                raise ValueError(f"{config}: {part}.{key} {found[key]!r} is not supported")
    return settings


def open_clip_transform(file: Path, size: int) -> ImageTransform:
    """The image preprocessing of a checkpoint: as in its open_clip_config.json, otherwise OpenAI's."""
    images = open_clip_settings(file).get("preprocess_cfg") or {}
    mode = images.get("resize_mode") or "shortest"
    if mode not in ("shortest", "squash"):
        raise ValueError(f"open_clip_config.json next to {file}: resize_mode {mode!r} is not supported")
    return ImageTransform(
        size,
        squash=mode == "squash",
        resample=images.get("interpolation") or "bicubic",
        mean=tuple(images.get("mean") or OPENAI_MEAN),
        std=tuple(images.get("std") or OPENAI_STD),
    )


def _config(tensors: Mapping[str, Tensor], settings: Mapping[str, Any], activation: Activation) -> dict[str, Any]:
    """Arguments of `CLIPConfig`, from tensor shapes and open_clip's `model_cfg`."""
    vocabulary, text_width = tensors["token_embedding.weight"].shape
    vision_width, _, patch, _ = tensors["visual.conv1.weight"].shape
    grid = isqrt(len(tensors["visual.positional_embedding"]) - 1)
    if vision_width > 1024 and not settings:
        raise ValueError("the head width of towers wider than ViT-L is unknown: add the model's open_clip_config.json")
    vision = settings.get("vision_cfg", {})
    text = {"heads": 8, **settings["text_cfg"]} if settings else {}  # 8 is open_clip's default
    joint = tensors["text_projection"].shape[1]

    def tower(width: int, prefix: str, options: Mapping[str, Any]) -> dict[str, Any]:
        block = re.compile(rf"{prefix}transformer\.resblocks\.(\d+)\.")
        return {
            "hidden_size": width,
            "intermediate_size": len(tensors[f"{prefix}transformer.resblocks.0.mlp.c_fc.bias"]),
            "num_hidden_layers": len({match[1] for name in tensors if (match := block.match(name))}),
            "num_attention_heads": options.get("heads", width // options.get("head_width", 64)),
            "hidden_act": activation,
            "layer_norm_eps": (options.get("norm_kwargs") or {}).get("eps", 1e-5),
            "projection_dim": joint,
        }

    return {
        "projection_dim": joint,
        "vision_config": {
            **tower(vision_width, "visual.", vision),
            "image_size": grid * patch,
            "patch_size": patch,
        },
        "text_config": {
            **tower(text_width, "", text),
            "vocab_size": vocabulary,
            "max_position_embeddings": len(tensors["positional_embedding"]),
            # OpenAI's vocabularies end with the start and the end token, and OpenAI pools at the highest id.
            "bos_token_id": vocabulary - 2,
            "eos_token_id": vocabulary - 1,
            "pad_token_id": vocabulary - 1,
        },
    }


def _convert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names and orientation of `CLIPModel`, in fp32: projections transposed, packed query–key–value weights split."""
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if IGNORED.fullmatch(name):
            continue
        if not tensor.is_floating_point():
            raise ValueError(f"{name} has dtype {tensor.dtype}; quantised weights are not supported")
        if name in ("text_projection", "visual.proj"):
            tensor = tensor.T
        if name == "logit_scale":
            tensor = tensor.reshape(())
        for pattern, target in RENAMES.items():
            name = re.sub(pattern, target, name)
        if ".in_proj_" in name:
            for part, piece in zip("qkv", tensor.chunk(3)):
                state[name.replace("in_proj_", f"{part}_proj.")] = piece.float().contiguous()
        else:
            state[name] = tensor.float().contiguous()
    return state
