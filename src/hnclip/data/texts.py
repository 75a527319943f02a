"""Captions into token ids: any Hugging Face tokenizer, truncation counted, padding left to the batch."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

# Printable ASCII and the white space that ftfy keeps, without "&": no entity, escape sequence or broken letter.
_PLAIN = re.compile(r"[\t\n\f\r -%'-~]*")
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_PIECE = re.compile(r"\w+|[^\w\s]")
_TOGETHER = 1024  # texts whose offsets are in memory at a time


@dataclass(frozen=True)
class TokenizedTexts:
    """Token ids of each text, special tokens included, and how many texts were cut to fit the context."""

    ids: tuple[tuple[int, ...], ...]
    truncated: int


@dataclass(frozen=True)
class TextTransform:
    """How a model wants its captions.

    A text of more than `context` tokens loses the last of its words and keeps all its special tokens: CLIP's and
    BERT's begin with the start token and end with the end token, as by `truncate=True` of OpenAI's `tokenize`;
    SigLIP's end with the end token; a tokenizer without special tokens cuts the text and no more.

    Args:
        tokenizer: a Hugging Face tokenizer, fast where there is one (only those know offsets).
        context: the longest text in tokens, special tokens included.
        clean: what is done to a text before: `clean_caption` for OpenAI's vocabulary, nothing when left out.
    """

    tokenizer: Any
    context: int
    clean: Callable[[str], str] = str  # str() of a text is the text

    @property
    def pad(self) -> int:
        """The id that fills a batch up: the padding token's, or the end token's where there is none."""
        for token in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return token
        raise ValueError("the tokenizer has neither a padding nor an end token: set its pad_token")

    @cached_property
    def edges(self) -> tuple[int, int]:
        """How many special tokens stand before and after the words of every text: (1, 1) in CLIP, (0, 1) in SigLIP."""
        whole, words = (self._encode(["a photo"], special)[0] for special in (True, False))
        spans = [whole[start : start + len(words)] for start in range(len(whole) - len(words) + 1)]
        before = spans.index(words)
        return before, len(whole) - len(words) - before

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self.tokenizer.all_special_ids)

    def __call__(self, texts: Sequence[str]) -> TokenizedTexts:
        """Token ids without padding. A text without a word is an error: no model has anything to read in it."""
        if isinstance(texts, str):
            raise ValueError("texts is a single string: give a list of captions")
        before, after = self.edges
        if self.context <= before + after:
            raise ValueError(f"context is {self.context}: beside {before + after} special tokens no word has room")
        if len(texts) == 0:
            return TokenizedTexts(ids=(), truncated=0)
        rows = self._encode([self._prepare(index, text) for index, text in enumerate(texts)])
        for index, row in enumerate(rows):
            if self._special.issuperset(row):
                raise ValueError(f"texts[{index}] is {texts[index]!r}: the tokenizer finds no word in it")
        cut = tuple(
            tuple(row) if len(row) <= self.context else (*row[: self.context - after], *row[len(row) - after :])
            for row in rows
        )
        return TokenizedTexts(ids=cut, truncated=sum(len(row) > self.context for row in rows))

    def offsets(self, texts: Sequence[str]) -> Iterator[list[tuple[int, int]]]:
        """Of each text, where its tokens stand in the cleaned text: [start, stop) in characters.

        Special tokens are left out: the first pair is that of the token behind the first of `edges`. Texts are not cut:
        of one that is longer than the context there are more tokens here than in its ids.

        Slow tokenizers know no offsets. Theirs are found by counting the tokens of the text's beginnings, and are those
        of the words or marks that tokens belong to; at most one word beyond the context is counted.
        """
        for first in range(0, len(texts), _TOGETHER):
            some = [self.clean(text) for text in texts[first : first + _TOGETHER]]
            if self.tokenizer.is_fast:
                found = self.tokenizer(some, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
                yield from found["offset_mapping"]
            else:
                yield from map(self._counted_offsets, some)

    def _counted_offsets(self, text: str) -> list[tuple[int, int]]:
        offsets = list[tuple[int, int]]()
        for piece in _PIECE.finditer(text):
            count = len(self._encode([text[: piece.end()]], special=False)[0])
            offsets += [piece.span()] * (count - len(offsets))
            if count > self.context - sum(self.edges):
                break
        return offsets

    def _prepare(self, index: int, text: str) -> str:
        cleaned = self.clean(text) if isinstance(text, str) else ""
        if not cleaned.strip():
            raise ValueError(f"texts[{index}] is empty ({text!r}): a caption needs at least one word")
        if not cleaned.isascii() and _HALF_PAIR.search(cleaned):
            # Halves of emoji, from captions cut in the middle of a JSON escape; tokenizers answer with riddles.
            raise ValueError(f"texts[{index}] is {text!r}: half of a surrogate pair is no letter")
        return cleaned

    def _encode(self, texts: list[str], special: bool = True) -> list[list[int]]:
        # Not asked to, transformers neither cuts nor pads, whatever the tokenizer's file says.
        return self.tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]


def clean_caption(text: str) -> str:
    """OpenAI's cleaning: broken encodings mended by ftfy, HTML entities read (twice), white space made single spaces.

    Where there is a capital sigma, letters become small too: OpenAI's tokenizer then knows the final sigma, of which
    the tokenizers that lower-case letter by letter know nothing.
    """
    if _PLAIN.fullmatch(text):
        return " ".join(text.split())
    import ftfy

    cleaned = " ".join(html.unescape(html.unescape(ftfy.fix_text(text))).split())
    return cleaned.lower() if "Σ" in cleaned else cleaned
