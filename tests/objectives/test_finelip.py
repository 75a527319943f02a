from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from hnclip.losses import GLOBAL_LOSSES, clip_loss, hard_negative_loss
from hnclip.objectives import finelip
from hnclip.objectives.choice import Choice
from hnclip.objectives.embeddings import Embeddings, ViewEmbeddings
from hnclip.objectives.finelip import FineLip, kept_tokens
from hnclip.objectives.global_term import GlobalTerm
from hnclip.objectives.objective import Moment, Objective

IDS = torch.tensor([[0, 0], [0, 1], [2, 1], [3, 3], [4, 4], [5, 5], [6, 6]])
PAIRS = len(IDS)


def make_embeddings(dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)

    def vectors(*shape):
        return F.normalize(torch.randn(*shape, generator=g, dtype=torch.float64), dim=-1).to(dtype).requires_grad_()

    everything = torch.ones(PAIRS, 5, dtype=torch.bool)
    some = everything.clone()
    some[2, :4] = False  # a caption of one token
    return Embeddings(
        {"full": ViewEmbeddings(vectors(PAIRS, 8), vectors(PAIRS, 5, 8), everything)},
        {"caption": ViewEmbeddings(vectors(PAIRS, 8), vectors(PAIRS, 5, 8), some)},
        torch.tensor(10.0, dtype=dtype, requires_grad=True),
        ids=IDS,
    )


def grads_of(value, embeddings):
    views = [*embeddings.images.values(), *embeddings.texts.values()]
    leaves = [embeddings.scale, *(tensor for view in views for tensor in (view.vectors, view.tokens))]
    grads = torch.autograd.grad(value, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads)]


def twin_fine(embeddings):
    """One caption, one picture, one hinge after the other."""
    image, text, ids = embeddings.images["full"], embeddings.texts["caption"], embeddings.ids
    scores = {}
    for j in range(PAIRS):
        for i in range(PAIRS):
            match = F.leaky_relu(text.tokens[j][text.mask[j]] @ image.tokens[i][image.mask[i]].T, 0.1)
            scores[i, j] = match.amax(1).mean() + match.amax(0).mean()
    total = 0.0
    for (i, j), score in scores.items():
        if not (ids[i] == ids[j]).any():
            total = total + torch.clamp(0.2 + score - scores[i, i], min=0)
            total = total + torch.clamp(0.2 + score - scores[j, j], min=0)
    return total


def test_terms_are_the_global_one_and_the_fine_one():
    e = make_embeddings()
    made: Objective = FineLip(GlobalTerm(hard_negative_loss, margins=True), 0.3)
    terms = made(e)
    assert list(terms) == ["global", "fine"]
    image, caption = e.images["full"].vectors, e.texts["caption"].vectors
    assert terms["global"] == hard_negative_loss(image, caption, e.scale, ids=IDS)
    expected = 0.3 * twin_fine(e)
    torch.testing.assert_close(terms["fine"], expected)
    for got, twin in zip(grads_of(terms["fine"], e), grads_of(expected, e)):
        torch.testing.assert_close(got, twin)
    assert (made.image_views, made.text_views, made.parts, made.tokens) == (("full",), ("caption",), (), True)


def test_as_released_there_is_no_global_term_and_the_scale_learns_nothing():
    e = make_embeddings()
    terms = FineLip(None)(e)
    assert list(terms) == ["fine"]
    scale, *by_vectors_and_tokens = grads_of(terms["fine"], e)
    assert scale == 0
    assert [bool(grad.any()) for grad in by_vectors_and_tokens] == [False, True, False, True]


@pytest.mark.parametrize("name", GLOBAL_LOSSES)
def test_the_fine_term_does_not_know_the_global_one(name):
    """FineLIP as released, with InfoNCE, with L_HN, or any other: the same bits, at any time."""
    e = make_embeddings(torch.float32)
    for moment in (Moment(1, 3, 2), Moment(4, 3, 2)):
        released = FineLip(None).at(moment)(e)["fine"]
        fine = FineLip(GlobalTerm(GLOBAL_LOSSES[name], margins=name == "hn")).at(moment)(e)["fine"]
        assert torch.equal(fine, released)
        for got, expected in zip(grads_of(fine, e), grads_of(released, e)):
            assert torch.equal(got, expected)


