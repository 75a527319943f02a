"""Near-duplicates among hits: the groups by every pair of vectors, the mean cosine, and the words that differ."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest

from hnclip.search.near_duplicates import CLOSE, SAMPLE, CaptionHit, Hit, find_near_duplicates, mean_cosine
from hnclip.search.reader import IndexedCaption, IndexedImage

WIDTH = 64


def hit(row: int, *captions: str, id: int | None = None) -> Hit:
    file = IndexedImage(row if id is None else id, f"{row}.png", row, b"%d" % row, "{}", 3, 4, captions)
    return Hit(file, row, 0.5)


def clustered(seed: int, families: int, members: int) -> np.ndarray:
    """[families · members, WIDTH] of length 1, in the first 32 directions: members are more or less near."""
    random = np.random.default_rng(seed)
    centres = np.repeat(random.standard_normal((families, 32)), members, axis=0)
    spread = random.uniform(0.05, 0.8, (families * members, 1))
    found = np.zeros((families * members, WIDTH))
    found[:, :32] = centres + spread * random.standard_normal((families * members, 32))
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def groups(vectors: np.ndarray, order: Sequence[int]) -> list[list[int]]:
    """The rows of each group."""
    found = find_near_duplicates(vectors, mean_cosine(vectors, np.empty(0, np.int64)), [hit(row) for row in order])
    for group in found:
        assert [order[place] for place in group.places] == [file.image for file in group.files]
        cosines = vectors[[file.image for file in group.files]] @ vectors[group.files[0].image]
        assert group.similarity == pytest.approx(cosines.min(), abs=1e-6)
    return [[file.image for file in group.files] for group in found]


@pytest.mark.parametrize("share", [0.0, 0.85])
@pytest.mark.parametrize("seed", range(4))
def test_groups_are_the_hits_close_to_their_best_member(seed: int, share: float) -> None:
    """With a direction that all share, every cosine c becomes a + (1 − a)·c, and so does the mean: groups stay."""
    vectors = clustered(seed, 6, 5)
    order = np.random.default_rng(seed).permutation(30)[:23].tolist()
    mean = float(np.mean([one @ other for one, other in combinations(vectors, 2)]))
    left, expected = list(order), []
    while left:
        close = [row for row in left if (vectors[row] @ vectors[left[0]] - mean) / (1 - mean) >= CLOSE]
        left = [row for row in left if row not in close]
        expected += [close] if len(close) > 1 else []
    assert 1 < sum(map(len, expected)) < 23
    similar = np.sqrt(1 - share) * vectors
    similar[:, -1] = np.sqrt(share)
    assert groups(similar, order) == expected
    assert groups(similar, order[:1]) == groups(similar, []) == []


def test_very_similar_images_are_near_duplicates() -> None:
    """Their own mean cosine must not hide it."""
    similar = np.sqrt(0.9999) * np.eye(1, WIDTH) + np.sqrt(0.0001) * np.eye(40, WIDTH, k=1)
    for count in (3, 40):
        assert groups(similar[:count], range(count)) == [[*range(count)]]


@pytest.mark.parametrize("count", [0, 1, 30, 3 * SAMPLE])
def test_the_mean_is_over_pairs_of_images_that_are_not_deleted(count: int) -> None:
    vectors = clustered(3, max(count, 1) + 1, 1)[: count + 1]
    left = vectors[1:]
    if count > SAMPLE:
        left = left[np.linspace(0, count - 1, SAMPLE).astype(int)]
    cosines = (left @ left.T)[~np.eye(len(left), dtype=bool)]
    expected = float(cosines.mean()) if count > 1 else 0.0
    assert mean_cosine(vectors, np.array([0])) == pytest.approx(expected, abs=1e-9)


def test_words_that_only_one_caption_has_are_highlighted() -> None:
    """Of images and of captions; files of one image have cosine 1."""
    texts = ("A red dog, near the Tree.", "a big red cat near the tree", "A red dog’s tail.")
    hits = [hit(0), *(hit(row, text, "another") for row, text in enumerate(texts, 1)), hit(4), hit(0, id=9)]
    vectors = np.eye(1, WIDTH).repeat(5, axis=0).astype(np.float16) * 0.999
    (group,) = find_near_duplicates(vectors, 0.0, hits)
    highlighted = {place: [word for word, own in pieces if own] for place, pieces in group.captions.items()}
    assert highlighted == {1: [], 2: ["big", "cat"], 3: ["tail"]}
    assert group.to_dict()["ids"] == [0, 1, 2, 3, 4, 9]
    assert group.similarity == pytest.approx(1, abs=1e-6)
    captions = [CaptionHit(IndexedCaption(one.text, (one.file,)), one.row, 0.5, (one,)) for one in hits[1:4]]
    (other,) = find_near_duplicates(vectors, 0.0, captions)
    assert [*other.captions.values()] == [*group.captions.values()]
