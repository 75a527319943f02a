from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from hnclip.models.parameters import interpolate, match_base
from hnclip.models.load import load, save, stretch


@pytest.fixture
def tuned(model):
    """The base with every weight moved."""
    moved = deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in moved.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
    return moved


def weights(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_every_weight_is_between(model, tuned, alpha):
    base, after = weights(model), weights(tuned)
    mixed = weights(interpolate(deepcopy(tuned), model, tuned, alpha))
    for name in base:
        expected = base[name].double() * (1 - alpha) + after[name].double() * alpha
        torch.testing.assert_close(mixed[name].double(), expected, rtol=1e-6, atol=1e-7)
    assert weights(model).keys() == base.keys()
    assert all(torch.equal(now, base[name]) for name, now in weights(model).items())  # the sources stay


@pytest.mark.parametrize(("alpha", "end"), [(0.0, "base"), (1.0, "tuned")])
def test_the_ends_are_the_models_themselves(model, tuned, alpha, end):
    expected = weights({"base": model, "tuned": tuned}[end])
    mixed = weights(interpolate(deepcopy(tuned), model, tuned, alpha))
    assert all(torch.equal(mixed[name], expected[name]) for name in expected)


def test_a_sweep_can_reuse_one_model(model, tuned):
    mixed = deepcopy(tuned)
    interpolate(mixed, model, tuned, 0.2)
    once = weights(interpolate(deepcopy(tuned), model, tuned, 0.7))
    again = weights(interpolate(mixed, model, tuned, 0.7))
    assert all(torch.equal(once[name], again[name]) for name in once)


def test_it_trains_and_is_saved_like_any_model(model, tuned, tmp_path):
    mixed = interpolate(deepcopy(tuned), model, tuned, 0.5)
    assert all(weight.requires_grad for weight in mixed.parameters())
    save(mixed, tmp_path / "mixed")
    assert weights(load(tmp_path / "mixed")).keys() == weights(model).keys()
    assert "0.5 ×" in mixed.source


def test_a_short_base_is_stretched_to_its_tuned_model(model, tuned):
    short = model.backbone.text_model.embeddings.position_embedding.weight.detach().clone()
    stretch(tuned)
    match_base(model, tuned)
    assert model.context == 248
    assert torch.equal(model.backbone.text_model.embeddings.position_embedding.weight[:20], short[:20])
    interpolate(tuned, model, tuned, 0.5)


def test_models_of_different_make_are_told_apart(model, model_directory):
    with pytest.raises(ValueError, match=r"different make: .*tensor [\w.]+"):
        match_base(model, load(model_directory))
    shallow = deepcopy(model)
    del shallow.backbone.vision_model.encoder.layers[-1]
    with pytest.raises(ValueError, match=r"the tuned model has no tensor vision_model.encoder.layers.3"):
        match_base(model, shallow)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_alpha_is_checked(model, tuned, alpha):
    with pytest.raises(ValueError, match="alpha must be between 0"):
        interpolate(tuned, model, tuned, alpha)
