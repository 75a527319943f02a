from __future__ import annotations

import re

import pytest

from hnclip.evaluate.metrics import summarize
from hnclip.evaluate.ranks import retrieval_ranks
from hnclip.models.load import load, save
from hnclip.models.model_card import Training, model_card


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


def test_a_card_says_how_it_was_trained(model, training):
    model.provenance = training
    card = model_card(model)
    for words in ("Base: bundled", "64 training pairs", "| gamma | 0.5 |", training.command, "validation, epoch 2"):
        assert words in card
    assert re.search(r"\| validation, epoch 2 \|( 100.0 \|){6}", card)


def test_what_is_known_of_a_training_stays_with_the_model(model, training, tmp_path):
    model.provenance = training
    save(model, tmp_path / "model")
    assert (tmp_path / "model" / "README.md").read_text(encoding="utf-8") == model_card(model)
    again = load(tmp_path / "model")
    assert again.provenance == training
    save(again, tmp_path / "again")
    assert load(tmp_path / "again").provenance == training


def test_a_damaged_record_of_a_training_is_named(model, training, tmp_path):
    model.provenance = training
    save(model, tmp_path / "model")
    (tmp_path / "model" / "training.json").write_text('{"base": 1, "wrong": 2}')
    with pytest.raises(ValueError, match=r"training\.json"):
        load(tmp_path / "model")


def test_the_card_is_read_by_the_hub_client(model, training):
    from huggingface_hub import ModelCard

    model.provenance = training
    card = ModelCard(model_card(model))
    assert card.data.library_name == "transformers"
    assert "clip" in card.data.tags
