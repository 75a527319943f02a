"""The index that is served: its model is loaded behind the scenes, and a newer version takes the place of the old one.

torch is imported where the model is loaded, not before: the server answers what needs no model meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING

from hnclip.search.index.layout import ENGINES
from hnclip.search.index.reader import Index
from hnclip.search.options import ServeOptions
from hnclip.search.serve.questions import Search

if TYPE_CHECKING:
    from hnclip.models.dual_encoder import DualEncoder
    from hnclip.search.find import Finder

log = logging.getLogger(__name__)

PAUSE = 2.0  # seconds between two looks whether there is a newer version
FIRST = 0.3  # seconds before torch is imported, which holds up all threads: who came first gets the page first


class View:
    """One version of the index. It is closed when it is not the current one any more and nobody uses it."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.finder: Finder | None = None
        self.engines = _engines(index)
        self.counted: tuple[int, int, int] | None = None  # pictures, captions, files left out: a scan of the catalogue
        self.users = 0
        self.current = True

    def counts(self) -> tuple[int, int, int]:
        """Pictures, captions, and files that could not be indexed."""
        if self.counted is None:
            captions = len(self.index.vectors("captions")) - len(self.index.dead("captions"))
            self.counted = (self.index.count(), captions, len(self.index.problems()))
        return self.counted

    def close(self) -> None:
        if self.finder is not None:
            self.finder.close()
        self.index.close()


class Keeper:
    """Who holds the current view. `ready` is set when it can be searched, or when `failure` says why it never will."""

    def __init__(self, options: ServeOptions, index: Index) -> None:
        """
        Args:
            index: an open one; the keeper closes it.
        """
        self.options = options
        self.ready = Event()
        self.failure: Exception | None = None
        self._view = View(index)
        self._model: tuple[str, DualEncoder] | None = None  # with the fingerprint of the index that it belongs to
        self._lock = Lock()
        self._stop = Event()
        self._trouble = ("", 0)  # what was wrong at the last look, and how often in a row
        self._thread: Thread | None = None

    def start(self, failed: Callable[[], object]) -> None:
        """Load the model, then look after the index, in a thread. `failed` is called if the model cannot be loaded."""
        self._thread = Thread(target=self._run, args=(failed,), name="keeper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self.ready.set()

    def join(self, seconds: float) -> bool:
        """Wait until the thread has ended, and close the index if it has; whether it has."""
        if self._thread is not None:
            self._thread.join(max(0.0, seconds))
            if self._thread.is_alive():
                return False
        self._replace(None)
        return True

    @contextmanager
    def borrow(self) -> Iterator[View]:
        """The current view, which stays open as long as it is borrowed."""
        with self._lock:
            view = self._view
            view.users += 1
        try:
            yield view
        finally:
            with self._lock:
                view.users -= 1
                unused = not (view.users or view.current)
            if unused:
                view.close()

    @property
    def searchable(self) -> bool:
        return self._view.finder is not None

    def load(self) -> None:
        """Make the current view searchable.

        Raises:
            ValueError: the model is another one now, or cannot be opened.
        """
        self._view.finder = self._finder(self._view.index)
        self.ready.set()

    def look(self) -> None:
        """Take the newer version, if there is one. If there is something wrong with it the old one stays."""
        view = self._view
        try:
            if view.index.stale() or _engines(view.index) != view.engines:
                self._reopen()
        except Exception as error:  # whatever it is: the next version may be better
            said, times = self._trouble
            told = str(error) or type(error).__name__
            self._trouble = (told, times + 1 if told == said else 1)
            # Once is no trouble yet: it may be that a writer was about to finish.
            if self._trouble[1] == 2:
                log.warning(f"the version of the index that was opened is served on: {told}")
        else:
            self._trouble = ("", 0)

    def _run(self, failed: Callable[[], object]) -> None:
        self._stop.wait(FIRST)
        if self._stop.is_set():
            return
        try:
            self.load()
        except Exception as error:
            self.failure = error
            self.ready.set()
            failed()
            return
        while not self._stop.wait(PAUSE):
            self.look()

    def _reopen(self) -> None:
        index = Index(self._view.index.path)
        try:
            view = View(index)
            view.finder = self._finder(index)
        except BaseException:
            index.close()
            raise
        self._replace(view)

    def _replace(self, view: View | None) -> None:
        with self._lock:
            old = self._view
            was_current, old.current = old.current, False
            unused = was_current and not old.users
            if view is not None:
                self._view = view
        if unused:
            old.close()

    def _finder(self, index: Index) -> Finder:
        from hnclip.search.find import Finder, open_model
        from hnclip.search.serve.answers import answer_searches

        mark = index.about.fingerprint
        if self._model is None or self._model[0] != mark:
            self._model = (mark, open_model(index, self.options.model, self.options.device))
        finder = Finder(index, self._model[1], engine=self.options.engine)
        try:
            # The first one takes longest, and shows whether there will be others.
            (answer,) = answer_searches(finder, [Search(k=1, find="images", text="a photo")])
            if isinstance(answer, Exception):
                raise answer
        except BaseException:
            finder.close()
            raise
        return finder


def _engines(index: Index) -> list[tuple[str, int]]:
    """What changes when an approximate engine was made anew, which is no new version of the index."""
    made = (index.directory / ENGINES).glob("*.json")  # what is written last (search/engines/made.py)
    return sorted((file.name, file.stat().st_mtime_ns) for file in made)
