"""Captions into token ids: any fast Hugging Face tokenizer, truncation counted, padding left to the batch."""

from __future__ import annotations

from collections.abc import Sequence
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
