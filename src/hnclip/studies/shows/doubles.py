"""How many training pairs share a caption or a picture with another one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b

from hnclip.config import TrainConfig
from hnclip.core import InvalidImage, Record
from hnclip.data.texts import TextTransform
from hnclip.studies.findings import Findings
from hnclip.studies.identity import Trained
from hnclip.studies.matched import open_start
from hnclip.studies.parts import Part, Shown, TablePart, WordsPart


@dataclass(frozen=True)
class Doubles:
    """Training pairs, and how many of them have the caption, the picture, or either of another one."""

    pairs: int
    caption: int
    picture: int
    either: int


def show(findings: Findings) -> Shown:
    """A table of domains; and a sentence if there are no doubles at all."""
    base = findings.setting.base
    transform = open_start(base, findings.store.options.device).text_transform
    found = {domain.name: count_doubles(replace(base, data=domain.data), transform) for domain in findings.domains}
    parts: list[Part] = [
        TablePart(
            title="Training pairs that share a caption or a picture with another one",
            headers=("domain", "training pairs", "same caption", "same picture", "either"),
            rows=tuple(
                (name, f"{count.pairs:,}", f"{count.caption:,}", f"{count.picture:,}", f"{count.either:,}")
                for name, count in found.items()
            ),
            notes=("Captions are the same if they are to the model, pictures if their files are.",),
        )
    ]
    if not any(count.either for count in found.values()):
        parts.append(WordsPart(("There are no doubles: both settings are then the same training.",)))
    return Shown(tuple(parts), {name: asdict(count) for name, count in found.items()})


def count_doubles(config: TrainConfig, transform: TextTransform) -> Doubles:
    """Of the pairs that a run of this configuration trains on."""
    records = Trained.by(config).records()
    tokens = iter(transform([caption for record in records for caption in record.captions]))
    captions = [[next(tokens).tobytes() for _ in record.captions] for record in records]
    same_caption = _shared(captions)
    same_picture = _shared([[_content(record)] for record in records])
    return Doubles(len(records), len(same_caption), len(same_picture), len(same_caption | same_picture))


def _shared(names: Sequence[Sequence[Hashable]]) -> set[int]:
    """The records that have a name which another record has too."""
    owners: dict[Hashable, set[int]] = defaultdict(set)
    for number, own in enumerate(names):
        for name in own:
            owners[name].add(number)
    return {number for found in owners.values() if len(found) > 1 for number in found}


def _content(record: Record) -> Hashable:
    try:
        return blake2b(record.image.read(), digest_size=16).digest()
    except (InvalidImage, OSError):
        return record.image.key
