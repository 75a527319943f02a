"""Readouts of the methods against transformers' own hidden states, part by part, in value and gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hnclip.core import Batch
from hnclip.data.batching import pad_texts
from hnclip.models.load import load
from hnclip.models.readout import TowerOutput
from hnclip.objectives.finelip import TokenAggregation
from hnclip.objectives.goal import PoolParts
from hnclip.objectives.structxlip import PoolChunks

TEXT = "a small red ball lies under a tall green tree and two brown dogs sleep in the shade of a white house"
LENGTHS = (12, 20, 5, 9)  # tokens with start and end
SPANS = torch.tensor(
    [
        [[1, 5], [4, 11], [11, 12], [0, 0]],
        [[1, 2], [0, 20], [18, 50], [7, 3]],
        [[1, 4], [3, 9], [5, 9], [60, 70]],
        [[2, 3], [8, 9], [0, 1], [9, 10]],
    ]
)  # some reach beyond the caption, some are empty


@pytest.fixture
def model(model_directory):
    return load(model_directory).eval().double()


def make_batch(model, lengths=LENGTHS, patches=None):
    ids = model.text_transform([TEXT])[0]
    texts = pad_texts([(*ids[: n - 1], ids[-1]) for n in lengths], model.text_transform.pad)
    shape = (len(lengths), 3, model.image_size, model.image_size)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    parts = {"caption": SPANS} | ({} if patches is None else {"full": patches})
    return Batch({"full": pixels}, {"caption": texts}, torch.zeros(len(lengths), 2, dtype=torch.long), parts=parts)


def project_text(backbone, pooled):
    return F.normalize(backbone.text_projection(backbone.text_model.final_layer_norm(pooled)), dim=-1)


def mean_twin(backbone, span):
    """The mean before the final norm."""
    return project_text(backbone, span.mean(0))


def chunk_twin(backbone, span, double_norm):
    """Σ softmax(‖h‖)·h over the span, then norm and projection; the weights have no gradient."""
    span = backbone.text_model.final_layer_norm(span) if double_norm else span
    weights = torch.softmax(span.norm(dim=-1).detach(), 0)
    return project_text(backbone, (weights[:, None] * span).sum(0))


def assert_equal_in_gradient(got, expected, leaves):
    """Values, and gradients of a loss that weights every number differently."""
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    weights = torch.randn(got.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    gradients = (torch.autograd.grad((weights * value).sum(), leaves, allow_unused=True) for value in (got, expected))
    for a, b in zip(*gradients):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("lengths", [LENGTHS, (20,) * 4], ids=["uneven", "even"])
@pytest.mark.parametrize(
    ("readout", "twin"),
    [
        (PoolParts(text=True), mean_twin),
        (PoolChunks(False), lambda *x: chunk_twin(*x, False)),
        (PoolChunks(True), lambda *x: chunk_twin(*x, True)),
    ],
    ids=["spans", "chunks", "chunks, normed twice"],
)
def test_spans_of_captions(model, readout, twin, lengths):
    backbone, batch = model.backbone, make_batch(model, lengths)
    model.readouts["caption"] = readout
    found = model(batch, tokens=True).texts["caption"]
    hidden = backbone.text_model(input_ids=batch.texts["caption"].ids, output_hidden_states=True).hidden_states[-1]
    expected = []
    for b, length in enumerate(lengths):
        for k, (start, stop) in enumerate(SPANS[b].tolist()):
            assert found.mask[b, k] == (start < min(stop, length))
            if found.mask[b, k]:
                expected.append(twin(backbone, hidden[b][start : min(stop, length)]))
    modules = (backbone.text_model, backbone.text_projection)
    leaves = [weight for module in modules for weight in module.parameters()]
    assert_equal_in_gradient(found.tokens[found.mask], torch.stack(expected), leaves)


def test_patches_of_images(model):
    backbone, count = model.backbone, (model.image_size // model.backbone.config.vision_config.patch_size) ** 2
    parts = torch.rand(4, 3, count, generator=torch.Generator().manual_seed(2)) < 0.3
    parts[1, 1], parts[2, 2] = True, False
    batch = make_batch(model, patches=parts)
    plain = model(batch).images["full"]
    model.readouts["full"] = PoolParts(text=False)
    found = model(batch, tokens=True).images["full"]
    torch.testing.assert_close(found.vectors, plain.vectors)
    pixels = model.normalize_pixels(batch.images["full"])
    hidden = backbone.vision_model(pixel_values=pixels, output_hidden_states=True).hidden_states[-1]
    assert torch.equal(found.mask, parts.any(2))
    pooled = torch.stack([hidden[b, 1:][parts[b, k]].mean(0) for b, k in parts.any(2).nonzero().tolist()])
    expected = F.normalize(backbone.visual_projection(backbone.vision_model.post_layernorm(pooled)), dim=-1)
    modules = (backbone.vision_model, backbone.visual_projection)
    leaves = [weight for module in modules for weight in module.parameters()]
    assert_equal_in_gradient(found.tokens[found.mask], expected, leaves)


def make_tower(width=16, lengths=(3, 7, 5), dtype=torch.float64, **options):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(len(lengths), max(lengths), width, generator=generator, dtype=dtype).requires_grad_()
    inside = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    vectors = torch.randn(len(lengths), width, generator=generator, dtype=dtype)
    return TowerOutput(vectors, hidden, inside, None, lambda x: 2 * x, lambda x: x, **options)


@pytest.mark.parametrize("text", [False, True])
def test_finelips_token_sets(text):
    """A twin takes one set of tokens at a time, without padding, as the formula reads."""
    torch.manual_seed(0)
    readout, tower = TokenAggregation(16, 4, text=text).double(), make_tower()
    with torch.no_grad():
        readout.aggregate.scale.fill_(2.5)
        readout.aggregate.weigh[-1].weight.mul_(10)
    tokens, mask = readout(tower)
    assert mask.all()
    norm, first, _, second = readout.aggregate.weigh
    rows = []
    for vector, hidden, inside in zip(tower.vectors, tower.hidden, tower.inside):
        own = 2 * hidden[inside][: -1 if text else None]  # [T, D]
        x = F.layer_norm(own, norm.normalized_shape, norm.weight, norm.bias)
        logits = F.gelu(x @ first.weight.T + first.bias) @ second.weight.T + second.bias
        mixtures = torch.softmax(logits.T * readout.aggregate.scale, dim=1) @ own
        rows.append(torch.cat([mixtures, vector[None]] if text else [vector[None], mixtures]))
    assert_equal_in_gradient(tokens, F.normalize(torch.stack(rows), dim=2), [tower.hidden, *readout.parameters()])
