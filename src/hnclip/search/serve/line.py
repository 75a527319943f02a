"""Requests that wait for one thread: a bounded line, from whose front a few are answered together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Condition, Thread
from typing import Any, Generic, TypeVar

Question = TypeVar("Question")


class Full(Exception):
    """As many wait already as may."""


class Line(Generic[Question]):
    """A thread that answers questions in the order in which they came.

    A question whose future was cancelled before its turn, because nobody waits for it any more, is not answered.
    """

    def __init__(
        self,
        name: str,
        answer: Callable[[Sequence[Question]], Sequence[Any]],
        *,
        waiting: int,
        together: int = 1,
        begin: Callable[[], object] = lambda: None,
    ) -> None:
        """
        Args:
            answer: gives each question its answer, or an exception as one; what it raises all of them get.
            waiting: questions that may wait, those that are being answered left out.
            together: most questions that are answered at once.
            begin: the thread's first deed; questions may wait for it to end.
        """
        self._answer, self._waiting, self._together, self._begin = answer, waiting, together, begin
        self._questions: deque[tuple[Question, Future[Any]]] = deque()
        self._changed = Condition()
        self._closed = False
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def ask(self, question: Question) -> Future[Any]:
        """The answer to come.

        Raises:
            Full: too many are waiting.
        """
        future: Future[Any] = Future()
        with self._changed:
            if len(self._questions) >= self._waiting:
                self._questions = deque(waiting for waiting in self._questions if not waiting[1].cancelled())
            if len(self._questions) >= self._waiting or self._closed:
                raise Full
            self._questions.append((question, future))
            self._changed.notify()
        return future

    def close(self) -> None:
        """No more questions; those that wait are cancelled."""
        with self._changed:
            self._closed = True
            for _, future in self._questions:
                future.cancel()
            self._changed.notify()

    def join(self, seconds: float) -> bool:
        """Wait until the thread has ended; whether it has."""
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._begin()
        while self._turn():
            pass

    def _turn(self) -> bool:
        """Answer some; whether there may be more. Nothing of them is kept while the thread waits for others."""
        chosen = self._next()
        futures = [future for _, future in chosen]
        try:
            if chosen:
                for future, answer in zip(futures, self._answer([question for question, _ in chosen]), strict=True):
                    _settle(future, answer)
        except Exception as error:  # of these questions: the thread must live
            for future in futures:
                if not future.done():
                    future.set_exception(error)
        return bool(chosen)

    def _next(self) -> list[tuple[Question, Future[Any]]]:
        """Questions that somebody waits for, at least one; none when the line is closed."""
        chosen: list[tuple[Question, Future[Any]]] = []
        with self._changed:
            while not chosen:
                self._changed.wait_for(lambda: self._questions or self._closed)
                if self._closed:
                    return []
                while self._questions and len(chosen) < self._together:
                    waiting = self._questions.popleft()
                    if waiting[1].set_running_or_notify_cancel():
                        chosen.append(waiting)
        return chosen


def _settle(future: Future[Any], answer: Any) -> None:
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)
