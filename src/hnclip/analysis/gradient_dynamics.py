"""How the gradients of InfoNCE and of L_HN develop along a run, from what `hnclip train --probe-gradients` measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hnclip.train.step import SATURATED
from hnclip.util.tables import text_table

Entries = Sequence[Mapping[str, Any]]

COLUMNS = (
    "epoch",
    "measured",
    "InfoNCE",
    "L_HN",
    "InfoNCE < 0.001",
    "L_HN < 0.001",
    "‖∇InfoNCE‖",
    "‖∇L_HN‖",
    "zero ∇InfoNCE",
    "zero ∇L_HN",
    "ratio",
    "cosine",
)


@dataclass(frozen=True)
class Quartiles:
    """A quarter of the values lies below `lower`, half of them below `median`, a quarter above `upper`."""

    lower: float
    median: float
    upper: float


@dataclass(frozen=True)
class Dynamics:
    """Some measurements in numbers. Shares are of the measurements, each of one batch.

    Args:
        infonce, hn, infonce_norm, hn_norm: both losses and the norms of both gradients. Where batches are either solved
            or not, the norms have two modes and their median lies between: then `hn_norm.upper` is the steady number.
        ratio: hn_norm / infonce_norm where that is not 0; None if it always is.
        cosine: between both gradients where neither is 0; None, as the three that follow, if there is no such place.
        cosine_mean, cosine_std, cosine_positive: its mean, standard deviation, and the share of them above 0.
        infonce_solved, hn_solved: the share with a loss below `SATURATED`.
        infonce_saturated, hn_saturated: the mean share of loss evaluations (micro-batches, if negatives come from
            those) below it.
        infonce_zero, hn_zero: the share with a gradient that is exactly 0.
    """

    measurements: int
    infonce: Quartiles
    hn: Quartiles
    infonce_norm: Quartiles
    hn_norm: Quartiles
    ratio: Quartiles | None
    cosine: Quartiles | None
    cosine_mean: float | None
    cosine_std: float | None
    cosine_positive: float | None
    infonce_solved: float
    hn_solved: float
    infonce_saturated: float
    hn_saturated: float
    infonce_zero: float
    hn_zero: float


@dataclass(frozen=True)
class GradientDynamics:
    """A run's measurements: all of them, each epoch's, and how they were computed.

    `dtypes` are those of the losses, `towers` those of the encoders. Several of either, of `negatives` or of `gammas`
    mean that unlike measurements were put together.
    """

    overall: Dynamics
    epochs: dict[int, Dynamics]
    dtypes: tuple[str, ...]
    towers: tuple[str, ...]
    negatives: tuple[str, ...]
    gammas: tuple[float, ...]

    @property
    def measurements(self) -> int:
        return self.overall.measurements

    @property
    def dtype(self) -> str:
        """Of the losses, in words."""
        return " and ".join(self.dtypes)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "epochs": {str(epoch): asdict(found) for epoch, found in self.epochs.items()}}

    def rows(self) -> list[list[str]]:
        """A table: names of columns, a row for each epoch, a row for all. Numbers are medians, but for shares."""
        named = [*((str(epoch), found) for epoch, found in self.epochs.items()), ("all", self.overall)]
        return [list(COLUMNS), *([name, *_cells(found)] for name, found in named)]

    def to_text(self) -> str:
        """The table, and below it how its numbers were computed."""
        names, *body, last = self.rows()
        return "\n".join([text_table(names, [*body, [], last]), *self.notes()])

    def notes(self) -> list[str]:
        """What the numbers of `rows` are, and how they were computed."""
        gammas = " and ".join(f"{gamma:g}" for gamma in self.gammas)
        notes = [
            "medians, and shares of measurements; ratio and cosine where they exist",
            f"losses in {self.dtype}, towers in {' and '.join(self.towers)}, γ {gammas}, --optim.negatives "
            f"{' and '.join(self.negatives)}",
        ]
        if len(self.dtypes) > 1 or len(self.towers) > 1:
            notes.append("mixed dtypes: how many gradients are exactly zero depends on them")
        return notes


def gradient_dynamics(entries: Entries) -> GradientDynamics:
    """Summarise the measurements of a run.

    Args:
        entries: as `read_metrics(run, "gradients")` gives them; see `GradientProbe.probe`.

    Relations:
        Quartiles are interpolated, the standard deviation is that of the values themselves (no n − 1).

    Reference:
        HN-CLIP, section 2.4, figure of the gradient analysis, appendix C.
    """
    if not entries:
        raise ValueError("there are no measurements of gradients: train with --probe-gradients 5")
    epochs = sorted({entry["epoch"] for entry in entries})
    return GradientDynamics(
        overall=_summary(entries),
        epochs={epoch: _summary([entry for entry in entries if entry["epoch"] == epoch]) for epoch in epochs},
        dtypes=_kinds(entries, "dtype"),
        towers=_kinds(entries, "towers"),
        negatives=_kinds(entries, "negatives"),
        gammas=_kinds(entries, "gamma"),
    )


def _summary(entries: Entries) -> Dynamics:
    losses = {name: _values(entries, name) for name in ("infonce", "hn")}  # [M] each
    norms = {name: _values(entries, f"{name}_norm") for name in ("infonce", "hn")}  # [M] each
    cosine = _values(entries, "cosine")  # [M] or fewer
    return Dynamics(
        measurements=len(entries),
        infonce=_quartiles(losses["infonce"]),
        hn=_quartiles(losses["hn"]),
        infonce_norm=_quartiles(norms["infonce"]),
        hn_norm=_quartiles(norms["hn"]),
        ratio=_quartiles(ratio) if len(ratio := _values(entries, "ratio")) else None,
        cosine=_quartiles(cosine) if len(cosine) else None,
        cosine_mean=float(cosine.mean()) if len(cosine) else None,
        cosine_std=float(cosine.std()) if len(cosine) else None,
        cosine_positive=float((cosine > 0).mean()) if len(cosine) else None,
        infonce_solved=float((losses["infonce"] < SATURATED).mean()),
        hn_solved=float((losses["hn"] < SATURATED).mean()),
        infonce_saturated=float(_values(entries, "infonce_saturated").mean()),
        hn_saturated=float(_values(entries, "hn_saturated").mean()),
        infonce_zero=float((norms["infonce"] == 0).mean()),
        hn_zero=float((norms["hn"] == 0).mean()),
    )


def _values(entries: Entries, name: str) -> np.ndarray:
    """The numbers [M] that entries have under a name; None is no number."""
    return np.array([entry[name] for entry in entries if entry[name] is not None], dtype=np.float64)


def _quartiles(values: np.ndarray) -> Quartiles:
    return Quartiles(*np.quantile(values, (0.25, 0.5, 0.75)).tolist())


def _kinds(entries: Entries, name: str) -> tuple[Any, ...]:
    return tuple(sorted({entry[name] for entry in entries}))


def _cells(found: Dynamics) -> list[str]:
    return [
        f"{found.measurements:,}",
        f"{found.infonce.median:.2g}",
        f"{found.hn.median:.2g}",
        f"{found.infonce_solved:.0%}",
        f"{found.hn_solved:.0%}",
        f"{found.infonce_norm.median:.2g}",
        f"{found.hn_norm.median:.2g}",
        f"{found.infonce_zero:.0%}",
        f"{found.hn_zero:.0%}",
        "–" if found.ratio is None else f"{found.ratio.median:.2g}",
        "–" if found.cosine is None else f"{found.cosine.median:+.2f}",
    ]
