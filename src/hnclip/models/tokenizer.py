"""Tokenizers by OpenAI's rules: the one of its own models, and one learnt for the bundled model."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_BPE_FILE = "bpe_simple_vocab_16e6.txt.gz"
_MERGES = 48_894  # 49,408 symbols without 2 · 256 bytes and two special tokens; the file has more, OpenAI reads these
# Packages that bring the file along.
_CARRIERS = ("open_clip", "clip", "longclip", "sam3", "hpsv2")
_START, _END = "<|startoftext|>", "<|endoftext|>"


def openai_tokenizer(beside: Path | None = None) -> Any:
    """The `CLIPTokenizer` of OpenAI's models, 49,408 symbols, fast and with offsets.

    It is made from OpenAI's file of merges, which this package need not bring along: models or packages that want it
    have it already. A tokenizer in Hugging Face files beside the model comes first, whatever its vocabulary.

    Of texts from `clean_caption` its ids are OpenAI's, but for
    - "<|startoftext|>" and "<|endoftext|>" written in a caption: both read them as the special tokens, OpenAI also in
      capitals, but not right after punctuation. (To open_clip they are <start_of_text> and <end_of_text>.)
    - letters that cleaning leaves decomposed (from an entity beside a "<", or by the small letters that come with a
      capital sigma), which are composed here;
    - "'ſ", which is "'s" to OpenAI's pattern, and U+0345, which it passes over;
    - letters so new that one of the two sides does not know them for letters.

    Args:
        beside: the file or directory of the model, beside which tokenizers and vocabularies are looked for.
    """
    if beside is not None:
        directory = _directory(beside)
        whole, *parts = ((directory / name).is_file() for name in ("tokenizer.json", "vocab.json", "merges.txt"))
        if whole or all(parts):
            return _read_tokenizer(directory)
    return _clip_tokenizer(_read_merges(find_bpe_file(beside)))


def find_bpe_file(beside: Path | None = None) -> Path:
    """OpenAI's `bpe_simple_vocab_16e6.txt.gz`: beside the model, else in an installed package, which is not imported.

    Args:
        beside: the file or directory of the model; `model/` in it and next to it count, as in Long-CLIP's repository.
    """
    if beside is not None:
        directory = _directory(beside)
        for place in (directory, directory / "model", directory.parent / "model"):
            if (place / _BPE_FILE).is_file():
                return place / _BPE_FILE
    for package in _CARRIERS:
        for place in _package_directories(package):
            for file in sorted(place.rglob(_BPE_FILE)):
                return file
    where = "" if beside is None else f" beside {beside} nor"
    raise ValueError(
        f"no {_BPE_FILE}{where} in the packages {', '.join(_CARRIERS)}: this model needs OpenAI's vocabulary. "
        "`pip install --no-deps open_clip_torch` brings it, or give the directory of a tokenizer"
    )


def _directory(beside: Path) -> Path:
    return beside if beside.is_dir() else beside.parent


def _package_directories(package: str) -> list[Path]:
    try:
        spec = find_spec(package)
    except ValueError:  # something of this name is imported that never was a package on disk
        return []
    return [Path(place) for place in (spec and spec.submodule_search_locations) or ()]


def _read_tokenizer(directory: Path) -> Any:
    from transformers import CLIPTokenizer

    try:
        tokenizer = CLIPTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # damaged files raise many types, down to the bare Exception
        raise ValueError(f"the tokenizer in {directory} cannot be read: {error}") from error
    # transformers adds the special tokens to any vocabulary it is given, and reads all words as unknown.
    if tokenizer.eos_token_id >= tokenizer.vocab_size:
        raise ValueError(f"the tokenizer in {directory} is not one of CLIP: its vocabulary has no {_END}")
    return tokenizer


def _read_merges(file: Path) -> list[tuple[str, ...]]:
    try:
        with gzip.open(file, "rt", encoding="utf-8", newline="\n") as text:
            lines = text.read().split("\n")
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is damaged ({error}): fetch it again") from error
    merges = [tuple(line.split()) for line in lines[1 : _MERGES + 1]]  # the first line is a version
    pairs = sum(len(merge) == 2 for merge in merges)
    if pairs != _MERGES:
        raise ValueError(f"{file} has {pairs:,} merges, OpenAI's vocabulary {_MERGES:,}: fetch it again")
    return merges


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """A small CLIP tokenizer (lower-case byte-level BPE, same rules as OpenAI's) learnt from `texts`.

    All 256 bytes are in the vocabulary, so any text can be written in it.
    """
    from tokenizers import pre_tokenizers, trainers
    from transformers import CLIPTokenizer

    backend = CLIPTokenizer(vocab={_START: 0, _END: 1}, merges=[])._tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        end_of_word_suffix="</w>",
        special_tokens=[],
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    merges = [tuple(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    return _clip_tokenizer(merges)


def _clip_tokenizer(merges: list[tuple[str, ...]]) -> Any:
    from tokenizers import pre_tokenizers
    from transformers import CLIPTokenizer

    # OpenAI's order: bytes, bytes at the end of a word, merged symbols, start, end. A trainer's own order of single
    # symbols differs from process to process.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [*alphabet, *(f"{letter}</w>" for letter in alphabet)]
    symbols = dict.fromkeys([*letters, *("".join(pair) for pair in merges), _START, _END])
    return CLIPTokenizer(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=merges)
