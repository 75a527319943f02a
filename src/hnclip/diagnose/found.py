"""What a diagnosis found: every part of it, or the reason why a part is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from hnclip.analysis.false_negatives import FalseNegatives
from hnclip.analysis.geometry import CaptionGeometry
from hnclip.analysis.gradient_dynamics import gradient_dynamics
from hnclip.analysis.hardness import Buckets
from hnclip.analysis.head_probe import HeadProbe
from hnclip.analysis.histogram import Histogram
from hnclip.analysis.saturation import BatchLosses
from hnclip.analysis.shown import CompanionRow, Finding
from hnclip.diagnose import advice

Result = TypeVar("Result")
Entries = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Negatives:
    """The negatives of an epoch's batches: their similarities, buckets of them, and the hardest of each caption.

    Shape:
        batch: [B, B], Ḡ of the first batch
    """

    similarities: Histogram
    hardest: float
    paper: Buckets
    quantiles: Buckets
    batch: Tensor
    left_out: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "similarities": self.similarities.to_dict(),
            "deviation": self.similarities.deviation,
            "hardest_in_batch": self.hardest,
            "buckets": self.paper.to_dict(),
            "quantile_buckets": self.quantiles.to_dict(),
            "batch": self.batch.tolist(),
            "left_out_pairs": self.left_out,
        }


@dataclass(frozen=True)
class Start:
    """Losses before the first step, with the negatives of micro-batches and of whole batches."""

    micro: BatchLosses
    batch: BatchLosses

    def to_dict(self) -> dict[str, Any]:
        return {"micro": self.micro.to_dict(), "batch": self.batch.to_dict()}


class Gaps(dict[str, str]):
    """Why a part is missing, by its name."""

    def attempt(self, part: str, make: Callable[[], Result]) -> Result | None:
        """What `make` gives; if it cannot, the part is a gap with its reason, and the diagnosis goes on."""
        try:
            return make()
        except (ValueError, OSError, RuntimeError) as error:
            self[part] = str(error)
            return None


@dataclass(frozen=True)
class Found:
    """The parts of a diagnosis, None where `gaps` says why or nobody asked.

    `gradients` are measurements at the model's own weights, `fractions` those of short runs on shares of the data, by
    their names ("5 %").
    """

    data: str
    model: str
    split: str
    records: int
    captions: int
    left_out: int
    truncated: int
    context: int
    scale: float
    gamma: float
    geometry: CaptionGeometry
    repeats: FalseNegatives
    near: Sequence[CompanionRow]
    hardest: Sequence[CompanionRow]
    suspected: Sequence[CompanionRow]
    negatives: Negatives | None = None
    start: Start | None = None
    gradients: Entries | None = None
    fractions: Mapping[str, Entries] | None = None
    probe: HeadProbe | None = None
    gaps: Gaps = field(default_factory=Gaps)

    def findings(self) -> list[Finding]:
        """Most pressing first; those of one level in the order of the report."""
        order = {"act": 0, "note": 1, "good": 2}
        return sorted(self._findings(), key=lambda finding: order[finding.level])

    def _findings(self) -> Iterator[Finding]:
        if self.probe is not None:
            change = self.probe.mean
            yield advice.prediction(
                self.probe.verdict,
                change.mean,
                change.low,
                change.high,
                gamma=self.probe.gamma,
                pairs=self.probe.pairs,
                held_out=self.probe.held_out,
            )
        if self.start is not None:
            micro, whole = self.start.micro, self.start.batch
            yield advice.start(
                micro.infonce_saturated,
                whole.infonce_saturated,
                micro.hn_saturated,
                negatives=micro.negatives,
                all_negatives=whole.negatives,
            )
        pairwise, hardest = self.geometry.pairwise.mean, self.geometry.hardest.mean
        yield advice.likeness(pairwise, hardest)
        if self.negatives is not None:
            similarities = self.negatives.similarities
            yield advice.meetings(self.negatives.hardest, hardest, similarities.deviation)
            yield advice.margins(similarities.mean, similarities.deviation, scale=self.scale, gamma=self.gamma)
        same_image = None if self.repeats.same_image is None else len(self.repeats.same_image)
        yield from advice.repeats(
            len(self.repeats.same_text), same_image, self.repeats.suspected_count, self.repeats.threshold
        )
        if (cut := advice.cut(self.truncated, self.captions, self.context)) is not None:
            yield cut

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; a part that is missing is null, and `gaps` says why."""
        parts: dict[str, Any] = {
            name: None if (part := getattr(self, name)) is None else part.to_dict()
            for name in ("geometry", "negatives", "repeats", "start", "probe")
        }
        measured = None if self.gradients is None else _measured(self.gradients)
        runs = None if self.fractions is None else {name: _measured(run) for name, run in self.fractions.items()}
        about = ("data", "model", "split", "records", "captions", "left_out", "truncated", "context", "scale", "gamma")
        return {
            **{name: getattr(self, name) for name in about},
            "findings": [finding.to_dict() for finding in self.findings()],
            **parts,
            "gradients": measured,
            "fractions": runs,
            "gaps": self.gaps,
        }


def _measured(entries: Entries) -> dict[str, Any]:
    return {"summary": gradient_dynamics(entries).to_dict(), "measurements": [dict(entry) for entry in entries]}
