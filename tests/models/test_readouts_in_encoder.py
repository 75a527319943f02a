"""Readouts inside the encoder: which views they read, and what they are given."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hnclip.core import Batch
from hnclip.models.load import load, save
from hnclip.models.parameters import trained_tensors
from hnclip.models.readout import Readout

TEXTS = {"caption": ["a red ball lies under a tall green tree", "two dogs"], "sentence": ["a ball", "one dog sleeps"]}


class AllTokens(Readout):
    """Gives the tokens that the encoder gives by itself."""

    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(()))
        self.seen = []

    def forward(self, seen):
        self.seen.append(seen)
        return self.factor * F.normalize(seen.project(seen.hidden), dim=-1), seen.inside


@pytest.fixture
def model(model_directory):
    return load(str(model_directory)).eval()


def batch_for(model):
    generator = torch.Generator().manual_seed(0)
    shape = (2, 3, model.image_size, model.image_size)
    pixels = {name: torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) for name in ("full", "crop")}
    texts = {name: model.tokenize(captions) for name, captions in TEXTS.items()}
    parts = {"sentence": torch.tensor([[[1, 3]], [[0, 0]]])}
    present = {"crop": torch.tensor([True, False])}
    return Batch(pixels, texts, torch.tensor([[0, 0], [1, 1]]), present=present, parts=parts)


def test_readouts_get_the_last_hidden_states_of_their_view(model):
    """Patches and words through norm and projection of the tower, of two views that are encoded together."""
    batch = batch_for(model)
    expected = model(batch, tokens=True)
    model.readouts.update({name: AllTokens() for name in ("full", "sentence")})
    assert model(batch).images["full"].tokens is None
    assert not model.readouts["full"].seen
    found = model(batch, tokens=True)
    for view, other in (
        (found.images["full"], expected.images["full"]),
        (found.texts["sentence"], expected.texts["sentence"]),
    ):
        mask, width = other.mask, other.tokens.shape[1]
        torch.testing.assert_close(view.vectors, other.vectors, rtol=0, atol=1e-6)
        assert view.mask[:, :width][mask].all()
        torch.testing.assert_close(view.tokens[:, :width][mask], other.tokens[mask], rtol=0, atol=1e-6)
    assert found.images["crop"].tokens is None
    assert torch.equal(found.images["crop"].present, torch.tensor([True, False]))
    (seen,) = model.readouts["sentence"].seen
    assert torch.equal(seen.inside.sum(1), batch.texts["sentence"].lengths)
    assert torch.equal(seen.parts, batch.parts["sentence"])


def test_readouts_train_and_are_not_saved(model, tmp_path):
    model.readouts["full"] = AllTokens()
    model(batch_for(model), tokens=True).images["full"].tokens.sum().backward()
    assert model.readouts["full"].factor.grad is not None
    assert "readouts.full.factor" in trained_tensors(model)
    save(model, tmp_path / "saved")
    assert not len(load(tmp_path / "saved").readouts)
