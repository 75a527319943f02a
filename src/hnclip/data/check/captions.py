"""Every caption read once: what is wrong with it, and how long it is in words and in a model's tokens."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hnclip.core import Problem, Record
from hnclip.data.readers.columns import invalid_text
from hnclip.data.texts import TextTransform

CHUNK = 1024  # captions that are tokenised together
_AROUND = 20  # letters shown on either side of one that is wrong


@dataclass(frozen=True)
class Caption:
    """A caption that can be used, `record` being the index of its record.

    `tokens` counts the special ones too, before anything is cut; None where no tokenizer was given.
    """

    record: int
    text: str
    words: int
    tokens: int | None


def read_captions(
    records: Sequence[Record], text_transform: TextTransform | None
) -> tuple[list[Caption], list[Problem]]:
    """The captions that a model can read, and the problems of these and of all others, in the order of the records."""
    captions: list[Caption] = []
    problems: list[Problem] = []
    written = [(index, number) for index, record in enumerate(records) for number in range(len(record.captions))]
    texts = [records[index].captions[number] for index, number in written]
    faults = [_fault(text) for text in texts]
    lengths = iter(_token_counts([text for text, fault in zip(texts, faults) if fault is None], text_transform))
    for (index, number), text, fault in zip(written, texts, faults):
        record = records[index]
        which = f"caption {number + 1}: " if len(record.captions) > 1 else ""
        tokens = None if fault else next(lengths)
        if tokens == 0:
            fault = ("empty caption", f"the tokenizer finds no word in {text!r}")
        if fault is not None:
            problems.append(Problem(fault[0], record.id, f"{which}{fault[1]}"))
            continue
        captions.append(Caption(index, text, len(text.split()), tokens))
        if (where := _garbled(text)) is not None:
            part = text[max(0, where - _AROUND) : where + _AROUND]
            problems.append(Problem("garbled caption", record.id, f"{which}… {part} …"))
        if text_transform is not None and tokens is not None and tokens > text_transform.context:
            detail = f"{which}{tokens} tokens, of which the model reads {text_transform.context}"
            problems.append(Problem("cut caption", record.id, detail))
    problems += [
        Problem("no caption", record.id, "the record has no caption") for record in records if not record.captions
    ]
    return captions, problems


def _fault(text: str) -> tuple[str, str] | None:
    """Kind and detail of what makes a caption useless to any model."""
    if bad := invalid_text(text):
        return "bad text", f"{text!r} {bad}"
    return None if text.strip() else ("empty caption", f"there is nothing in {text!r}")


def _garbled(text: str) -> int | None:
    """Where letters stand that nobody wrote."""
    if text.isascii():
        return None
    from ftfy.badness import is_bad

    found = re.search("\ufffd", text) or (re.search(r"[^\x00-\x7f]", text) if is_bad(text) else None)
    return found and found.start()


def _token_counts(texts: Sequence[str], text_transform: TextTransform | None) -> list[int | None]:
    """Tokens of each text; 0 where the tokenizer finds no word, None without one."""
    if text_transform is None:
        return [None] * len(texts)
    uncut = replace(text_transform, context=sys.maxsize)

    def count(part: Sequence[str]) -> list[int | None]:
        try:
            return [len(ids) for ids in uncut(part).ids]
        except ValueError:  # of one of them
            return [found for text in part for found in count([text])] if len(part) > 1 else [0]

    return [found for start in range(0, len(texts), CHUNK) for found in count(texts[start : start + CHUNK])]
