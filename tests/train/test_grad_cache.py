from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hnclip.core import Batch, Embeddings, TextBatch, ViewEmbeddings, join_embeddings
from hnclip.data.batching import prepare
from hnclip.data.images import ImageTransform
from hnclip.data.scenes import scene_records
from hnclip.data.texts import TextTransform
from hnclip.losses import clip_loss, hard_negative_loss
from hnclip.models.load import wrap
from hnclip.models.preprocessing import train_tokenizer
from hnclip.objectives.base import GlobalTerm
from hnclip.objectives.hn_clip import HNClip
from hnclip.train.grad_cache import BACKWARD, cached_backward, chunk_slices, micro_backward

PAIRS = 11
# Rows 0 and 5 show one picture, rows 2 and 9 carry one caption.
DUPLICATES = torch.tensor([[i if i != 5 else 0, i if i != 9 else 2] for i in range(PAIRS)])
FULL = HNClip(GlobalTerm(hard_negative_loss), {"token": 1.0})


def small_data():
    """Eleven scenes, shortest caption first, and a tokenizer made of their captions."""
    records = sorted(scene_records("park", "train", families=3, members=4)[:PAIRS], key=lambda r: len(r.captions[0]))
    tokenizer = train_tokenizer([record.captions[0] for record in records], 700)
    data = prepare(records, TextTransform(tokenizer, 200), ImageTransform(16), text_views=("caption", "short"))
    margins = F.normalize(torch.randn(PAIRS, 6, generator=torch.Generator().manual_seed(3)).double(), dim=1)
    return data.with_margin_text(margins), tokenizer


def small_encoder(tokenizer, *, dropout=0.0, dtype=torch.float64):
    """A two-layer CLIP, always with the same weights, in training mode."""
    from transformers import CLIPConfig, CLIPModel

    tower = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "attention_dropout": dropout,
    }
    words = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 200,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = CLIPConfig(
        projection_dim=16,
        text_config={**tower, **words},
        vision_config={**tower, "image_size": 16, "patch_size": 8},
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        clip = CLIPModel(config)
        for parameter in clip.parameters():  # HF starts so small that a wrong gradient would hide below 1e-12
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.2)
    return wrap(clip, tokenizer, ImageTransform(16, mean=(0.5,) * 3, std=(0.3,) * 3)).to(dtype).train()


@pytest.fixture(scope="session")
def data():
    return small_data()


@pytest.fixture
def batch(data):
    pairs = data[0].batch(range(PAIRS))
    return replace(pairs, ids=DUPLICATES, texts={"caption": pairs.texts["caption"]})


@pytest.fixture
def model(data):
    return small_encoder(data[1])


def gradients(model, step):
    """What `step` leaves in every parameter, and what it returns."""
    model.zero_grad(set_to_none=True)
    result = step()
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return grads, result


def whole_batch(model, batch, objective):
    """The slow twin: one forward of all pairs, one graph."""
    terms = objective(model(batch, tokens=objective.tokens))
    sum(terms.values()).backward()
    return {name: term.detach() for name, term in terms.items()}


def chunks_in_one_graph(model, batch, objective, slices, autocast=nullcontext):
    """The twin for dropout: the same encoder calls in the same order, but with one graph and one backward."""
    parts = []
    for rows in slices:
        with autocast():
            parts.append(model(batch[rows], tokens=objective.tokens))
    terms = objective(join_embeddings(parts))
    sum(terms.values()).backward()
    return {name: term.detach() for name, term in terms.items()}


def assert_same(found, expected, atol=1e-12):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], value, atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


OBJECTIVES = {
    "global and token": FULL,
    "global only": HNClip(GlobalTerm(hard_negative_loss)),
    "frozen margins": HNClip(GlobalTerm(partial(hard_negative_loss, center="mean"), frozen=True), {"token": 0.3}),
}


@pytest.mark.parametrize("chunk", [1, 3, 5, 16, 100])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_cached_gradients_are_the_whole_batchs(model, batch, name, chunk):
    objective = OBJECTIVES[name]
    expected, terms = gradients(model, lambda: whole_batch(model, batch, objective))
    found, result = gradients(model, lambda: cached_backward(model, batch, objective, chunk=chunk))
    assert all(grad.abs().max() > 1e-6 for name, grad in expected.items() if "k_proj.bias" not in name)
    assert_same(found, expected)
    assert_same(result.terms, terms)
    assert not any(term.requires_grad for term in result.terms.values())


