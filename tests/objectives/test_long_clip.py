from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from hnclip.losses import GLOBAL_LOSSES, clip_loss, hard_negative_loss, smoothed_loss
from hnclip.losses.partial import principal_part
from hnclip.objectives import long_clip
from hnclip.objectives.choice import Choice
from hnclip.objectives.embeddings import Embeddings, ViewEmbeddings
from hnclip.objectives.global_term import GlobalTerm
from hnclip.objectives.hn_clip import HNClip
from hnclip.objectives.long_clip import LongClip, principal_note
from hnclip.objectives.objective import Moment, Objective

PAIRS = 40  # more than 33, so that PCA_32 leaves something out


def make_embeddings(n=PAIRS, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    topic = torch.randn(n, 48, generator=g, dtype=torch.float64)

    def vectors():
        noisy = topic + torch.randn(n, 48, generator=g, dtype=torch.float64)
        return F.normalize(noisy, dim=1).to(dtype).requires_grad_()

    ids = torch.stack([torch.arange(n), torch.arange(n)], 1)
    ids[1, 0] = ids[0, 0]
    ids[5, 1] = ids[7, 1]
    return Embeddings(
        {"full": ViewEmbeddings(vectors())},
        {"caption": ViewEmbeddings(vectors()), "short": ViewEmbeddings(vectors())},
        torch.tensor(10.0, dtype=dtype, requires_grad=True),
        ids=ids,
    )


def leaves_of(embeddings):
    views = [*embeddings.images.values(), *embeddings.texts.values()]
    return [*(view.vectors for view in views), embeddings.scale]


def grads_of(value, embeddings):
    leaves = leaves_of(embeddings)
    grads = torch.autograd.grad(value, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads)]


def twin_short(embeddings):
    """PCA by the eigenvectors of the covariance, and label smoothing written out, one row after the other."""
    image, short, s = embeddings.images["full"].vectors, embeddings.texts["short"].vectors, embeddings.scale
    centred = image - image.mean(0)
    kept = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -32:]
    coarse = centred @ kept @ kept.T + image.mean(0)
    logits, ids, total = s * coarse @ short.T, embeddings.ids, 0.0
    for matrix in (logits, logits.T):
        for i, row in enumerate(matrix):
            columns = [j for j in range(len(row)) if j == i or not (ids[i] == ids[j]).any()]
            log_p = row[columns] - torch.logsumexp(row[columns], 0)
            total = total - 0.9 * log_p[columns.index(i)] - 0.1 * log_p.mean()
    return total / (2 * len(image))


def test_terms_are_the_global_one_and_the_short_one():
    e = make_embeddings()
    made: Objective = LongClip(GlobalTerm(hard_negative_loss, margins=True), 0.3)
    terms = made(e)
    assert list(terms) == ["global", "short"]
    image, caption = e.images["full"].vectors, e.texts["caption"].vectors
    assert terms["global"] == hard_negative_loss(image, caption, e.scale, ids=e.ids)
    expected = twin_short(e)
    torch.testing.assert_close(terms["short"], 0.3 * expected)
    for got, twin in zip(grads_of(terms["short"], e), grads_of(0.3 * expected, e)):
        torch.testing.assert_close(got, twin, rtol=1e-6, atol=1e-9)
    short = e.texts["short"].vectors
    assert terms["short"] != 0.3 * smoothed_loss(image, short, e.scale, ids=e.ids)
    assert made.image_views == ("full",)
    assert made.text_views == ("caption", "short")
    assert made.parts == ()
    assert not made.tokens
    assert made.at(Moment(7, 3, 5)) == made


def test_without_the_short_term_it_is_plain_fine_tuning_bit_for_bit():
    """The row that HN-CLIP's tables call Long-CLIP; and no short caption is asked for."""
    e = make_embeddings(dtype=torch.float32)
    e = replace(e, texts={"caption": e.texts["caption"]})
    made = LongClip(GlobalTerm(clip_loss), 0.0)
    assert made.text_views == ("caption",)
    terms, plain = made(e), HNClip(clip_loss, token_weight=0)(e)
    assert terms.keys() == plain.keys() == {"global"}
    for got, expected in zip(grads_of(terms["global"], e), grads_of(plain["global"], e)):
        assert torch.equal(got, expected)
    assert torch.equal(terms["global"], plain["global"])


@pytest.mark.parametrize("name", GLOBAL_LOSSES)
def test_the_short_term_does_not_know_the_global_one(name):
    e = make_embeddings(dtype=torch.float32)
    terms = LongClip(GlobalTerm(GLOBAL_LOSSES[name], margins=name == "hn"))(e)
    alone = LongClip(None)(e)
    assert list(alone) == ["short"]
    assert torch.equal(terms["short"], alone["short"])
    for got, expected in zip(grads_of(terms["short"], e), grads_of(alone["short"], e)):
        assert torch.equal(got, expected)


def test_with_few_pairs_the_short_term_is_smoothed_infonce():
    e = make_embeddings(33)
    image, short = e.images["full"].vectors, e.texts["short"].vectors
    assert LongClip(None)(e)["short"] == smoothed_loss(image, short, e.scale, ids=e.ids)


@pytest.mark.parametrize("sizes", [[20, 20], [1, 30, 9]], ids=str)
def test_weighted_shards_are_the_whole(sizes):
    """As processes do it: (W·R / N)·term, averaged over W processes. Directions come from all pairs in each."""
    e = make_embeddings()
    made = LongClip(GlobalTerm(hard_negative_loss, margins=True), 0.5)
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    shards = [made(replace(e, offset=start, rows=rows)) for start, rows in zip(starts, sizes)]
    for name, whole in made(e).items():
        joined = sum(rows / PAIRS * shard[name] for rows, shard in zip(sizes, shards))
        torch.testing.assert_close(joined, whole)
        assert shards[0][name] != whole
        for got, expected in zip(grads_of(joined, e), grads_of(whole, e)):
            torch.testing.assert_close(got, expected)


def test_the_note_says_when_nothing_is_left_out():
    assert principal_note(34) is None
    assert principal_note(10, count=8) is None
    for pairs, count in ((33, 32), (16, 32), (9, 8)):
        note = principal_note(pairs, count)
        assert note is not None
        assert f"PCA_{count} of {pairs} pictures" in note
        vectors = make_embeddings(pairs).images["full"].vectors
        assert torch.equal(principal_part(vectors, count), vectors)


def test_built_from_a_choice():
    term = GlobalTerm(clip_loss)
    assert long_clip.objective(Choice(term, {"short": 0.1})) == LongClip(term, 0.1)
    assert long_clip.readouts(Choice(term, {"short": 1.0}), None) == {}


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_wrong_weights_are_an_error(weight):
    with pytest.raises(ValueError, match="short_weight must"):
        LongClip(GlobalTerm(clip_loss), weight)


def test_no_term_at_all_is_an_error():
    with pytest.raises(ValueError, match="Long-CLIP needs a term"):
        LongClip(None, 0.0)
