"""What all tests share: settings of the property tests, and a model small enough to be on disk for each of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples on every run, however slow the machine; `--hypothesis-profile=explore` looks for new ones.
settings.register_profile("steady", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("steady")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Training comes first. Some of its modules begin with minutes of several processes: near the end each worker would
    take some of their tests from the other, and begin them again."""
    items.sort(key=lambda item: item.path.parent.name != "training")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Commands configure the package's logger; the next test starts without its handlers."""
    yield
    root = logging.getLogger("hnclip")
    for handler in [*root.handlers]:
        root.removeHandler(handler)
    root.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True, scope="session")
def image_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An image cache of the tests' own: the user's is neither read nor filled."""
    directory = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HNCLIP_CACHE", str(directory))
        yield directory


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained CLIP of two narrow layers per tower, 248 tokens long, with a tokenizer of its own."""
    import torch
    from transformers import CLIPConfig, CLIPModel

    from hnclip.data.scenes import scene_records
    from hnclip.models.load import save, wrap
    from hnclip.models.preprocessing import train_tokenizer

    texts = [record.captions[0] for record in scene_records("park", "train", families=50, members=4)]
    tokenizer = train_tokenizer(texts, 700)
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPConfig(
        projection_dim=32,
        text_config={
            **tower,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 248,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "attention_dropout": 0.1,  # so that an inexact random state shows
        },
        vision_config={**tower, "image_size": 48, "patch_size": 16, "attention_dropout": 0.1},
    )
    torch.manual_seed(0)
    model = wrap(CLIPModel(config), tokenizer)
    directory = tmp_path_factory.mktemp("models") / "small"
    save(model, directory)
    return directory
