"""Parts of pictures and captions as vectors, against transformers' own hidden states, part by part."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hnclip.data.batches import Batch, pad_texts
from hnclip.data.texts import TextTransform
from hnclip.models.load import load
from hnclip.models.packing import is_worth_packing
from hnclip.models.readout import Seen
from hnclip.models.readouts.pool import PoolChunks, PoolPatches, PoolSpan
from small_families import WRITERS

LENGTHS = (12, 30, 5, 9)  # tokens with start and end
SPANS = torch.tensor(
    [
        [[1, 5], [4, 11], [11, 12], [0, 0]],
        [[1, 2], [0, 30], [28, 50], [7, 3]],
        [[1, 4], [3, 9], [5, 9], [60, 70]],
        [[2, 3], [8, 9], [0, 1], [9, 10]],
    ]
)  # some reach beyond the caption, some are empty


def tokenized(model, captions, lengths):
    long = " ".join(captions[:2])
    return pad_texts([TextTransform(model.tokenizer, n)([long]).ids[0] for n in lengths], model.text_transform.pad)


def make_batch(model, texts, spans, patches=None):
    g = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (len(spans), 3, model.image_size, model.image_size), dtype=torch.uint8, generator=g)
    parts = {"caption": spans}
    if patches is not None:
        parts["full"] = patches
    return Batch({"full": pixels}, {"caption": texts}, torch.zeros(len(spans), 2, dtype=torch.long), parts=parts)


def norm(hidden):
    return F.layer_norm(hidden, hidden.shape[-1:])


def some_patches(model):
    """[4, 3, P]: a corner, everything, nothing, and at random."""
    count = (model.image_size // model.backbone.config.vision_config.patch_size) ** 2
    parts = torch.rand(4, 3, count, generator=torch.Generator().manual_seed(2)) < 0.3
    parts[0, 0] = torch.arange(count) < 1
    parts[1, 1] = True
    parts[2, 2] = False
    return parts


def mean_twin(backbone, hidden, length, start, stop):
    """Mean over the span before the final norm, then norm and projection, as GOAL's text term is defined."""
    pooled = hidden[start : min(stop, length)].mean(0)
    return F.normalize(backbone.text_projection(backbone.text_model.final_layer_norm(pooled)), dim=-1)


def chunk_twin(backbone, hidden, length, start, stop, double_norm):
    """Σ softmax(‖h‖)·h over the span, then norm and projection."""
    if double_norm:
        hidden = backbone.text_model.final_layer_norm(hidden)
    span = hidden[start : min(stop, length)]
    weights = torch.softmax(span.norm(dim=-1).detach(), 0)
    pooled = sum(w * h for w, h in zip(weights, span))
    return F.normalize(backbone.text_projection(backbone.text_model.final_layer_norm(pooled)), dim=-1)


def assert_spans_are_the_twins(model, readout, twin, lengths, captions, spans=SPANS):
    """Values of every span, and gradients of all weights of the text tower."""
    model.double()
    texts = tokenized(model, captions, lengths)
    model.readouts["caption"] = readout
    batch = make_batch(model, texts, spans)
    found = model(batch, tokens=True).texts["caption"]
    hidden = model.backbone.text_model(input_ids=texts.ids, output_hidden_states=True).hidden_states[-1]
    weights = torch.randn(found.tokens.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = 0
    for b, length in enumerate(lengths):
        for k, (start, stop) in enumerate(spans[b].tolist()):
            there = start < min(stop, length)
            assert found.mask[b, k] == there
            if there:
                vector = twin(model.backbone, hidden[b], length, start, stop)
                torch.testing.assert_close(found.tokens[b, k], vector, rtol=0, atol=1e-10)
                expected = expected + (weights[b, k] * vector).sum()
    got = (weights * found.tokens)[found.mask].sum()
    tower = [*model.backbone.text_model.parameters(), *model.backbone.text_projection.parameters()]
    for a, b in zip(torch.autograd.grad(got, tower), torch.autograd.grad(expected, tower)):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("lengths", [LENGTHS, (30, 30, 30, 30)], ids=["packed", "unpacked"])
def test_spans_are_means_before_the_final_norm(model, captions, lengths):
    assert is_worth_packing(tokenized(model, captions, lengths)) == (lengths == LENGTHS)
    assert_spans_are_the_twins(model, PoolSpan(), mean_twin, lengths, captions)


@pytest.mark.parametrize("double_norm", [False, True])
@pytest.mark.parametrize("lengths", [LENGTHS, (30, 30, 30, 30)], ids=["packed", "unpacked"])
def test_chunks_are_mixed_by_the_lengths_of_hidden_states(model, captions, lengths, double_norm):
    def twin(*args):
        return chunk_twin(*args, double_norm)

    assert_spans_are_the_twins(model, PoolChunks(double_norm), twin, lengths, captions)


def test_normed_once_and_twice_differ(model, captions):
    texts = tokenized(model, captions, LENGTHS)
    found = []
    for double_norm in (False, True):
        model.readouts["caption"] = PoolChunks(double_norm)
        found.append(model(make_batch(model, texts, SPANS), tokens=True).texts["caption"])
    assert torch.equal(found[0].mask, found[1].mask)
    gap = (found[0].tokens - found[1].tokens)[found[0].mask].norm(dim=-1)
    several = (SPANS[..., 1].clamp(max=torch.tensor(LENGTHS)[:, None]) - SPANS[..., 0])[found[0].mask] > 1
    assert (gap[several] > 1e-3).all()


def test_weights_of_chunks_carry_no_gradient():
    hidden = torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True)
    inside = torch.ones(1, 3, dtype=torch.bool)
    seen = Seen(hidden[:, 0], hidden, inside, torch.tensor([[[0, 3]]]), lambda h: h, lambda h: h)
    tokens, _ = PoolChunks(double_norm=False)(seen)
    direction = torch.randn(4, dtype=torch.float64)
    got = torch.autograd.grad((tokens[0, 0] * direction).sum(), hidden)[0]
    weights = torch.softmax(hidden.detach()[0].norm(dim=-1), 0)
    pooled = F.normalize((weights[:, None] * hidden[0]).sum(0), dim=-1)
    torch.testing.assert_close(got, torch.autograd.grad((pooled * direction).sum(), hidden)[0])


