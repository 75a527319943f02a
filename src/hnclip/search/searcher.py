"""Finds images and captions of an index by a text or an image."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import numpy as np

from hnclip.data.image_sources import FileImage
from hnclip.search.engines import FEW, Gallery, open_engine
from hnclip.search.near_duplicates import CaptionHit, Hit, Separation, find_groups, mean_cosine
from hnclip.search.query_encoder import QueryEncoder, check_words, read_query
from hnclip.search.render import SearchResult
from hnclip.search.store import KINDS, IndexedImage, Kind, Store, damaged
from hnclip.search.vectors import invalid_rows, score_rows
from hnclip.util.text import counted

if TYPE_CHECKING:
    from PIL import Image

    from hnclip.search.explain import Explanation

RERANKED = 100  # hits that are put into another order
EXPLAINED = 3  # best hits whose words and patches are explained
SEPARATED = 6  # members of a group, with different content, whose words are compared
OWNERS = 20  # files of a caption that are listed
THUMBNAILS = "for images that are gone, have changed, or are not files of their own, the thumbnails were used"


class Searcher:
    """An open index and what encodes queries for it. Threads may share it."""

    def __init__(self, store: Store, encoder: QueryEncoder, *, engine: str | None = None) -> None:
        """
        Args:
            engine: to use instead of the index's own.
        """
        self.store, self.encoder = store, encoder
        self._engine = engine
        self._galleries: dict[Kind, Gallery] = {}
        self._means: dict[Kind, float] = {}
        with ExitStack() as opened:
            for kind in KINDS:
                found = open_engine(store, kind, engine or store.about.engine)
                if close := getattr(found, "close", None):
                    opened.callback(close)
                self._galleries[kind] = Gallery(store, kind, found)
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()
        self.store.close()

    def __enter__(self) -> Searcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reopen(self) -> Searcher:
        """A searcher of the newest state of the index, with the same encoder if it has the same model."""
        store = Store(self.store.path)
        try:
            encoder = self.encoder
            if store.about.fingerprint != encoder.fingerprint:
                encoder = encoder.for_index(store)
            return Searcher(store, encoder, engine=self._engine)
        except BaseException:
            store.close()
            raise

    def load_model(self) -> None:
        """Load the model with torch, which only text queries do not need. ValueError if it cannot be opened."""
        self.encoder.model(self.store)

    def engine_of(self, kind: Kind) -> str:
        """The engine that searches a kind: exact where there are few rows, or no engine was built."""
        return "exact" if self._galleries[kind].engine is None else self._engine or self.store.about.engine

    def search(
        self,
        text: str | None = None,
        *,
        image: Image.Image | None = None,
        k: int = 20,
        find: Literal["images", "captions"] = "images",
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
        if (text is None) == (image is None):
            raise ValueError("give either a text or an image")
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        if rerank and (text is None or find != "images"):
            raise ValueError("re-ranking needs a text and finds images")
        truncated = False
        if text is not None:
            check_words(self.encoder.text.transform, text)
            truncated = self.encoder.text.transform([text]).truncated > 0
            vector = self.encoder.text.encode(text)  # [D]
        else:
            assert image is not None
            vector = self.encoder.encode_image(self.store, image)  # [D]
        hits, captions = tuple[Hit, ...](), tuple[CaptionHit, ...]()
        if find == "captions":
            captions = self.find_captions(vector, k)
        else:
            hits = self.find_images(vector, max(k, RERANKED) if rerank else k)
            if rerank and text is not None:
                from hnclip.search.explain import rerank as reorder

                hits = tuple(reorder(self.encoder.model(self.store), self.store, text, hits))[:k]
        groups = find_groups(self.store.vectors[find], self._mean(find), hits or captions)
        files = [hit.file for hit in hits] + [one.file for hit in captions for one in hit.images]
        files += [hit.caption.files[0] for hit in captions]
        sources = {file.id: self.store.source(file) for file in files}
        result = SearchResult(
            index=self.store.path,
            engine=self.engine_of(find),
            query=name if text is None else text.strip(),
            kind="image" if text is None else "text",
            find=find,
            total=self.store.count(find),
            truncated=truncated,
            hits=hits,
            captions=captions,
            groups=tuple(groups),
            seconds=perf_counter() - start,
            paths={number: source.key for number, source in sources.items() if isinstance(source, FileImage)},
            places={file.id: file.name if (found := sources[file.id]) is None else found.key for file in files},
        )
        result = self._explained(replace(result, explained=True), text) if explain else result
        return replace(result, notes=self._notes(result, text, k, explain), seconds=perf_counter() - start)

    def explain(self, text: str, ids: Sequence[int]) -> list[Explanation]:
        """Which words of a text match which parts of the images with these ids. KeyError for an unknown id."""
        from hnclip.search.explain import explain

        return explain(self.encoder.model(self.store), self.store, text, self._files(ids))

    def separate(self, text: str, ids: Sequence[int]) -> Separation:
        """Which words of a text separate the images with these ids. KeyError for an unknown id."""
        from hnclip.search.explain import separate

        return separate(self.encoder.model(self.store), self.store, text, self._files(ids))

    def find_images(self, vector: np.ndarray, k: int) -> tuple[Hit, ...]:
        """The k nearest files to a vector [D]; files with equal images have equal scores."""
        rows, scores = self._nearest("images", vector, k)
        ids = self.store.ids["images"][rows].tolist()
        files = self.store.files_of(ids)
        hits = [
            Hit(file, int(row), float(score))
            for row, score, image in zip(rows, scores, ids)
            for file in files.get(image, ())  # of an image that was deleted since there are none
        ]
        return tuple(hits[:k])

    def find_captions(self, vector: np.ndarray, k: int) -> tuple[CaptionHit, ...]:
        """The k nearest captions to a vector [D], with the files that have them."""
        rows, scores = self._nearest("captions", vector, k)
        ids = self.store.ids["captions"][rows].tolist()
        captions = self.store.captions(ids)
        return tuple(
            CaptionHit(captions[one], int(row), float(score), self._owners(vector, captions[one].files[:OWNERS]))
            for row, score, one in zip(rows, scores, ids)
            if one in captions
        )

    def _owners(self, vector: np.ndarray, files: Sequence[IndexedImage]) -> tuple[Hit, ...]:
        """The files of a caption, with the cosines of their images; without those that are newer than this state."""
        ids = self.store.ids["images"]
        rows = np.searchsorted(ids, [file.image for file in files])  # ids rise with the rows
        known = [(file, row) for file, row in zip(files, rows) if row < len(ids) and ids[row] == file.image]
        scores = score_rows(self.store.vectors["images"], vector, np.array([row for _, row in known], np.int64))
        return tuple(Hit(file, int(row), float(score)) for (file, row), score in zip(known, scores))

    def _nearest(self, kind: Kind, vector: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        rows, scores = self._galleries[kind].nearest(vector, k)
        if len(invalid_rows(self.store.vectors[kind][rows])):
            raise ValueError(damaged(self.store.path, f"a vector of its {kind} is not of length 1"))
        return rows, scores

    def _mean(self, kind: Kind) -> float:
        if kind not in self._means:
            self._means[kind] = mean_cosine(self.store.vectors[kind], self.store.deleted[kind])
        return self._means[kind]

    def _files(self, ids: Sequence[int]) -> list[IndexedImage]:
        found = [self.store.file(number) for number in ids]
        if missing := [number for number, file in zip(ids, found) if file is None]:
            raise KeyError(missing[0])
        return [file for file in found if file is not None]

    def _explained(self, result: SearchResult, text: str | None) -> SearchResult:
        """With explanations of the best hits and separating words of the groups, for a text that finds images."""
        if text is None or result.find == "captions" or not result.hits:
            return result
        separations = []
        for group in result.groups:
            different: dict[int, IndexedImage] = {}
            for file in group.files:
                different.setdefault(file.image, file)
            separations.append(self.separate(text, [file.id for file in list(different.values())[:SEPARATED]]))
        explanations = self.explain(text, [hit.file.id for hit in result.hits[:EXPLAINED]])
        return replace(result, separations=tuple(separations), explanations=tuple(explanations))

    def _notes(self, result: SearchResult, text: str | None, k: int, explain: bool) -> tuple[str, ...]:
        notes = []
        what, found = result.find.removesuffix("s"), len(result.hits) + len(result.captions)
        if not self.store.count("images"):
            notes.append(f"{self.store.path} holds no images")
        elif not result.total:
            notes.append(f"{self.store.path} holds no captions: the data that it was made of had none")
        elif found == result.total < k:
            notes.append(f"the index holds no more than {counted(result.total, what)}")
        engine = self._engine or self.store.about.engine
        if result.engine != engine and len(self.store.ids[result.find]) >= FEW:
            notes.append(f"all {result.find} were scanned: update the index with --engine {engine} to build it")
        if result.truncated and text is not None:
            last = " ".join(word.text for word in read_query(self.encoder.text.transform, text).words[-5:])
            context = self.encoder.text.transform.context
            notes.append(
                f"the query is longer than the model's context of {context} tokens and was read up to “… {last}”"
            )
        if explain and result.kind == "image":
            notes.append("words and patches can be explained for text queries only")
        elif explain and result.find == "captions":
            notes.append("words and patches can be explained for images only")
        used: list[Hit | Separation | Explanation] = [*result.hits, *result.separations, *result.explanations]
        return (*notes, *([THUMBNAILS] if any(one.approximate for one in used) else []))


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
    store = Store(path)
    try:
        return Searcher(store, QueryEncoder(store, model=model, device=device), engine=engine)
    except BaseException:
        store.close()
        raise
