"""`hnclip search`: one question to an index."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hnclip.data.image_sources import FileImage
from hnclip.search.answer import Answer, Separated, item_places
from hnclip.search.description import Description, read_description
from hnclip.search.engines.made import again
from hnclip.search.engines.open import has_enough
from hnclip.search.explain import Explanation, explain
from hnclip.search.find import CaptionHit, Finder, Hit, open_finder
from hnclip.search.index.reader import Item
from hnclip.search.options import SearchOptions
from hnclip.search.rerank import MOST, rerank
from hnclip.search.twins import TwinGroup, separators, twin_groups
from hnclip.util.text import counted

if TYPE_CHECKING:
    from PIL import Image

EXPLAINED = 3  # best results whose words and patches are shown
SEPARATED = 6  # members of a group, of different content, whose words are compared
THUMBNAILS = "pictures that are no files of their own, are gone or have changed were looked at by their thumbnails"


def ask(options: SearchOptions) -> Answer:
    """
    Raises:
        ValueError: the index, its model, the description or the picture cannot be used; the message says why.
    """
    text = _standard_input() if options.text == "-" else options.text
    picture = None if options.image is None else read_query(options.image)
    with open_finder(options.index, model=options.model, engine=options.engine, device=options.device) as finder:
        description = None if text is None else read_description(finder.model, text)
        found, captions = _found(finder, options, text, _vector(finder, text, picture, options.image))
        hits = found[: options.k]
        twins, explanations = _explained(finder, options, text, hits, captions)
        items = [*(hit.item for hit in hits), *(item for hit in captions for item in hit.caption.items)]
        places, files = item_places(finder.index, items)
        total = finder.index.count() if options.find == "images" else len(finder.galleries["captions"])
        return Answer(
            index=options.index,
            engine=finder.engine_of(options.find),
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
            notes=(
                *_notes_on_index(finder, options, total),
                *_notes_on_description(finder, options, description),
                *([THUMBNAILS] if _approximate(found, twins, explanations) else []),
            ),
        )


def read_query(path: Path) -> Image.Image:
    """A picture to search by; InvalidImage, which is a ValueError, says what is wrong with it."""
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
    """Pictures, or captions; of pictures that were re-ranked all, not only those that are shown."""
    if options.find == "captions":
        return [], finder.captions(vector, options.k)[0]
    if not options.rerank or text is None:
        return finder.images(vector, options.k)[0], []
    return rerank(finder, text, finder.images(vector, max(MOST, options.k))[0]), []


def _explained(
    finder: Finder, options: SearchOptions, text: str | None, hits: list[Hit], captions: list[CaptionHit]
) -> tuple[list[Separated], list[Explanation]]:
    if not options.explain:
        return [], []
    groups = twin_groups(finder, hits or captions)
    if text is None or not hits:
        return [Separated(group) for group in groups], []
    twins = [_separated(finder, text, group) for group in groups]
    return twins, explain(finder, text, [hit.item for hit in hits[:EXPLAINED]])


def _separated(finder: Finder, text: str, group: TwinGroup) -> Separated:
    """By the first members whose content differs."""
    different: dict[int, tuple[int, Item]] = {}
    for place, item in zip(group.places, group.items):
        different.setdefault(item.row, (place, item))
    some = list(different.values())[:SEPARATED]
    found = separators(finder, text, [item for _, item in some])
    return Separated(group, tuple(found), tuple(place for place, _ in some) if found else ())


def _approximate(hits: list[Hit], twins: list[Separated], explanations: list[Explanation]) -> bool:
    """Whether a thumbnail stood in for a picture."""
    separating = [separator for group in twins for separator in group.separators]
    return any(one.approximate for some in (hits, separating, explanations) for one in some)


def _notes_on_index(finder: Finder, options: SearchOptions, total: int) -> Iterator[str]:
    what = "picture" if options.find == "images" else "caption"
    if not finder.index.count():
        yield f"{options.index} holds no pictures"
    elif not total:
        yield f"{options.index} holds no captions: there were none beside the pictures that it was made of"
    elif total < options.k:
        yield f"there are no more: {options.index} holds {counted(total, what)}"
    if finder.engine_of(options.find) != finder.engine and has_enough(finder.index, options.find):
        command = again(finder.index, finder.engine)
        yield f"{finder.engine} of the {what}s is not made, or is gone, so all of them were looked at: {command}"


def _notes_on_description(finder: Finder, options: SearchOptions, description: Description | None) -> Iterator[str]:
    if description is not None and description.cut:
        last = " ".join(word.text for word in description.words[-5:])
        yield (
            f"the description is longer than the model's context of {finder.model.context} tokens"
            f"{f': it was read up to “… {last}”' * bool(last)}"
        )
    if options.explain and description is None:
        yield "words and patches are explained for descriptions: a picture has no words"
    elif options.explain and options.find == "captions":
        yield "words and patches are explained where pictures are found"
