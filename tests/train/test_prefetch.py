"""One ahead, in order, and errors where their results were due."""

from __future__ import annotations

import threading

import pytest

from hnclip.train.prefetch import ahead


def test_results_are_those_of_map() -> None:
    assert list(ahead(lambda x: x * x, range(7))) == [x * x for x in range(7)]
    assert list(ahead(str, [])) == []
    assert list(ahead(str, [5])) == ["5"]


def test_the_next_one_is_made_while_the_present_one_is_used() -> None:
    """The second is made although nobody has asked for it yet; the third is not."""
    made = {item: threading.Event() for item in range(3)}

    def make(item: int) -> int:
        made[item].set()
        return item

    results = ahead(make, range(3))
    assert next(results) == 0
    assert made[1].wait(timeout=30)
    assert not made[2].is_set()
    assert list(results) == [1, 2]


def test_an_error_comes_in_its_turn() -> None:
    results = ahead(lambda x: 1 // x, [2, 1, 0, 5])
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_closing_ends_the_thread() -> None:
    before = threading.active_count()
    results = ahead(str, range(100))
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before
