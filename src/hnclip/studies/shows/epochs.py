"""The epoch that validation chose for every run, beside the ones that the paper printed."""

from __future__ import annotations

from typing import Any

from hnclip.evaluate.published import paper_title
from hnclip.studies.findings import Findings
from hnclip.studies.notes import missing_note, versions_note
from hnclip.studies.paper_rows import BENCHMARKS, MISSING, TITLE, paper_rows
from hnclip.studies.parts import Part, Shown, TablePart
from hnclip.studies.study import Domain, Study


def show(findings: Findings) -> Shown:
    """A row per run: the best epoch, and the validation R@1 (mean of both directions) at the best and at the last. The
    paper's epochs are those of its own benchmarks."""
    runs = [
        (row.name, seed, domain, findings.training(row.name, domain, seed))
        for row in findings.study.rows
        if row.trained
        for seed in findings.seeds
        for domain in findings.domains
    ]
    parts: list[Part] = [_table(findings, runs)]
    if (printed := _paper(findings.study)) is not None:
        parts.append(printed)
    data = {
        "runs": [
            {"row": row, "seed": seed, "domain": domain.name, "best": found["best"], "last": found["last"]}
            for row, seed, domain, found in runs
            if found is not None
        ],
        "paper": [row.to_dict() for row in paper_rows(findings.study) if row.result.epoch is not None],
    }
    return Shown(tuple(parts), data)


def _table(findings: Findings, runs: list[tuple[str, int, Domain, dict[str, Any] | None]]) -> TablePart:
    several = len(findings.seeds) > 1
    lines: list[tuple[str, ...]] = []
    for row, seed, domain, found in runs:
        name = f"{row}, {domain.name}, seed {seed}" if several else f"{row}, {domain.name}"
        if found is None:
            lines.append((name, MISSING, MISSING, MISSING))
        else:
            best, last = found["best"], found["last"]
            recall = [f"{one['mean_R@1']:.2f}" for one in (best, last)]
            lines.append((name, f"{best['epoch']} of {last['epoch']}", *recall))
    return TablePart(
        f"{findings.study.title}. Epochs chosen by validation",
        ("", "best epoch", "R@1 at best", "R@1 at last"),
        tuple(lines),
        notes=(
            "R@1 on the validation split in percent, average of both directions. Of equal epochs the first is chosen.",
            *missing_note(findings),
            *versions_note(findings),
        ),
    )


def _paper(study: Study) -> TablePart | None:
    rows = [row for row in paper_rows(study) if row.result.epoch is not None]
    if not rows:
        return None
    columns = [name for name in BENCHMARKS if any(row.result.benchmark == name for row in rows)]
    found = {(row.name, row.result.benchmark): str(row.result.epoch) for row in rows}
    names = dict.fromkeys(row.name for row in rows)
    return TablePart(
        TITLE,
        ("selected epoch", *columns),
        tuple((name, *(found.get((name, column), MISSING) for column in columns)) for name in names),
        notes=(f"Printed in “{paper_title()}”.",),
    )
