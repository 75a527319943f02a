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


@pytest.mark.parametrize(("length", "keep", "ratio"), [(77, 20, 4), (77, 0, 4), (77, 75, 4), (32, 8, 2), (9, 3, 1)])
def test_equals_the_definition(length, keep, ratio):
    table = torch.randn(length, 3, dtype=torch.float64)
    stretched = stretch_positions(table, keep=keep, ratio=ratio)
    assert len(stretched) == stretched_length(length, keep=keep, ratio=ratio)
    torch.testing.assert_close(stretched, twin(table, keep, ratio), rtol=0, atol=1e-14)
    half = stretch_positions(table.bfloat16(), keep=keep, ratio=ratio)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half[:keep], table.bfloat16()[:keep])


def test_a_stretched_model_takes_long_captions_after_a_round_trip(model, tmp_path, captions):
    """And its positions train."""
    before = model.encode(["a red house"], to="torch")
    assert stretch(model) is model
    torch.testing.assert_close(model.encode(["a red house"], to="torch"), before)
    save(model, tmp_path / "long")
    reopened = load(tmp_path / "long")
    assert (model.context, reopened.context, reopened.tokenizer.model_max_length) == (248, 248, 248)
    long = reopened.tokenize([" ".join(captions[:3])])
    assert long.lengths.item() > 200
    reopened.encode_texts(long).vectors.sum().backward()
    gradient = reopened.backbone.text_model.embeddings.position_embedding.weight.grad
    assert (gradient[:200].abs().sum(dim=1) > 0).all()
    assert load(tmp_path / "long", context=77).context == 248
    with pytest.raises(ValueError, match="unstretched"):
        load(tmp_path / "long", context=300)


@pytest.mark.parametrize(("context", "options", "ratio"), [(100, {}, 2), (300, {}, 5), (200, {"keep": 10}, 3)])
def test_a_model_is_opened_at_any_context(model, saved, context, options, ratio):
    table = model.backbone.text_model.embeddings.position_embedding.weight.detach()
    opened = load(saved, context=context, **options)
    expected = stretch_positions(table, keep=options.get("keep", 20), ratio=ratio)[:context]
    assert torch.equal(opened.backbone.text_model.embeddings.position_embedding.weight, expected)
    assert f"stretched from 77 to {context} tokens" in opened.source
    assert len(opened.text_transform(["word " * 400])[0]) == context == opened.context
    with pytest.raises(ValueError, match="keep"):
        load(saved, context=248, keep=76)
