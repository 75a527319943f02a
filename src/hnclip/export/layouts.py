"""The two layouts of an exported model: which files, which inputs, which settings beside them.

Both layouts give L2-normalised vectors and take batches of any size. What hnclip does to captions before they reach
the tokenizer (`hnclip.data.texts.clean_caption`: broken encodings, HTML) is no part of them; plain text needs none.

`onnx`, for any program:
    image.onnx                pixel_values [B, 3, H, W] float32, colours normalised -> image_embeds [B, D]
    text.onnx                 input_ids [B, T] int64, two towers also attention_mask -> text_embeds [B, D]
    tokenizer.json, …         ids, without padding and truncation
    preprocessor_config.json  pictures, as transformers reads it
    hnclip.json               context, padding, scale and the rest in a few lines
  T is any length up to the context; SigLIP was trained on texts padded to the context, so there T is the context.

`immich`, for the photo app of that name, version 3.1 (read at commit b26b0cc8 of immich-app/immich, in
machine-learning/immich_ml/models/: base.py, constants.py, transforms.py, clip/visual.py, clip/textual.py; its own
exports, in immich-app/ml-models at 8897fc0c, are normalised too):
    config.json                     text_cfg.context_length, to which every text is cut or padded on the right
    visual/model.onnx               image [B, 3, H, W] float32 -> image_embeds [B, D]
    visual/preprocess_cfg.json      size, mean, std, interpolation
    textual/model.onnx              text [B, context] int32, or for two towers input_ids and attention_mask, as its
                                    M-CLIP models -> text_embeds [B, D]
    textual/tokenizer.json          read by `tokenizers` alone, so all cleaning must be in it
    textual/tokenizer_config.json   pad_token, as a string
  immich knows its models by name, and the name alone says which inputs the text tower has and how wide the vectors
  are (CLIP_MODEL_INFO in server/src/constants.ts). So a model of one's own goes into the cache of models as
  `clip/NAME`, where NAME is a model that immich knows, of the same width; `export_onnx` reports one that fits. Three
  things to know there: a directory that fails to load is deleted and fetched anew; machines with ARM NN or RKNN look
  for other formats first and fetch immich's own model over this one, unless MACHINE_LEARNING_ANN or
  MACHINE_LEARNING_RKNN is false; and pictures always have their shortest side resized by bicubic interpolation and
  their centre cut out, whatever preprocess_cfg.json says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from hnclip.export.tokenizer_files import write_json, write_tokenizer
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.preprocessing import image_processor

Layout = Literal["onnx", "immich"]

# Names immich knows, by the width of their vectors. Only its M-CLIP models give the text tower an attention mask.
_IMMICH_NAMES = {
    512: "ViT-B-16__openai",
    640: "ViT-B-16-plus-240__laion400m_e32",
    768: "ViT-L-14__openai",
    1024: "ViT-H-14__laion2b-s32b-b79k",
    1152: "ViT-SO400M-16-SigLIP2-384__webli",
    1536: "ViT-gopt-16-SigLIP2-384__webli",
}
_IMMICH_TWO_TOWERS = {
    512: "XLM-Roberta-Large-Vit-B-32",
    640: "XLM-Roberta-Large-Vit-B-16Plus",
    768: "XLM-Roberta-Large-Vit-L-14",
}


@dataclass(frozen=True)
class Contract:
    """Where a layout keeps the graphs of a model, and what their inputs are."""

    image_file: str
    text_file: str
    image: str
    text: tuple[str, ...]  # the ids, and the mask where there is one
    integer: torch.dtype
    fixed: bool  # every text is padded to the context
    left: bool  # on its left side


def contract_of(model: DualEncoder, layout: Layout) -> Contract:
    fixed = model.family.fixed_length
    left = fixed and model.tokenizer.padding_side == "left"
    masked = ("input_ids", "attention_mask")
    if layout == "onnx":
        text = masked if is_two_towers(model) else masked[:1]
        return Contract("image.onnx", "text.onnx", "pixel_values", text, torch.int64, fixed=fixed, left=left)
    if left:
        raise ValueError("this model pads its texts on the left, immich always on the right: it would misread them")
    text = masked if is_two_towers(model) else ("text",)
    visual, textual = "visual/model.onnx", "textual/model.onnx"
    return Contract(visual, textual, "image", text, torch.int32, fixed=True, left=False)


def is_two_towers(model: DualEncoder) -> bool:
    return model.family.kind == "vision-text-dual-encoder"


def write_settings(model: DualEncoder, directory: Path, contract: Contract, dimension: int) -> None:
    """Everything of the plain layout but its graphs."""
    write_tokenizer(model.text_transform, directory)
    image, text = model.image_transform, model.text_transform
    image_processor(model.image_transform, model.backbone.config).save_pretrained(directory)
    bias = getattr(model.backbone, "logit_bias", None)  # SigLIP's
    about = {
        "source": model.source,
        "dimension": dimension,
        "scale": model.scale.item(),
        **({} if bias is None else {"bias": bias.item()}),
        "image_size": image.size,
        "mean": image.mean,
        "std": image.std,
        "pixel_values": f"float32 [batch, 3, {image.size}, {image.size}]: (byte / 255 - mean) / std, red green blue",
        "context": text.context,
        "pad": text.pad,
        "padding_side": "left" if contract.left else "right",
        "input_ids": f"int64 [batch, {text.context if contract.fixed else 'length'}]",
    }
    if is_two_towers(model):
        about["attention_mask"] = "int64 [batch, length]: 1 for tokens, 0 for padding"
    write_json(directory / "hnclip.json", about)


def write_immich_settings(model: DualEncoder, directory: Path, dimension: int) -> None:
    """Everything of immich's layout but its graphs."""
    write_tokenizer(model.text_transform, directory / "textual")
    if not (directory / "textual/tokenizer.json").is_file():
        kind = type(model.tokenizer).__name__
        raise ValueError(f"immich reads tokenizer.json, and a {kind} cannot be written as one")
    image, text = model.image_transform, model.text_transform
    preprocessing = {
        "size": [image.size, image.size],
        "mode": "RGB",
        "mean": image.mean,
        "std": image.std,
        "interpolation": image.resample,
        "resize_mode": "squash" if image.squash else "shortest",
    }
    write_json(directory / "visual/preprocess_cfg.json", preprocessing)
    config = {
        "embed_dim": dimension,
        "vision_cfg": {"image_size": image.size},
        "text_cfg": {"context_length": text.context, "vocab_size": len(text.tokenizer)},
    }
    write_json(directory / "config.json", config)


def immich_advice(model: DualEncoder, dimension: int) -> Iterator[str]:
    """What to do with the directory, and where immich will treat pictures otherwise than here."""
    known = _IMMICH_TWO_TOWERS if is_two_towers(model) else _IMMICH_NAMES
    if dimension in known:
        yield (
            f"immich takes names it knows only: put the directory into its cache of models as clip/{known[dimension]}, "
            "choose that name in the settings of smart search, and run that job for all pictures"
        )
    else:
        widths = ", ".join(str(width) for width in known)
        yield f"immich has no name for vectors of {dimension} numbers: its server stores those of {widths}"
    image = model.image_transform
    if image.squash or image.resample != "bicubic" or image.shortest not in (None, image.size):
        yield (
            f"immich resizes the shortest side to {image.size} (bicubic) and cuts out the centre; this model was made "
            "for pictures prepared otherwise"
        )
