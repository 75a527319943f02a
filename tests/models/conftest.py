from __future__ import annotations

import pytest
import torch

from hnclip.data.scenes import scene_records
from hnclip.models.load import save, wrap
from hnclip.models.preprocessing import train_tokenizer
from small_families import WRITERS


@pytest.fixture(scope="session")
def captions():
    """Dense captions of both domains."""
    return [r.captions[0] for domain in ("park", "shelf") for r in scene_records(domain, "train", families=40)]


@pytest.fixture(scope="session")
def tokenizer(captions):
    return train_tokenizer(captions, 900)


@pytest.fixture
def model(tokenizer):
    """A small random model. Its weights are scaled up, so that different captions and images have different vectors."""
    from transformers import CLIPConfig, CLIPModel

    tower = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = CLIPConfig(
        projection_dim=128,
        text_config={**tower, **special, "vocab_size": len(tokenizer), "max_position_embeddings": 77},
        vision_config={**tower, "image_size": 96, "patch_size": 16},
    )
    torch.manual_seed(0)
    clip = CLIPModel(config).eval()
    with torch.no_grad():
        for weight in clip.parameters():
            if weight.ndim > 1:
                weight.mul_(4)
    return wrap(clip, tokenizer)


@pytest.fixture
def saved(model, tmp_path):
    save(model, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="session")
def directories(tmp_path_factory, model_directory):
    """A saved model of every family."""
    root = tmp_path_factory.mktemp("families")
    return {"clip": model_directory, **{kind: write(root / kind) for kind, write in WRITERS.items()}}
