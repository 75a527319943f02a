from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from hnclip.data.batches import Batch, TextBatch
from hnclip.models.readout import Seen
from hnclip.models.readouts.mask import CaptionMask, head_count, open_or_closed
from hnclip.objectives.embeddings import Embeddings
from hnclip.train.grad_cache import cached_backward

LENGTHS = torch.tensor([3, 7, 5])


def make_seen(width=16, hidden=12, length=7, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(3, length, hidden, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(width, hidden, generator=generator, dtype=dtype)
    inside = torch.arange(length)[None] < LENGTHS[:, None]
    vectors = torch.randn(3, width, generator=generator, dtype=dtype)
    return Seen(vectors, states, inside, None, lambda states: states @ weight.T, lambda states: states)


def make_mask(width=16, dtype=torch.float64, spread=True):
    """With `spread` every parameter is random, so that about half the dimensions are open and everything matters."""
    torch.manual_seed(1)
    readout = CaptionMask(width).to(dtype)
    if spread:
        with torch.no_grad():
            for parameter in readout.parameters():
                parameter.normal_(0, 0.5)
    return readout


def attend(attention: nn.MultiheadAttention, query, tokens):
    """Multi-head attention of one query to the tokens of one caption, head by head."""
    width, heads = attention.embed_dim, attention.num_heads
    q, k, v = (
        vectors @ weight.T + bias
        for vectors, weight, bias in zip(
            (query, tokens, tokens), attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
        )
    )
    size, found = width // heads, []
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        weights = torch.softmax(k[:, part] @ q[part] / math.sqrt(size), dim=0)  # [T]
        found.append(weights @ v[:, part])
    return torch.cat(found) @ attention.out_proj.weight.T + attention.out_proj.bias


def twin_sigmoid(readout: CaptionMask, seen: Seen):
    """The sigmoid of the mask, caption by caption without pads, token by token."""
    rows = []
    for states, length in zip(seen.hidden, LENGTHS):
        tokens = seen.project(states[:length])  # [L, D]
        normed = readout.block.norm1(tokens)
        tokens = tokens + torch.stack([attend(readout.block.self_attn, token, normed) for token in normed])
        inner = nn.functional.gelu(readout.block.linear1(readout.block.norm2(tokens)))
        tokens = readout.norm(tokens + readout.block.linear2(inner))
        rows.append(torch.sigmoid(attend(readout.pool, readout.query, tokens)))
    return torch.stack(rows)  # [B, D]


def gradients(loss, readout, seen):
    leaves = {"hidden": seen.hidden, **dict(readout.named_parameters())}
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))


@pytest.mark.parametrize("width", [16, 128])
def test_the_mask_is_that_of_a_literal_twin_in_value_and_gradient(width):
    readout, seen = make_mask(width), make_seen(width)
    tokens, counts = readout(seen)
    soft = twin_sigmoid(readout, seen)
    assert tokens.shape == (3, 1, width)
    assert torch.equal(counts, torch.ones(3, 1, dtype=torch.bool))
    assert torch.equal(tokens[:, 0], (soft > 0.5).double())
    assert 0.2 < tokens.mean() < 0.8  # both kinds
    push = torch.randn(3, width, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = gradients((push * tokens[:, 0]).sum(), readout, seen)
    expected = gradients((push * soft).sum(), readout, seen)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-8, atol=1e-10)
    assert all(gradient.abs().max() > 1e-6 for gradient in expected.values())


def test_straight_through():
    logits = torch.tensor([-3.0, -1e-4, 0.0, 1e-4, 3.0, 200.0], requires_grad=True)
    found = open_or_closed(logits)
    assert found.tolist() == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    soft = torch.sigmoid(logits.detach())
    torch.testing.assert_close(gradient, soft * (1 - soft))


def test_half_precision_is_widened_before_the_sigmoid():
    # Near 0.5 numbers of bfloat16 are 2^-9 apart: there the sigmoid of this logit would be 0.5, and closed.
    logits = torch.tensor([1e-3], dtype=torch.bfloat16)
    found = open_or_closed(logits)
    assert (found.dtype, found.item()) == (torch.float32, 1.0)
    assert torch.sigmoid(logits).item() == 0.5


def test_neither_pad_length_nor_pad_contents_matter():
    readout, seen = make_mask(), make_seen()
    tokens, _ = readout(seen)
    grow = torch.full((3, 4, 12), 50.0, dtype=torch.float64)
    hidden = torch.where(seen.inside[:, :, None], seen.hidden, 50.0)
    inside = torch.arange(11)[None] < LENGTHS[:, None]
    longer = replace(seen, hidden=torch.cat([hidden, grow], dim=1), inside=inside)
    soft = twin_sigmoid(readout, longer)
    assert (soft - 0.5).abs().min() > 1e-6  # nothing on the threshold: rounding cannot tip it
    assert torch.equal(readout(longer)[0], tokens)
    push = torch.randn(3, 1, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = gradients((push * readout(longer)[0]).sum(), readout, seen)
    for name, gradient in gradients((push * tokens).sum(), readout, seen).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-8, atol=1e-10)
        if name == "hidden":
            assert (gradient[~seen.inside] == 0).all()


