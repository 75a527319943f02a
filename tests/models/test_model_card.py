from __future__ import annotations

import pytest
from huggingface_hub import ModelCard

from hnclip.models.load import load, save
from hnclip.models.model_card import Training, model_card

RECALLS = {"R@1": 100.0, "R@5": 100.0, "R@10": 100.0}


@pytest.fixture
def training():
    return Training(
        base="bundled",
        data="scenes/park, 64 training pairs",
        objective={"global_loss": "hn", "gamma": 0.5},
        command="hnclip train --recipe paper --seed 7",
        metrics={"validation, epoch 2": {"text_to_image": RECALLS, "image_to_text": RECALLS}},
    )


def test_a_card_describes_the_training_and_is_read_by_the_hub_client(model, training):
    model.provenance = training
    card = ModelCard(model_card(model))
    assert card.data.library_name == "transformers"
    assert "clip" in card.data.tags
    row = "| validation, epoch 2 |" + 6 * " 100.0 |"
    for words in ("Base: bundled", "64 training pairs", "| gamma | 0.5 |", training.command, row):
        assert words in card.text


def test_the_record_of_a_training_stays_with_the_model(model, training, tmp_path):
    model.provenance = training
    save(model, tmp_path / "model")
    save(load(tmp_path / "model"), tmp_path / "again")
    again = load(tmp_path / "again")
    assert again.provenance == training
    assert (tmp_path / "again" / "README.md").read_text(encoding="utf-8") == model_card(again)
    (tmp_path / "again" / "training.json").write_text('{"base": 1, "wrong": 2}')
    with pytest.raises(ValueError, match=r"training\.json"):
        load(tmp_path / "again")


def test_weights_that_changed_after_they_were_saved_are_reported(model, training, tmp_path, caplog):
    model.provenance = training
    save(model, tmp_path / "model")
    load(tmp_path / "model")
    assert not caplog.records
    weights = tmp_path / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    load(tmp_path / "model")
    assert str(weights) in caplog.text
    save(load(tmp_path / "model"), tmp_path / "again")  # the change is kept and recorded
    caplog.clear()
    load(tmp_path / "again")
    assert not caplog.records
