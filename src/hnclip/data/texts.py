"""Captions into token ids: any Hugging Face tokenizer, truncation counted, padding left to the batch; sentences."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, Literal, TypeAlias

import numpy as np

CHUNK = 4096  # texts that are tokenised at once
NO_WORD = "the tokenizer finds no word in it"

# Printable ASCII and the white space that ftfy keeps, without "&": nothing to repair.
_PLAIN = re.compile(r"[\t\n\f\r -%'-~]*")
_WORD = re.compile(r"\w+|[^\w\s]")
_SURROGATE = re.compile("[\ud800-\udfff]")

Tokens: TypeAlias = Sequence[int] | np.ndarray
"""Token ids of one text."""
Splitting = Literal["careful", "dots"]


@dataclass(frozen=True, eq=False)
class TokenizedTexts(Sequence[np.ndarray]):
    """Token ids of N texts with special tokens, without padding: a sequence of int32 arrays over one array.

    Shape:
        tokens: [ΣT] int32
        starts: [N + 1] int64; text i is tokens[starts[i] : starts[i + 1]]
        truncated: number of texts that were longer than the context
    """

    tokens: np.ndarray
    starts: np.ndarray
    truncated: int

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: Any) -> Any:
        """One text, or with a slice a list of them."""
        rows = range(len(self))[index]
        if isinstance(rows, range):
            return [self[row] for row in rows]
        return self.tokens[self.starts[rows] : self.starts[rows + 1]]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)  # [N]


@dataclass(frozen=True)
class TextTransform:
    """The text preprocessing of a model: a Hugging Face tokenizer, after `clean` was applied (`clean_caption` for
    OpenAI's vocabulary). A text of more than `context` tokens loses its last words and keeps all special tokens, as
    with `truncate=True` of OpenAI's `tokenize`."""

    tokenizer: Any
    context: int
    clean: Callable[[str], str] = str  # str() of a text is the text

    @property
    def pad(self) -> int:
        """The id that fills a batch: the padding token's, or the end token's if there is none."""
        for token in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return token
        raise ValueError("the tokenizer has neither a padding nor an end token: set its pad_token")

    @cached_property
    def edges(self) -> tuple[int, int]:
        """Special tokens before and after the words of every text: (1, 1) for CLIP, (0, 1) for SigLIP."""
        whole, words = (self._encode(["a photo"], special)[0] for special in (True, False))
        room = len(whole) - len(words)
        before = next(start for start in range(room + 1) if whole[start : start + len(words)] == words)
        return before, room - before

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self.tokenizer.all_special_ids)

    def _is_special(self, row: Sequence[int]) -> bool:
        return all(token in self._special for token in row)  # stops at the first word

    def __call__(self, texts: Sequence[str]) -> TokenizedTexts:
        """Tokenise texts, in chunks. A text without a word is an error (`validate` finds all of them)."""
        if isinstance(texts, str):
            raise ValueError("texts is a single string: give a list of captions")
        before, after = self.edges
        if self.context <= before + after:
            raise ValueError(f"a context of {self.context} has no room for a word with {before + after} special tokens")
        tokens, lengths, truncated = [np.empty(0, np.int32)], [0], 0
        for first, cleaned, reasons in self._chunks(texts):
            rows = self._encode([text if reason is None else "" for text, reason in zip(cleaned, reasons)])
            for number, row in enumerate(rows):
                if len(row) > self.context:
                    truncated += 1
                    rows[number] = [*row[: self.context - after], *row[len(row) - after :]]
                elif self._is_special(row):
                    reason = reasons[number] or NO_WORD
                    raise ValueError(f"texts[{first + number}] is {texts[first + number]!r}: {reason}")
            lengths += map(len, rows)
            tokens.append(np.fromiter(chain.from_iterable(rows), np.int32))
        return TokenizedTexts(np.concatenate(tokens), np.cumsum(lengths, dtype=np.int64), truncated)

    def validate(self, texts: Sequence[str]) -> list[str | None]:
        """For each text why the model cannot read it, or None. A text is tokenised only if the tokenizer does not know
        its first word; different first words are few."""
        found = list[str | None]()
        for _, cleaned, reasons in self._chunks(texts):
            heads = ["" if reason else text.split(None, 1)[0] for text, reason in zip(cleaned, reasons)]
            words = list(dict.fromkeys(heads))
            unknown = {word for word, row in zip(words, self._encode(words)) if self._is_special(row)}
            for text, reason, head in zip(cleaned, reasons, heads):
                if reason is None and head in unknown and self._is_special(self._encode([text])[0]):
                    reason = NO_WORD
                found.append(reason)
        return found

    def _chunks(self, texts: Sequence[str]) -> Iterator[tuple[int, list[str], list[str | None]]]:
        """The first index, the cleaned texts and why they are unreadable, some texts at a time."""
        for first in range(0, len(texts), CHUNK):
            cleaned = [self.clean(text) if isinstance(text, str) else "" for text in texts[first : first + CHUNK]]
            yield first, cleaned, [unreadable(text) for text in cleaned]

    def offsets(self, texts: Sequence[str]) -> Iterator[list[tuple[int, int]]]:
        """For each text the characters [start, stop) of its tokens in the cleaned text, without special tokens and not
        truncated. Slow tokenizers, such as SigLIP's, have no offsets: theirs are found by tokenising the beginnings of
        the text up to the end of the context, and are those of whole words."""
        for _, cleaned, _ in self._chunks(texts):
            if self.tokenizer.is_fast:
                found = self.tokenizer(cleaned, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
                yield from found["offset_mapping"]
            else:
                yield from map(self._word_offsets, cleaned)

    def _word_offsets(self, text: str) -> list[tuple[int, int]]:
        offsets = list[tuple[int, int]]()
        for word in _WORD.finditer(text):
            count = len(self._encode([text[: word.end()]], special=False)[0])
            offsets += [word.span()] * (count - len(offsets))
            if count > self.context:
                break
        return offsets

    def _encode(self, texts: list[str], special: bool = True) -> list[list[int]]:
        # By default, transformers neither truncates nor pads, whatever the tokenizer's file specifies.
        return self.tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]


