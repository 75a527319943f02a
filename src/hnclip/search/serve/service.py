"""What answers questions: two lines, so that what takes long does not keep quick searches waiting."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

from hnclip.search.options import ServeOptions
from hnclip.search.serve.failures import busy
from hnclip.search.serve.keeper import Keeper
from hnclip.search.serve.line import Line
from hnclip.search.serve.questions import Explain, Search, Separate
from hnclip.search.serve.schema import Health, Info, Limits

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

TOGETHER = 16  # searches that are answered at once


class Service:
    """An index, and who computes for it. `searches` takes plain searches; `details` one question at a time."""

    def __init__(self, keeper: Keeper, options: ServeOptions) -> None:
        self.keeper, self.options = keeper, options
        self.searches: Line[Search] = Line(
            "searches", self._search, waiting=options.waiting, together=TOGETHER, begin=self._begin
        )
        self.details: Line[Search | Explain | Separate] = Line(
            "details", self._detail, waiting=options.waiting, begin=self._begin
        )

    def health(self) -> Health:
        return Health(ready=self.keeper.searchable)

    def info(self) -> Info:
        with self.keeper.borrow() as view:
            pictures, captions, left_out = view.counts()
            about = view.index.about
            return Info(
                name=view.index.path.absolute().stem,
                pictures=pictures,
                captions=captions,
                left_out=left_out,
                model=about.source,
                engine=view.finder.engine_of("images") if view.finder else self.options.engine or about.engine,
                storage=about.storage,
                ready=self.keeper.searchable,
                limits=Limits(
                    k=self.options.max_k,
                    text=self.options.max_text,
                    upload=self.options.max_upload,
                    pixels=self.options.max_pixels,
                ),
            )

    def pixels(self, picture: Image.Image) -> Tensor:
        """A picture as the model sees it, [3, H, W] uint8.

        Raises:
            ValueError: it has a shape or values that the model cannot see.
        """
        with self.keeper.borrow() as view:
            if view.finder is None:
                raise busy()
            return view.finder.model.preprocess_images([picture])[0].cpu()

    def close(self, seconds: float) -> bool:
        """Stop; whether all threads have ended within that time."""
        until = monotonic() + seconds
        self.searches.close()
        self.details.close()
        self.keeper.stop()
        ended = [part.join(until - monotonic()) for part in (self.searches, self.details, self.keeper)]
        return all(ended)

    def _begin(self) -> None:
        self.keeper.ready.wait()
        if self.options.threads and self.keeper.searchable:
            import torch

            torch.set_num_threads(self.options.threads)  # counts for the thread that says so

    def _search(self, searches: Sequence[Search]) -> Sequence[Any]:
        from hnclip.search.serve.answers import answer_searches

        with self.keeper.borrow() as view:
            if view.finder is None:
                raise busy()
            return answer_searches(view.finder, searches)

    def _detail(self, questions: Sequence[Search | Explain | Separate]) -> Sequence[Any]:
        from hnclip.search.serve.answers import answer_detail, answer_searches

        (question,) = questions
        with self.keeper.borrow() as view:
            if view.finder is None:
                raise busy()
            if isinstance(question, Search):
                return answer_searches(view.finder, [question])
            return [answer_detail(view.finder, question)]