def test_the_fine_term_rises_through_the_first_epoch():
    e = make_embeddings()
    made = FineLip(GlobalTerm(clip_loss), 0.5)
    whole = made(e)
    for step, share in ((0, 0.125), (1, 0.375), (3, 0.875), (4, 1.0), (5, 1.0), (11, 1.0)):
        now = made.at(Moment(step, epoch_steps=4, epochs=3))
        assert now.tokens
        terms = now(e)
        assert list(terms) == ["global", "fine"]
        torch.testing.assert_close(terms["fine"], share * whole["fine"])
        assert terms["global"] == whole["global"]
    again = made.at(Moment(1, 4, 3)).at(Moment(6, 4, 3))
    assert again(e)["fine"] == whole["fine"]  # of its own weight each time, not of the last


@pytest.mark.parametrize("sizes", [[1, 6], [3, 2, 2]], ids=str)
def test_weighted_shards_are_the_whole(sizes):
    """As processes do it: (W·R / N)·term, averaged over W processes."""
    e = make_embeddings()
    made = FineLip(GlobalTerm(partial(hard_negative_loss, gamma=0.3), margins=True), 0.7, rise=0.4)
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    shards = [made(replace(e, offset=start, rows=rows)) for start, rows in zip(starts, sizes)]
    for name, whole in made(e).items():
        joined = sum(rows / PAIRS * shard[name] for rows, shard in zip(sizes, shards))
        torch.testing.assert_close(joined, whole)
        assert shards[0][name] != whole
        for got, expected in zip(grads_of(joined, e), grads_of(whole, e)):
            torch.testing.assert_close(got, expected)


def test_weight_zero_reads_no_tokens():
    e = make_embeddings()
    vectors_only = replace(
        e,
        images={"full": ViewEmbeddings(e.images["full"].vectors)},
        texts={"caption": ViewEmbeddings(e.texts["caption"].vectors)},
    )
    made = FineLip(GlobalTerm(clip_loss), 0.0)
    assert not made.tokens
    assert list(made(vectors_only)) == ["global"]
    with pytest.raises(ValueError, match="needs the tokens of its readouts"):
        FineLip(None)(vectors_only)


def test_wrong_weights_and_no_term_at_all_are_errors():
    for weight in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="fine_weight must"):
            FineLip(None, weight)
    with pytest.raises(ValueError, match="FineLIP needs a term"):
        FineLip(None, 0.0)


def small_model(side, width=10):
    """What the readouts ask of a model: its patches along a side and the width of its vectors."""
    return SimpleNamespace(
        family=SimpleNamespace(grid=lambda backbone, size: side),
        backbone=None,
        image_size=48,
        width=width,
    )


@pytest.mark.parametrize(
    ("side", "official", "keep"), [(16, True, 39), (16, False, 51), (14, False, 39), (3, False, 1), (1, False, 1)]
)
def test_how_many_tokens_are_kept(side, official, keep):
    switches = frozenset({"finelip_patch_count"} if official else ())
    made = finelip.readouts(Choice(None, {"fine": 1.0}, switches), small_model(side))
    assert list(made) == ["full", "caption"]
    for readout in made.values():
        assert readout.aggregate.weigh[0].normalized_shape == (10,)
        assert readout.aggregate.weigh[-1].out_features == keep


def test_a_model_that_does_not_say_its_patches_is_an_error_that_knows_a_way():
    choice = Choice(None, {"fine": 1.0})
    with pytest.raises(ValueError, match="finelip_patch_count to official"):
        finelip.readouts(choice, small_model(None))
    assert finelip.readouts(replace(choice, official=frozenset({"finelip_patch_count"})), small_model(None))


def test_built_from_a_choice():
    term = GlobalTerm(clip_loss)
    assert finelip.objective(Choice(term, {"fine": 0.1})) == FineLip(term, 0.1)
    assert finelip.objective(Choice(None, {"fine": 1.0})) == FineLip(None)
    assert finelip.readouts(Choice(term, {"fine": 0.0}), small_model(None)) == {}


def test_the_published_numbers_of_tokens():
    assert [kept_tokens(patches) for patches in (196, 256)] == [39, 51]
