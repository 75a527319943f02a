"""A tokenizer for the bundled model, made by OpenAI's rules from its own captions."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any


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
