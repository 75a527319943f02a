"""Ranks and top candidates against a count over pairs with ties made on purpose; recalls against counts by hand."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from small_galleries import tied_vectors
from torch import Tensor

from hnclip.evaluation import recall_at, summarize
from hnclip.evaluation.bootstrap import bootstrap_intervals
from hnclip.evaluation.ranks import Ranks, retrieval_ranks, top_candidates


def counted_ranks(image: Tensor, text: Tensor, owner: Tensor) -> Ranks:
    """Both directions by looking at every pair, in fp64; scores below 1e-9 apart are the same."""
    scores = F.normalize(text.double(), dim=1) @ F.normalize(image.double(), dim=1).T  # [T, I]
    text_ranks = []
    for t, own in enumerate(owner.tolist()):
        wrong = [scores[t, i] for i in range(len(image)) if i != own]
        text_ranks.append(1 + sum(bool(score >= scores[t, own] - 1e-9) for score in wrong))
    image_ranks = []
    for i in range(len(image)):
        best = max(scores[t, i] for t in range(len(text)) if owner[t] == i)
        wrong = [scores[t, i] for t in range(len(text)) if owner[t] != i]
        image_ranks.append(1 + sum(bool(score >= best - 1e-9) for score in wrong))
    return Ranks(torch.tensor(text_ranks), torch.tensor(image_ranks), owner)


def same(one: Ranks, other: Ranks) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in vars(one))


def random_vectors(count: int, width: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(count, width, generator=generator, dtype=torch.float64), dim=1).to(dtype)


@settings(max_examples=120, deadline=None)
@given(tied_vectors(20), st.sampled_from([None, 1, 3, 7, 64]), st.sampled_from([torch.float32, torch.float64]))
def test_equals_counting_pairs_with_ties(gallery, chunk, dtype):
    image, text, owner = gallery
    assert same(retrieval_ranks(image.to(dtype), text.to(dtype), owner, chunk=chunk), counted_ranks(*gallery))


@settings(max_examples=60, deadline=None)
@given(tied_vectors(), st.sampled_from([1, 2, 5, 40]), st.sampled_from([1, 3, 64]))
def test_top_candidates_are_the_highest_wrong_scores(gallery, k, chunk):
    image, text, owner = gallery
    scores = F.normalize(text, dim=1) @ F.normalize(image, dim=1).T  # [T, I]
    own = owner[:, None] == torch.arange(len(image))
    found = top_candidates(*gallery, k, chunk=chunk)
    assert found.right.tolist() == pytest.approx(scores[own].tolist(), abs=1e-6)
    wrong = scores.masked_fill(own, -torch.inf)
    for (highest, rows), literal in ((found.images, wrong), (found.texts, wrong.T)):
        expected = F.pad(literal, (0, k), value=-torch.inf).sort(1, descending=True).values[:, :k]
        torch.testing.assert_close(highest.sort(1, descending=True).values, expected)
        there = highest > -torch.inf
        torch.testing.assert_close(literal.gather(1, rows)[there], highest[there])
        assert all(len(set(row[mask].tolist())) == int(mask.sum()) for row, mask in zip(rows, there))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [33, 4096])
@pytest.mark.parametrize("chunk", [1, 7, None])
def test_copies_of_the_right_answer_tie_at_every_place(chunk, width, dtype):
    """Copies of every image, spread over all tile positions, in vectors wide enough for rounding errors."""
    base = random_vectors(7, width, 5, dtype) + 2 / width**0.5  # large mean: scores near one
    text = base + 0.1 * random_vectors(7, width, 6, dtype)  # [7, D]
    ranks = retrieval_ranks(base.repeat(5, 1), text.repeat(5, 1), torch.arange(35), chunk=chunk)
    assert ranks.text_to_image.tolist() == ranks.image_to_text.tolist() == [5] * 35


@pytest.mark.parametrize(
    ("dtype", "gap", "rank"),
    [(torch.float32, 2e-7, 2), (torch.float32, 2e-5, 1), (torch.float64, 1e-13, 2), (torch.float64, 1e-11, 1)],
)
def test_a_worse_image_ties_only_within_rounding(dtype, gap, rank):
    angle = torch.tensor(1.0, dtype=torch.float64)
    angles = torch.stack([angle, angle + gap / angle.sin()])  # [2] cosines with the caption `gap` apart
    image = torch.stack([angles.cos(), angles.sin()], dim=1).to(dtype)  # [2, 2]
    text = torch.tensor([[1.0, 0.0]], dtype=dtype).expand(2, 2)  # [2, 2]
    assert int(retrieval_ranks(image, text, torch.tensor([0, 1])).text_to_image[0]) == rank


def test_bf16_vectors_are_multiplied_in_fp32():
    """The ranks are those of the bf16 vectors in fp64; a bf16 product would tie what they keep apart."""
    image, text = random_vectors(90, 8, 9, torch.bfloat16), random_vectors(90, 8, 10, torch.bfloat16)
    expected = counted_ranks(image, text, torch.arange(90))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same(retrieval_ranks(image.requires_grad_(), text, torch.arange(90), chunk=64), expected)
    scores = text @ image.T  # [T, I] bf16
    assert (scores >= scores.diagonal()[:, None]).sum(1).tolist() != expected.text_to_image.tolist()


IMAGE, TEXT, OWNER = random_vectors(3, 4, 17), random_vectors(4, 4, 18), torch.tensor([0, 1, 2, 2])


@pytest.mark.parametrize(
    ("argument", "changed"),
    [
        ("image", {"image": IMAGE * torch.tensor([[1.0], [torch.nan], [1.0]])}),
        ("text", {"text": TEXT[:, :3]}),
        ("text_to_image", {"text_to_image": torch.tensor([0, 2, 2, 2])}),
    ],
)
def test_errors_name_the_argument(argument, changed):
    with pytest.raises(ValueError, match=rf"^{argument} "):
        retrieval_ranks(**{"image": IMAGE, "text": TEXT, "text_to_image": OWNER, **changed})


# Recalls and statistics ---------------------------------------------------------------------------------------

# Two images; captions 0, 1, 2 describe image 0, caption 3 describes image 1.
RANKS = Ranks(torch.tensor([1, 2, 6, 11]), torch.tensor([1, 3]), torch.tensor([0, 0, 0, 1]))


def test_recalls_and_statistics_by_hand():
    assert [recall_at(RANKS.text_to_image, k) for k in (1, 2, 5, 6, 999)] == [25.0, 50.0, 50.0, 75.0, 100.0]
    assert recall_at(torch.tensor([1] * 29 + [2] * 71), 1) == 29.0  # exact for whole numbers
    with pytest.raises(ValueError, match="k"):
        recall_at(RANKS.text_to_image, 0)
    expected = {
        "text_to_image": {"R@1": 25.0, "R@10": 75.0, "mean_rank": 5.0, "median_rank": 4.0, "queries": 4},
        "image_to_text": {"R@1": 50.0, "R@10": 100.0, "mean_rank": 2.0, "median_rank": 2.0, "queries": 2},
        "mean_R@1": 37.5,
        "mean_R@10": 87.5,
    }
    assert json.loads(json.dumps(summarize(RANKS, ks=(1, 10)))) == expected


def test_intervals_draw_groups_of_images_with_all_their_captions():
    """Captions of one image share their rank, so they are one observation, not four."""
    rank = torch.randint(1, 4, (60,), generator=torch.Generator().manual_seed(0))  # [I]
    ranks = Ranks(rank.repeat_interleave(4), rank, torch.arange(60).repeat_interleave(4))
    for groups in (None, torch.arange(60) // 6):
        summary = summarize(ranks, ks=(1, 3), intervals=True, groups=groups)
        (expected,) = bootstrap_intervals(100.0 * (rank <= 1)[:, None], groups=groups)
        assert summary["image_to_text"]["R@1_interval"] == [expected.low, expected.high]
        values = summary["text_to_image"]
        assert values["R@1_interval"] == pytest.approx([expected.low, expected.high])
        assert 0 < expected.low < values["R@1"] < expected.high < 100
        assert values["R@3_interval"] == [100.0, 100.0]
    assert summarize(ranks, intervals=True, groups=torch.zeros(60)) == summarize(ranks)  # no spread to measure
