"""Readouts inside the encoder: which views they read, and what they are given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from hnclip.core import Batch
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load
from hnclip.models.readout import Readout, TowerOutput

TEXTS = {"caption": ["a red ball lies under a tall green tree", "two dogs"], "sentence": ["a ball", "one dog sleeps"]}


class AllTokens(Readout):
    """What the encoder does by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(()))
        self.seen: list[TowerOutput] = []

    def forward(self, seen: TowerOutput) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen.append(seen)
        return self.factor * F.normalize(seen.project(seen.hidden), dim=-1), seen.inside


@pytest.fixture
def model(model_directory: Path) -> DualEncoder:
    return load(str(model_directory)).eval()


def batch_for(model: DualEncoder) -> Batch:
    generator = torch.Generator().manual_seed(0)
    side = model.image_size
    pixels = {
        name: torch.randint(0, 256, (2, 3, side, side), dtype=torch.uint8, generator=generator)
        for name in ("full", "crop")
    }
    texts = {name: model.tokenize(said) for name, said in TEXTS.items()}
    ids = torch.tensor([[0, 0], [1, 1]])
    return Batch(pixels, texts, ids, present={"crop": torch.tensor([True, False])})


def test_a_readout_can_be_what_tokens_are(model: DualEncoder) -> None:
    """Patches and words through norm and projection of the tower, of two views that are encoded together."""
    batch = batch_for(model)
    expected = model(batch, tokens=True)
    model.readouts.update({name: AllTokens() for name in ("full", "sentence")})
    found = model(batch, tokens=True)
    for name, side in {"full": "images", "sentence": "texts"}.items():
        view, other = getattr(found, side)[name], getattr(expected, side)[name]
        width = other.tokens.shape[1]
        torch.testing.assert_close(view.vectors, other.vectors, rtol=0, atol=1e-6)
        mask = other.mask
        assert view.mask[:, :width][mask].all()
        torch.testing.assert_close(view.tokens[:, :width][mask], other.tokens[mask], rtol=0, atol=1e-6)
    assert found.images["crop"].tokens is None
    assert found.texts["caption"].tokens is None


def test_without_tokens_no_readout_runs(model: DualEncoder) -> None:
    model.readouts["full"] = readout = AllTokens()
    found = model(batch_for(model))
    assert found.images["full"].tokens is None
    assert not readout.seen
    assert torch.equal(found.images["crop"].present, torch.tensor([True, False]))
    assert found.images["full"].present is None


def test_what_a_readout_is_given(model: DualEncoder) -> None:
    parts = torch.tensor([[[1, 3]], [[0, 0]]])
    batch = replace(batch_for(model), parts={"caption": parts})
    model.readouts["caption"] = readout = AllTokens()
    model(batch, tokens=True)
    (seen,) = readout.seen
    lengths = batch.texts["caption"].lengths
    assert torch.equal(seen.inside.sum(1), lengths)
    assert torch.equal(seen.parts, parts)
    # The end token's hidden state, through norm and projection, is the caption's vector.
    end = seen.hidden[torch.arange(2), lengths - 1]
    torch.testing.assert_close(seen.project(end), seen.vectors, rtol=0, atol=1e-5)
    torch.testing.assert_close(seen.norm(end), model.backbone.text_model.final_layer_norm(end))


def test_readouts_train_and_are_not_saved(model: DualEncoder, tmp_path: Path) -> None:
    from hnclip.models.load import save
    from hnclip.models.parameters import describe_trainable, trained_tensors

    model.readouts["full"] = AllTokens()
    model(batch_for(model), tokens=True).images["full"].tokens.sum().backward()
    assert model.readouts["full"].factor.grad is not None
    assert "readouts.full.factor" in trained_tensors(model)
    assert "1 parameters of the training method" in describe_trainable(model)
    save(model, tmp_path / "saved")
    assert not len(load(str(tmp_path / "saved")).readouts)