def test_chunks_are_not_independent_batches(model, batch):
    """The control: what is compared above is worth comparing."""
    cached, _ = gradients(model, lambda: cached_backward(model, batch, FULL, chunk=4))
    micro, _ = gradients(model, lambda: micro_backward(model, batch, FULL, chunk=4))
    cosine = F.cosine_similarity(*(torch.cat([g.flatten() for g in gs.values()]) for gs in (cached, micro)), dim=0)
    assert cosine < 0.999


def test_ids_reach_the_objective(model, batch):
    unmasked = replace(batch, ids=torch.arange(PAIRS)[:, None])
    with_ids, _ = gradients(model, lambda: cached_backward(model, batch, FULL, chunk=3))
    without, _ = gradients(model, lambda: cached_backward(model, unmasked, FULL, chunk=3))
    assert (with_ids["backbone.text_projection.weight"] - without["backbone.text_projection.weight"]).abs().max() > 1e-6


def test_scale_gradient_counts_once(model, batch):
    assert len(chunk_slices(PAIRS, 3)) == 4
    expected, _ = gradients(model, lambda: whole_batch(model, batch, FULL))
    found, _ = gradients(model, lambda: cached_backward(model, batch, FULL, chunk=3))
    assert expected["backbone.logit_scale"].abs() > 1e-3
    assert found["backbone.logit_scale"] / expected["backbone.logit_scale"] == pytest.approx(1, abs=1e-12)


def test_gradients_add_to_what_is_there(model, batch):
    once, _ = gradients(model, lambda: cached_backward(model, batch, FULL, chunk=4))
    cached_backward(model, batch, FULL, chunk=4)
    assert_same({n: p.grad for n, p in model.named_parameters()}, {n: 2 * grad for n, grad in once.items()})


@pytest.mark.parametrize("frozen", ["vision", "text", "both"])
def test_frozen_towers(model, batch, frozen):
    for name, parameter in model.named_parameters():
        tower = "vision" if "vis" in name else "text"
        parameter.requires_grad_("logit_scale" in name or frozen not in (tower, "both"))
    expected, _ = gradients(model, lambda: whole_batch(model, batch, FULL))
    found, _ = gradients(model, lambda: cached_backward(model, batch, FULL, chunk=4))
    assert any(grad is None for grad in expected.values())
    assert_same(found, expected)


# Dropout ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [3, 5, 100])
def test_attention_dropout_is_replayed(data, batch, chunk):
    model = small_encoder(data[1], dropout=0.3)
    torch.manual_seed(5)
    expected, terms = gradients(model, lambda: chunks_in_one_graph(model, batch, FULL, chunk_slices(PAIRS, chunk)))
    after = torch.get_rng_state()
    torch.manual_seed(5)
    found, result = gradients(model, lambda: cached_backward(model, batch, FULL, chunk=chunk))
    assert_same(found, expected)
    assert_same(result.terms, terms)
    # One encoding of every chunk has been drawn: neither rewound by the replay nor drawn twice.
    assert torch.equal(torch.get_rng_state(), after)
    again, _ = gradients(model, lambda: cached_backward(model, batch, FULL, chunk=chunk))
    assert (again["backbone.text_projection.weight"] - found["backbone.text_projection.weight"]).abs().max() > 1e-6


class Toy(nn.Module):
    """Two linear towers with dropout; patches have tokens, captions may; "crop" and "short" are second views."""

    def __init__(self, *, text_tokens=True):
        super().__init__()
        self.pixels, self.words = nn.Linear(12, 6), nn.Embedding(20, 6)
        self.dropout = nn.Dropout(0.4)
        self.log_scale = nn.Parameter(torch.tensor(1.5))
        self.text_tokens = text_tokens
        self.double()

    def forward(self, batch, *, tokens=False):
        return Embeddings(
            {name: self.image(view, tokens) for name, view in batch.images.items()},
            {name: self.text(view, tokens and self.text_tokens) for name, view in batch.texts.items()},
            self.log_scale.exp(),
            batch.ids,
        )

    def image(self, pixels, tokens):
        patches = self.dropout(self.pixels(pixels.double().flatten(2).mT.reshape(len(pixels), -1, 12) / 255))
        mask = torch.ones(patches.shape[:2], dtype=torch.bool)
        vectors = F.normalize(patches.mean(1), dim=-1)
        return ViewEmbeddings(vectors, patches, mask) if tokens else ViewEmbeddings(vectors)

    def text(self, texts, tokens):
        mask = torch.arange(texts.ids.shape[1])[None] < texts.lengths[:, None]
        words = self.dropout(self.words(texts.ids)) * mask[..., None]
        vectors = F.normalize(words.sum(1), dim=-1)
        return ViewEmbeddings(vectors, words, mask) if tokens else ViewEmbeddings(vectors)


