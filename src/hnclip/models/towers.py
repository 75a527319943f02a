"""Two towers of different origin joined into one dual encoder with fresh projections."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from hnclip.files import read_settings
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.families import family_of
from hnclip.models.huggingface import open_backbone, open_image_transform, open_tokenizer, wrap

WIDTH = 512  # of the joint space, as CLIP B/16
SCALE = 14.3  # where CLIP's temperature starts, 1 / 0.07


def join_towers(image: Path, text: Path, *, width: int = WIDTH, tokenizer: Any = None) -> DualEncoder:
    """A dual encoder from the directories of a picture tower (DINOv2, ViT, …) and a text tower (MiniLM, BERT, …).

    The towers keep their weights; the two projections into the joint space are new, drawn from torch's random state,
    so the model knows nothing of pairs before it is trained.
    """
    from transformers import VisionTextDualEncoderConfig, VisionTextDualEncoderModel

    vision_model = _open_tower(image, "picture")
    text_model = _open_tower(text, "text")
    config = VisionTextDualEncoderConfig.from_vision_text_configs(
        vision_model.config,
        text_model.config,
        projection_dim=width,
        logit_scale_init_value=float(torch.tensor(SCALE).log()),
    )
    backbone = VisionTextDualEncoderModel(config, vision_model, text_model).float()
    transform = open_image_transform(image, family_of(config).image_size(backbone))
    joined = wrap(backbone, tokenizer or open_tokenizer(text), transform)
    joined.source += ", projections fresh: train before use"
    return joined


def _open_tower(directory: Path, which: str) -> Any:
    """One tower, with the pooled output that a dual encoder reads."""
    from transformers import AutoConfig, AutoModel

    file = directory / "config.json"
    if not file.is_file():
        raise ValueError(f"the {which} tower {directory} has no config.json: it is not a saved model")
    kind = read_settings(file).get("model_type")
    try:
        backbone_class = AutoModel._model_mapping[type(AutoConfig.from_pretrained(directory, local_files_only=True))]
    except (KeyError, ValueError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} says model_type {kind!r}, which transformers cannot open as a tower") from error
    tower = open_backbone(directory, backbone_class)
    if which == "picture" and tower.main_input_name != "pixel_values":
        raise ValueError(f"{directory} is a {kind} model, which does not take pictures: give the picture tower first")
    if which == "text" and tower.main_input_name != "input_ids":
        raise ValueError(f"{directory} is a {kind} model, which does not take texts: give the text tower second")
    if not isinstance(getattr(tower.config, "hidden_size", None), int):
        raise ValueError(f"{directory} is a {kind} model, whose width is not one number: it cannot be a {which} tower")
    return tower
