from __future__ import annotations

import pytest
import torch

from hnclip.models.load import load, save
from hnclip.models.long_context import stretch, stretch_positions, stretched_length


def twin(P, keep=20, ratio=4):
    """The definition, position by position."""
    last = len(P) - 1
    rows = [P[p] for p in range(keep)]
    for i in range(last - keep):
        rows += [((ratio - r) / ratio) * P[keep + i] + (r / ratio) * P[keep + i + 1] for r in range(ratio)]
    rows += [P[last] + (r / ratio) * (P[last] - P[last - 1]) for r in range(ratio)]
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("length", "keep", "ratio"), [(77, 20, 4), (77, 0, 4), (77, 75, 4), (32, 8, 2), (9, 3, 3), (9, 3, 1)]
)
def test_equals_the_definition(length, keep, ratio):
    table = torch.randn(length, 3, dtype=torch.float64)
    stretched = stretch_positions(table, keep=keep, ratio=ratio)
    assert len(stretched) == stretched_length(length, keep=keep, ratio=ratio)
    torch.testing.assert_close(stretched, twin(table, keep, ratio), rtol=0, atol=1e-14)
    half = stretch_positions(table.bfloat16(), keep=keep, ratio=ratio)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half[:keep], table.bfloat16()[:keep])
    with pytest.raises(ValueError, match="248 positions"):  # a table that is stretched already
        stretch_positions(torch.zeros(248, 5))


@pytest.fixture
def saved(model, tmp_path):
    save(model, tmp_path / "model")
    return tmp_path / "model"


def encode_text(model, caption):
    return model.encode_texts(model.tokenize([caption])).vectors


def test_a_stretched_model_takes_long_captions_after_a_round_trip(model, tmp_path, captions):
    """And its positions train."""
    with torch.no_grad():
        before = encode_text(model, "a red house")
        assert stretch(model) is model
        torch.testing.assert_close(encode_text(model, "a red house"), before)
    save(model, tmp_path / "long")
    reopened = load(tmp_path / "long")
    assert (model.context, reopened.context, reopened.tokenizer.model_max_length) == (248, 248, 248)
    caption = " ".join(captions[:3])
    assert len(reopened.text_transform([caption])[0]) > 200
    found = encode_text(reopened, caption)
    torch.testing.assert_close(found, encode_text(model, caption), rtol=0, atol=1e-6)
    ending = captions[0].split(". ")
    swapped = ". ".join([*ending[:-2], ending[-1], ending[-2]])
    assert not torch.allclose(encode_text(reopened, swapped), encode_text(reopened, captions[0]), atol=1e-3)
    found.sum().backward()
    gradient = reopened.backbone.text_model.embeddings.position_embedding.weight.grad
    assert (gradient[:200].abs().sum(dim=1) > 0).all()


@pytest.mark.parametrize(
    ("context", "options", "ratio"), [(100, {}, 2), (248, {}, 4), (300, {}, 5), (200, {"keep": 10}, 3)]
)
def test_any_context_can_be_asked_for(model, saved, context, options, ratio):
    keep = options.get("keep", 20)
    table = model.backbone.text_model.embeddings.position_embedding.weight.detach()
    opened = load(saved, context=context, **options)
    expected = stretch_positions(table, keep=keep, ratio=ratio)[:context]
    assert opened.context == context
    assert torch.equal(opened.backbone.text_model.embeddings.position_embedding.weight, expected)
    assert f"stretched from 77 to {context} tokens (keep {keep}, ratio {ratio})" in opened.source
    assert len(opened.text_transform(["word " * 400])[0]) == context


def test_a_long_model_is_not_changed_and_an_impossible_stretch_is_refused(model, saved, tmp_path):
    for options in ({"ratio": 2}, {"keep": 76}, {"keep": -1}):
        with pytest.raises(ValueError, match="keep"):
            load(saved, context=248, **options)
    save(stretch(model), tmp_path / "long")
    for context in (None, 77, 248):
        opened = load(tmp_path / "long", context=context)
        assert (opened.context, "stretched" in opened.source) == (248, False)
    with pytest.raises(ValueError, match="unstretched"):
        load(tmp_path / "long", context=300)
    with pytest.raises(ValueError, match="already"):
        stretch(opened)
