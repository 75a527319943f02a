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
    learnt = backend.get_vocab()
    merges = [tuple(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    symbols = [s for s, _ in sorted(learnt.items(), key=lambda item: item[1]) if s not in (start, end)]
    missing = [symbol for letter in alphabet for symbol in (letter, f"{letter}</w>") if symbol not in learnt]
    vocab = {symbol: index for index, symbol in enumerate([*symbols, *missing, start, end])}
    return CLIPTokenizer(vocab=vocab, merges=merges)
