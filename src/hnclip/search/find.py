"""Find pictures and captions of an index by a description or by a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from hnclip.encode.fingerprint import model_fingerprint
from hnclip.search.engines.gallery import Gallery
from hnclip.search.engines.open import open_candidates
from hnclip.search.index.layout import KINDS, Kind
from hnclip.search.index.reader import Caption, Index, Item

if TYPE_CHECKING:
    from PIL import Image

    from hnclip.models.dual_encoder import DualEncoder


@dataclass(frozen=True)
class Hit:
    """A picture that was found; `score` is its cosine with the query, `tokens` the late interaction that put it where
    it is, if it was re-ranked, and `approximate` if that was the thumbnail's."""

    item: Item
    score: float
    tokens: float | None = None
    approximate: bool = False


@dataclass(frozen=True)
class CaptionHit:
    """A caption that was found, with the items that it is said of."""

    caption: Caption
    score: float


class Finder:
    """An index, its model, and the engines that search it. Threads may share it."""

    def __init__(self, index: Index, model: DualEncoder, *, engine: str | None = None) -> None:
        """
        Args:
            model: the one that the index was made with.
            engine: another than the index's own.
        """
        self.index, self.model = index, model
        self.engine = engine or index.about.engine
        self.galleries: dict[Kind, Gallery] = {}
        with ExitStack() as opened:  # closes what is open if another cannot be opened
            for kind in KINDS:
                candidates = open_candidates(index, kind, self.engine)
                if candidates is not None:
                    opened.callback(candidates.close)
                self.galleries[kind] = Gallery(index, kind, candidates)
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()

    def engine_of(self, kind: Kind) -> str:
        """What really searches this kind: where there are few rows, or the engine has made nothing of them, they are
        all looked at."""
        return "exact" if self.galleries[kind].candidates is None else self.engine

    def text_vectors(self, texts: Sequence[str]) -> np.ndarray:
        """[Q, D]; a text that is longer than the model's context is cut."""
        with torch.no_grad():
            return self.model.encode_texts(self.model.tokenize(texts)).vectors.float().cpu().numpy()

    def picture_vectors(self, pictures: Sequence[Image.Image]) -> np.ndarray:
        """[Q, D]"""
        with torch.no_grad():
            return self.model.encode_images(self.model.preprocess_images(pictures)).vectors.float().cpu().numpy()

    def images(self, queries: np.ndarray, k: int) -> list[list[Hit]]:
        """The k nearest pictures of each query [Q, D]. Items of the same content have the same score."""
        found = self.galleries["images"].nearest(queries, k)
        items = self.index.items(sorted({int(row) for near in found for row in near.rows}))
        return [
            [Hit(item, float(score)) for row, score in zip(near.rows, near.scores) for item in items[int(row)]][:k]
            for near in found
        ]

    def captions(self, queries: np.ndarray, k: int) -> list[list[CaptionHit]]:
        """The k nearest captions of each query [Q, D]."""
        found = self.galleries["captions"].nearest(queries, k)
        captions = self.index.captions(sorted({int(row) for near in found for row in near.rows}))
        return [
            [CaptionHit(captions[int(row)], float(score)) for row, score in zip(near.rows, near.scores)]
            for near in found
        ]


def open_model(index: Index, model: str | None = None, device: str = "auto") -> DualEncoder:
    """The model that an index was made with.

    Args:
        model: where it lies now, if that is not where it lay then.

    Raises:
        ValueError: it is not where it was, or it is another model: its vectors would mean nothing to the index.
    """
    from hnclip.models.load import load, models_of
    from hnclip.util.device import find_device

    name = model or index.about.model
    try:
        opened = load(models_of(name)[0][1], **index.about.opening).eval()
    except (ValueError, OSError) as error:
        if model is not None:
            raise
        raise ValueError(
            f"{index.path} was made with {index.about.source}, which cannot be opened: {error}\n"
            "If it has moved, say where it lies now by --model"
        ) from error
    if model_fingerprint(opened, opened.name) != index.about.fingerprint:
        raise ValueError(
            f"{index.path} was made with {index.about.source}, and {name} is another model now: give the one it was "
            f"made with by --model, or index again with\n  hnclip index {index.about.data} --out NEW.hnc --model {name}"
        )
    return opened.to(find_device(device))


@contextmanager
def open_finder(
    path: str | Path, *, model: str | None = None, engine: str | None = None, device: str = "auto"
) -> Iterator[Finder]:
    """An index ready to be searched, from Python: `with open_finder("photos.hnc") as finder: …`"""
    with Index(path) as index:
        finder = Finder(index, open_model(index, model, device), engine=engine)
        try:
            yield finder
        finally:
            finder.close()
