"""Text→image retrievals that differ between two rows: how many, and what they look like."""

from __future__ import annotations

from typing import NamedTuple

from hnclip.analysis.examples import count_differences, differing_examples
from hnclip.data.image_cache import cache_directory
from hnclip.evaluate.retrieval import drop_unusable, evaluate, open_task, prepare_gallery
from hnclip.report.caption_figures import Example, retrieval_figure
from hnclip.studies.findings import Findings
from hnclip.studies.notes import missing_note, versions_note
from hnclip.studies.paper_rows import MISSING
from hnclip.studies.parts import FigurePart, Part, Shown, TablePart
from hnclip.studies.plan import Job
from hnclip.studies.shows.gaps import nothing_yet
from hnclip.studies.study import Domain
from hnclip.util.text import slugify

EXAMPLES = 4


class _Difference(NamedTuple):
    counts: dict[str, int]
    examples: list[Example]


def show(findings: Findings) -> Shown:
    """Of every row and the first that it is compared with: counts as a table, some examples of each domain."""
    rows = [row for row in findings.study.rows if row.against]
    parts: list[Part] = []
    data: dict[str, dict[str, dict[str, int]]] = {}
    seed = findings.seeds[0]
    for row in rows:
        names = (row.against[0], row.name)
        body: list[tuple[str, ...]] = []
        counts: dict[str, dict[str, int]] = {}
        figures = []
        for domain in findings.domains:
            jobs = {name: findings.job(name, domain, seed) for name in names}
            found = _difference(findings, domain, {name: job for name, job in jobs.items() if job is not None})
            if found is None:
                body.append((domain.name, *(MISSING,) * 4))
                continue
            body.append((domain.name, *(f"{count:,}" for count in found.counts.values())))
            counts[domain.name] = found.counts
            if not found.examples:  # they agree on every caption
                continue
            figures.append(
                FigurePart(
                    slugify("retrievals", *([row.name] if len(rows) > 1 else []), domain.name),
                    f"Retrievals that differ: {domain.name}",
                    retrieval_figure(found.examples),
                    f"Captions for which {names[0]} and {names[1]} disagree at rank 1, taken from both sides in turn, "
                    f"each from another family of pictures; seed {seed}.",
                )
            )
        if counts:
            data[f"{names[1]} against {names[0]}"] = counts
            headers = ("test captions of", "both", f"only {names[0]}", f"only {names[1]}", "neither")
            title = f"Text→image: which of {names[0]} and {names[1]} puts the right picture first, in captions"
            notes = (f"Seed {seed}.", *missing_note(findings), *versions_note(findings))
            parts += [TablePart(title, headers, tuple(body), notes=notes), *figures]
    return Shown(tuple(parts) or (nothing_yet(findings),), data)


def _difference(findings: Findings, domain: Domain, jobs: dict[str, Job]) -> _Difference | None:
    """Both models on the domain's first gallery; None if one of them is not there."""
    if len(jobs) < 2:
        return None
    evaluations, records = {}, None
    for name, job in jobs.items():
        read = job.config.read
        model = findings.store.open_model(job)
        if records is None:  # of one start, so both can use the same ones
            records = drop_unusable(open_task(domain.galleries[0], None, read), model, read).records
        gallery = prepare_gallery(records, model, cache=cache_directory(read.cache))
        evaluations[name] = evaluate(model, gallery, batch=findings.store.options.evaluate_batch)
        del model  # before the next one is opened
    assert records is not None
    examples = differing_examples(evaluations, records, limit=EXAMPLES)
    return _Difference(count_differences(evaluations), examples)
