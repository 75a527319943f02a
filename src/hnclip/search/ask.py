"""`hnclip search`: one question to an index."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hnclip.data.pictures import FileImage
from hnclip.search.answer import Answer, Separated, item_places
from hnclip.search.description import Description, read_description
from hnclip.search.explain import Explanation, explain
from hnclip.search.find import CaptionHit, Finder, Hit, open_finder
from hnclip.search.options import SearchOptions
from hnclip.search.rerank import MOST, rerank
from hnclip.search.twins import separators, twin_groups

if TYPE_CHECKING:
    from PIL import Image

EXPLAINED = 3  # best results whose words and patches are shown
SEPARATED = 6  # members of a group whose words are compared


def ask(options: SearchOptions) -> Answer:
    """
    Raises:
        ValueError: the index, its model, the description or the picture cannot be used; the message says why.
    """
    text = _standard_input() if options.text == "-" else options.text
    picture = None if options.image is None else read_query(options.image)
    with open_finder(options.index, model=options.model, engine=options.engine, device=options.device) as finder:
        description = None if text is None else read_description(finder.model, text)
        hits, captions = _found(finder, options, text, _vector(finder, text, picture, options.image))
        twins, explanations = _explained(finder, options, text, hits, captions)
        items = [*(hit.item for hit in hits), *(item for hit in captions for item in hit.caption.items)]
        places, files = item_places(finder.index, items)
        total = finder.index.count() if options.find == "images" else len(finder.galleries["captions"])
        return Answer(
            index=options.index,
            engine=finder.engine,
            query=str(options.image) if text is None else text.strip(),
            asked="image" if text is None else "text",
            find=options.find,
            total=total,
            cut=description is not None and description.cut,
            hits=tuple(hits),
            captions=tuple(captions),
            twins=tuple(twins),
            explanations=tuple(explanations),
            places=places,
            files=files,
            notes=tuple(_notes(finder, options, description, total, explanations)),
        )


def read_query(path: Path) -> Image.Image:
    """A picture to search by; BadPicture, which is a ValueError, says what is wrong with it."""
    return FileImage(path).load()


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is no text in {(sys.stdin.encoding or '').upper()}: {error}") from error


def _vector(finder: Finder, text: str | None, picture: Image.Image | None, path: Path | None) -> np.ndarray:
    """The query's, [1, D]."""
    if picture is None:
        assert text is not None  # `SearchOptions` wants one of the two
        return finder.text_vectors([text])
    try:
        return finder.picture_vectors([picture])
    except ValueError as error:  # too thin to be resized, or of a mode without agreed values
        raise ValueError(f"{path}: {error}") from error


def _found(
    finder: Finder, options: SearchOptions, text: str | None, vector: np.ndarray
) -> tuple[list[Hit], list[CaptionHit]]:
    if options.find == "captions":
        return [], finder.captions(vector, options.k)[0]
    if not options.rerank or text is None:
        return finder.images(vector, options.k)[0], []
    return rerank(finder, text, finder.images(vector, max(MOST, options.k))[0])[: options.k], []


def _explained(
    finder: Finder, options: SearchOptions, text: str | None, hits: list[Hit], captions: list[CaptionHit]
) -> tuple[list[Separated], list[Explanation]]:
    if not options.explain:
        return [], []
    groups = twin_groups(finder, hits or captions)
    if text is None or not hits:
        return [Separated(group) for group in groups], []
    twins = [Separated(group, tuple(separators(finder, text, group.items[:SEPARATED]))) for group in groups]
    return twins, explain(finder, text, [hit.item for hit in hits[:EXPLAINED]])


def _notes(
    finder: Finder,
    options: SearchOptions,
    description: Description | None,
    total: int,
    explanations: list[Explanation],
) -> list[str]:
    notes = []
    if not finder.index.count():
        notes.append(f"{options.index} holds no pictures")
    elif not total:
        notes.append(f"{options.index} holds no captions: there were none beside the pictures that it was made of")
    elif total < options.k:
        what = "pictures" if options.find == "images" else "captions"
        notes.append(f"there are no more: {options.index} holds {total:,} {what}")
    if description is not None and description.cut:
        last = " ".join(word.text for word in description.words[-5:])
        notes.append(
            f"the description is longer than the model's context of {finder.model.context} tokens: it was read up to "
            f"“… {last}”"
        )
    if any(explanation.approximate for explanation in explanations):
        notes.append("pictures that cannot be read any more were explained by their thumbnails: patches are roughly so")
    if options.explain and description is None:
        notes.append("words and patches are explained for descriptions: a picture has no words")
    elif options.explain and options.find == "captions":
        notes.append("words and patches are explained where pictures are found")
    return notes
