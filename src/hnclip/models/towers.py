"""Two towers of different origin joined into one dual encoder with fresh projections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hnclip.files import read_settings
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.families import family_of
from hnclip.models.huggingface import open_backbone, open_image_transform, open_tokenizer, wrap

WIDTH = 512  # of the joint space, as CLIP B/16


def join_towers(image: Path, text: Path, *, width: int = WIDTH, tokenizer: Any = None) -> DualEncoder:
    """A dual encoder from the directories of a picture tower (DINOv2, ViT, …) and a text tower (MiniLM, BERT, …).

    The towers keep their weights; the two projections into the joint space are new, drawn from torch's random state,
    so the model knows nothing of pairs before it is trained.
    """
    from transformers import VisionTextDualEncoderConfig, VisionTextDualEncoderModel

    vision_model = _open_tower(image, "picture")
    text_model = _open_tower(text, "text")
    config = VisionTextDualEncoderConfig.from_vision_text_configs(
        vision_model.config, text_model.config, projection_dim=width
    )
    # transformers begins batch norms anew when it joins towers: it spares their weights, not their statistics.
    statistics = [(buffer, buffer.clone()) for tower in (vision_model, text_model) for buffer in tower.buffers()]
    backbone = VisionTextDualEncoderModel(config, vision_model, text_model).float()
    for buffer, before in statistics:
        buffer.copy_(before)
    family = family_of(config)
    transform = open_image_transform(image, family.kind, family.image_size(backbone))
    joined = wrap(backbone, tokenizer or open_tokenizer(text), transform).eval()  # as every model that was opened
    joined.source += ", projections fresh: train before use"
    _try(joined, image, text)
    return joined


@torch.no_grad()
def _try(joined: DualEncoder, image: Path, text: Path) -> None:
    """Some towers have no pooled output, which shows only when they are used."""
    size = joined.image_size
    for directory, encode in (
        (image, lambda: joined.encode_images(torch.zeros(1, 3, size, size, dtype=torch.uint8))),
        (text, lambda: joined.encode_texts(joined.tokenize(["a photo"]))),
    ):
        try:
            encode()
        except (AttributeError, TypeError) as error:
            raise ValueError(
                f"{directory} cannot be a tower: a dual encoder reads a pooled output, which it does not have"
            ) from error


def _open_tower(directory: Path, which: str) -> Any:
    """One tower, with the pooled output that a dual encoder reads."""
    from transformers import AutoModel

    file = directory / "config.json"
    if not file.is_file():
        raise ValueError(f"the {which} tower {directory} has no config.json: it is not a saved model")
    kind = read_settings(file).get("model_type")
    tower = open_backbone(directory, AutoModel, heads=True)
    if which == "picture" and tower.main_input_name != "pixel_values":
        raise ValueError(f"{directory} is a {kind} model, which does not take pictures: give the picture tower first")
    if which == "text" and tower.main_input_name != "input_ids":
        raise ValueError(f"{directory} is a {kind} model, which does not take texts: give the text tower second")
    if not isinstance(getattr(tower.config, "hidden_size", None), int):
        raise ValueError(f"{directory} is a {kind} model, whose width is not one number: it cannot be a {which} tower")
    return tower
