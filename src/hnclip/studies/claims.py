"""The paper's claims, and questions that it does not ask, as data: which study tests each, and how."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from hnclip.studies.figures import all_gradients, gradient_summaries
from hnclip.studies.paper import runs_on_paper_data
from hnclip.studies.results import MEAN, StudyResults, Term, rounded
from hnclip.studies.step_timer import step_timings
from hnclip.studies.verdicts import ClaimTest, Judgement, Sum, Values, above, always, better, gains, reaches, within


@dataclass(frozen=True)
class Claim:
    """What is claimed, where the paper says so (None for a question that it does not ask), and how it is tested.

    Args:
        study: its name.
        only: the claim is a number of the paper's model and data, or of its hardware, which others do not refute.
    """

    text: str
    where: str | None
    study: str
    test: ClaimTest
    only: Literal["data", "hardware"] | None = None

    def judge(self, results: StudyResults) -> Judgement:
        found = self.test.judge(results)
        if found.measured and (self.only == "hardware" or (self.only and not runs_on_paper_data(results.setting))):
            what = "its hardware" if self.only == "hardware" else "Long-CLIP-L on its benchmarks"
            return Judgement("not comparable", found.measured, f"the paper's number is of {what}")
        return found


def _first_epoch_beats_last(row: str, *others: str) -> Callable[[StudyResults], Mapping[str, bool | None]]:
    """On validation, a row is better after its first epoch than each other row is after its last; None for a row that
    training did not improve, which it means nothing to beat."""

    def compare(results: StudyResults) -> Iterator[tuple[str, bool | None]]:
        for domain in results.domains:
            for seed in results.seeds:
                logs = {name: results.metrics(name, domain, seed, "evaluation") for name in (row, *others)}
                recalls = {
                    name: {entry["epoch"]: rounded(entry["mean_R@1"]) for entry in entries}
                    for name, entries in logs.items()
                }
                for other in others:
                    ours, theirs = recalls[row].get(1), recalls[other]
                    learnt = ours is not None and bool(theirs) and theirs[max(theirs)] > theirs.get(0, -math.inf)
                    verdict = ours > theirs[max(theirs)] if learnt and ours is not None else None
                    yield f"{domain.name}, {other}, seed {seed}", verdict

    return lambda results: dict(compare(results))


def _best_under_every_seed(row: str, *others: str) -> Callable[[StudyResults], Mapping[str, bool | None]]:
    """Under every seed a row has the highest average R@1 on every column. A tie is not the highest."""

    def compare(results: StudyResults) -> Iterator[tuple[str, bool | None]]:
        for column in results.columns:
            for seed in results.seeds if len(results.seeds) > 1 else ():
                found = [column.recall(name, MEAN, 1) for name in (row, *others)]
                heights = [rounded(one.values[seed]) for one in found if one is not None and seed in one.values]
                known = len(heights) == len(found)
                yield f"{column.name}, seed {seed}", heights[0] > max(heights[1:]) if known else None

    return lambda results: dict(compare(results))


def _geometry(key: str) -> Values:
    """The mean of a distribution of cosines, by domain."""

    def values(results: StudyResults) -> dict[str, float | None]:
        found = {domain.name: results.measurement("geometry", domain) for domain in results.domains}
        return {name: None if one is None else one[key]["mean"] for name, one in found.items()}

    return values


def _gradients(key: str, *, epoch: int | None = None) -> Values:
    """A number of the measured gradients of the runs with all data, by domain: of one epoch, or of all."""

    def values(results: StudyResults) -> dict[str, float | None]:
        found = gradient_summaries(results)
        numbers: dict[str, float | None] = {}
        for domain in results.domains:
            one = found.get((_WHOLE, domain.name))
            part = None if one is None else one.overall if epoch is None else one.epochs.get(epoch)
            value = None if part is None else part[key]
            numbers[domain.name] = value[1] if isinstance(value, list | tuple) else value  # of quartiles the median
        return numbers

    return values


def _all_gradients(key: str) -> Values:
    """The same of all runs together, if none of them is missing."""

    def values(results: StudyResults) -> dict[str, float | None]:
        complete = len(gradient_summaries(results)) == len(results.study.rows) * len(results.domains)
        return {"all runs": all_gradients(results).overall[key] if complete else None}

    return values


def _step_ratio(row: str) -> Values:
    def values(results: StudyResults) -> dict[str, float | None]:
        found = step_timings(results)
        return {row: found[row].ratio(found["HN-CLIP"]) if {row, "HN-CLIP"} <= {*found} else None}

    return values


_OTHERS = ("FineLIP", "GOAL", "StructXLIP")
_WHOLE = "HN-CLIP, 100 %"
_SHARES = ("HN-CLIP, 5 %", "HN-CLIP, 20 %", "HN-CLIP, 50 %", _WHOLE)
_GAMMAS = ("γ 0.25", "γ 0.5", "γ 0.75", "γ 1")
_FIXED = "fixed margin γ·mean(Ḡ)"


def _if_goal_learnt(*sums: Sum) -> ClaimTest:
    """To beat a method that fine-tuning made worse does not show that less data is needed."""
    learnt = Term(1, "GOAL, 100 %"), Term(-1, "zero-shot")
    return above(*sums, given=[learnt], otherwise="GOAL with all data is not above the untrained model here")


def _lead(other: str, k: int = 1, *, weight: int = 1) -> Sum:
    return Term(weight, "HN-CLIP", k), Term(-weight, other, k)


CLAIMS = (
    Claim(
        "Captions are nearly the same to the encoder: mean cosine 0.84 to 0.88 between any two.",
        "Figure 1, Table A1",
        "geometry",
        reaches("mean cosine", 0.84, _geometry("pairwise")),
        only="data",
    ),
    Claim(
        "Every caption has a nearly identical hardest negative: mean cosine 0.92 to 0.94.",
        "Figure 1, Table A1",
        "geometry",
        reaches("mean cosine", 0.92, _geometry("hardest")),
        only="data",
    ),
    Claim(
        "InfoNCE saturates: on 80 % of batches it is below 0.001 within the first epoch.",
        "abstract, section 2.4",
        "gradients",
        reaches("share of batches", 0.8, _gradients("infonce_solved", epoch=1), _WHOLE),
        only="data",
    ),
    Claim(
        "The gradient of InfoNCE is numerically zero in 47 % of measurements.",
        "abstract, section 2.4",
        "gradients",
        reaches("share of measurements", 0.47, _gradients("infonce_zero"), _WHOLE),
        only="data",
    ),
    Claim(
        "Where the gradient of InfoNCE is not zero, that of L_HN is at least 100 times as large (median).",
        "section 2.4, appendix C",
        "gradients",
        reaches("median ratio of norms", 100, _gradients("ratio"), _WHOLE, digits=".3g"),
        only="data",
    ),
    Claim(
        "Both gradients have compatible directions: their cosine is positive in 98 % of measurements.",
        "section 2.4, appendix C",
        "gradients",
        reaches("share of measurements", 0.98, _all_gradients("cosine_positive"), *_SHARES),
        only="data",
    ),
    Claim(
        "HN-CLIP is better than FineLIP, GOAL and StructXLIP on every benchmark.",
        "Table 1",
        "main",
        better("HN-CLIP", *_OTHERS),
    ),
    Claim("HN-CLIP is better than fine-tuning with InfoNCE.", "Tables 2 and 3b", "main", better("HN-CLIP", "InfoNCE")),
    Claim(
        "The lead over FineLIP, GOAL and StructXLIP is larger at R@1 than at R@10.",
        "section 3.2",
        "main",
        above(
            *([*_lead(other), *_lead(other, 10, weight=-1)] for other in _OTHERS),
            given=[_lead(other) for other in _OTHERS],
            otherwise="there is no clear lead at R@1 here",
        ),
    ),
    Claim(
        "The first epoch of HN-CLIP exceeds the final accuracy of FineLIP, GOAL and StructXLIP.",
        "section 3.2, Figure 5",
        "convergence",
        always("HN-CLIP", *_OTHERS, compare=_first_epoch_beats_last("HN-CLIP", *_OTHERS)),
    ),
    Claim(
        "L_HN improves all six methods.",
        "abstract, Table 2",
        "plug",
        gains(("L_HN", "InfoNCE"), *((f"{name} + L_HN", name) for name in (*_OTHERS, "LoRA", "DoRA"))),
    ),
    Claim(
        "Trained on one domain, HN-CLIP leads on the other.",
        "section 3.4, Tables A7 and A10",
        "cross-domain",
        better("HN-CLIP", *_OTHERS, transfers=True),
    ),
    Claim(
        "HN-CLIP with a fifth of the data is better than GOAL with all of it.",
        "Table A9, GOAL",
        "samples",
        _if_goal_learnt([Term(1, "HN-CLIP, 20 %"), Term(-1, "GOAL, 100 %")]),
    ),
    Claim(
        "The lead over GOAL widens as the data shrink to 20 %.",
        "section 3.4, Table A9, GOAL",
        "samples",
        _if_goal_learnt(
            [Term(1, "HN-CLIP, 20 %"), Term(-1, "GOAL, 20 %"), Term(-1, "HN-CLIP, 100 %"), Term(1, "GOAL, 100 %")]
        ),
    ),
    Claim("Every γ from 0.25 to 1 is better than γ = 0.", "Table 3a", "gamma", gains(*((g, "γ 0") for g in _GAMMAS))),
    Claim(
        "The choice of γ matters little: 0.25 and 1 differ by at most 1 point (the bound is this project's).",
        "section 3.5, Table 3a",
        "gamma",
        within("γ 0.25", "γ 1"),
    ),
    Claim(
        "The token term alone leaves accuracy where InfoNCE left it: within 1 point (the bound is this project's).",
        "section 3.5, Table 3b",
        "components",
        within("InfoNCE + L_tok", "InfoNCE"),
    ),
    Claim(
        "L_HN alone contributes at least half of the gain.",
        "section 3.5, Table 3b",
        "components",
        above(
            [Term(1, "L_HN"), Term(-1, "InfoNCE")],
            [Term(1, "L_HN + L_tok"), Term(-1, "InfoNCE")],
            [Term(1, "L_HN"), Term(-0.5, "InfoNCE"), Term(-0.5, "L_HN + L_tok")],
        ),
    ),
    Claim(
        "Caption similarities must be recomputed: frozen at the start they are worse.",
        "section 3.5, Table 3c",
        "frozen",
        better("Ḡ recomputed", "Ḡ frozen"),
    ),
    Claim(
        "HN-CLIP is best under every seed.",
        "Tables A8 and A11",
        "main",
        always("HN-CLIP", *_OTHERS, compare=_best_under_every_seed("HN-CLIP", *_OTHERS)),
    ),
    *(
        Claim(
            f"HN-CLIP trains {times} times as fast as {row}.",
            "abstract, Table A3",
            "efficiency",
            reaches("time of a step over HN-CLIP's", times, _step_ratio(row), row, "HN-CLIP", digits=".1f"),
            only="hardware",
        )
        for row, times in (("GOAL", 2.4), ("StructXLIP", 5.4))
    ),
    Claim("Fine-tuning with InfoNCE improves on the untrained model.", None, "main", better("InfoNCE", "zero-shot")),
    Claim("Adaptive margins beat one fixed margin of the same mean.", None, "fixed-margin", better("L_HN", _FIXED)),
    Claim(
        "L_HN beats other losses that weight negatives.",
        None,
        "rivals",
        better("L_HN", "score margin", "HN-NCE", "HCL", "debiased", "max hinge", "sigmoid"),
    ),
    Claim("L_HN with 15 negatives beats InfoNCE with 127.", None, "negatives", better("L_HN", "InfoNCE, batch")),
    Claim(
        "Masking duplicates helps where captions repeat.",
        None,
        "duplicates",
        gains(("InfoNCE", "InfoNCE, not masked"), ("L_HN", "L_HN, not masked")),
    ),
)