@pytest.mark.parametrize("width", [16, 128, 512])
def test_at_the_start_nearly_all_dimensions_are_open(width):
    readout, seen = make_mask(width, spread=False), make_seen(width)
    tokens, _ = readout(seen)
    assert tokens.mean() > 0.99
    assert 0.85 < twin_sigmoid(readout, seen).mean() < 0.97  # and none out of reach of the gradient
    assert all(gradient.isfinite().all() for gradient in gradients(tokens.sum(), readout, seen).values())


def test_it_learns_to_close_a_dimension():
    readout, seen = make_mask(spread=False), make_seen()
    optimizer = torch.optim.Adam(readout.parameters(), lr=1e-2)
    wanted = torch.zeros(16, dtype=torch.float64)
    wanted[::2] = 1
    for _ in range(60):
        tokens, _ = readout(seen)
        optimizer.zero_grad()
        (tokens - wanted).square().sum().backward()
        optimizer.step()
    assert torch.equal(readout(seen)[0], wanted.expand(3, 1, 16))


def test_under_autocast_masks_are_zeros_and_ones():
    readout, seen = make_mask(dtype=torch.float32), make_seen(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tokens, _ = readout(seen)
    assert tokens.dtype == torch.float32
    assert ((tokens == 0) | (tokens == 1)).all()
    assert (tokens == readout(seen)[0]).float().mean() > 0.9
    found = gradients(tokens.sum(), readout, seen)
    assert all(gradient.isfinite().all() and gradient.dtype == torch.float32 for gradient in found.values())


@pytest.mark.parametrize(("width", "heads"), [(768, 12), (512, 8), (128, 2), (32, 1), (24, 1), (100, 2), (97, 1)])
def test_heads_have_about_64_dimensions(width, heads):
    assert head_count(width) == heads


@pytest.fixture
def batch(model, captions):
    shape = (6, 3, model.image_size, model.image_size)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    texts = model.tokenize([caption[: 40 * (number + 1)] for number, caption in enumerate(captions[:6])])
    return Batch({"full": pixels}, {"caption": texts}, torch.arange(12).view(6, 2))


def masked(model):
    model.readouts["caption"] = make_mask(model.backbone.config.projection_dim, torch.float32)
    return model


def test_inside_the_encoder_it_takes_the_place_of_words(model, batch):
    plain = model(batch)
    found = masked(model)(batch, tokens=True)
    caption = found.texts["caption"]
    width = model.backbone.config.projection_dim
    assert caption.tokens.shape == (6, 1, width)
    assert caption.mask.all()
    assert ((caption.tokens == 0) | (caption.tokens == 1)).all()
    assert len({tuple(row) for row in caption.tokens[:, 0].tolist()}) == 6  # of each caption its own
    assert found.images["full"].tokens is None
    torch.testing.assert_close(caption.vectors, plain.texts["caption"].vectors)
    assert torch.equal(found.images["full"].vectors, plain.images["full"].vectors)
    assert model(batch).texts["caption"].tokens is None  # retrieval knows no masks


def test_inside_the_encoder_the_pad_id_does_not_matter(model, batch):
    masked(model)
    texts = batch.texts["caption"]
    inside = torch.arange(texts.ids.shape[1]) < texts.lengths[:, None]
    others = TextBatch(torch.where(inside, texts.ids, 5), texts.lengths)
    assert not torch.equal(others.ids, texts.ids)
    found = model(replace(batch, texts={"caption": others}), tokens=True).texts["caption"].tokens
    assert torch.equal(found, model(batch, tokens=True).texts["caption"].tokens)


class Pushed:
    """A sum over pairs that looks at masks and vectors, so that it is the same in chunks and whole."""

    tokens = True

    def __call__(self, embeddings: Embeddings):
        caption = embeddings.texts["caption"]
        return {"pushed": (caption.tokens[:, 0] * caption.vectors * embeddings.images["full"].vectors).sum()}


def test_gradient_caching_reaches_the_mask_network(model, batch):
    masked(model)
    Pushed()(model(batch, tokens=True))["pushed"].backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.backbone.logit_scale.requires_grad_(False)
    cached_backward(model, batch, Pushed(), chunk=2)
    names = [name for name in expected if name.startswith("readouts.caption.")]
    assert len(names) == len(list(model.readouts.parameters())) > 10
    for name, parameter in model.named_parameters():
        if expected[name] is not None:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-5)
    assert all(expected[name] is not None for name in names)
    assert expected["backbone.text_projection.weight"].abs().max() > 0
