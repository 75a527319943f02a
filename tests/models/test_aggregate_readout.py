from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hnclip.data.batches import Batch, TextBatch
from hnclip.losses import clip_loss
from hnclip.models.readout import Seen
from hnclip.models.readouts.aggregate import AggregateImage, AggregateText, Aggregator
from hnclip.objectives.finelip import FineLip
from hnclip.objectives.global_term import GlobalTerm
from hnclip.train.grad_cache import cached_backward, micro_backward

KEEP = 3


@pytest.fixture
def batch(model, captions):
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(256, (6, 3, model.image_size, model.image_size), generator=generator, dtype=torch.uint8)
    texts = [captions[0][:150], "a", captions[1][:40], captions[2][:90], "a red ball", captions[3][:120]]
    ids = torch.arange(6)[:, None].expand(-1, 2)
    return Batch({"full": pictures}, {"caption": model.tokenize(texts)}, ids)


@pytest.fixture
def model_with_readouts(model):
    """Aggregators whose weights are blown up, so that no two mixtures are alike."""
    width = model.backbone.config.projection_dim
    torch.manual_seed(1)
    model.readouts["full"], model.readouts["caption"] = AggregateImage(width, KEEP), AggregateText(width, KEEP)
    with torch.no_grad():
        for weight in model.readouts.parameters():
            if weight.ndim == 2:
                weight.mul_(6)
        for readout in model.readouts.values():
            readout.aggregate.scale.fill_(1.3)
    return model


def literal(aggregator, tokens):
    """One set of tokens [T, D] without padding, as the formula reads."""
    norm, first, _, second = aggregator.weigh
    x = F.layer_norm(tokens, norm.normalized_shape, norm.weight, norm.bias)
    hidden = F.gelu(x @ first.weight.T + first.bias)
    logits = (hidden @ second.weight.T + second.bias).T * aggregator.scale.squeeze()  # [keep, T]
    return torch.softmax(logits, dim=1) @ tokens


def test_shapes_of_the_parameters():
    aggregator = Aggregator(768, 39)
    assert {name: tuple(p.shape) for name, p in aggregator.named_parameters()} == {
        "scale": (1,),
        "weigh.0.weight": (768,),
        "weigh.0.bias": (768,),
        "weigh.1.weight": (153, 768),
        "weigh.1.bias": (153,),
        "weigh.3.weight": (39, 153),
        "weigh.3.bias": (39,),
    }
    assert aggregator.scale == 1
    assert Aggregator(512, 39).weigh[1].out_features == 102
    assert Aggregator(4, 1).weigh[1].out_features == 1  # narrow models keep a hidden layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_padded_sets_equal_a_loop_over_real_ones(dtype):
    torch.manual_seed(0)
    aggregator, lengths = Aggregator(12, 4).to(dtype), [7, 1, 4, 9]
    with torch.no_grad():
        aggregator.scale.fill_(2.5)
        aggregator.weigh[-1].weight.mul_(10)
    x = torch.randn(4, 9, 12, dtype=dtype, requires_grad=True)
    mask = torch.arange(9)[None] < torch.tensor(lengths)[:, None]
    got = aggregator(x, mask)
    expected = torch.stack([literal(aggregator, row[:length]) for row, length in zip(x, lengths)])
    torch.testing.assert_close(got, expected)
    weights = torch.linspace(-1, 1, got.numel(), dtype=dtype).view_as(got)
    leaves = [x, *aggregator.parameters()]
    for a, b in zip(*(torch.autograd.grad((value * weights).sum(), leaves) for value in (got, expected))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_mixture_is_convex():
    torch.manual_seed(0)
    x, mask = torch.randn(2, 6, 8), torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 0, 1, 0, 1]]).bool()
    aggregator = Aggregator(8, 5)
    ones = aggregator(torch.ones(2, 6, 8), mask)
    torch.testing.assert_close(ones, torch.ones(2, 5, 8))
    mixed = aggregator(x, mask)
    for row, there, found in zip(x, mask, mixed):
        assert (found <= row[there].amax(0) + 1e-6).all()
        assert (found >= row[there].amin(0) - 1e-6).all()


def test_a_set_without_tokens_is_zero_and_its_gradient_finite():
    x = torch.randn(2, 3, 8, requires_grad=True)
    mask = torch.tensor([[True, True, False], [False, False, False]])
    aggregator = Aggregator(8, 2)
    found = aggregator(x, mask)
    assert (found[1] == 0).all()
    assert (found[0] != 0).all()
    found.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in (x, *aggregator.parameters()))
    assert (x.grad[1] == 0).all()  # type: ignore[index]


