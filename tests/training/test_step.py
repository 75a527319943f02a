"""Gradients of a step against one graph of everything, by kind of negatives; how a batch is divided; the memory."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small import DUPLICATES, PAIRS, assert_same, gradients, small_batch, small_encoder, small_memory

from hnclip.config import OptimConfig
from hnclip.core import NegativePairs, join_embeddings
from hnclip.losses import GLOBAL_LOSSES, clip_loss, hard_negative_loss
from hnclip.objectives.base import GlobalTerm
from hnclip.objectives.hn_clip import HNClip
from hnclip.training.memory import PairMemory
from hnclip.training.step import backward, split_batch

FULL = HNClip(GlobalTerm(hard_negative_loss), {"token": 1.0})
GLOBAL = HNClip(GlobalTerm(hard_negative_loss))
FROZEN = HNClip(GlobalTerm(partial(hard_negative_loss, center="mean"), frozen=True), {"token": 0.3})


@dataclass(frozen=True)
class TwoViews:
    """Reads two pairs of views and token sums, so that every kind of leaf has a gradient; draws a random number."""

    tokens: bool = True

    def __call__(self, embeddings):
        image, text, scale = embeddings.images, embeddings.texts, embeddings.scale
        views = [*image.values(), *text.values()]
        return {
            "global": clip_loss(image["full"].vectors, text["caption"].vectors, scale),
            "local": torch.rand(()) * hard_negative_loss(image["crop"].vectors, text["short"].vectors, scale),
            "tokens": sum((view.tokens.pow(3) * view.mask[..., None]).sum() for view in views),
        }


def optim(chunk, negatives="batch", **others):
    return OptimConfig(micro_batch=chunk, negatives=negatives, **{"precision": "fp32", **others})


@pytest.fixture(scope="module")
def data():
    """A batch of two views of images and captions, and a tokenizer."""
    batch, tokenizer = small_batch()
    texts = batch.texts["caption"]
    short = replace(texts, ids=texts.ids[:, :9], lengths=texts.lengths.clamp(max=9))
    images = {**batch.images, "crop": batch.images["full"].flip(-1)}
    return replace(batch, images=images, texts={**batch.texts, "short": short}), tokenizer


def one_graph(model, batch, objective, optim, autocast=nullcontext):
    """The slow twin: the same encoder calls in the same order, one graph, one backward pass of the mean over all pairs.
    Pairs of other groups are no negatives."""
    total, losses, infonces = {}, [], []
    for group in split_batch(range(PAIRS), optim)[1]:
        parts = []
        for rows in group.chunks:
            with autocast():
                parts.append(model(batch[rows], tokens=objective.tokens))
        embeddings = join_embeddings(parts)
        terms = objective(embeddings)
        image, text = embeddings.images["full"].vectors, embeddings.texts["caption"].vectors
        infonces.append(clip_loss(image, text, embeddings.scale, ids=embeddings.ids).detach())
        losses.append(sum(terms.values()).detach())
        total = {name: total.get(name, 0) + len(image) / PAIRS * term for name, term in terms.items()}
    sum(total.values()).backward()
    return {name: term.detach() for name, term in total.items()}, torch.stack(losses), torch.stack(infonces)


SIZES = [("batch", 2), ("batch", 4), ("batch", 16), ("micro", 4), ("micro", 5)]


@pytest.mark.parametrize(("negatives", "chunk"), SIZES)
@pytest.mark.parametrize("frozen", [None, "vision", "text"])
@pytest.mark.parametrize(
    "objective", [FULL, GLOBAL, FROZEN, TwoViews()], ids=["global and token", "global", "frozen margins", "two views"]
)
def test_a_step_has_the_gradient_of_one_graph(data, objective, frozen, negatives, chunk):
    """Its terms, and of every group the loss and InfoNCE. Dropout is replayed, for views that the objective ignores
    too."""
    batch, tokenizer = data
    model = small_encoder(tokenizer, dropout=0.3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("logit_scale" in name or frozen != ("vision" if "vis" in name else "text"))
    torch.manual_seed(7)
    expected, wanted = gradients(model, lambda: one_graph(model, batch, objective, optim(chunk, negatives)))
    after = torch.get_rng_state()
    torch.manual_seed(7)
    found, result = gradients(model, lambda: backward(model, batch, objective, optim(chunk, negatives)))
    assert any(grad is None for grad in expected.values()) == (frozen is not None)
    assert all(g is None or g.abs().max() > 1e-6 for name, g in expected.items() if "k_proj.bias" not in name)
    assert_same(found, expected)
    assert_same(result.terms, wanted[0])
    assert not any(term.requires_grad for term in result.terms.values())
    torch.testing.assert_close((result.losses, result.infonce), wanted[1:])
    # Every chunk has drawn once: the replay neither rewinds the generator nor draws again.
    assert torch.equal(torch.get_rng_state(), after)


def test_autocast_covers_both_encodings(data):
    batch, tokenizer = data
    model = small_encoder(tokenizer, dtype=torch.float32)
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    expected, _ = gradients(model, lambda: one_graph(model, batch, FULL, optim(4), autocast))
    found, _ = gradients(model, lambda: backward(model, batch, FULL, optim(4, precision="bf16")))
    exact, _ = gradients(model, lambda: backward(model, batch, FULL, optim(4)))
    size = max(grad.abs().max() for grad in expected.values())
    assert_same(found, expected, atol=1e-5 * size)
    assert max((found[name] - exact[name]).abs().max() for name in exact) > 1e-3 * size


# Division of a batch ------------------------------------------------------------------------------------------


@given(
    count=st.integers(2, 60),
    micro=st.integers(2, 9),
    world=st.integers(1, 7),
    negatives=st.sampled_from(["micro", "batch", "memory"]),
)
def test_ranks_share_a_batch(count, micro, world, negatives):
    """Every pair once, micro-batches in order; as many chunks on every rank, none too large."""
    batch = [100 + row for row in range(count)]
    splits = [split_batch(batch, optim(micro, negatives), rank=rank, world=world) for rank in range(world)]
    assert len({len(groups) for _, groups in splits}) == 1
    for number, group in enumerate(splits[0][1]):
        found = []
        for rows, groups in splits:
            mine = groups[number]
            assert mine.pairs == group.pairs
            assert len(mine.pairs) >= 2
            assert len(mine.chunks) == len(group.chunks)
            encoded = [row for chunk in mine.chunks for row in rows[chunk]]
            assert len(encoded) == max(mine.rows, 1)
            assert all(1 <= chunk.stop - chunk.start <= micro + (negatives != "batch") for chunk in mine.chunks)
            found += encoded[: mine.rows]
        assert (sorted(found) if negatives == "batch" else found) == list(group.pairs)
    assert [row for group in splits[0][1] for row in group.pairs] == batch


# Memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*GLOBAL_LOSSES, "frozen"])
@pytest.mark.parametrize("count", [0, 3, PAIRS])
def test_memory_negatives_are_more_columns(data, name, count):
    """Against a literal twin: pairs in memory are columns of every query, without gradient; duplicates are masked,
    also a pair's own older entry. The token term is that of the micro-batch."""
    batch, tokenizer = data
    model, frozen = small_encoder(tokenizer), name == "frozen"
    loss = GLOBAL_LOSSES["hn" if frozen else name]
    objective = HNClip(GlobalTerm(loss, frozen=frozen), {"token": 0.5})
    memory, image, text = small_memory(batch, PAIRS, count)

    def twin():
        e = model(batch[:PAIRS], tokens=True)
        options = {"margin_text": torch.cat([batch.margin_text, batch.margin_text[:count]])} if frozen else {}
        value = loss(
            torch.cat([e.images["full"].vectors, image]),
            torch.cat([e.texts["caption"].vectors, text]),
            e.scale,
            rows=PAIRS,
            ids=torch.cat([DUPLICATES, DUPLICATES[:count]]),
            **options,
        )
        terms = {"global": value, "token": HNClip(None, {"token": 0.5})(e)["token"]}
        sum(terms.values()).backward()
        return {key: term.detach() for key, term in terms.items()}

    expected, terms = gradients(model, twin)
    found, result = gradients(model, lambda: backward(model, batch, objective, optim(PAIRS, "memory"), memory=memory))
    assert_same(found, expected)
    assert_same(result.terms, terms)


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True), max_size=8), st.integers(1, 12))
def test_memory_keeps_the_pairs_seen_last(batches, size):
    """Against a list: each pair once, with its newest vectors; the one seen longest ago is replaced."""

    def pairs(rows, turn):
        vectors = torch.tensor([[float(row), float(turn)] for row in rows])
        return NegativePairs(vectors, vectors, torch.tensor(rows)[:, None])

    memory = PairMemory(size, pairs([0], -1), torch.tensor([0]))
    expected = [(0, -1)]
    for turn, rows in enumerate(batches):
        memory.add(pairs(rows, turn), torch.tensor(rows))
        for row in rows:
            expected = [*[entry for entry in expected if entry[0] != row], (row, turn)]
        expected = expected[-size:]
    again = PairMemory(size, pairs([3], 7), torch.tensor([3]))
    again.load_state_dict(memory.state_dict())
    for found in (memory, again):
        assert sorted(map(tuple, found.negatives().image.tolist())) == sorted(map(tuple, expected))
        assert sorted(found.negatives().ids.flatten().tolist()) == sorted(row for row, _ in expected)
