"""`hnclip data check`: everything that can be known to be wrong with data before any training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hnclip.core import Problem, Record
from hnclip.data.check.captions import read_captions
from hnclip.data.check.counts import count_by_split, count_captions, count_pictures
from hnclip.data.check.doubles import caption_doubles, identities, image_doubles
from hnclip.data.check.fingerprint import MOST_BITS
from hnclip.data.check.pictures import Picture, look_at
from hnclip.data.check.report import CheckReport
from hnclip.data.images import ImageTransform
from hnclip.data.problems import ERRORS, WARNINGS
from hnclip.data.records import DataSet
from hnclip.data.texts import TextTransform
from hnclip.util.console import Iterate

__all__ = ["CheckReport", "check_data"]

_ORDER = {kind: place for place, kind in enumerate((*ERRORS, *WARNINGS))}


def check_data(
    data: DataSet,
    *,
    text_transform: TextTransform | None = None,
    image_transform: ImageTransform | None = None,
    similar_captions: float = 0.8,
    similar_images: int = 4,
    images: bool = True,
    workers: int | None = None,
    progress: Iterate = iter,
) -> CheckReport:
    """Read every caption, decode every picture, and compare all with each other.

    Args:
        text_transform, image_transform: of the model that is to be trained: what it would cut, or find too small.
        similar_captions: the least share of their runs of three words that near-duplicates of captions have in common:
            at 0.8 up to four changed words in 120, and one in 25. See data/check/shingles.py.
        similar_images: the most bits of 64 in which near-duplicates of pictures differ. See data/check/fingerprint.py.
        images: look at the pictures; without, only captions, and pictures by their names.
        workers: threads that decode, as many as processors when left out.
        progress: walks through the range of pictures.
    """
    if not 0 < similar_captions <= 1:
        raise ValueError(f"similar_captions must be above 0 and at most 1, got {similar_captions}")
    if not 0 <= similar_images <= MOST_BITS:
        raise ValueError(f"similar_images must be between 0 and {MOST_BITS} bits, got {similar_images}")
    context = None if text_transform is None else text_transform.context
    side = None if image_transform is None else image_transform.shortest or image_transform.size
    records = data.records
    captions, problems = read_captions(records, text_transform)
    keys = [record.image.key for record in records]
    sources = {key: record.image for key, record in zip(keys, records)}
    seen: dict[str, Picture | Problem] = {}
    if images:
        seen = dict(zip(sources, look_at(list(sources.values()), image_transform, workers=workers, progress=progress)))
    sound = {key: found for key, found in seen.items() if isinstance(found, Picture)}
    same_looks = image_doubles(records, keys, sound, similar_images)
    same_words = caption_doubles(records, identities(keys, sound), captions, similar_captions)
    groups = [*same_looks.groups, *same_words.groups]
    problems = [
        *data.problems,
        *problems,
        *_repeated_ids(records),
        *_bad_pictures(records, keys, seen),
        *_small_pictures(records, keys, sound, side),
        *(group.problem() for group in groups),
    ]
    readable = {caption.record for caption in captions}
    usable = [index in readable and (not images or key in sound) for index, key in enumerate(keys)]
    return CheckReport(
        name=data.name,
        total=count_captions(len(records), captions, context),
        splits=count_by_split(records, captions, context),
        pictures=len(sources),
        images=count_pictures(sound.values(), side) if images else None,
        problems=tuple(sorted(problems, key=lambda problem: _ORDER[problem.kind])),
        groups=tuple(sorted(groups, key=lambda group: _ORDER[group.kind])),
        unfinished=("similar image",) * (not same_looks.complete) + ("similar caption",) * (not same_words.complete),
        left_out=usable.count(False),
        unread=sum(problem.kind in ERRORS for problem in data.problems),
        context=context,
        side=side,
    )


def _repeated_ids(records: Sequence[Record]) -> list[Problem]:
    counts = Counter(record.id for record in records)
    return [Problem("repeated id", id, f"{count} records have this id") for id, count in counts.items() if count > 1]


def _bad_pictures(
    records: Sequence[Record], keys: Sequence[str], seen: Mapping[str, Picture | Problem]
) -> list[Problem]:
    """One problem for each record that shows such a picture."""
    return [
        replace(bad, where=record.id) for record, key in zip(records, keys) if isinstance(bad := seen.get(key), Problem)
    ]


def _small_pictures(
    records: Sequence[Record], keys: Sequence[str], sound: Mapping[str, Picture], side: int | None
) -> list[Problem]:
    """One problem for each record that shows such a picture."""
    return [
        Problem("small image", record.id, f"{picture.width} × {picture.height} pixels, the model wants {side}")
        for record, key in zip(records, keys)
        if side is not None and (picture := sound.get(key)) is not None and picture.shortest < side
    ]
