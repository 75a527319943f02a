"""Doubles by identity and suspects by similarity, against loops over all pairs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hnclip.analysis.false_negatives import FalseNegatives, Suspect, find_false_negatives


def captions(count: int, width: int = 3) -> Tensor:
    """Of so few dimensions that some are near each other."""
    return F.normalize(torch.randn(count, width, generator=torch.Generator().manual_seed(0)), dim=1)


def suspects_by_loop(
    text: Tensor, owner: list[int], caption_ids: list[int], image_ids: list[int] | None, threshold: float
) -> list[tuple[float, int, int]]:
    """Most similar first."""
    found = []
    for i in range(len(text)):
        for j in range(i + 1, len(text)):
            known = caption_ids[i] == caption_ids[j]
            if image_ids is not None:
                known |= image_ids[owner[i]] == image_ids[owner[j]]
            similarity = float(text[i] @ text[j])
            if owner[i] != owner[j] and not known and similarity >= threshold:
                found.append((similarity, i, j))
    return sorted(found, reverse=True)


@settings(max_examples=30)
@given(st.data(), st.integers(1, 16), st.integers(0, 12), st.booleans())
def test_suspects_equal_a_loop(data: st.DataObject, chunk: int, limit: int, pictures: bool) -> None:
    count = 14
    numbers = st.lists(st.integers(0, 8), min_size=count, max_size=count)
    owner = data.draw(numbers.filter(lambda owner: len(set(owner)) > 1))
    caption_ids, image_ids = data.draw(numbers), data.draw(numbers)[:9] if pictures else None
    text = captions(count)
    found = find_false_negatives(
        text,
        torch.tensor(owner),
        torch.tensor(caption_ids),
        None if image_ids is None else torch.tensor(image_ids),
        threshold=0.6,
        limit=limit,
        chunk=chunk,
    )
    expected = suspects_by_loop(text, owner, caption_ids, image_ids, 0.6)
    assert found.suspected_count == len(expected)
    assert [(pair.first, pair.second) for pair in found.suspects] == [(i, j) for _, i, j in expected[:limit]]
    assert [pair.similarity for pair in found.suspects] == pytest.approx([s for s, _, _ in expected[:limit]], abs=1e-6)
    rows = range(count)
    doubles = {(i, j) for i in rows for j in rows if caption_ids[i] == caption_ids[j] and owner[i] != owner[j]}
    in_groups = {(i, j) for group in found.same_text for i in group for j in group if owner[i] != owner[j]}
    assert in_groups == doubles
    assert all(len({owner[row] for row in group}) > 1 for group in found.same_text)
    assert (found.same_image is None) == (image_ids is None)


def test_groups_by_hand() -> None:
    """Captions 0 and 1 are one text of one record; 3 says the same; 4 and 5 are equal within a record only."""
    owner = torch.tensor([0, 0, 1, 2, 3, 3, 4])
    found = find_false_negatives(
        torch.eye(7), owner, torch.tensor([5, 5, 2, 5, 1, 1, 2]), torch.tensor([8, 9, 9, 7, 9]), threshold=0.5
    )
    assert found.same_text == ((0, 1, 3), (2, 6))
    assert found.same_image == ((1, 2, 4),)
    assert (found.suspected_count, found.suspects) == (0, ())


def test_without_doubles_there_are_no_groups() -> None:
    found = find_false_negatives(torch.eye(3), torch.arange(3), torch.arange(3), torch.arange(3))
    assert found == FalseNegatives((), (), 0.98, 0, ())


def test_the_threshold_belongs_to_the_suspected() -> None:
    text = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
    owner = torch.arange(3)
    similarity = float(text[0] @ text[1])
    at = find_false_negatives(text, owner, owner, None, threshold=similarity, chunk=1)
    assert at.suspects == (Suspect(1, 2, pytest.approx(0.8)), Suspect(0, 1, pytest.approx(0.6)))
    above = find_false_negatives(text, owner, owner, None, threshold=similarity + 1e-6)
    assert [pair.first for pair in above.suspects] == [1]


@pytest.mark.parametrize("chunk", [7, 1024])
def test_an_encoder_that_returns_one_vector_makes_every_pair_a_suspect(chunk: int) -> None:
    text, owner = captions(1).expand(50, 3), torch.arange(50)
    found = find_false_negatives(text, owner, owner, owner, limit=10, chunk=chunk)
    assert found.suspected_count == 50 * 49 // 2
    assert len(set(found.suspects)) == 10
    assert all(pair.first < pair.second for pair in found.suspects)


def test_too_many_pairs_are_not_searched_and_not_called_none() -> None:
    owner = torch.tensor([0, 1, 2, 3])
    same = torch.tensor([0, 0, 1, 2])
    found = find_false_negatives(captions(4), owner, same, same, threshold=-1, search_up_to=5)
    assert (found.suspected_count, found.suspects) == (None, ())
    assert found.same_text == found.same_image == ((0, 1),)
    assert find_false_negatives(captions(4), owner, same, same, threshold=-1, search_up_to=6).suspected_count == 5


def test_progress_walks_through_the_tiles() -> None:
    walked: list[int] = []

    def progress(steps: range) -> Iterator[int]:
        walked.append(len(steps))
        yield from steps

    find_false_negatives(captions(9), torch.arange(9), torch.arange(9), None, chunk=3, progress=progress)
    assert walked == [6]


def test_bad_input_is_named() -> None:
    text, numbers = captions(4), torch.arange(4)
    for threshold in (1.5, -1.1, float("nan")):
        with pytest.raises(ValueError, match="threshold"):
            find_false_negatives(text, numbers, numbers, None, threshold=threshold)
    with pytest.raises(ValueError, match="limit"):
        find_false_negatives(text, numbers, numbers, None, limit=-1)
    with pytest.raises(ValueError, match="caption_ids"):
        find_false_negatives(text, numbers, numbers[:3], None)
    with pytest.raises(ValueError, match="image_ids"):
        find_false_negatives(text, numbers, numbers, numbers.float())
    for images in (numbers[:3], numbers[:0]):
        with pytest.raises(ValueError, match="owner must hold records"):
            find_false_negatives(text, numbers, numbers, images)
    with pytest.raises(ValueError, match="NaN"):
        find_false_negatives(text * torch.nan, numbers, numbers, None)