@dataclass(frozen=True)
class TwoViews:
    """Reads everything: both pairs of views, and token sums, so every kind of leaf carries gradient."""

    tokens: bool = True
    image_views = ("full", "crop")
    text_views = ("caption", "short")

    def __call__(self, embeddings):
        image, text, scale = embeddings.images, embeddings.texts, embeddings.scale
        noise = torch.rand((), dtype=scale.dtype)  # an objective may draw, too
        sums = [
            (view.tokens.pow(3) * view.mask[..., None]).sum()
            for view in (*image.values(), *text.values())
            if view.tokens is not None
        ]
        return {
            "global": clip_loss(image["full"].vectors, text["caption"].vectors, scale),
            "local": noise * hard_negative_loss(image["crop"].vectors, text["short"].vectors, scale),
            "tokens": sum(sums, torch.zeros_like(scale)),
        }


def toy_batch(count=PAIRS):
    g = torch.Generator().manual_seed(1)

    def texts(longest):
        lengths = torch.randint(1, longest + 1, (count,), generator=g)
        return TextBatch(torch.randint(20, (count, int(lengths.max())), generator=g), lengths)

    images = {
        name: torch.randint(256, (count, 3, size, size), generator=g, dtype=torch.uint8)
        for name, size in (("full", 4), ("crop", 2))
    }
    return Batch(images, {"caption": texts(9), "short": texts(3)}, torch.arange(count)[:, None])


@pytest.mark.parametrize("objective", [TwoViews(), TwoViews(tokens=False), HNClip(GlobalTerm(clip_loss))])
@pytest.mark.parametrize("text_tokens", [True, False])
@pytest.mark.parametrize("chunk", [1, 4, 50])
def test_views_tokens_and_dropout_of_any_kind(objective, text_tokens, chunk):
    """Several views, views without tokens, and with `HNClip` two views that nobody reads."""
    torch.manual_seed(0)
    model, batch = Toy(text_tokens=text_tokens).train(), toy_batch()
    torch.manual_seed(7)
    expected, terms = gradients(model, lambda: chunks_in_one_graph(model, batch, objective, chunk_slices(PAIRS, chunk)))
    after = torch.get_rng_state()
    torch.manual_seed(7)
    found, result = gradients(model, lambda: cached_backward(model, batch, objective, chunk=chunk))
    assert_same(found, expected)
    assert_same(result.terms, terms)
    assert torch.equal(torch.get_rng_state(), after)


def test_an_ignored_tower_has_no_gradient():
    class TextOnly(TwoViews):
        def __call__(self, embeddings):
            return {"text": embeddings.scale * embeddings.texts["short"].vectors[:, 0].sum()}

    torch.manual_seed(0)
    model = Toy()
    found, _ = gradients(model, lambda: cached_backward(model, toy_batch(), TextOnly(), chunk=4))
    assert found["pixels.weight"] is None
    assert found["words.weight"].abs().max() > 1e-3


def test_autocast_is_the_same_in_both_passes(data, batch):
    model = small_encoder(data[1], dtype=torch.float32)

    def autocast():
        return torch.autocast("cpu", torch.bfloat16)

    slices = chunk_slices(PAIRS, 4)
    expected, terms = gradients(model, lambda: chunks_in_one_graph(model, batch, FULL, slices, autocast))
    found, result = gradients(model, lambda: cached_backward(model, batch, FULL, chunk=4, autocast=autocast))
    exact, _ = gradients(model, lambda: cached_backward(model, batch, FULL, chunk=4))
    assert_same(result.terms, terms, atol=1e-6)
    size = max(grad.abs().max() for grad in expected.values())
    assert_same(found, expected, atol=1e-5 * size)
    assert max((found[name] - exact[name]).abs().max() for name in exact) > 1e-3 * size


# What is computed when ----------------------------------------------------------------------------------------


class Recorder(nn.Module):
    """Notes for every encoder call how many pairs it had and whether a graph was built."""

    def __init__(self, model):
        super().__init__()
        self.model, self.calls = model, []

    def forward(self, batch, *, tokens=False):
        embeddings = self.model(batch, tokens=tokens)
        graph = embeddings.images["full"].vectors.grad_fn is not None
        self.calls.append((len(batch), tokens, torch.is_grad_enabled(), graph))
        return embeddings


