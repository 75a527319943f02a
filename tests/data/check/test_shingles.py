from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_records import components

from hnclip.data.check import linking, shingles
from hnclip.data.check.shingles import jaccard, shingle_sets, similar_texts


def runs(text):
    """Shingles by their definition, of texts in small letters without punctuation."""
    words = text.split()
    padded = ["", "", *words, "", ""]
    return {tuple(padded[start : start + 3]) for start in range(len(words) + 2)} if words else set()


def similarity(one, other):
    one, other = runs(one), runs(other)
    return len(one & other) / len(one | other) if one or other else 0.0


def slowly(texts, threshold):
    """Every text with every other."""
    return components(len(texts), lambda one, other: similarity(texts[one], texts[other]) >= threshold)


def family_texts(seed, *, vocabulary, length, families=48, members=2):
    """Families of texts that are a few words apart, so that similarities lie on both sides of any threshold.

    In families of two no third text can make up for a pair that was missed.
    """
    rng = random.Random(seed)
    texts = []
    for _ in range(families):
        base = [f"w{rng.randrange(vocabulary)}" for _ in range(rng.randint(max(1, length // 2), length))]
        texts.append(" ".join(base))
        for _ in range(members - 1):
            words = list(base)
            for _ in range(rng.randint(1, 1 + length // 20)):
                place = rng.randrange(len(words))
                words[place : place + rng.randint(0, 2)] = [f"w{rng.randrange(vocabulary)}"] * rng.randint(0, 2)
                words = words or ["w"]
            texts.append(" ".join(words))
    rng.shuffle(texts)
    return list(dict.fromkeys(texts))


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.8, 0.9, 1.0])
@pytest.mark.parametrize(("vocabulary", "length"), [(5000, 40), (40, 30), (6, 12), (3, 6)])
@pytest.mark.parametrize("members", [2, 8])
def test_the_join_finds_what_comparing_all_pairs_finds(vocabulary, length, members, threshold):
    texts = family_texts(members, vocabulary=vocabulary, length=length, families=64 // members, members=members)
    found = similar_texts(texts, threshold)
    assert found.complete
    assert found.groups == slowly(texts, threshold)


@given(
    texts=st.lists(st.lists(st.sampled_from("abc"), max_size=7).map(" ".join), max_size=12, unique=True),
    threshold=st.sampled_from([0.1, 1 / 3, 0.5, 0.6, 0.75, 0.8, 1.0]),
)
def test_the_join_is_exact_for_any_texts(texts, threshold):
    assert similar_texts(texts, threshold).groups == slowly(texts, threshold)


def test_the_material_has_pairs_at_the_threshold_and_around_it():
    texts = family_texts(2, vocabulary=40, length=30)
    values = [similarity(one, other) for one in texts for other in texts if one < other]
    assert 0.8 in values
    assert min(sum(0.8 <= value < 0.9 for value in values), sum(0.7 <= value < 0.8 for value in values)) > 5


def test_shingles_are_runs_of_three_words_with_empty_ones_around():
    texts = ["a red dog runs", "a", "the end", ""]
    sets = shingle_sets(texts)
    assert sets.sizes.tolist() == [len(runs(text)) for text in texts] == [6, 3, 4, 0]
    assert jaccard(sets[0], sets[0]) == 1
    assert jaccard(sets[0], sets[1]) == similarity(texts[0], texts[1]) == 1 / 8  # both begin with "a"


@pytest.mark.parametrize("place", [0, 3, 29])
def test_a_changed_word_counts_the_same_wherever_it_stands(place):
    words = [f"w{number}" for number in range(30)]
    other = [*words[:place], "other", *words[place + 1 :]]
    sets = shingle_sets([" ".join(words), " ".join(other)])
    assert jaccard(sets[0], sets[1]) == 29 / 35


def test_case_and_punctuation_do_not_count():
    assert similar_texts(["A dog, running.", "a DOG running", "a cat running"], 1.0).groups == [[0, 1]]


def test_scripts_without_spaces_are_read_letter_by_letter():
    base = "一只棕色的狗在公园的草地上奔跑追着一个红色的球旁边有一棵很大的树"
    assert similar_texts([base, base.replace("棕", "黑"), "桌子上放着一本打开的书和一杯热咖啡"], 0.8).groups == [[0, 1]]


def test_texts_without_words_are_like_nothing():
    assert similar_texts(["", "...", "!"], 0.8).groups == []
    assert similar_texts([], 0.8).groups == []
    assert similar_texts(["one alone"], 0.8).groups == []


def test_words_beyond_the_numbers_only_share_them(monkeypatch):
    monkeypatch.setattr(shingles, "_WORD_BITS", 4)
    texts = [f"one{number} two{number} three{number} four{number}" for number in range(0, 60)]
    texts.append(texts[0] + ".")
    groups = similar_texts(texts, 0.8).groups
    assert any({0, 60} <= set(group) for group in groups)


def test_shingles_that_share_a_place_in_the_table_lose_nothing(monkeypatch):
    monkeypatch.setattr(shingles, "_RARITY_BITS", 5)
    texts = family_texts(1, vocabulary=40, length=30)
    assert similar_texts(texts, 0.8).groups == slowly(texts, 0.8)


def test_texts_too_long_for_the_counts_of_a_histogram_are_not_missed(monkeypatch):
    monkeypatch.setattr(shingles, "_MOST", 3)
    long = [[f"{number}w{place}" for place in range(300)] for number in range(20)]
    texts = [" ".join(words[start:]) for words in long for start in (0, 1)]
    assert similar_texts(texts, 0.98).groups == [[2 * number, 2 * number + 1] for number in range(20)]


def test_captions_that_are_all_alike_are_one_group_in_short_time():
    body = " ".join(f"w{number}" for number in range(40))
    texts = [f"{body} number {number}" for number in range(3000)]
    found = similar_texts(texts, 0.8)
    assert found.groups == [list(range(3000))]
    assert found.complete


def test_a_search_that_is_given_up_reports_only_what_is_true(monkeypatch):
    monkeypatch.setattr(linking, "REACH", 3)
    texts = family_texts(2, vocabulary=6, length=12)
    found = similar_texts(texts, 0.5)
    assert not found.complete
    assert found.groups
    whole = [set(group) for group in slowly(texts, 0.5)]
    assert all(any(set(group) <= full for full in whole) for group in found.groups)


@pytest.mark.parametrize("threshold", [0, -0.1, 1.1, float("nan")])
def test_a_threshold_outside_the_range_is_refused(threshold):
    with pytest.raises(ValueError, match="threshold must be above 0"):
        similar_texts(["a"], threshold)


def test_the_answer_does_not_depend_on_the_order_of_the_texts():
    texts = family_texts(3, vocabulary=40, length=30)
    order = np.random.default_rng(0).permutation(len(texts)).tolist()
    there = {frozenset(texts[i] for i in group) for group in similar_texts(texts, 0.6).groups}
    back = {frozenset(texts[order[i]] for i in group) for group in similar_texts([texts[i] for i in order], 0.6).groups}
    assert there == back


@pytest.mark.parametrize(
    ("words", "changes", "expected"), [(120, 4, True), (120, 5, False), (25, 1, True), (24, 1, False)]
)
def test_what_the_default_means_in_words(words, changes, expected):
    base = [f"w{number}" for number in range(words)]
    other = list(base)
    for change in range(changes):
        other[10 + 10 * change] = "changed"
    assert (similar_texts([" ".join(base), " ".join(other)], 0.8).groups == [[0, 1]]) == expected
