"""Similarity of captions of different images against a loop over pairs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hnclip.analysis.caption_pairs import Hardest, caption_pairs, caption_similarity

OWNER = torch.tensor([0, 0, 1, 2, 3, 3, 3, 4, 5, 6, 7])


def unit_vectors(count: int, width: int, seed: int = 0) -> Tensor:
    return F.normalize(torch.randn(count, width, generator=torch.Generator().manual_seed(seed)), dim=1)


def negatives(text: Tensor, owner: Tensor) -> list[dict[int, float]]:
    """For each caption the similarity of every negative by its row, one pair at a time."""
    rows = range(len(text))
    return [{j: float(text[i].double() @ text[j].double()) for j in rows if owner[i] != owner[j]} for i in rows]


owners = st.lists(st.integers(-3, 5), min_size=2, max_size=12).filter(lambda owner: len(set(owner)) > 1)


@settings(max_examples=60)
@given(owners, st.integers(1, 14), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_both_numbers_equal_a_loop(owner: list[int], chunk: int, dtype: torch.dtype) -> None:
    text = unit_vectors(len(owner), 5).to(dtype)
    all_pairs = negatives(text, torch.tensor(owner))
    flat = [value for row in all_pairs for value in row.values()]
    found = caption_similarity(text, torch.tensor(owner), chunk=chunk)
    assert found.pairwise == pytest.approx(sum(flat) / len(flat), abs=1e-6)
    assert found.hardest == pytest.approx(sum(max(row.values()) for row in all_pairs) / len(owner), abs=1e-6)
    assert found._asdict() == {"pairwise": found.pairwise, "hardest": found.hardest}


@settings(max_examples=60)
@given(owners, st.integers(1, 14))
def test_tiles_hold_every_pair_once(owner: list[int], chunk: int) -> None:
    text = unit_vectors(len(owner), 5)
    pairs = caption_pairs(text, torch.tensor(owner))
    seen: dict[frozenset[int], float] = {}
    for rows, columns, similarity in pairs.tiles(chunk):
        assert similarity.shape == (rows.stop - rows.start, columns.stop - columns.start)
        assert max(similarity.shape) <= chunk
        for r, c in (similarity > -torch.inf).nonzero().tolist():
            pair = frozenset((rows.start + r, columns.start + c))
            assert pair not in seen
            seen[pair] = float(similarity[r, c])
    expected = {
        frozenset((i, j)): value
        for i, row in enumerate(negatives(text, torch.tensor(owner)))
        for j, value in row.items()
    }
    assert seen == pytest.approx(expected, abs=1e-6)
    assert pairs.count == len(expected)


@settings(max_examples=40)
@given(owners, st.integers(1, 14), st.data())
def test_the_hardest_negative_and_its_row(owner: list[int], chunk: int, data: st.DataObject) -> None:
    """For all captions from the tiles, and for some of them by a search."""
    text = unit_vectors(len(owner), 3)
    expected = [max((value, j) for j, value in row.items()) for row in negatives(text, torch.tensor(owner))]
    pairs = caption_pairs(text, torch.tensor(owner))
    found = Hardest(pairs.text, len(pairs))
    for tile in pairs.tiles(chunk):
        found.add(tile)
    assert found.similarity.tolist() == pytest.approx([value for value, _ in expected], abs=1e-6)
    assert found.nearest.tolist() == [row for _, row in expected]
    queries = data.draw(st.lists(st.integers(0, len(owner) - 1), max_size=20))
    similarity, nearest = pairs.search(torch.tensor(queries, dtype=torch.int64), chunk)
    assert similarity.tolist() == pytest.approx([expected[row][0] for row in queries], abs=1e-6)
    assert nearest.tolist() == [expected[row][1] for row in queries]


def test_the_mean_takes_images_in_blocks() -> None:
    """More images than a block has, their captions far apart."""
    owner = torch.randint(2500, (4000,), generator=torch.Generator().manual_seed(1))
    text = unit_vectors(4000, 4)
    matrix = (text.double() @ text.double().T)[owner[:, None] != owner]
    assert caption_pairs(text, owner).mean() == pytest.approx(matrix.mean().item(), abs=1e-9)


def test_the_mean_keeps_its_digits_among_many_captions() -> None:
    """Sums in fp32 would be off by more."""
    text = F.normalize(unit_vectors(30_000, 4) * 0.01 + torch.tensor([1.0, 0, 0, 0]), dim=1)
    owner = torch.arange(30_000)
    wide = text.double()
    expected = (wide.sum(0).square().sum() - wide.square().sum()).item() / (30_000 * 29_999)
    assert caption_pairs(text, owner).mean() == pytest.approx(expected, rel=1e-12)


def test_autocast_and_gradients_make_no_difference() -> None:
    text = unit_vectors(11, 64)
    expected = caption_similarity(text, OWNER, chunk=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert caption_similarity(text.requires_grad_(), OWNER, chunk=4) == expected
    assert not any(tile.similarity.requires_grad for tile in caption_pairs(text, OWNER).tiles())


class Largest(TorchDispatchMode):
    """The largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        for value in found if isinstance(found, tuple | list) else [found]:
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return found


def test_no_more_than_a_tile_at_once() -> None:
    text = unit_vectors(500, 4)
    with Largest() as largest:
        caption_similarity(text, torch.arange(500), chunk=50)
        caption_pairs(text, torch.arange(500)).search(torch.arange(500), 50)
    assert largest.elements <= max(50 * 50, text.numel(), 2 * 500)


@pytest.mark.parametrize(
    ("text", "owner", "keyword"),
    [
        (torch.full((11, 5), torch.nan), OWNER, "NaN"),
        (torch.eye(3), torch.zeros(3, dtype=torch.long), "captions of 1"),
        (torch.eye(3), torch.arange(4), "owner"),
        (torch.ones(3), torch.arange(3), "text"),
    ],
)
def test_invalid_captions_are_refused(text: Tensor, owner: Tensor, keyword: str) -> None:
    with pytest.raises(ValueError, match=keyword):
        caption_similarity(text, owner)