def test_first_pass_builds_no_graph(model, batch):
    recorder = Recorder(model)
    seen = []

    def gather(embeddings):
        seen.append((len(recorder.calls), len(embeddings.ids), embeddings.texts["caption"].tokens.shape[1]))
        return embeddings

    cached_backward(recorder, batch, FULL, chunk=4, gather=gather)
    sizes = (4, 4, 3)
    assert recorder.calls == [(n, True, False, False) for n in sizes] + [(n, True, True, True) for n in sizes]
    assert seen == [(3, PAIRS, int(batch.texts["caption"].lengths.max()))]


@pytest.mark.parametrize("negatives", BACKWARD)
def test_no_token_vectors_without_token_term(model, batch, negatives):
    recorder = Recorder(model)
    BACKWARD[negatives](recorder, batch, HNClip(GlobalTerm(clip_loss)), chunk=4)
    assert {tokens for _, tokens, _, _ in recorder.calls} == {False}


# Micro-batches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chunk", "sizes"), [(4, [4, 4, 3]), (5, [5, 6]), (11, [11]), (100, [11])])
def test_micro_batches_average_by_their_pairs(model, batch, chunk, sizes):
    def by_hand():
        start, total = 0, {"global": 0, "token": 0}
        for size in sizes:
            terms = FULL(model(batch[start : start + size], tokens=True))
            (sum(terms.values()) * size / PAIRS).backward()
            total = {name: total[name] + terms[name].detach() * size / PAIRS for name in total}
            start += size
        return total

    expected, terms = gradients(model, by_hand)
    found, result = gradients(model, lambda: micro_backward(model, batch, FULL, chunk=chunk))
    assert_same(found, expected)
    assert_same(result.terms, terms)
    assert not any(term.requires_grad for term in result.terms.values())


def test_one_micro_batch_is_the_cached_batch(model, batch):
    micro, _ = gradients(model, lambda: micro_backward(model, batch, FULL, chunk=PAIRS))
    cached, _ = gradients(model, lambda: cached_backward(model, batch, FULL, chunk=3))
    assert_same(micro, cached)


def test_infonce_of_every_evaluation(model, batch):
    """Plain InfoNCE whatever the objective, with the same pairs masked."""

    def infonce(part):
        e = model(part)
        return clip_loss(e.images["full"].vectors, e.texts["caption"].vectors, e.scale, ids=part.ids).detach()

    micro = micro_backward(model, batch, FULL, chunk=6).infonce
    cached = cached_backward(model, batch, FULL, chunk=6).infonce
    torch.testing.assert_close(micro, torch.stack([infonce(batch[:6]), infonce(batch[6:])]))
    torch.testing.assert_close(cached, infonce(batch)[None])
    assert not micro.requires_grad
    assert not cached.requires_grad


def test_loss_of_every_evaluation(model, batch):
    """The sum of the terms, not weighted by the size of the micro-batch."""

    def loss(part):
        return sum(FULL(model(part, tokens=True)).values()).detach()

    micro, cached = (BACKWARD[negatives](model, batch, FULL, chunk=6).losses for negatives in ("micro", "batch"))
    torch.testing.assert_close(micro, torch.stack([loss(batch[:6]), loss(batch[6:])]))
    torch.testing.assert_close(cached, loss(batch)[None])
    assert not micro.requires_grad
    assert not cached.requires_grad


@pytest.mark.parametrize("negatives", BACKWARD)
def test_a_batch_of_one_has_no_negatives(model, batch, negatives):
    with pytest.raises(ValueError, match="at least 2 pairs"):
        BACKWARD[negatives](model, batch[:1], FULL, chunk=4)


def test_chunks_cover_every_row_and_leave_none_alone():
    for count, size in product(range(1, 20), range(1, 9)):
        slices = chunk_slices(count, size)
        assert [row for part in slices for row in range(count)[part]] == list(range(count))
        lengths = [part.stop - part.start for part in slices]
        assert all(length == size for length in lengths[:-1])
        assert lengths[-1] <= size + 1
        assert count == 1 or size == 1 or min(lengths) >= 2


@pytest.mark.parametrize(("count", "size"), [(0, 4), (4, 0), (4, -1)])
def test_chunks_of_nothing_are_an_error(count, size):
    with pytest.raises(ValueError, match="at least 1 pair"):
        chunk_slices(count, size)
