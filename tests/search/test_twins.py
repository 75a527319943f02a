"""Near-twins: who is near whom by a literal twin, whatever the model's cone, and what tells them apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from small_index import bundled, small_index

from hnclip.data.scenes import scene_records
from hnclip.search import twins
from hnclip.search.explain import explain
from hnclip.search.find import CaptionHit, Finder, Hit, open_finder
from hnclip.search.index.changes import Change, NewItem, NewPicture
from hnclip.search.index.layout import About
from hnclip.search.index.opening import open_writer
from hnclip.search.index.reader import Index
from hnclip.search.twins import CLOSE, SEPARATORS, TwinGroup, separators, twin_groups, usual_cosine
from hnclip.util.text import STOP_WORDS

WIDTH = 64
RECORDS = scene_records("park", "test", families=3)
TEXT = "The umbrella and the balloon stand under a pink tree, a tent, a house, the flag, an apple and the balloon."


def clustered(seed: int, families: int, members: int) -> np.ndarray:
    """[families · members, WIDTH] of length 1, in the first 32 directions: members are more or less near."""
    random = np.random.default_rng(seed)
    centres = np.repeat(random.standard_normal((families, 32)), members, axis=0)
    spread = random.uniform(0.05, 0.8, (families * members, 1))
    found = np.zeros((families * members, WIDTH))
    found[:, :32] = centres + spread * random.standard_normal((families * members, 32))
    return found / np.linalg.norm(found, axis=1, keepdims=True)


@contextmanager
def finder_of(
    path: Path, vectors: np.ndarray, *, gone: Sequence[int] = (), again: Sequence[int] = (), said: str | None = None
) -> Iterator[Finder]:
    """An index of these vectors; `again` are further items of these rows. Captions have the same vectors."""
    about = About("none", "none", "none", {}, vectors.shape[1], "bf16", 0, "none", None)
    vectors = vectors.astype(np.float32)

    def captions(row: int) -> tuple[str, ...]:
        return () if said is None else (f"{said} {row}",)

    with open_writer(path, about) as writer:
        writer.commit(
            Change(
                pictures=[NewPicture(b"%d" % row, vector, (3, 4), b"t") for row, vector in enumerate(vectors)],
                items=[NewItem(f"{row}", b"%d" % row, "{}", "s", captions(row)) for row in range(len(vectors))],
                captions={captions(row)[0]: vectors[row] for row in range(len(vectors)) if said is not None},
            )
        )
        writer.commit(
            Change(
                gone=[f"{row}" for row in gone],
                items=[NewItem(f"{row} again", b"%d" % row, "{}", "s") for row in again],
            )
        )
    with Index(path) as index:
        yield SimpleNamespace(index=index)  # type: ignore[misc]


def all_hits(finder: Finder, order: Sequence[int] | None = None) -> list[Hit]:
    items = list(finder.index.all_items())
    chosen = items if order is None else [items[place] for place in order]
    return [Hit(item, 1 - place / 100) for place, item in enumerate(chosen)]


def names(groups: Sequence[TwinGroup]) -> list[list[str]]:
    return [[item.name for item in group.items] for group in groups]


def literal_groups(finder: Finder, hits: Sequence[Hit]) -> list[list[str]]:
    stored = finder.index.vectors("images").rows(slice(None)).astype(np.float64)
    stored /= np.linalg.norm(stored, axis=1, keepdims=True)
    usual = float(np.mean([one @ other for one, other in combinations(stored, 2)]))
    left, groups = list(hits), []
    while left:
        best = left[0].item
        near = [hit for hit in left if (stored[hit.item.row] @ stored[best.row] - usual) / (1 - usual) >= CLOSE]
        left = [hit for hit in left if hit not in near]
        if len(near) > 1:
            groups.append([hit.item.name for hit in near])
    return groups


@pytest.mark.parametrize("seed", range(4))
def test_groups_are_the_literal_ones(tmp_path: Path, seed: int) -> None:
    vectors = clustered(seed, 6, 5)
    order = np.random.default_rng(seed).permutation(30)[:23].tolist()
    with finder_of(tmp_path / "a.hnc", vectors) as finder:
        hits = all_hits(finder, order)
        groups = twin_groups(finder, hits)
        assert names(groups) == literal_groups(finder, hits)
        assert groups
        stored = finder.index.vectors("images").rows(slice(None))
        for group in groups:
            assert [hits[place].item for place in group.places] == list(group.items)
            near = [stored[item.row] @ stored[group.items[0].row] for item in group.items]
            assert group.similarity == pytest.approx(min(near), abs=0.01)
    sizes = [len(group) for group in names(groups)]
    assert max(sizes) > 1 and sum(sizes) < 23  # noqa: PT018 - some are near, some are not


def test_a_cone_changes_nothing(tmp_path: Path) -> None:
    """With a direction that all share every cosine c becomes a + (1 − a)·c, and so does the mean."""
    vectors = clustered(7, 6, 5)
    found = []
    for share in (0.0, 0.5, 0.85):
        cone = np.sqrt(1 - share) * vectors
        cone[:, -1] = np.sqrt(share)
        with finder_of(tmp_path / f"{share}.hnc", cone) as finder:
            found.append(names(twin_groups(finder, all_hits(finder))))
    assert found[0] == found[1] == found[2] != []


def test_groups_do_not_chain(tmp_path: Path) -> None:
    """B is near A and C is near B, but C is not near A; the others keep the mean at about 0."""
    angles = np.radians([0, 30, 60])
    vectors = np.zeros((3 + WIDTH - 2, WIDTH))
    vectors[:3, 0], vectors[:3, 1] = np.cos(angles), np.sin(angles)
    vectors[3:, 2:] = np.eye(WIDTH - 2)
    with finder_of(tmp_path / "a.hnc", vectors) as finder:
        assert names(twin_groups(finder, all_hits(finder, [0, 1, 2]))) == [["0", "1"]]
        assert names(twin_groups(finder, all_hits(finder, [1, 0, 2]))) == [["1", "0", "2"]]
        assert names(twin_groups(finder, all_hits(finder, [2, 5, 0, 1]))) == [["2", "1"]]


def test_the_same_content_is_a_twin_of_similarity_1(tmp_path: Path) -> None:
    with finder_of(tmp_path / "a.hnc", clustered(2, 9, 1), again=range(9)) as finder:
        groups = twin_groups(finder, all_hits(finder))
    assert names(groups) == [[f"{row}", f"{row} again"] for row in range(9)]
    assert {group.similarity for group in groups} == {1.0}  # whatever the rounding of their vectors


def test_the_same_content_is_a_twin_also_where_all_is_alike(tmp_path: Path) -> None:
    vectors = np.zeros((3, WIDTH))
    vectors[:, 0] = 1
    with finder_of(tmp_path / "a.hnc", vectors, again=[1]) as finder:
        assert ["1", "1 again"] in [group[-2:] for group in names(twin_groups(finder, all_hits(finder, [1, 3])))]


@pytest.mark.parametrize("count", [2, 3, 40])
def test_twins_are_found_where_all_is_alike(tmp_path: Path, count: int) -> None:
    """Their own mean cosine must not make them usual."""
    vectors = np.zeros((count, WIDTH))
    vectors[:, 0], vectors[:, 1:] = 1, 0.01 * np.eye(count, WIDTH - 1)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    assert vectors[0] @ vectors[1] == pytest.approx(0.9999, abs=1e-5)
    with finder_of(tmp_path / "a.hnc", vectors) as finder:
        assert names(twin_groups(finder, all_hits(finder))) == [[f"{row}" for row in range(count)]]


def test_few_pictures_do_not_make_a_cone(tmp_path: Path) -> None:
    """Of cosine 0.92: twins beside one that is not alike, whether they are all or there are many."""
    alike = np.full((3, 1), np.sqrt(0.92)) * np.eye(1, WIDTH) + np.sqrt(0.08) * np.eye(3, WIDTH, k=1)
    for others in (0, 30):
        with finder_of(tmp_path / f"{others}.hnc", np.concatenate([alike, np.eye(others, WIDTH, k=9)])) as finder:
            assert names(twin_groups(finder, all_hits(finder))) == [["0", "1", "2"]]


def test_few_results_have_no_twins(tmp_path: Path) -> None:
    with finder_of(tmp_path / "a.hnc", np.eye(WIDTH)[:5]) as finder:
        for order in ([], [3], [3, 1]):
            assert twin_groups(finder, all_hits(finder, order)) == []


def test_the_usual_cosine_is_the_mean_over_pairs_that_live(tmp_path: Path) -> None:
    vectors = clustered(3, 5, 4)
    with finder_of(tmp_path / "a.hnc", vectors, gone=[0, 1, 2, 3, 11]) as finder:
        stored = finder.index.vectors("images").rows(slice(None)).astype(np.float64)
        stored /= np.linalg.norm(stored, axis=1, keepdims=True)
        living = [row for number, row in enumerate(stored) if number not in (0, 1, 2, 3, 11)]
        expected = float(np.mean([one @ other for one, other in combinations(living, 2)]))
        for _ in range(2):
            assert usual_cosine(finder.index, "images") == pytest.approx(expected, abs=1e-9)
        assert usual_cosine(finder.index, "captions") == 0.0


def test_a_sample_stands_for_a_large_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hnclip.search.twins.SAMPLE", 4)
    vectors = clustered(5, 3, 3)
    with finder_of(tmp_path / "a.hnc", vectors, gone=[1]) as finder:
        stored = finder.index.vectors("images").rows(slice(None)).astype(np.float64)
        stored /= np.linalg.norm(stored, axis=1, keepdims=True)
        spread = stored[[0, 3, 5, 8]]  # evenly through 0, 2, 3 … 8
        expected = float(np.mean([one @ other for one, other in combinations(spread, 2)]))
        assert usual_cosine(finder.index, "images") == pytest.approx(expected, abs=1e-9)


def test_captions_that_were_found_have_twins_too(tmp_path: Path) -> None:
    vectors = np.eye(WIDTH)[:6]
    vectors[4] = vectors[1] + 0.1 * vectors[5]
    vectors[4] /= np.linalg.norm(vectors[4])
    with finder_of(tmp_path / "a.hnc", vectors, said="caption number") as finder:
        captions = finder.index.captions(range(6))
        hits = [CaptionHit(captions[row], 0.5) for row in (5, 1, 3, 4)]
        (group,) = twin_groups(finder, hits)
    assert ([item.name for item in group.items], group.places) == (["1", "4"], (1, 3))
    assert [(said.place, said.item.name) for said in group.captions] == [(1, "1"), (3, "4")]
    assert [said.passage for said in group.captions] == [
        (("caption number ", False), ("1", True)),
        (("caption number ", False), ("4", True)),
    ]


@pytest.fixture(scope="module")
def finder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finder]:
    path = tmp_path_factory.mktemp("twins") / "a.hnc"
    small_index(path, bundled(), RECORDS, tokens=True)
    with open_finder(path) as finder:
        yield finder


def test_words_that_one_member_alone_has_are_highlighted(finder: Finder) -> None:
    text = RECORDS[5].captions[0]
    group = twin_groups(finder, finder.images(finder.text_vectors([text]), 10)[0])[0]
    assert len(group.captions) == len(group.items) == 4
    found = 0
    for said in group.captions:
        item, passage = said.item, said.passage
        assert item == group.items[group.places.index(said.place)]
        assert "".join(piece for piece, _ in passage) == item.captions[0]
        others = " ".join(other.captions[0].lower() for other in group.items if other != item)
        marked = [piece for piece, highlighted in passage if highlighted]
        found += len(marked)
        assert all(piece.lower() not in others.replace(".", " ").replace(",", " ").split() for piece in marked)
    assert found > 10  # though a caption may have no word of its own


def test_separators_are_the_words_of_the_largest_difference(finder: Finder) -> None:
    items = list(finder.index.all_items())[4:7]
    found = separators(finder, TEXT, items)
    explained = explain(finder, TEXT, items)
    spreads: dict[str, float] = {}
    for words in zip(*(each.words for each in explained)):
        scores = [word.score for word in words]
        spreads[words[0].text.lower()] = max(spreads.get(words[0].text.lower(), 0), max(scores) - min(scores))
    expected = sorted((word for word in spreads if word not in STOP_WORDS), key=lambda word: -spreads[word])
    assert [separator.word.lower() for separator in found] == expected[:SEPARATORS]
    assert len(expected) > SEPARATORS
    for separator in found:
        assert len(separator.scores) == 3
        assert max(separator.scores) - min(separator.scores) == pytest.approx(spreads[separator.word.lower()])


def test_a_word_counts_where_it_separates_best(finder: Finder, monkeypatch: pytest.MonkeyPatch) -> None:
    said = ["Tree", "the", "house", "tree", "tree", "alike"]
    scores = [[0.2, 0.9, 0.1, 0.3, 0.6, 0.5], [0.3, 0.1, 0.2, 0.7, 0.5, 0.5009]]
    explained = [
        SimpleNamespace(
            words=[SimpleNamespace(text=word, score=score) for word, score in zip(said, row)], approximate=False
        )
        for row in scores
    ]
    monkeypatch.setattr("hnclip.search.twins.explain", lambda *_: explained)
    found = separators(finder, "", list(finder.index.all_items())[:2])
    assert [(each.word, each.scores) for each in found] == [("tree", (0.3, 0.7)), ("house", (0.1, 0.2))]


def test_one_picture_is_separated_from_nothing(finder: Finder) -> None:
    assert separators(finder, "a tree", list(finder.index.all_items())[:1]) == []
    assert separators(finder, "the of", list(finder.index.all_items())[:2]) == []


def test_files_of_the_same_content_are_separated_by_nothing(finder: Finder, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = list(finder.index.all_items())[4:6]
    copy = replace(one, id=99, name="copy")
    assert separators(finder, TEXT, [one, copy]) == []
    looked: list[int] = []
    monkeypatch.setattr(twins, "explain", lambda *given: looked.append(len(given[2])) or explain(*given))
    found = separators(finder, TEXT, [one, copy, other, one])
    assert looked == [2]  # each once
    assert [each.word for each in found] == [each.word for each in separators(finder, TEXT, [one, other])]
    for each in found:
        assert each.scores[0] == each.scores[1] == each.scores[3] != each.scores[2]
        assert not each.approximate


def test_thumbnails_that_separate_are_told(finder: Finder, tmp_path: Path) -> None:
    small_index(tmp_path / "a.hnc", finder.model, RECORDS[:2])  # without stored patches, and without files
    with open_finder(tmp_path / "a.hnc") as bare:
        found = separators(bare, RECORDS[0].captions[0], list(bare.index.all_items()))
    assert found
    assert all(each.approximate for each in found)
