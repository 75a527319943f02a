"""The tokenizer of an exported model: one file that the `tokenizers` library reads alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hnclip.data.texts import TextTransform
from hnclip.util.files import read_json

# Capitals, marks, spaces and letters that tokenizers treat differently.
_SENTENCES = ("a dog", "A red  Bench, under the tree; it's old.", "café (2 m²)\n – 3.5 €")


def write_tokenizer(transform: TextTransform, directory: Path) -> None:
    """The tokenizer's files. SigLIP's, which is Python around SentencePiece, is written as tokenizer.json too."""
    from tokenizers import Tokenizer

    transform.tokenizer.save_pretrained(directory)
    file = directory / "tokenizer.json"
    if file.is_file():
        fast = Tokenizer.from_file(str(file))
    elif type(transform.tokenizer).__name__ == "SiglipTokenizer":
        fast = fast_siglip_tokenizer(directory)
    else:
        return
    fast.no_padding()
    fast.no_truncation()
    fast.save(str(file))
    _check_tokenizer(fast, transform)
    file = directory / "tokenizer_config.json"
    pad = transform.tokenizer.convert_ids_to_tokens(transform.pad)
    write_json(file, {**read_json(file), "model_max_length": transform.context, "pad_token": pad})


def fast_siglip_tokenizer(directory: Path) -> Any:
    """A saved `SiglipTokenizer` as one of `tokenizers`: the cleaning that it does in Python becomes a normaliser."""
    from tokenizers import Regex, normalizers
    from transformers import SiglipTokenizer
    from transformers.convert_slow_tokenizer import UdopConverter

    slow = SiglipTokenizer.from_pretrained(directory, local_files_only=True)
    fast = UdopConverter(slow).converted()  # SentencePiece with `</s>` at the end, as SigLIP's
    fast.normalizer = normalizers.Sequence(
        [
            *([normalizers.Lowercase()] if slow.do_lower_case else []),
            normalizers.Replace(Regex(r"[!-/:-@\[-`{-~]"), ""),  # string.punctuation
            fast.normalizer,
        ]
    )
    return fast


def _check_tokenizer(fast: Any, transform: TextTransform) -> None:
    """tokenizer.json must say what the model's own tokenizer says, also where it cuts a text."""
    sentences = [*_SENTENCES, "a small house and " * transform.context]
    rows = transform.tokenizer(sentences, truncation=False, padding=False, verbose=False)["input_ids"]
    fast.enable_truncation(max_length=transform.context)
    after = transform.edges[1]
    for sentence, row in zip(sentences, rows):
        cut = row if len(row) <= transform.context else [*row[: transform.context - after], *row[len(row) - after :]]
        if fast.encode(sentence).ids != cut:
            kind = type(transform.tokenizer).__name__
            raise ValueError(
                f"tokenizer.json reads {sentence[:40]!r} otherwise than the {kind} of this model: part of its work is "
                "done in Python, where other programs do not see it"
            )


def write_json(file: Path, settings: dict[str, Any]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
