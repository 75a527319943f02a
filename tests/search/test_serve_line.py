"""The line in front of a thread that answers: bounded, in order, together, and never blocked by a failure."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from hnclip.search.serve.line import Full, Line


class Desk:
    """Who answers, when the test says so; `taken` are the batches in order."""

    def __init__(self) -> None:
        self.taken: list[list[Any]] = []
        self.begun = threading.Semaphore(0)
        self.go = threading.Semaphore(0)

    def __call__(self, questions: Sequence[Any]) -> Sequence[Any]:
        self.taken.append(list(questions))
        self.begun.release()
        assert self.go.acquire(timeout=10)
        if "fail" in questions:
            raise OSError("the desk burns")
        return [KeyError(question) if question == "wrong" else f"{question}!" for question in questions]


@contextmanager
def line_at(desk: Desk, **options: Any) -> Iterator[Line]:
    line = Line("test", desk, **options)
    try:
        yield line
    finally:
        line.close()
        for _ in range(50):
            desk.go.release()
        assert line.join(10)


def test_those_who_wait_are_answered_together_in_their_order() -> None:
    desk = Desk()
    with line_at(desk, waiting=10, together=3) as line:
        first = line.ask(0)
        assert desk.begun.acquire(timeout=10)
        futures = [line.ask(number) for number in range(1, 6)]
        for _ in range(3):
            desk.go.release()
        assert first.result(10) == "0!"
        assert [future.result(10) for future in futures] == ["1!", "2!", "3!", "4!", "5!"]
    assert desk.taken == [[0], [1, 2, 3], [4, 5]]


def test_a_full_line_refuses_at_once_and_has_room_again_when_some_gave_up() -> None:
    desk = Desk()
    with line_at(desk, waiting=2) as line:
        line.ask("being answered")
        assert desk.begun.acquire(timeout=10)
        waiting = [line.ask("a"), line.ask("b")]
        with pytest.raises(Full):
            line.ask("c")
        assert waiting[0].cancel()
        last = line.ask("c")
        with pytest.raises(Full):
            line.ask("d")
        for _ in range(3):
            desk.go.release()
        assert last.result(10) == "c!"
    assert desk.taken == [["being answered"], ["b"], ["c"]]


def test_who_gave_up_is_not_answered() -> None:
    desk = Desk()
    with line_at(desk, waiting=5, together=5) as line:
        line.ask(0)
        assert desk.begun.acquire(timeout=10)
        futures = [line.ask(number) for number in (1, 2, 3)]
        futures[0].cancel()
        futures[2].cancel()
        desk.go.release()
        desk.go.release()
        assert futures[1].result(10) == "2!"
    assert desk.taken == [[0], [2]]


def test_a_failure_is_that_of_its_questions_alone() -> None:
    desk = Desk()
    with line_at(desk, waiting=5, together=2) as line:
        line.ask(0)
        assert desk.begun.acquire(timeout=10)
        futures = [line.ask(question) for question in ("fail", "beside", "wrong", "good")]
        for _ in range(3):
            desk.go.release()
        for future in futures[:2]:
            with pytest.raises(OSError, match="the desk burns"):
                future.result(10)
        with pytest.raises(KeyError):
            futures[2].result(10)
        assert futures[3].result(10) == "good!"


def test_closing_cancels_those_who_wait_and_lets_nobody_in() -> None:
    desk = Desk()
    with line_at(desk, waiting=5) as line:
        first = line.ask(0)
        assert desk.begun.acquire(timeout=10)
        second = line.ask(1)
        line.close()
        assert second.cancelled()
        with pytest.raises(Full):
            line.ask(2)
        desk.go.release()
        assert first.result(10) == "0!"
    assert desk.taken == [[0]]


def test_too_few_answers_are_an_error_and_not_a_wait_for_ever() -> None:
    line = Line("test", lambda questions: [], waiting=1)
    try:
        with pytest.raises(ValueError):
            line.ask(0).result(10)
    finally:
        line.close()
        assert line.join(10)
