"""Captions without words of appearance (colours, materials, textures), so that shape and position remain."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from importlib import import_module
from importlib.resources import files

FORMAT = 2  # of the filters' results; raise it when the lists or the code change them
CATEGORIES = ("colours", "materials", "textures")
LISTS = (*CATEGORIES, "structxlip_colours")  # the last is the list of the released code
CaptionFilter = Callable[[str], str]

_STOP_WORD = re.compile("a|an|the|and|or|but|of|in|on|at|to|with|by|for|from|is|are|was|were|it|its|this|that|there|as")
_VOWEL = r"(?!one\b|once\b|eu|uni|us[ae])(?:[aeiou]|hour|heir|hono)"  # "an" stands before these
_LEAST = 2  # words that must remain


def word_list(category: str) -> tuple[str, ...]:
    """The entries of a category in lower case."""
    if category not in LISTS:
        raise ValueError(f"there is no word list {category!r}: choose from {', '.join(LISTS)}")
    lines = (files("hnclip.data") / "words" / f"{category}.txt").read_text(encoding="utf-8").splitlines()
    return tuple(line.strip().lower() for line in lines if line.strip() and not line.startswith("#"))


def filter_caption(text: str, categories: Sequence[str] = CATEGORIES, *, repair: bool = True) -> str:
    """A caption without the words of these lists: whole words in any case, longest entries first. A text is not changed
    if fewer than two words other than stop words would remain.

    Args:
        repair: also remove hyphens and conjunctions of removed words, and choose between "a" and "an" again.
            StructXLIP's released filter does not: "An orange tree" becomes "An tree".
    """
    word = _pattern(tuple(categories))
    left = _repaired(text, word) if repair else re.sub(rf"\b{word}\b", " ", text, flags=re.IGNORECASE)
    left = re.sub(r"\s+", " ", left)
    left = re.sub(r" ([,.;:!?])", r"\1", left)
    left = re.sub(r"([,.;:!?])\1+", r"\1", left)
    left = re.sub(r"(,\s*)+,", ",", left).strip()
    words = [word for word in re.findall(r"\w+", left.lower()) if not _STOP_WORD.fullmatch(word)]
    return left if len(words) >= _LEAST else text


def _repaired(text: str, word: str) -> str:
    word = rf"-?\b{word}\b(?!['’]s\b)-?"
    words = rf"{word}(?:\s*[,/]?\s*(?:\b(?:and|or)\b[\s-]*)?{word})*"  # "red, white and blue", "black-and-white"
    # After an article, a comma or conjunction with what follows goes as well: "a red and tall car", "a red, tall car".
    described = rf"\b(an?|the)\s+{words}(?:\s*,(?=\s+\w)|\s+(?:and|or)\b(?=\s+\w))?"
    # \0 marks articles whose noun phrase changed.
    text = re.sub(described, r"\1\0 ", text.replace("\0", " "), flags=re.IGNORECASE)
    text = re.sub(words, " ", text, flags=re.IGNORECASE)
    text = re.sub(r"\(\s*\)", " ", text)
    text = re.sub(rf"\b(a)n?\0\s+(?={_VOWEL})", r"\1n ", text, flags=re.IGNORECASE)
    return re.sub(r"\b(a)n\0", r"\1", text, flags=re.IGNORECASE).replace("\0", "")


@lru_cache
def _pattern(categories: tuple[str, ...]) -> str:
    entries = sorted({entry for category in categories for entry in word_list(category)}, key=len, reverse=True)
    return rf"(?:{'|'.join(map(re.escape, entries)) or '(?!)'})"


def load_filter(name: str) -> CaptionFilter:
    """The filter of that name; it can be pickled. `lexicon` for all lists, `blunt` for the same without repair,
    `lexicon:colours` or `blunt:colours,materials` for some lists; or `package.module:function`, a function from text to
    text, for example one that calls a language model."""
    kind, colon, rest = name.partition(":")
    if kind in ("lexicon", "blunt"):
        categories = tuple(part.strip() for part in rest.split(",")) if colon else CATEGORIES
        _pattern(categories)  # an unknown list is an error now, not at the first caption
        return partial(filter_caption, categories=categories, repair=kind == "lexicon")
    if not (kind and rest):
        raise ValueError(f"there is no filter {name!r}: use lexicon, blunt or package.module:function")
    try:
        function = getattr(import_module(kind), rest)
    except Exception as error:  # the user's module may raise anything while it is imported
        raise ValueError(f"the filter {name!r} cannot be imported ({error!r}): is it on PYTHONPATH?") from error
    if not callable(function):
        raise ValueError(f"the filter {name!r} is not a function")
    return partial(_checked, function, name)


def filter_version(name: str) -> str:
    """The name of a filter, and of a shipped one also its format."""
    return f"{name} {FORMAT}" if name.partition(":")[0] in ("lexicon", "blunt") else name


def _checked(function: CaptionFilter, name: str, text: str) -> str:
    result = function(text)
    if not isinstance(result, str) or not result.strip():
        raise ValueError(f"the filter {name} returned {result!r} for {text[:60]!r}: it must return non-empty text")
    return result
