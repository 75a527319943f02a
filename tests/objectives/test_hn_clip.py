from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from hnclip.losses import GLOBAL_LOSSES, clip_loss, hard_negative_loss, token_loss
from hnclip.objectives.embeddings import Embeddings, ViewEmbeddings
from hnclip.objectives.hn_clip import HNClip
from hnclip.objectives.objective import Objective

IDS = torch.tensor([[0, 0], [0, 1], [2, 1], [3, 3], [4, 4], [5, 5]])


def make_embeddings(n=6, seed=0):
    g = torch.Generator().manual_seed(seed)

    def vectors(*shape):
        return F.normalize(torch.randn(*shape, generator=g, dtype=torch.float64), dim=-1)

    words = torch.arange(5)[None] < torch.tensor([5, 3, 1, 4, 2, 5])[:n, None]
    return Embeddings(
        {"full": ViewEmbeddings(vectors(n, 8), vectors(n, 4, 8), torch.ones(n, 4, dtype=torch.bool))},
        {"caption": ViewEmbeddings(vectors(n, 8), vectors(n, 5, 8), words)},
        torch.tensor(10.0, dtype=torch.float64),
        ids=IDS[:n],
        margin_text=vectors(n, 3),
    )


def test_terms_are_the_global_loss_and_the_weighted_token_loss():
    e = make_embeddings()
    image, text = e.images["full"], e.texts["caption"]
    objective: Objective = HNClip(partial(hard_negative_loss, gamma=0.3), token_weight=0.25)
    terms = objective(e)
    assert list(terms) == ["global", "token"]
    assert terms["global"] == hard_negative_loss(image.vectors, text.vectors, e.scale, 0.3, ids=IDS)
    token = token_loss(image.tokens, text.tokens, image.mask, text.mask, e.scale, ids=IDS)
    assert terms["token"] == 0.25 * token
    assert terms["global"] != hard_negative_loss(image.vectors, text.vectors, e.scale, 0.3)
    assert (objective.image_views, objective.text_views, objective.tokens) == (("full",), ("caption",), True)


def test_weight_zero_reads_no_tokens():
    e = make_embeddings()
    objective = HNClip(clip_loss, token_weight=0)
    vectors_only = replace(
        e,
        images={"full": ViewEmbeddings(e.images["full"].vectors)},
        texts={"caption": ViewEmbeddings(e.texts["caption"].vectors)},
    )
    assert not objective.tokens
    assert list(objective(vectors_only)) == ["global"]
    with pytest.raises(ValueError, match="token vectors"):
        HNClip(clip_loss)(vectors_only)


@pytest.mark.parametrize("name", GLOBAL_LOSSES)
def test_token_term_does_not_know_the_global_loss(name):
    e = make_embeddings()
    assert torch.equal(HNClip(GLOBAL_LOSSES[name])(e)["token"], HNClip(hard_negative_loss)(e)["token"])


def test_shards_average_to_the_whole():
    e = make_embeddings()
    objective = HNClip(hard_negative_loss)
    shards = [objective(replace(e, offset=offset, rows=2)) for offset in (0, 2, 4)]
    for name, whole in objective(e).items():
        torch.testing.assert_close(torch.stack([shard[name] for shard in shards]).mean(), whole)
        assert shards[0][name] != whole


def test_frozen_margins_come_from_the_batch():
    e = make_embeddings()
    frozen, live = HNClip(hard_negative_loss, frozen_margin=True), HNClip(hard_negative_loss)
    image, text = e.images["full"].vectors, e.texts["caption"].vectors
    expected = hard_negative_loss(image, text, e.scale, margin_text=e.margin_text, ids=IDS)
    assert frozen(e)["global"] == expected
    assert live(e)["global"] != expected
    with pytest.raises(ValueError, match="margin_text"):
        frozen(replace(e, margin_text=None))


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_wrong_weights_are_an_error(weight):
    with pytest.raises(ValueError, match="token_weight"):
        HNClip(clip_loss, token_weight=weight)
