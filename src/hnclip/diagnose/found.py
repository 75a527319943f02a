"""What a diagnosis found: every part of it, or the reason why a part is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

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
from hnclip.diagnose.gradients import ProbedRun

Result = TypeVar("Result")
Entries = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Negatives:
    """The negatives of an epoch's batches: their similarities, buckets of them, and the mean of each pair's hardest in
    its batch and among all pairs.

    Shape:
        batch: [B, B], Ḡ of the first pairs that meet
    """

    similarities: Histogram
    hardest: float
    hardest_of_all: float
    paper: Buckets
    quantiles: Buckets
    batch: Tensor

    def to_dict(self) -> dict[str, Any]:
        return {
            "similarities": self.similarities.to_dict(),
            "deviation": self.similarities.deviation,
            "hardest_in_batch": self.hardest,
            "hardest_of_all": self.hardest_of_all,
            "buckets": self.paper.to_dict(),
            "quantile_buckets": self.quantiles.to_dict(),
            "batch": self.batch.tolist(),
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

    `source` is where the negatives of a pair come from. `names` are the ids of the records, `owner` is the record of
    each caption. `cut_alike` counts those groups of `repeats.same_text` whose captions differ behind the model's
    context. `gradients` are measurements at the model's own weights, `fractions` those of runs on shares of the data,
    by their names ("5 %").
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
    source: Literal["micro", "batch"]
    gamma: float
    names: Sequence[str]
    owner: Sequence[int]
    geometry: CaptionGeometry
    repeats: FalseNegatives
    cut_alike: int
    near: Sequence[CompanionRow]
    hardest: Sequence[CompanionRow]
    suspected: Sequence[CompanionRow]
    negatives: Negatives | None = None
    start: Start | None = None
    gradients: Entries | None = None
    fractions: Mapping[str, ProbedRun] = field(default_factory=dict)
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
                source=self.source,
            )
        pairwise, hardest = self.geometry.pairwise.mean, self.geometry.hardest.mean
        yield advice.likeness(pairwise, hardest)
        if self.negatives is not None:
            similarities = self.negatives.similarities
            met = self.negatives.hardest, self.negatives.hardest_of_all
            yield advice.meetings(*met, similarities.deviation, source=self.source)
            yield advice.margins(similarities.mean, similarities.deviation, scale=self.scale, gamma=self.gamma)
        same_image = None if self.repeats.same_image is None else len(self.repeats.same_image)
        yield from advice.repeats(
            len(self.repeats.same_text) - self.cut_alike,
            same_image,
            self.repeats.suspected_count,
            self.repeats.threshold,
        )
        if (cut := advice.cut(self.truncated, self.captions, self.context, self.cut_alike)) is not None:
            yield cut

    @property
    def same_text(self) -> list[list[str]]:
        """The records of each group of captions that are the same to the model."""
        return [[self.names[self.owner[row]] for row in group] for group in self.repeats.same_text]

    @property
    def same_image(self) -> list[list[str]] | None:
        """Those of each group of equal pictures."""
        groups = self.repeats.same_image
        return None if groups is None else [[self.names[record] for record in group] for group in groups]

    def _repeats(self) -> dict[str, Any]:
        return {
            "same_text": self.same_text,
            "same_text_once_cut": self.cut_alike,
            "same_image": self.same_image,
            "threshold": self.repeats.threshold,
            "suspected": self.repeats.suspected_count,
            "suspects": [
                {
                    "first": self.names[self.owner[pair.first]],
                    "second": self.names[self.owner[pair.second]],
                    "cosine": pair.similarity,
                }
                for pair in self.repeats.suspects
            ],
        }

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; a part that is missing is null, and `gaps` says why."""
        parts: dict[str, Any] = {
            name: None if (part := getattr(self, name)) is None else part.to_dict()
            for name in ("geometry", "negatives", "start", "probe")
        }
        measured = None if self.gradients is None else _measured(self.gradients)
        runs = {
            name: {**_measured(run.gradients), "evaluations": run.evaluations} for name, run in self.fractions.items()
        }
        about = ("data", "model", "split", "records", "captions", "left_out", "truncated", "context", "scale", "gamma")
        return {
            **{name: getattr(self, name) for name in about},
            "findings": [finding.to_dict() for finding in self.findings()],
            **parts,
            "near_duplicates": [_row(row) for row in self.near],
            "hardest_pairs": [_row(row) for row in self.hardest],
            "repeats": self._repeats(),
            "gradients": measured,
            "fractions": runs,
            "gaps": self.gaps,
        }


def _row(row: CompanionRow) -> dict[str, Any]:
    """Captions with their labels, as they are shown."""
    query, *others = (
        {"label": shown.label, "caption": "".join(text for text, _ in shown.text)}
        for shown in (row.query, *row.companions)
    )
    return {"query": query, "companions": others}


def _measured(entries: Entries) -> dict[str, Any]:
    return {"summary": gradient_dynamics(entries).to_dict(), "measurements": [dict(entry) for entry in entries]}
