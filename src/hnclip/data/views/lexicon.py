"""Captions without their words of appearance: colours, materials, textures. What is left tells of shape and place."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from importlib import import_module
from importlib.resources import files

from hnclip.data.views.grammar import STOP_WORDS, Entries, drop_words

CATEGORIES = ("colours", "materials", "textures")
LISTS = (*CATEGORIES, "structxlip_colours")  # the last is the list of the released code
CaptionFilter = Callable[[str], str]

_ROOM = files("hnclip.data.views")
_LEAST = 2  # words that must be left


def word_list(category: str) -> tuple[str, ...]:
    """The shipped entries of a category, in the order of the file, in small letters."""
    if category not in LISTS:
        raise ValueError(f"there is no word list {category!r}: choose from {', '.join(LISTS)}")
    lines = (_ROOM / "words" / f"{category}.txt").read_text(encoding="utf-8").splitlines()
    return tuple(line.strip().lower() for line in lines if line.strip() and not line.startswith("#"))


def filter_caption(text: str, categories: Sequence[str] = CATEGORIES, *, careful: bool = True) -> str:
    """A caption without the words of these lists: whole words, whatever their case, the longest entries first.

    Args:
        careful: keep the rest grammatical, see `data/views/grammar.py`: articles agree, coordinations and hyphenated
            words go as a whole, a word that names a thing ("a glass of water") stays, and so do quotes and names.
            Otherwise the words are cut out and nothing else is done.

    Returns:
        The filtered text; the text itself if fewer than two words that are no stop-words would be left.

    Relations:
        Filtering twice is filtering once. Every word of the result is one of the text, but for "a" and "an".

    Reference:
        StructXLIP's released filter is the one that is not careful: "An orange tree" becomes "An tree".
    """
    if isinstance(categories, str):
        raise ValueError(f"categories is a single string: give a list such as [{categories!r}]")
    chosen = tuple(categories)
    left = _careful(text, chosen) if careful else _blunt(text, chosen)
    words = [word for word in re.findall(r"\w+", left.lower()) if word not in STOP_WORDS]
    return left if len(words) >= _LEAST else text


def load_filter(name: str) -> CaptionFilter:
    """The filter of that name. It can be sent to other processes.

    Args:
        name: `lexicon`, the shipped lists with care, or `blunt`, the same without; `lexicon:colours` or
            `blunt:colours,materials` for some lists alone; or `package.module:function`, a function of one text that
            returns text, for example one that asks a language model.
    """
    kind, categories = _parsed(name)
    if kind is not None:
        return partial(filter_caption, categories=categories, careful=kind == "lexicon")
    return partial(_checked, _function(name), name)


def _parsed(name: str) -> tuple[str | None, tuple[str, ...]]:
    """Kind and categories of a shipped filter; no kind for a function of the user's."""
    kind, colon, rest = name.partition(":")
    if kind not in ("lexicon", "blunt"):
        return None, ()
    categories = tuple(part.strip() for part in rest.split(",")) if colon else CATEGORIES
    for category in categories:
        if category not in LISTS:
            raise ValueError(f"the filter {name!r} asks for the word list {category!r}: choose from {', '.join(LISTS)}")
    return kind, categories


def _function(name: str) -> CaptionFilter:
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ValueError(
            f"there is no filter {name!r}: use lexicon, blunt, either with lists (lexicon:colours,materials), or a "
            "function of your own as package.module:function"
        )
    try:
        found = import_module(module)
    except Exception as error:  # the user's module may raise anything while it is imported
        raise ValueError(
            f"the filter {name!r} cannot be loaded: importing {module} fails ({type(error).__name__}: {error}). Is its "
            "directory on PYTHONPATH?"
        ) from error
    function = getattr(found, attribute, None)
    if not callable(function):
        raise ValueError(f"the filter {name!r} cannot be loaded: {module} has no function {attribute!r}")
    return function


def _checked(function: CaptionFilter, name: str, text: str) -> str:
    result = function(text)
    if not isinstance(result, str) or not result.strip():
        raise ValueError(
            f"the filter {name} returned {result!r} for {text[:60]!r}: it must return text that is not empty; return "
            "the caption itself where nothing would be left"
        )
    return result


def _careful(text: str, categories: tuple[str, ...]) -> str:
    """Words dropped until there is nothing more to drop: what a word's neighbours leave may make it droppable."""
    while (left := drop_words(text, _entries(categories))) != text:
        text = left
    return text


def _blunt(text: str, categories: tuple[str, ...]) -> str:
    """The released filter: words replaced by a space, spaces before punctuation and repeated marks removed."""
    left = re.sub(r"\s+", " ", _pattern(categories).sub(" ", text))
    left = re.sub(r" ([,.;:!?])", r"\1", left)
    left = re.sub(r"([,.;:!?])\1+", r"\1", left)
    return re.sub(r"(,\s*)+,", ",", left).strip()


@lru_cache
def _entries(categories: tuple[str, ...]) -> Entries:
    return Entries({category: word_list(category) for category in categories})


@lru_cache
def _pattern(categories: tuple[str, ...]) -> re.Pattern[str]:
    entries = sorted({entry for category in categories for entry in word_list(category)}, key=len, reverse=True)
    return re.compile(rf"\b(?:{'|'.join(map(re.escape, entries)) or '(?!)'})\b", re.IGNORECASE)
