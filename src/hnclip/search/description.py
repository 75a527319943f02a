"""A description as a model reads it: its words, the tokens that each is made of, and where it was cut."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hnclip.util.text import word_spans

if TYPE_CHECKING:
    from hnclip.models.dual_encoder import DualEncoder


@dataclass(frozen=True)
class Word:
    """A word at text[start:stop], and the positions of its tokens, counted without special tokens."""

    text: str
    start: int
    stop: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Description:
    """A text as the model reads it (`TextTransform.clean`), and its words in order.

    Words beyond the context are left out; `cut` says that there were some. Of a word that the context ends within,
    there are those tokens that were read. `given` is the text before it was cleaned, which is what a model takes: to
    clean twice is not to clean once.
    """

    text: str
    words: tuple[Word, ...]
    cut: bool
    given: str


def read_description(model: DualEncoder, text: str) -> Description:
    """
    Raises:
        ValueError: there is no word in it.
    """
    transform = model.text_transform
    cleaned = transform.clean(text)
    if not any(_pieces(cleaned)):
        raise ValueError("the description has no word: say what is to be seen")
    try:
        tokenized = transform([text])
    except ValueError as error:
        raise ValueError(str(error).replace("texts[0]", "the description")) from error
    read = len(tokenized[0]) - sum(transform.edges)
    (offsets,) = transform.offsets([text])
    return Description(cleaned, tuple(_words(cleaned, offsets[:read])), tokenized.truncated > 0, text)


def token_vectors(model: DualEncoder, text: str) -> Tensor:
    """[T, D] of length 1: a vector for each token that was read, special ones left out, on the model's device."""
    with torch.no_grad():
        encoded = model.encode_texts(model.tokenize([text]), tokens=True)
    assert encoded.tokens is not None  # they were asked for
    assert encoded.mask is not None
    return encoded.tokens[0][encoded.mask[0]].float()


def word_vectors(model: DualEncoder, description: Description) -> Tensor:
    """[W, D]: the mean of each word's token vectors; its product with a patch is the mean of their cosines."""
    tokens = token_vectors(model, description.given)  # [T, D]
    if not description.words:
        return tokens[:0]
    return torch.stack([tokens[list(word.tokens)].mean(dim=0) for word in description.words])


def _words(text: str, offsets: list[tuple[int, int]]) -> Iterator[Word]:
    """Pieces of the text that tokens touch; those that one token reaches over are one word."""
    owner: dict[int, tuple[int, int]] = {}  # the piece of each character in one
    for piece in _pieces(text):
        owner.update(dict.fromkeys(range(*piece), piece))
    found: list[tuple[int, int, list[int]]] = []
    for number, token in enumerate(offsets):
        touched = [owner[place] for place in range(*token) if place in owner]
        if not touched:
            continue
        start, stop = touched[0][0], touched[-1][1]
        if found and start < found[-1][1]:
            first, _, tokens = found.pop()
            found.append((first, stop, [*tokens, number]))
        else:
            found.append((start, stop, [number]))
    for start, stop, tokens in found:
        yield Word(text[start:stop], start, stop, tuple(tokens))


def _pieces(text: str) -> Iterator[tuple[int, int]]:
    """Where words begin and end. Scripts without spaces, and symbols, emoji among them, are taken apart into
    characters."""
    for start, stop, spaced in word_spans(text):
        yield from [(start, stop)] if spaced else zip(range(start, stop), range(start + 1, stop + 1))
    yield from ((place, place + 1) for place, letter in enumerate(text) if unicodedata.category(letter) == "So")
