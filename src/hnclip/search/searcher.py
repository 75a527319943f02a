"""Finds images and captions of an index by a text or an image."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from hnclip.search.database import KINDS, Kind, damaged
from hnclip.search.engines import FEW, VectorSearch, open_engine
from hnclip.search.near_duplicates import (
    CaptionHit,
    Hit,
    NearDuplicates,
    Separation,
    find_near_duplicates,
    mean_cosine,
)
from hnclip.search.query_encoder import QueryEncoder, QueryText, read_query
from hnclip.search.reader import IndexedImage, IndexReader
from hnclip.search.render import SearchResult
from hnclip.search.vectors import invalid_rows, score_rows
from hnclip.util.text import counted

if TYPE_CHECKING:
    from PIL import Image

    from hnclip.search.explain import Explanation

EXPLAINED = 3  # best hits whose words and patches are explained
SEPARATED = 6  # members of a group, with different content, whose words are compared
OWNERS = 20  # files of a caption that are listed
THUMBNAILS = "for images that are gone, have changed, or are not files of their own, the thumbnails were used"


class Searcher:
    """An open index and what encodes queries for it. Threads may share it."""

    def __init__(self, reader: IndexReader, encoder: QueryEncoder, *, engine: str | None = None) -> None:
        """
        Args:
            engine: to use instead of the index's own.
        """
        self.reader, self.encoder = reader, encoder
        self._engine = engine
        self._searches: dict[Kind, VectorSearch] = {}
        self._mean = cache(lambda kind: mean_cosine(reader.vectors[kind], reader.deleted[kind]))
        with ExitStack() as opened:
            for kind in KINDS:
                found = open_engine(reader, kind, engine or reader.about.engine)
                if close := getattr(found, "close", None):
                    opened.callback(close)
                self._searches[kind] = VectorSearch(reader, kind, found)
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()
        self.reader.close()

    def __enter__(self) -> Searcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reopen(self) -> Searcher:
        """A searcher of the newest state of the index, with the same encoder if it has the same model."""
        reader = IndexReader(self.reader.path)
        try:
            return Searcher(reader, self.encoder.for_index(reader), engine=self._engine)
        except BaseException:
            reader.close()
            raise

    def load_model(self) -> None:
        """Load the model with torch, which only text queries do not need. ValueError if it cannot be opened."""
        self.encoder.model()

    def engine_of(self, kind: Kind) -> str:
        """The engine that searches a kind: exact where there are few rows, or no engine was built."""
        return "exact" if self._searches[kind].engine is None else self._engine or self.reader.about.engine

    def search(
        self,
        text: str | None = None,
        *,
        image: Image.Image | None = None,
        k: int = 20,
        find: Kind = "images",
        rerank: bool = False,
        explain: bool = False,
        name: str = "an image",
    ) -> SearchResult:
        """The k nearest images or captions to a text or an image.

        Args:
            rerank: order the best hits by words and patches as well; for a text that finds images.
            explain: also say which words match where, and which words separate near-duplicates.
            name: of the image, for the result.

        Raises:
            ValueError: the query contains no words, the image cannot be used, or the index is damaged.
        """
        start = perf_counter()
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        if find not in KINDS:
            raise ValueError(f"find must be one of {', '.join(KINDS)}, got {find!r}")
        if rerank and (text is None or find != "images"):
            raise ValueError("re-ranking requires a text and finds images")
        query = None if text is None else read_query(self.encoder.transform, text)
        if query is not None and image is None:
            vector = self.encoder.encode_text(query.given)  # [D]
        elif query is None and image is not None:
            vector = self.encoder.encode_image(image)  # [D]
        else:
            raise ValueError("give either a description or an image")
        hits, captions = tuple[Hit, ...](), tuple[CaptionHit, ...]()
        if find == "captions":
            captions = self.find_captions(vector, k)
        elif query is not None and rerank:
            hits = self._reranked(query, vector, k)
        else:
            hits = self.find_images(vector, k)
        result = SearchResult(
            index=self.reader.path,
            root=self.reader.root,
            engine=self.engine_of(find),
            query=name if query is None else query.given.strip(),
            kind="image" if query is None else "text",
            find=find,
            total=self.reader.count(find),
            truncated=query is not None and query.truncated,
            hits=hits,
            captions=captions,
            groups=tuple(find_near_duplicates(self.reader.vectors[find], self._mean(find), hits or captions)),
        )
        if explain:
            result = self._explained(result, query)
        return replace(result, notes=self._notes(result, query, k, explain), seconds=perf_counter() - start)

    def explain(self, text: str, ids: Sequence[int]) -> list[Explanation]:
        """Which words of a text match which parts of the images with these ids. KeyError for an unknown id."""
        from hnclip.search.explain import explain

        return explain(self.encoder.model(), self.reader, text, self._files(ids))

    def separate(self, text: str, ids: Sequence[int]) -> Separation:
        """Which words of a text separate the images with these ids. KeyError for an unknown id."""
        from hnclip.search.explain import separate

        return separate(self.encoder.model(), self.reader, text, self._files(ids))

    def find_images(self, vector: np.ndarray, k: int) -> tuple[Hit, ...]:
        """The k nearest files to a vector [D]; files with equal images have equal scores."""
        found = self._nearest("images", vector, k)
        files = self.reader.files_of([image for image, _, _ in found])  # without those that were deleted since
        hits = [Hit(file, row, score) for image, row, score in found for file in files.get(image, ())]
        return tuple(hits[:k])

    def find_captions(self, vector: np.ndarray, k: int) -> tuple[CaptionHit, ...]:
        """The k nearest captions to a vector [D], with the files that have them."""
        found = self._nearest("captions", vector, k)
        captions = self.reader.captions([caption for caption, _, _ in found])  # without those that were deleted since
        hits = [
            CaptionHit(captions[caption], row, score, self._owners(vector, captions[caption].files[:OWNERS]))
            for caption, row, score in found
            if caption in captions
        ]
        return tuple(hit for hit in hits if hit.images)

    def _owners(self, vector: np.ndarray, files: Sequence[IndexedImage]) -> tuple[Hit, ...]:
        """The files of a caption, with the cosines of their images; without those that are newer than this state."""
        ids = self.reader.ids["images"]
        rows = np.searchsorted(ids, [file.image for file in files])  # ids rise with the rows, and newer ones are larger
        known = [(file, int(row)) for file, row in zip(files, rows) if row < len(ids)]
        scores = score_rows(self.reader.vectors["images"], vector, np.array([row for _, row in known], np.int64))
        return tuple(Hit(*pair, score) for pair, score in zip(known, scores.tolist()))

    def _nearest(self, kind: Kind, vector: np.ndarray, k: int) -> list[tuple[int, int, float]]:
        """Ids, rows and cosines of the k nearest rows to a vector [D]."""
        rows, scores = self._searches[kind].nearest(vector, k)
        if len(invalid_rows(self.reader.vectors[kind][rows])):
            raise ValueError(damaged(self.reader.path, f"a vector of its {kind} is not of length 1"))
        return list(zip(self.reader.ids[kind][rows].tolist(), rows.tolist(), scores.tolist()))

    def _files(self, ids: Sequence[int]) -> list[IndexedImage]:
        found = [self.reader.file(number) for number in ids]
        if missing := [number for number, file in zip(ids, found) if file is None]:
            raise KeyError(missing[0])
        return [file for file in found if file is not None]

    def _reranked(self, query: QueryText, vector: np.ndarray, k: int) -> tuple[Hit, ...]:
        from hnclip.search.explain import MOST, rerank

        hits = self.find_images(vector, max(k, MOST))
        return tuple(rerank(self.encoder.model(), self.reader, query.given, hits)[:k])

    def _explained(self, result: SearchResult, query: QueryText | None) -> SearchResult:
        """With the words that separate groups, and explanations of the best hits, for a text that finds images."""
        if query is None or not result.hits:
            return replace(result, groups=tuple(replace(group, separation=Separation()) for group in result.groups))
        from hnclip.search.explain import explain, separate

        model, text = self.encoder.model(), query.given

        def separated(group: NearDuplicates) -> NearDuplicates:
            different: dict[int, IndexedImage] = {}
            for file in group.files:
                different.setdefault(file.image, file)
            files = list(different.values())[:SEPARATED]
            return replace(group, separation=separate(model, self.reader, text, files))

        best = [hit.file for hit in result.hits[:EXPLAINED]]
        explanations = tuple(explain(model, self.reader, text, best))
        return replace(result, groups=tuple(map(separated, result.groups)), explanations=explanations)

    def _notes(self, result: SearchResult, query: QueryText | None, k: int, explain: bool) -> tuple[str, ...]:
        notes = []
        what, found = result.find.removesuffix("s"), len(result.hits) + len(result.captions)
        if not self.reader.count("images"):
            notes.append("the index holds no images")
        elif not result.total:
            notes.append("the index holds no captions: the data that it was made of had none")
        elif found == result.total < k:
            notes.append(f"the index holds no more than {counted(result.total, what)}")
        engine = self._engine or self.reader.about.engine
        if result.engine != engine and len(self.reader.ids[result.find]) >= FEW:
            notes.append(f"all {result.find} were scanned: update the index with --engine {engine} to build it")
        if query is not None and query.truncated:
            last = " ".join(word.text for word in query.words[-5:])
            context = self.encoder.transform.context
            notes.append(
                f"the query is longer than the model's context of {context} tokens and was read up to “… {last}”"
            )
        if explain and (query is None or result.find == "captions"):
            notes.append("words and patches are explained where a text finds images")
        separated = [group.separation for group in result.groups if group.separation]
        used: list[Hit | Separation | Explanation] = [*result.hits, *result.explanations, *separated]
        if any(one.approximate for one in used):
            notes.append(THUMBNAILS)
        return tuple(notes)


def open_index(
    path: str | Path, *, engine: str | None = None, model: str | None = None, device: str = "auto"
) -> Searcher:
    """An index, ready to be searched: `with open_index("photos.hnc") as index: index.search("a red tent")`.

    Args:
        engine: to use instead of the index's own.
        model: where its model is now, if it has moved.

    Raises:
        ValueError: there is no index, it is damaged, or its model cannot be opened; the message says what to do.
    """
    reader = IndexReader(path)
    try:
        return Searcher(reader, QueryEncoder(reader, model=model, device=device), engine=engine)
    except BaseException:
        reader.close()
        raise