def unreadable(text: str) -> str | None:
    """Why no tokenizer can read a text, or None."""
    if not text.strip():
        return "it is empty: a caption needs at least one word"
    if not text.isascii() and _SURROGATE.search(text):
        return "it holds half of a surrogate pair, or a byte that is not UTF-8"
    return None


def clean_caption(text: str) -> str:
    """OpenAI's cleaning: encoding errors repaired by ftfy, HTML entities decoded twice, white space collapsed. Texts
    with a capital sigma are lower-cased as well: tokenizers that lower-case letter by letter produce no final sigma."""
    if _PLAIN.fullmatch(text):
        return " ".join(text.split())
    import ftfy

    cleaned = " ".join(html.unescape(html.unescape(ftfy.fix_text(text))).split())
    return cleaned.lower() if "Σ" in cleaned else cleaned


# A stop with what closes after it and white space, a stop of Chinese or Japanese, or an empty line.
_STOP = re.compile(r"""(?<![.!?…])(?P<stop>[.!?…]+(?:\s+[.!?…]+)*["'”’»)\]]*)\s+|[。！？]+|\n\s*\n""")
# What ends in a dot and continues: before anything, before a number, before a word in lower case.
_CONTINUES = re.compile(
    r"(?:\b(?:mr|mrs|ms|dr|prof|st|mt|vs|e\.g|i\.e|approx|ca|cf|(?-i:[A-Z]))|(?:^|[.!?…]\s)\s*\d{1,2})$", re.IGNORECASE
)
_BEFORE_NUMBER = re.compile(r"\b(?:nos?|figs?|vol|pp?)$", re.IGNORECASE)
_BEFORE_LOWER = re.compile(r"(?:\b(?:etc|al|inc|ltd|co|jr|sr|ave|[a-z]|[a-z]\.[a-z])|\d\s?[a-z]{1,3})$", re.IGNORECASE)


def split_sentences(text: str, how: Splitting = "careful") -> list[str]:
    """The sentences of a caption, without white space around them.

    Args:
        how: "careful" keeps decimals, common abbreviations, initials, list numbers, and quotes that continue in lower
            case together. "dots" splits at every dot as GOAL's released code does, which breaks "3.5 m" and "e.g.".
    """
    ends = [match.end() for match in _STOP.finditer(text) if _ends_sentence(text, match)]
    careful = (text[start:stop] for start, stop in pairwise([0, *ends, len(text)]))
    return [part.strip() for part in (text.split(".") if how == "dots" else careful) if part.strip()]


def _ends_sentence(text: str, match: re.Match[str]) -> bool:
    if match["stop"] is None:
        return True
    before, after = text[max(0, match.start() - 16) : match.start()], text[match.end() : match.end() + 1]
    if match["stop"] != ".":
        return not after.islower()  # 'a sign that reads "Stop!" in red'
    if _CONTINUES.search(before) or (after.isdigit() and _BEFORE_NUMBER.search(before)):
        return False
    return not (after.islower() and _BEFORE_LOWER.search(before))


def first_sentence(text: str) -> str:
    """The short caption of a long one as in Long-CLIP's released trainer: all before the first dot and space."""
    return text.replace("\n", " ").split(". ")[0].strip() or text.strip()