def test_patches_are_means_before_the_final_norm(model, captions):
    model.double()
    parts = some_patches(model)
    batch = make_batch(model, tokenized(model, captions, LENGTHS), SPANS, parts)
    model.readouts["full"] = PoolPatches()
    found = model(batch, tokens=True).images["full"]
    backbone = model.backbone
    pixels = model.normalize_pixels(batch.images["full"])
    output = backbone.vision_model(pixel_values=pixels, output_hidden_states=True)
    weights = torch.randn(found.tokens.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = 0
    for b in range(4):
        for k in range(3):
            assert found.mask[b, k] == bool(parts[b, k].any())
            if parts[b, k].any():
                chosen = [1 + number for number, there in enumerate(parts[b, k].tolist()) if there]
                pooled = sum(output.hidden_states[-1][b, number] for number in chosen) / len(chosen)
                vector = backbone.visual_projection(backbone.vision_model.post_layernorm(pooled))
                vector = F.normalize(vector, dim=-1)
                torch.testing.assert_close(found.tokens[b, k], vector, rtol=0, atol=1e-10)
                expected = expected + (weights[b, k] * vector).sum()
    got = (weights * found.tokens)[found.mask].sum()
    tower = [*backbone.vision_model.parameters(), *backbone.visual_projection.parameters()]
    for a, b in zip(torch.autograd.grad(got, tower), torch.autograd.grad(expected, tower)):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


def test_readouts_leave_the_vectors_alone_and_other_views_without_tokens(model, captions):
    texts = tokenized(model, captions, LENGTHS)
    batch = make_batch(model, texts, SPANS, some_patches(model))
    plain = model(batch)
    model.readouts["caption"] = PoolSpan()
    found = model(batch, tokens=True)
    torch.testing.assert_close(found.texts["caption"].vectors, plain.texts["caption"].vectors)
    assert torch.equal(found.images["full"].vectors, plain.images["full"].vectors)
    assert found.images["full"].tokens is None
    assert not list(model.readouts.parameters())


def test_a_caption_reads_the_same_in_any_company(model, captions):
    texts = tokenized(model, captions, LENGTHS)
    for readout in (PoolSpan(), PoolChunks(double_norm=True)):
        model.readouts["caption"] = readout
        batch = make_batch(model, texts, SPANS)
        together = model(batch, tokens=True).texts["caption"]
        for b in range(4):
            alone = model(batch[b : b + 1], tokens=True).texts["caption"]
            assert torch.equal(alone.mask[0], together.mask[b])
            there = alone.mask[0]
            torch.testing.assert_close(alone.tokens[0, there], together.tokens[b, there], rtol=0, atol=1e-5)


def test_two_text_views_share_a_call(model, captions):
    """A view that is narrower than the other is padded to its width, and reads the same."""
    texts, short = tokenized(model, captions, LENGTHS), tokenized(model, captions, (4, 6, 5, 3))
    model.readouts["filtered"] = PoolSpan()
    spans = torch.tensor([[[1, 3]], [[2, 30]], [[4, 5]], [[3, 6]]])
    batch = make_batch(model, texts, SPANS)
    both = replace(batch, texts={"caption": texts, "filtered": short}, parts={"filtered": spans})
    found = model(both, tokens=True).texts
    model.readouts.clear()
    model.readouts["caption"] = PoolSpan()
    alone = model(replace(batch, texts={"caption": short}, parts={"caption": spans}), tokens=True).texts["caption"]
    assert found["caption"].tokens is None
    assert found["filtered"].mask.flatten().tolist() == alone.mask.flatten().tolist() == [True, True, True, False]
    torch.testing.assert_close(found["filtered"].tokens[:3], alone.tokens[:3], rtol=0, atol=1e-5)


@settings(max_examples=30)
@given(st.data())
def test_masks_say_which_parts_are_there(data):
    lengths = torch.tensor(data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=2)))
    span = st.tuples(st.integers(-2, 9), st.integers(-2, 9))
    spans = torch.tensor([data.draw(st.lists(span, min_size=3, max_size=3)) for _ in lengths])
    inside = torch.arange(6)[None] < lengths[:, None]
    hidden = torch.randn(2, 6, 4, requires_grad=True)
    for readout in (PoolSpan(), PoolChunks(False), PoolChunks(True)):
        seen = Seen(hidden[:, 0], hidden, inside, spans.to(torch.int16), norm, norm)
        tokens, mask = readout(seen)
        for b, length in enumerate(lengths.tolist()):
            for k, (start, stop) in enumerate(spans[b].tolist()):
                assert mask[b, k] == any(start <= place < stop for place in range(length))
        grad = torch.autograd.grad(tokens.sum(), hidden)[0]
        assert tokens.isfinite().all()
        assert grad.isfinite().all()
        assert not grad[~inside].any()


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return {kind: write(root / kind) for kind, write in WRITERS.items()}


