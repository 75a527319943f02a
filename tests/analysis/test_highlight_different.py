"""Words that one text has and no other."""

from __future__ import annotations

from hnclip.analysis.near_duplicates import highlight_different


def marked(*texts: str, limit: int = 700) -> list[list[str]]:
    return [
        [piece for piece, highlighted in passage if highlighted] for passage in highlight_different(*texts, limit=limit)
    ]


def test_only_what_no_other_has_is_highlighted() -> None:
    texts = "A red dog's ball on the lawn.", "The RED cat on a lawn", "a blue dog, a cat and a bird"
    assert marked(*texts) == [["ball"], [], ["blue", "bird"]]
    assert ["".join(piece for piece, _ in passage) for passage in highlight_different(*texts)] == list(texts)


def test_stop_words_and_equal_texts_differ_in_nothing() -> None:
    assert marked("a tree under it", "the tree over her") == [[], []]
    assert marked("two trees", "two trees", "two trees") == [[], [], []]
    assert marked("a tree") == [[]]
    assert highlight_different() == ()


def test_what_lies_beyond_the_limit_is_compared_but_not_shown() -> None:
    long = "a tree " + "and a bush " * 20 + "beside one tent"
    assert marked(long, "a tent and a flag", limit=40) == [["tree", "bush", "bush", "bush"], ["flag"]]


def test_scripts_without_spaces() -> None:
    assert marked("红房子", "红房客") == [["房子"], ["房客"]]
