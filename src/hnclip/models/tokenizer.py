"""Captions into token ids: any fast Hugging Face tokenizer, truncation counted, padding left to the batch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TokenizedTexts:
    """Token ids of each text, start and end token included, and how many texts were cut to fit the context."""

    ids: tuple[tuple[int, ...], ...]
    truncated: int


def tokenize(tokenizer: Any, texts: Sequence[str], context: int) -> TokenizedTexts:
    """Token ids without padding. A text beyond `context` keeps its first tokens and ends with the end token."""
    for index, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"texts[{index}] is empty: a caption needs at least one word")
    ids = tokenizer(list(texts), truncation=False, add_special_tokens=True, verbose=False)["input_ids"]
    end = tokenizer.eos_token_id
    cut = tuple(tuple(row) if len(row) <= context else (*row[: context - 1], end) for row in ids)
    return TokenizedTexts(ids=cut, truncated=sum(len(row) > context for row in ids))


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """A small CLIP tokenizer (lower-case byte-level BPE, same rules as OpenAI's) learnt from `texts`.

    All 256 bytes are in the vocabulary, so any text can be written in it.
    """
    from tokenizers import pre_tokenizers, trainers
    from transformers import CLIPTokenizer

    start, end = "<|startoftext|>", "<|endoftext|>"
    backend = CLIPTokenizer(vocab={start: 0, end: 1}, merges=[])._tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=alphabet,
        end_of_word_suffix="</w>",
        special_tokens=[],
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    merges = [tuple(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    # OpenAI's order: bytes, bytes at the end of a word, merged symbols, start, end. The trainer's own order of single
    # symbols differs from process to process.
    letters = [*alphabet, *(f"{letter}</w>" for letter in alphabet)]
    symbols = dict.fromkeys([*letters, *("".join(pair) for pair in merges), start, end])
    return CLIPTokenizer(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=merges)