def test_a_text_of_one_token_has_the_end_token_alone():
    """A tokenizer without a start token makes one of an empty caption."""
    inside = torch.tensor([[True, False, False], [True, True, False]])
    hidden = torch.randn(2, 3, 8, requires_grad=True)
    seen = Seen(torch.randn(2, 8), hidden, inside, None, lambda x: x, lambda x: x)
    tokens, mask = AggregateText(8, 2)(seen)
    assert mask.tolist() == [[False, False, True], [True, True, True]]
    torch.testing.assert_close(tokens[1, 0], F.normalize(hidden[1, 0], dim=0))  # of one token the mixture is itself
    tokens[mask].sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


def test_what_the_encoder_hands_on_is_what_a_loop_over_captions_makes(model_with_readouts, batch):
    """Towers called by hand, one caption at a time at its real length, and no padding anywhere."""
    model, backbone = model_with_readouts, model_with_readouts.backbone
    found = model(batch, tokens=True)
    image, text = found.images["full"], found.texts["caption"]
    assert image.mask is not None
    assert text.mask is not None
    assert image.mask.all()
    assert text.mask.all()

    output = backbone.vision_model(pixel_values=model.normalize_pixels(batch.images["full"]))
    every = backbone.visual_projection(backbone.vision_model.post_layernorm(output.last_hidden_state))  # [B, 1 + P, D]
    for row, tokens in enumerate(every):
        mixtures = literal(model.readouts["full"].aggregate, tokens[1:])
        expected = F.normalize(torch.cat([tokens[:1], mixtures]), dim=1)
        torch.testing.assert_close(image.tokens[row], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(image.tokens[:, 0], image.vectors)

    texts = batch.texts["caption"]
    assert len(set(texts.lengths.tolist())) > 3
    for row, length in enumerate(texts.lengths.tolist()):
        hidden = backbone.text_model(input_ids=texts.ids[row : row + 1, :length]).last_hidden_state
        tokens = backbone.text_projection(hidden)[0]  # [len, D], start … end
        mixtures = literal(model.readouts["caption"].aggregate, tokens[:-1])
        expected = F.normalize(torch.cat([mixtures, tokens[-1:]]), dim=1)
        torch.testing.assert_close(text.tokens[row], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(text.tokens[:, -1], text.vectors)


def test_pads_do_not_matter(model_with_readouts, batch):
    model, texts = model_with_readouts, batch.texts["caption"]
    longer = TextBatch(F.pad(texts.ids, (0, 9), value=model.text_transform.pad), texts.lengths)
    padded = Batch(batch.images, {"caption": longer}, batch.ids)
    a, b = (model(some, tokens=True).texts["caption"].tokens for some in (batch, padded))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert a.shape == (6, KEEP + 1, model.backbone.config.projection_dim)


def test_tokens_have_length_one_also_under_autocast(model_with_readouts, batch):
    with torch.autocast("cpu", torch.bfloat16):
        found = model_with_readouts(batch, tokens=True)
    for view in (found.images["full"], found.texts["caption"]):
        assert view.tokens is not None
        assert view.tokens.dtype == torch.float32
        torch.testing.assert_close(view.tokens.norm(dim=2), torch.ones(6, KEEP + 1))


def test_gradients_reach_every_parameter(model_with_readouts, batch):
    model = model_with_readouts
    result = micro_backward(model, batch, FineLip(None), chunk=6)
    assert result.terms["fine"] > 0
    without = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    # As released there is no temperature; and a key's bias shifts all logits of a softmax alike.
    assert {name for name in without if "k_proj.bias" not in name} == {"backbone.logit_scale"}


@pytest.mark.parametrize("term", [None, GlobalTerm(clip_loss)], ids=["released", "with infonce"])
def test_gradient_caching_treats_readouts_like_towers(model_with_readouts, batch, term):
    model, made = model_with_readouts.double(), FineLip(term)
    found = []
    for backward, chunk in ((micro_backward, 6), (cached_backward, 2)):
        model.zero_grad()
        result = backward(model, batch, made, chunk=chunk)
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append((result.terms["fine"], grads))
    (whole, plain), (cached, by_chunks) = found
    torch.testing.assert_close(whole, cached)
    assert plain.keys() == by_chunks.keys()
    for name, grad in plain.items():
        torch.testing.assert_close(grad, by_chunks[name], msg=lambda text, name=name: f"{name}: {text}")
