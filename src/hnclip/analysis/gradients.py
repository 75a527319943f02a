"""How the gradients of InfoNCE and of L_HN develop along a run, from what `hnclip train --probe-gradients` measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hnclip.report.document import Table
from hnclip.training.step import SATURATED
from hnclip.util.tables import MISSING, text_table

Entries = Sequence[Mapping[str, Any]]
NAMES = {"infonce": "InfoNCE", "hn": "L_HN"}
HEADERS = (
    "epoch",
    "measured",
    *NAMES.values(),
    *(f"{name} < {SATURATED:g}" for name in NAMES.values()),
    *(f"‖∇{name}‖" for name in NAMES.values()),
    *(f"zero ∇{name}" for name in NAMES.values()),
    "ratio",
    "cosine",
)


@dataclass(frozen=True)
class GradientSummary:
    """Measurements of a run: all of them, and by epoch.

    Each is a dict. Shares are of the measurements, each of one batch; quartiles are None if there is no measurement.

        measurements: their number
        infonce, hn, infonce_norm, hn_norm: quartiles of the losses and of the norms of their gradients
        ratio: quartiles of hn_norm / infonce_norm where that is not 0
        cosine: quartiles of the cosine between both gradients where neither is 0
        cosine_mean, cosine_std, cosine_positive: its mean, deviation (no n − 1), and share above 0
        infonce_solved, hn_solved: share with a loss below `SATURATED`
        infonce_saturated, hn_saturated: mean share of loss evaluations below it
        infonce_zero, hn_zero: share with a gradient of exactly 0

    Args:
        dtypes, towers, negatives, gammas: how it was computed.
    """

    overall: dict[str, Any]
    epochs: dict[int, dict[str, Any]]
    dtypes: tuple[str, ...]
    towers: tuple[str, ...]
    negatives: tuple[str, ...]
    gammas: tuple[float, ...]

    def table(self) -> Table:
        """A row for each epoch and one for all; medians, and shares of measurements."""
        rows = [_cells(str(epoch), found) for epoch, found in self.epochs.items()]
        return Table(HEADERS, [*rows, [], _cells("all", self.overall)], notes=self.notes())

    def to_text(self) -> str:
        table = self.table()
        return "\n".join([text_table(table.headers, table.rows), *table.notes])

    def notes(self) -> list[str]:
        """How the numbers of the table were computed."""
        kinds = (self.dtypes, self.towers, [f"{gamma:g}" for gamma in self.gammas], self.negatives)
        dtypes, towers, gammas, negatives = map(" and ".join, kinds)
        return [
            "Medians, and shares of measurements; ratio and cosine where they exist.",
            f"Losses in {dtypes} (on which exact zeros depend), towers in {towers}, γ {gammas}, "
            f"--optim.negatives {negatives}.",
        ]


def gradient_summary(entries: Entries) -> GradientSummary:
    """Summarise entries as `read_metrics(run, "gradients")` returns them (`probe_gradients`).

    Reference:
        HN-CLIP, section 2.4, figure of the gradient analysis, appendix C.
    """
    epochs = sorted({entry["epoch"] for entry in entries})
    by_epoch = {epoch: _summary([entry for entry in entries if entry["epoch"] == epoch]) for epoch in epochs}
    settings = (tuple(sorted({entry[name] for entry in entries})) for name in ("dtype", "towers", "negatives", "gamma"))
    return GradientSummary(_summary(entries), by_epoch, *settings)


def _summary(entries: Entries) -> dict[str, Any]:
    values = {
        name: np.array([entry[name] for entry in entries if entry[name] is not None], dtype=np.float64)
        for name in ("infonce", "hn", "infonce_norm", "hn_norm", "ratio", "cosine")
    }
    cosine = values["cosine"]
    found: dict[str, Any] = {"measurements": len(entries)}
    found |= {
        name: np.quantile(column, (0.25, 0.5, 0.75)).tolist() if len(column) else None
        for name, column in values.items()
    }
    for name, value in (("mean", np.mean), ("std", np.std), ("positive", lambda cosine: np.mean(cosine > 0))):
        found[f"cosine_{name}"] = float(value(cosine)) if len(cosine) else None
    for name in NAMES:
        found[f"{name}_solved"] = float((values[name] < SATURATED).mean())
        found[f"{name}_saturated"] = float(np.mean([entry[f"{name}_saturated"] for entry in entries]))
        found[f"{name}_zero"] = float((values[f"{name}_norm"] == 0).mean())
    return found


def _cells(name: str, found: Mapping[str, Any]) -> list[str]:
    return [
        name,
        f"{found['measurements']:,}",
        *(f"{found[loss][1]:.2g}" for loss in NAMES),
        *(f"{found[f'{loss}_solved']:.0%}" for loss in NAMES),
        *(f"{found[f'{loss}_norm'][1]:.2g}" for loss in NAMES),
        *(f"{found[f'{loss}_zero']:.0%}" for loss in NAMES),
        MISSING if found["ratio"] is None else f"{found['ratio'][1]:.2g}",
        MISSING if found["cosine"] is None else f"{found['cosine'][1]:+.2f}",
    ]
