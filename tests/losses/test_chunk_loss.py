"""StructXLIP's local term against a twin that loops over samples and spans."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from loss_twins import assert_equal, value_and_grads

from hnclip.losses.chunks import chunk_loss

IDS = torch.tensor([[0, 0], [0, 1], [1, 1], [2, 2], [3, 3], [4, 4]])
SHARDS = [[2, 4], [1, 2, 3], [1] * 6]


def make_chunks(n=6, s=4, k=2, d=5, seed=0, dtype=torch.float64):
    """Chunks, crops and scale with gradient; masks: pair 3 has no chunk, pair 4 no crop, others some of each."""
    g = torch.Generator().manual_seed(seed)
    chunks, crops = (F.normalize(torch.randn(n, t, d, generator=g, dtype=torch.float64), dim=2) for t in (s, k))
    chunk_mask = torch.arange(s) < torch.tensor([4, 1, 3, 0, 2, 2])[:n, None]
    crop_mask = torch.tensor([[1, 1], [0, 1], [1, 0], [1, 1], [0, 0], [1, 1]], dtype=torch.bool)[:n, :k]
    leaves = [t.to(dtype).requires_grad_() for t in (chunks, crops, torch.tensor(7.0))]
    return leaves, [chunk_mask, crop_mask]


def twin(chunks, crops, scale, chunk_mask, crop_mask, ids=None):
    """As the definition reads: a mean over spans, then over samples that have a span and a valid crop."""
    n = len(chunks)
    samples = []
    for b in range(n):
        spans = []
        for span in range(chunks.shape[1]):
            if not chunk_mask[b, span]:
                continue
            positives, everything = [], []
            for j in range(n):
                same = ids is not None and j != b and bool((ids[j] == ids[b]).any())
                for k in range(crops.shape[1]):
                    if crop_mask[j, k] and not same:
                        logit = scale * (chunks[b, span] * crops[j, k]).sum()
                        everything.append(logit.exp())
                        if j == b:
                            positives.append(logit.exp())
            if positives:
                spans.append(-(torch.log(sum(positives)) - torch.log(sum(everything))))
        if spans:
            samples.append(sum(spans) / len(spans))
    return sum(samples) / len(samples)


@pytest.mark.parametrize("ids", [None, IDS], ids=["no ids", "ids"])
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradients_are_the_twins(ids, seed):
    leaves, masks = make_chunks(seed=seed)
    got = value_and_grads(lambda c, p, s: chunk_loss(c, p, *masks, s, ids=ids), leaves)
    assert_equal(got, value_and_grads(lambda c, p, s: twin(c, p, s, *masks, ids), leaves))


@pytest.mark.parametrize("ids", [None, IDS], ids=["no ids", "ids"])
@pytest.mark.parametrize("shards", SHARDS)
def test_weighted_shards_average_to_the_whole(ids, shards):
    leaves, masks = make_chunks()

    def total(c, p, s):
        start, found = 0, []
        for rows in shards:
            term = chunk_loss(c, p, *masks, s, ids=ids, offset=start, rows=rows)
            found.append(len(shards) * rows / 6 * term)
            start += rows
        return torch.stack(found).mean()

    whole = value_and_grads(lambda c, p, s: chunk_loss(c, p, *masks, s, ids=ids), leaves)
    assert_equal(value_and_grads(total, leaves), whole)


def test_one_chunk_and_one_crop_is_half_of_infonce():
    (chunks, crops, scale), _ = make_chunks(s=1, k=1)
    there = torch.ones(6, 1, dtype=torch.bool)
    logits = scale * chunks[:, 0] @ crops[:, 0].T
    expected = F.cross_entropy(logits, torch.arange(6))
    assert_equal([chunk_loss(chunks, crops, there, there, scale)], [expected])


def test_masked_places_are_not_read():
    leaves, masks = make_chunks()
    expected = value_and_grads(lambda c, p, s: chunk_loss(c, p, *masks, s), leaves)
    chunks, crops, scale = (leaf.detach().clone() for leaf in leaves)
    chunks[~masks[0]] *= -50
    crops[~masks[1]] *= -50
    other = [leaf.requires_grad_() for leaf in (chunks, crops, scale)]
    assert_equal(value_and_grads(lambda c, p, s: chunk_loss(c, p, *masks, s), other), expected)


@pytest.mark.parametrize("absent", [0, 1])
def test_without_chunks_or_crops_it_is_zero_with_zero_gradients(absent):
    leaves, masks = make_chunks()
    masks[absent] = torch.zeros_like(masks[absent])
    for tensor in value_and_grads(lambda c, p, s: chunk_loss(c, p, *masks, s), leaves):
        assert torch.equal(tensor, torch.zeros_like(tensor))


def test_half_precision_is_computed_in_float32_also_under_autocast():
    leaves, masks = make_chunks(d=64, dtype=torch.bfloat16)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = value_and_grads(lambda c, p, s: chunk_loss(c, p, *masks, s), wide)
    got = value_and_grads(lambda c, p, s: chunk_loss(c, p, *masks, s), leaves, autocast=True)
    assert got[0].dtype == torch.float32
    assert_equal([got[0].double()], [expected[0]], 1e-5)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda c, p, m, n: (c[0], p, m, n), "chunks must have 3 dimensions"),
        (lambda c, p, m, n: (c, p[:, :, :3], m, n), "agree in pairs and width"),
        (lambda c, p, m, n: (c, p, m[:, :2], n), "mask of chunks"),
        (lambda c, p, m, n: (c, p, m, n.long()), "mask of crops"),
    ],
)
def test_wrong_shapes_are_an_error(change, match):
    (chunks, crops, scale), masks = make_chunks()
    with pytest.raises(ValueError, match=match):
        chunk_loss(*change(chunks, crops, *masks), scale)
