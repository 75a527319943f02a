from __future__ import annotations

import pytest
import torch

from hnclip.data.scenes import scene_records


@pytest.fixture(scope="session")
def captions():
    """Dense captions of both styles."""
    return [r.captions[0] for style in ("park", "shelf") for r in scene_records(style, "train", families=20)]


@pytest.fixture(scope="session")
def tokenizer(captions):
    from hnclip.models.tokenizer import train_tokenizer

    return train_tokenizer(captions, 900)


@pytest.fixture
def model(tokenizer):
    """A small random model. Its weights are blown up, so that no two captions or pictures look alike to it."""
    from hnclip.models.huggingface import wrap
    from hnclip.models.tiny import tiny_clip

    torch.manual_seed(0)
    clip = tiny_clip(tokenizer).eval()
    with torch.no_grad():
        for weight in clip.parameters():
            if weight.ndim > 1:
                weight.mul_(4)
    return wrap(clip, tokenizer)
