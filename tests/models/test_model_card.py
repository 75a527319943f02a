from __future__ import annotations

import pytest
from huggingface_hub import ModelCard

from hnclip.models.load import load, save
from hnclip.models.model_card import Training, model_card

RECALLS = {"R@1": 100.0, "R@5": 100.0, "R@10": 100.0}
TRAINING = Training(
    base="bundled",
    data="scenes/park, 64 training pairs",
    objective={"global_loss": "hn", "gamma": 0.5},
    command="hnclip train --recipe paper --seed 7",
    metrics={"validation, epoch 2": {"text_to_image": RECALLS, "image_to_text": RECALLS}},
)


def test_the_record_of_a_training_stays_with_the_model_and_its_card(model, tmp_path, caplog):
    """The client of the hub reads the card; weights that changed after they were saved are reported."""
    model.provenance = TRAINING
    save(model, tmp_path / "model")
    save(load(tmp_path / "model"), tmp_path / "again")
    again = load(tmp_path / "again")
    assert again.provenance == TRAINING
    text = (tmp_path / "again" / "README.md").read_text(encoding="utf-8")
    assert text == model_card(again)
    card = ModelCard(text)
    assert card.data.library_name == "transformers"
    assert all(words in card.text for words in ("bundled", "64 training pairs", TRAINING.command, "100.0"))
    assert not caplog.records
    weights = tmp_path / "again" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    load(tmp_path / "again")
    assert str(weights) in caplog.text
    (tmp_path / "again" / "training.json").write_text('{"base": 1, "wrong": 2}')
    with pytest.raises(ValueError, match=r"training\.json"):
        load(tmp_path / "again")
