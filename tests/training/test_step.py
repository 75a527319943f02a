"""Gradients of a step against one graph of everything, by kind of negatives; how a batch is divided; the memory."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small import DUPLICATES, PAIRS, assert_same, gradients, small_batch, small_encoder, small_memory

from hnclip.config import OptimConfig
from hnclip.core import Embeddings, ViewEmbeddings, join_embeddings
from hnclip.losses import GLOBAL_LOSSES, clip_loss, hard_negative_loss
from hnclip.objectives.base import GlobalTerm
from hnclip.objectives.hn_clip import HNClip
from hnclip.training.memory import PairMemory
from hnclip.training.step import backward, chunk_slices, split_batch

FULL = HNClip(GlobalTerm(hard_negative_loss), {"token": 1.0})
GLOBAL = HNClip(GlobalTerm(hard_negative_loss))
FROZEN = HNClip(GlobalTerm(partial(hard_negative_loss, center="mean"), frozen=True), {"token": 0.3})


@dataclass(frozen=True)
class TwoViews:
    """Reads two pairs of views and token sums, so that every kind of leaf has a gradient; draws a random number."""

    tokens: bool = True

    def __call__(self, embeddings):
        image, text, scale = embeddings.images, embeddings.texts, embeddings.scale
        noise = torch.rand((), dtype=scale.dtype)
        views = [view for view in (*image.values(), *text.values()) if view.tokens is not None]
        sums = [(view.tokens.pow(3) * view.mask[..., None]).sum() for view in views]
        return {
            "global": clip_loss(image["full"].vectors, text["caption"].vectors, scale),
            "local": noise * hard_negative_loss(image["crop"].vectors, text["short"].vectors, scale),
            "tokens": sum(sums, torch.zeros_like(scale)),
        }


def optim(chunk, negatives="batch", **others):
    return OptimConfig(micro_batch=chunk, negatives=negatives, **{"precision": "fp32", **others})


@pytest.fixture(scope="module")
def data():
    return small_batch()


@pytest.fixture
def batch(data):
    return data[0]


@pytest.fixture
def model(data):
    return small_encoder(data[1])


def one_graph(model, batch, objective, chunk=PAIRS, autocast=nullcontext):
    """The slow twin: the same encoder calls in the same order, one graph, one backward pass."""
    (group,) = split_batch(range(PAIRS), optim(chunk))[1]
    parts = []
    for rows in group.chunks:
        with autocast():
            parts.append(model(batch[rows], tokens=objective.tokens))
    terms = objective(join_embeddings(parts))
    sum(terms.values()).backward()
    return {name: term.detach() for name, term in terms.items()}


@pytest.mark.parametrize("chunk", [2, 3, 5, 16])
@pytest.mark.parametrize("objective", [FULL, GLOBAL, FROZEN], ids=["global and token", "global", "frozen margins"])
def test_batch_negatives_have_the_gradient_of_the_whole_batch(model, batch, objective, chunk):
    expected, terms = gradients(model, lambda: one_graph(model, batch, objective))
    found, result = gradients(model, lambda: backward(model, batch, objective, optim(chunk)))
    assert all(grad.abs().max() > 1e-6 for name, grad in expected.items() if "k_proj.bias" not in name)
    assert_same(found, expected)
    assert_same(result.terms, terms)
    assert not any(term.requires_grad for term in result.terms.values())


@pytest.mark.parametrize(("chunk", "sizes"), [(4, [4, 4, 3]), (5, [5, 6]), (11, [11]), (100, [11])])
def test_micro_batches_average_by_their_pairs(model, batch, chunk, sizes):
    def twin():
        start, total = 0, {"global": 0, "token": 0}
        for size in sizes:
            terms = FULL(model(batch[start : start + size], tokens=True))
            (sum(terms.values()) * size / PAIRS).backward()
            total = {name: total[name] + terms[name].detach() * size / PAIRS for name in total}
            start += size
        return total

    expected, terms = gradients(model, twin)
    found, result = gradients(model, lambda: backward(model, batch, FULL, optim(chunk, "micro")))
    assert_same(found, expected)
    assert_same(result.terms, terms)


@pytest.mark.parametrize("negatives", ["micro", "batch"])
@pytest.mark.parametrize("frozen", ["vision", "text", "both"])
def test_frozen_towers_have_no_gradient(model, batch, frozen, negatives):
    for name, parameter in model.named_parameters():
        tower = "vision" if "vis" in name else "text"
        parameter.requires_grad_("logit_scale" in name or frozen not in (tower, "both"))
    expected, _ = gradients(model, lambda: one_graph(model, batch, FULL))
    found, _ = gradients(
        model, lambda: backward(model, batch, FULL, optim(4 if negatives == "batch" else 11, negatives))
    )
    assert any(grad is None for grad in expected.values())
    assert_same(found, expected)


@pytest.mark.parametrize(
    "objective", [FULL, GLOBAL, TwoViews(), TwoViews(False)], ids=["full", "global", "views", "no tokens"]
)
@pytest.mark.parametrize("chunk", [2, 4, 50])
def test_dropout_is_replayed(data, batch, objective, chunk):
    """For several views, without tokens, and with views that the objective ignores."""
    texts = batch.texts["caption"]
    short = replace(texts, ids=texts.ids[:, :9], lengths=texts.lengths.clamp(max=9))
    batch = replace(
        batch, images={**batch.images, "crop": batch.images["full"].flip(-1)}, texts={**batch.texts, "short": short}
    )
    model = small_encoder(data[1], dropout=0.3)
    torch.manual_seed(7)
    expected, terms = gradients(model, lambda: one_graph(model, batch, objective, chunk))
    after = torch.get_rng_state()
    torch.manual_seed(7)
    found, result = gradients(model, lambda: backward(model, batch, objective, optim(chunk)))
    assert_same(found, expected)
    assert_same(result.terms, terms)
    # Every chunk has drawn once: the replay neither rewinds the generator nor draws again.
    assert torch.equal(torch.get_rng_state(), after)
    again, _ = gradients(model, lambda: backward(model, batch, objective, optim(chunk)))
    assert (again["backbone.text_projection.weight"] - found["backbone.text_projection.weight"]).abs().max() > 1e-6


def test_autocast_covers_both_encodings(data, batch):
    model = small_encoder(data[1], dtype=torch.float32)
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    expected, terms = gradients(model, lambda: one_graph(model, batch, FULL, 4, autocast))
    found, result = gradients(model, lambda: backward(model, batch, FULL, optim(4, precision="bf16")))
    exact, _ = gradients(model, lambda: backward(model, batch, FULL, optim(4)))
    assert_same(result.terms, terms, atol=1e-6)
    size = max(grad.abs().max() for grad in expected.values())
    assert_same(found, expected, atol=1e-5 * size)
    assert max((found[name] - exact[name]).abs().max() for name in exact) > 1e-3 * size


@pytest.mark.parametrize(
    ("negatives", "calls"),
    [("batch", [(n, graph) for graph in (False, True) for n in (3, 4, 4)]), ("micro", [(n, True) for n in (4, 4, 3)])],
)
def test_gradient_caching_encodes_first_without_a_graph(model, batch, negatives, calls):
    """A group of one chunk is encoded once."""
    found = []
    model.register_forward_hook(
        lambda model, given, out: found.append((len(given[0]), out.images["full"].vectors.requires_grad))
    )
    backward(model, batch, FULL, optim(4, negatives))
    assert found == calls


def test_losses_are_reported_for_every_group(model, batch):
    """InfoNCE and the sum of the terms of each evaluation, unweighted, with the same pairs masked."""

    def infonce(part):
        e = model(part)
        return clip_loss(e.images["full"].vectors, e.texts["caption"].vectors, e.scale, ids=part.ids).detach()

    def loss(part):
        return sum(FULL(model(part, tokens=True)).values()).detach()

    for negatives, parts in (("micro", [batch[:6], batch[6:]]), ("batch", [batch])):
        found = backward(model, batch, FULL, optim(6, negatives))
        torch.testing.assert_close(found.infonce, torch.stack([infonce(part) for part in parts]))
        torch.testing.assert_close(found.losses, torch.stack([loss(part) for part in parts]))


# Division of a batch ------------------------------------------------------------------------------------------


def test_chunks_cover_every_row_and_leave_none_alone():
    for count, size in product(range(1, 20), range(1, 9)):
        slices = chunk_slices(count, size)
        assert [row for part in slices for row in range(count)[part]] == list(range(count))
        lengths = [part.stop - part.start for part in slices]
        assert all(length == size for length in lengths[:-1])
        assert count == 1 or size == 1 or 2 <= lengths[-1] <= size + 1


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
def test_memory_negatives_are_more_columns(model, batch, name, count):
    """Against a literal twin: pairs in memory are columns of every query, without gradient; duplicates are masked,
    also a pair's own older entry. The token term is that of the micro-batch."""
    frozen = name == "frozen"
    loss = GLOBAL_LOSSES["hn" if frozen else name]
    objective = HNClip(GlobalTerm(loss, frozen=frozen), {"token": 0.5})
    memory, image, text = small_memory(batch, PAIRS, count)

    def twin():
        e = model(batch, tokens=True)
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