@pytest.mark.parametrize("kind", WRITERS)
def test_hidden_states_of_every_family_project_to_its_tokens(kind, directories):
    model = load(directories[kind]).eval()
    texts = model.tokenize(["a red dog", "a small green cat lies on the grass beside the house", "a bench"])
    pixels = torch.randint(0, 256, (3, 3, model.image_size, model.image_size), dtype=torch.uint8)
    pixels = model.normalize_pixels(pixels)
    family, backbone = model.family, model.backbone
    with torch.no_grad():
        for features, project, given_ in (
            (family.image_features, family.patch_vectors, (pixels,)),
            (family.text_features, family.word_vectors, (texts, model.text_transform)),
        ):
            vectors, hidden = features(backbone, *given_, request="hidden")
            expected, tokens = features(backbone, *given_, request="tokens")
            torch.testing.assert_close(vectors, expected)
            torch.testing.assert_close(project(backbone, hidden), tokens)
        assert torch.equal(family.text_norm(backbone, hidden), hidden)  # none of them norms on the way


@pytest.mark.parametrize("kind", WRITERS)
def test_one_token_and_one_patch_of_every_family_are_its_token_vectors(kind, directories):
    model = load(directories[kind]).eval()
    texts = model.tokenize(["a red dog", "a small green cat lies on the grass beside the house", "a bench"])
    length = int(texts.lengths.max())
    spans = torch.stack([torch.arange(length), torch.arange(1, length + 1)], 1).expand(3, -1, 2)  # each token alone
    patches = torch.eye(16, dtype=torch.bool).expand(3, 16, 16)
    batch = make_batch(model, texts, spans, patches)
    with torch.no_grad():
        plain = model(batch, tokens=True)
        for readout in (PoolSpan(), PoolChunks(False), PoolChunks(True)):
            model.readouts.update({"full": PoolPatches(), "caption": readout})
            found = model(batch, tokens=True)
            torch.testing.assert_close(found.images["full"].tokens, plain.images["full"].tokens, rtol=0, atol=1e-5)
            there = plain.texts["caption"].mask
            assert found.texts["caption"].mask[there].all()
            torch.testing.assert_close(
                found.texts["caption"].tokens[there], plain.texts["caption"].tokens[there], rtol=0, atol=1e-5
            )


def test_autocast_pools_in_full_precision(model, captions):
    texts = tokenized(model, captions, LENGTHS)
    model.readouts.update({"caption": PoolChunks(False), "full": PoolPatches()})
    batch = make_batch(model, texts, SPANS, some_patches(model))
    with torch.no_grad():
        expected = model(batch, tokens=True)
        with torch.autocast("cpu", torch.bfloat16):
            found = model(batch, tokens=True)
    for a, b in ((found.images["full"], expected.images["full"]), (found.texts["caption"], expected.texts["caption"])):
        assert a.tokens.dtype == torch.float32
        torch.testing.assert_close(a.tokens[a.mask].norm(dim=-1), torch.ones(int(a.mask.sum())))
        assert (a.tokens * b.tokens).sum(-1)[a.mask].min() > 0.99


def test_wrong_parts_are_an_error(model, captions):
    texts = tokenized(model, captions, LENGTHS)
    model.readouts["full"] = PoolPatches()
    with pytest.raises(ValueError, match="batch has none"):
        model(make_batch(model, texts, SPANS), tokens=True)
    with pytest.raises(ValueError, match="given in 5 patches"):
        model(make_batch(model, texts, SPANS, torch.ones(4, 1, 5, dtype=torch.bool)), tokens=True)
