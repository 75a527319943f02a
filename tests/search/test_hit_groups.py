"""Near-duplicates among hits: the groups by every pair of vectors, the mean cosine, and the words that differ."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest

from hnclip.search.near_duplicates import CLOSE, SAMPLE, CaptionHit, Hit, find_near_duplicates, mean_cosine
from hnclip.search.reader import IndexedCaption, IndexedImage

WIDTH = 64
NONE = np.empty(0, np.int64)


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


def groups(vectors: np.ndarray, order: Sequence[int], deleted: np.ndarray = NONE) -> list[list[int]]:
    """The rows of each group."""
    found = find_near_duplicates(vectors, mean_cosine(vectors, deleted), [hit(row) for row in order])
    for group in found:
        assert [order[place] for place in group.places] == [file.image for file in group.files]
        cosines = [float(vectors[file.image] @ vectors[group.files[0].image]) for file in group.files]
        assert group.similarity == pytest.approx(min(cosines), abs=1e-6)
    return [[file.image for file in group.files] for group in found]


@pytest.mark.parametrize("share", [0.0, 0.5, 0.85])
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


def test_members_are_close_to_the_best_one_and_not_only_to_each_other() -> None:
    """B is close to A and C to B, but C not to A; the others keep the mean at about 0."""
    angles = np.radians([0, 30, 60])
    vectors = np.zeros((1 + WIDTH, WIDTH))
    vectors[:3, 0], vectors[:3, 1] = np.cos(angles), np.sin(angles)
    vectors[3:, 2:] = np.eye(WIDTH - 2)
    assert groups(vectors, [0, 1, 2]) == [[0, 1]]
    assert groups(vectors, [1, 0, 2]) == [[1, 0, 2]]
    assert groups(vectors, [2, 5, 0, 1]) == [[2, 1]]


@pytest.mark.parametrize(
    ("count", "others", "cosine"), [(3, 0, 0.92), (3, 30, 0.92), (3, 0, 0.9999), (3, 37, 0.9999), (40, 0, 0.9999)]
)
def test_very_similar_images_are_near_duplicates(count: int, others: int, cosine: float) -> None:
    """Their own mean cosine must not hide it, whether there are others or not."""
    similar = np.sqrt(cosine) * np.eye(1, WIDTH) + np.sqrt(1 - cosine) * np.eye(count, WIDTH, k=1)
    assert groups(np.concatenate([similar, np.eye(others, WIDTH, k=9)]), range(count)) == [[*range(count)]]


def test_files_of_one_image_are_near_duplicates_of_cosine_1() -> None:
    rounded = clustered(2, 9, 1).astype(np.float16)
    found = find_near_duplicates(rounded, 0.0, [hit(row, id=10 * row + copy) for row in range(9) for copy in range(2)])
    assert [[file.id for file in group.files] for group in found] == [[10 * row, 10 * row + 1] for row in range(9)]
    assert {group.similarity for group in found} == {1.0}  # whatever float16 makes of a length


@pytest.mark.parametrize("count", [0, 1, 30, 3 * SAMPLE])
def test_the_mean_is_over_pairs_of_images_that_are_not_deleted(count: int) -> None:
    vectors = clustered(3, max(count, 1) + 1, 1)[: count + 1]
    deleted = np.array([0])
    left = vectors[1:]
    if count > SAMPLE:
        left = left[np.linspace(0, count - 1, SAMPLE).astype(int)]
    cosines = (left @ left.T)[~np.eye(len(left), dtype=bool)]
    expected = float(cosines.mean()) if count > 1 else 0.0
    assert mean_cosine(vectors, deleted) == pytest.approx(expected, abs=1e-9)
    if count < SAMPLE:
        damaged = np.concatenate([vectors, np.full((1, WIDTH), np.nan), np.zeros((1, WIDTH))])
        assert mean_cosine(damaged, deleted) == pytest.approx(expected, abs=1e-9)


def test_words_that_only_one_caption_has_are_highlighted() -> None:
    texts = ("A red dog, near the Tree.", "a big red cat near the tree", "A red dog’s tail.")
    hits = [hit(0), *(hit(row, text, "another") for row, text in enumerate(texts, 1)), hit(4)]
    (group,) = find_near_duplicates(np.eye(1, WIDTH).repeat(5, axis=0), 0.0, hits)
    highlighted = {place: [word for word, own in pieces if own] for place, pieces in group.captions.items()}
    assert highlighted == {1: [], 2: ["big", "cat"], 3: ["tail"]}
    shown = group.to_dict()
    assert (shown["ids"], shown["similarity"]) == ([*range(5)], 1.0)
    captions = {one["id"]: "".join(piece for piece, _ in one["pieces"]) for one in shown["captions"]}
    assert captions == dict(enumerate(texts, 1))


def test_captions_have_groups_too() -> None:
    vectors = np.eye(WIDTH)[:6]
    vectors[4] = vectors[1] + 0.1 * vectors[5]
    vectors[4] /= np.linalg.norm(vectors[4])
    owners = {row: hit(row + 10) for row in (5, 1, 3, 4)}
    captions = {row: IndexedCaption(f"caption number {row}", (owner.file,)) for row, owner in owners.items()}
    hits = [CaptionHit(captions[row], row, 0.5, (owner,)) for row, owner in owners.items()]
    (group,) = find_near_duplicates(vectors, 0.0, hits)
    assert (group.places, [file.id for file in group.files]) == ((1, 3), [11, 14])
    assert group.captions == {row: (("caption number ", False), (text, True)) for row, text in ((1, "1"), (3, "4"))}