def test_later_micro_batches_see_earlier_ones(model, batch):
    memory, _, _ = small_memory(batch, 4, 2)
    backward(model, batch, FULL, optim(4, "memory"), memory=memory)
    kept, encoded = memory.negatives(), model(batch, tokens=False)
    slots = memory.state_dict()["slots"]
    assert sorted(row for row, _ in slots) == [7, 8, 9, 10]
    for row, slot in slots:
        torch.testing.assert_close(kept.image[slot], encoded.images["full"].vectors[row].detach())
        torch.testing.assert_close(kept.text[slot], encoded.texts["caption"].vectors[row].detach())
        assert torch.equal(kept.ids[slot], DUPLICATES[row])
    assert not kept.image.requires_grad


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True), max_size=8), st.integers(1, 12))
def test_memory_keeps_the_pairs_seen_last(batches, size):
    """Against a list: each pair once, with its newest vectors; the one seen longest ago is replaced."""

    def embeddings(rows, turn):
        vectors = torch.tensor([[float(row), float(turn)] for row in rows])
        view = ViewEmbeddings(vectors)
        return Embeddings({"full": view}, {"caption": view}, torch.tensor(1.0), torch.tensor(rows)[:, None])

    memory = PairMemory(size, embeddings([0], -1), torch.tensor([0]))
    expected = [(0, -1)]
    for turn, rows in enumerate(batches):
        memory.add(embeddings(rows, turn), torch.tensor(rows))
        for row in rows:
            expected = [*[entry for entry in expected if entry[0] != row], (row, turn)]
        expected = expected[-size:]
    again = PairMemory(size, embeddings([3], 7), torch.tensor([3]))
    again.load_state_dict(memory.state_dict())
    for found in (memory, again):
        assert sorted(map(tuple, found.negatives().image.tolist())) == sorted(map(tuple, expected))
        assert sorted(found.negatives().ids.flatten().tolist()) == sorted(row for row, _ in expected)
