from __future__ import annotations

import re

import pytest

from hnclip.evaluate.metrics import summarize
from hnclip.evaluate.ranks import retrieval_ranks
from hnclip.models.card import Training, model_card
from hnclip.models.load import save


@pytest.fixture
def training():
    import torch

    vectors = torch.eye(4)
    metrics = summarize(retrieval_ranks(vectors, vectors, torch.arange(4))).to_dict()
    return Training(
        base="bundled",
        data="scenes/park, 64 training pairs",
        objective={"global_loss": "hn", "gamma": 0.5},
        command="hnclip train --recipe paper --seed 7",
        metrics={"validation, epoch 2": metrics},
    )


def test_a_card_says_what_the_model_is(model):
    card = model_card(model)
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert card.count("\n---\n") == 1
    assert model.source in card
    assert "77 tokens" in card
    assert "shortest side to 96, centre crop of 96 × 96" in card
    assert "CLIPModel.from_pretrained(path)" in card
    assert "nothing was trained" in card


def test_a_card_says_how_it_was_trained(model, training):
    card = model_card(model, training)
    for words in ("Base: bundled", "64 training pairs", "| gamma | 0.5 |", training.command, "validation, epoch 2"):
        assert words in card
    assert re.search(r"\| validation, epoch 2 \|( 100.0 \|){6}", card)
    assert "nothing was trained" not in card


def test_the_card_is_saved_with_the_model(model, training, tmp_path):
    save(model, tmp_path / "model", training=training)
    assert (tmp_path / "model" / "README.md").read_text(encoding="utf-8") == model_card(model, training)


def test_the_card_is_read_by_the_hub_client(model, training):
    from huggingface_hub import ModelCard

    card = ModelCard(model_card(model, training))
    assert card.data.library_name == "transformers"
    assert "clip" in card.data.tags
