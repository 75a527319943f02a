"""Memory of tokenised captions: one integer array for all of them (`TokenizedTexts`), and a tuple for each.

Both hold the same tokens of the same captions, those of generated scenes repeated up to the number that is asked for.
Memory is what Python and NumPy hold when the captions are tokenised, by `tracemalloc`; the largest amount on the way
includes a chunk of texts that is tokenised at once. Times are those of one turn, with `tracemalloc` switched off.
"""

from __future__ import annotations

import logging
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hnclip.data.scenes import scene_records
from hnclip.data.texts import TextTransform
from hnclip.measure import Report, machine

log = logging.getLogger("hnclip.bench")

SCENES = 1000
SHAREGPT4V = 1_200_000  # captions


@dataclass(frozen=True)
class Options:
    """Memory of tokens."""

    captions: int = 20_000
    model: str = "bundled"
    """The model whose tokenizer and context are used."""


def as_tuples(transform: TextTransform, captions: list[str]) -> Any:
    """Tokenised in one call, as a tuple of Python integers for each caption."""
    cleaned = [transform.clean(caption) for caption in captions]
    return [tuple(row[: transform.context]) for row in transform.tokenizer(cleaned, verbose=False)["input_ids"]]


def run(options: Options) -> Report:
    from hnclip.models.load import load

    transform = load(options.model).text_transform
    scenes = scene_records("park", "train", families=SCENES // 4, members=4)
    captions = [scenes[number % SCENES].captions[0] for number in range(options.captions)]
    transform(captions[:1])
    ways: dict[str, Callable[[], Any]] = {
        "a tuple for each": lambda: as_tuples(transform, captions),
        "TokenizedTexts": lambda: transform(captions),
    }
    rows: list[dict[str, Any]] = []
    for name, tokenise in ways.items():
        log.info(name)
        start = time.perf_counter()
        tokenise()
        seconds = time.perf_counter() - start
        tracemalloc.start()
        found = tokenise()
        held, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        tokens = sum(map(len, found))
        rows.append(
            {
                "way": name,
                "bytes_per_token": held / tokens,
                "megabytes": held / 1e6,
                "largest_megabytes": most / 1e6,
                "captions_per_second": len(captions) / seconds,
                "sharegpt4v_gigabytes": held / len(captions) * SHAREGPT4V / 1e9,
            }
        )
    columns = {
        "way": "",
        "bytes_per_token": "bytes per token",
        "megabytes": "MB held",
        "largest_megabytes": "MB at most",
        "captions_per_second": "captions per second",
        "sharegpt4v_gigabytes": "GB for 1.2 M captions",
    }
    notes = [f"{len(captions):,} captions, {tokens / len(captions):.0f} tokens each"]
    return Report("token_memory", columns, rows, machine(), notes)
