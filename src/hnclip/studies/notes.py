"""What a reader must know of a study's numbers, in sentences that several shows share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hnclip.studies.findings import Column, Findings
from hnclip.studies.measured import Measured

CLEAR = "Of a difference, {best} says that its interval excludes zero."


def marks_note(groups: Sequence[Sequence[object]]) -> str:
    """What marks of a table mean.

    Args:
        groups: of rows that are compared with each other.
    """
    where = " of its group" if len(groups) > 1 else ""
    best = (
        f"Marked {{best}}: above every other row{where}, with zero outside the paired 95 % interval of each difference"
    )
    second = "; {second}: likewise above all but the best" if max(map(len, groups), default=0) > 2 else ""
    return f"{best}{second}. A lead without a mark may be chance."


def seeds_note(findings: Findings) -> str:
    """How differences are paired, and over what."""
    seeds = findings.seeds
    named = ", ".join(map(str, seeds))
    if len(seeds) == 1:
        return (
            f"One seed ({named}): intervals are over queries, paired, families of near-duplicates whole; they do not "
            "tell how another seed would do."
        )
    return (
        f"{len(seeds)} seeds ({named}): mean ± sample standard deviation; intervals are over queries and seeds, "
        "paired, families of near-duplicates whole."
    )


def missing_note(findings: Findings, columns: Iterable[Column] | None = None) -> tuple[str, ...]:
    """How many runs are not there, or not evaluated; nothing if all are."""
    store = findings.store
    wanted: dict[str, bool] = {}
    for column in findings.columns if columns is None else columns:
        for place, job in findings.jobs.items():
            if place.domain == column.domain.name:
                there = store.is_trained(job) and store.result_path(job, column.gallery).exists()
                wanted[str(job.identity)] = wanted.get(str(job.identity), True) and there
    missing = len(wanted) - sum(wanted.values())
    if not missing:
        return ()
    return (
        f"{missing} of {len(wanted)} runs are missing: their cells are “–” or of fewer seeds. "
        "Differences are over the seeds that both rows have.",
    )


def versions_note(findings: Findings) -> tuple[str, ...]:
    """How many runs were made by other versions of the code, where the store takes them."""
    store = findings.store
    if not store.any_version:
        return ()
    jobs = {str(job.identity): job for job in findings.jobs.values() if store.is_trained(job)}
    others = sum(not store.home(job).name.endswith(name) for name, job in jobs.items())
    return (f"{others} of {len(jobs)} runs were made by another version of the code.",) if others else ()


def gallery_note(measured: Measured) -> tuple[str, ...]:
    """Sizes of a gallery, and what was left out or cut; nothing if nothing was measured."""
    found = list(measured.all())
    if not found:
        return ()
    first, gallery = found[0], measured.column.gallery
    name = gallery.name if gallery.whole else f"{gallery.name} {first.split}"
    sentences = [f"{name}: {first.images:,} images, {first.captions:,} captions."]
    if first.skipped:
        sentences.append(f"{first.skipped:,} records could not be used and are left out.")
    if cut := {result.truncated for result in found if result.truncated}:
        number = f"{max(cut):,}" if len(cut) == 1 else f"{min(cut):,} to {max(cut):,}"
        sentences.append(f"Captions cut at the model's context: {number}.")
    return (" ".join(sentences),)
