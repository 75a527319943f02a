"""Gradient dynamics across data scales: does InfoNCE run out of gradient, and does L_HN not?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hnclip.analysis.figures import scale_grid_figure
from hnclip.analysis.gradient_dynamics import GradientDynamics, gradient_dynamics
from hnclip.studies.findings import Findings
from hnclip.studies.notes import missing_note, versions_note
from hnclip.studies.paper_rows import MISSING
from hnclip.studies.parts import FigurePart, Shown, TablePart
from hnclip.studies.shows.gaps import nothing_yet

Entries = Sequence[Mapping[str, Any]]

HEADERS = (
    "run",
    "measured",
    "InfoNCE < 0.001, epoch 1",
    "all epochs",
    "L_HN < 0.001",
    "zero gradient, InfoNCE",
    "L_HN",
    "ratio of norms",
    "cosine",
    "cosine > 0",
)
# HN-CLIP, abstract, section 2.4 and appendix C. "A ratio of 1e2–1e6" are medians by epoch, below by run.
PAPER = (
    ("paper: DOCCI, 100 %", "148", "80 %", MISSING, "at most 74 %", "47 %", MISSING, "1e2–1e6", "0.47 (mean)", MISSING),
    (
        "paper: DOCCI and DCI, all shares",
        MISSING,
        MISSING,
        MISSING,
        MISSING,
        "21 %",
        MISSING,
        "1e2–1e6",
        "0.58",
        "98 %",
    ),
)


def show(findings: Findings) -> Shown:
    """The figure of all runs, shares × domains, and their statistics beside the paper's."""
    runs = {
        (f"{100 * row.x:g} %" if row.x is not None else row.name, domain.name): [
            findings.metrics(row.name, domain, seed, "gradients") for seed in findings.seeds
        ]
        for row in findings.study.rows
        for domain in findings.domains
    }
    first = {key: next((entries for entries in seeds if entries), []) for key, seeds in runs.items()}
    if not any(first.values()):
        return Shown((nothing_yet(findings),), {"runs": {}})
    first_seed = " The first seed of each; the table has all together." if len(findings.seeds) > 1 else ""
    figure = FigurePart(
        "gradients",
        "Gradient dynamics across data scales",
        scale_grid_figure(first),
        "From the top of each cell: both losses on the batch of a step, both gradient norms and their ratio, the "
        f"cosine between both gradients. Values below 1e-10 are drawn there.{first_seed}",
    )
    pooled = {key: [entry for entries in seeds for entry in entries] for key, seeds in runs.items()}
    every = [entry for entries in pooled.values() for entry in entries]
    measured = {f"{domain}, {share}": entries for (share, domain), entries in pooled.items()}
    found = {name: gradient_dynamics(entries) for name, entries in measured.items() if entries}
    whole = gradient_dynamics(every)
    table = TablePart(
        title="Gradients of InfoNCE and of L_HN on the batches of the same runs",
        headers=HEADERS,
        rows=(
            *(_row(name, found.get(name)) for name in measured),
            (),
            _row("all", whole),
            (),
            *PAPER,
        ),
        notes=(
            "Shares are of the measurements, each of one batch; a gradient is zero if it is exactly that. Ratio of the "
            "norms, L_HN over InfoNCE, where that is not zero, and cosine are medians. The paper's ratios are medians "
            "by epoch and by run; where its row says 80 %, it means the first epoch.",
            *whole.notes()[1:],
            *missing_note(findings),
            *versions_note(findings),
        ),
    )
    return Shown((figure, table), {"runs": {name: _data(one) for name, one in found.items()}, "all": _data(whole)})


def _row(name: str, found: GradientDynamics | None) -> tuple[str, ...]:
    if found is None:
        return (name, *(MISSING,) * (len(HEADERS) - 1))
    start, every = found.epochs.get(1), found.overall
    return (
        name,
        f"{every.measurements:,}",
        MISSING if start is None else _percent(start.infonce_solved),
        _percent(every.infonce_solved),
        _percent(every.hn_solved),
        _percent(every.infonce_zero),
        _percent(every.hn_zero),
        MISSING if every.ratio is None else f"{every.ratio.median:.2g}",
        MISSING if every.cosine is None else f"{every.cosine.median:.2f}",
        MISSING if every.cosine_positive is None else _percent(every.cosine_positive),
    )


def _data(found: GradientDynamics) -> dict[str, Any]:
    """The numbers of the table, and behind them all of them."""
    start, every = found.epochs.get(1), found.overall
    return {
        "measurements": every.measurements,
        "measurements_first_epoch": 0 if start is None else start.measurements,
        "infonce_solved_first_epoch": None if start is None else start.infonce_solved,
        "infonce_solved": every.infonce_solved,
        "hn_solved": every.hn_solved,
        "infonce_zero": every.infonce_zero,
        "hn_zero": every.hn_zero,
        "ratio": None if every.ratio is None else every.ratio.median,
        "cosine": None if every.cosine is None else every.cosine.median,
        "cosine_positive": every.cosine_positive,
        "dynamics": found.to_dict(),
    }


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
