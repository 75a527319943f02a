"""The paper's claims, and questions that it does not ask, as data: which study tests each, and how."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hnclip.studies.figures import gradient_entries, summarize_gradients
from hnclip.studies.paper import runs_on_paper_data
from hnclip.studies.results import MEAN, StudyResults, Term, rounded
from hnclip.studies.step_timer import PEER, step_timings
from hnclip.studies.verdicts import Judgement, Sum, Test, above, exceeds, gains, judge, within


@dataclass(frozen=True)
class Claim:
    """What is claimed, where the paper says so (None for a question that it does not ask), and how it is tested.

    Args:
        study: its name.
        only: the claim is a number of the paper's model and data, or of its hardware, which others do not refute.
        given: what must hold first, and in words; otherwise the claim is undecided.
    """

    text: str
    where: str | None
    study: str
    test: Test
    only: Literal["data", "hardware"] | None = None
    given: tuple[Test, str] | None = None

    def judge(self, results: StudyResults) -> Judgement:
        found = judge(self.test(results))
        if found.measured and (self.only == "hardware" or (self.only and not runs_on_paper_data(results.setting))):
            what = "its hardware" if self.only == "hardware" else "Long-CLIP-L on its benchmarks"
            return Judgement("not comparable", found.measured, f"the paper's number is of {what}")
        if self.given is not None and judge(self.given[0](results)).verdict != "holds":
            return Judgement("undecided", found.measured, f"decided only if {self.given[1]}")
        return found


def _first_epoch(results: StudyResults) -> dict[str, float | None]:
    """Validation R@1 of HN-CLIP after its first epoch minus that of each other row after its last."""
    logs = _validation(results)
    return {
        f"{domain}, {row}, seed {seed}": rounded(logs[domain, "HN-CLIP", seed][1] - log[max(log)])
        if log and logs[domain, "HN-CLIP", seed]
        else None
        for (domain, row, seed), log in logs.items()
        if row in _OTHERS
    }


def _learnt(results: StudyResults) -> dict[str, float | None]:
    """What training added to the validation R@1 of the other rows."""
    return {
        f"{domain}, {row}, seed {seed}": rounded(log[max(log)] - log.get(0, -math.inf)) if log else None
        for (domain, row, seed), log in _validation(results).items()
        if row in _OTHERS
    }


def _validation(results: StudyResults) -> dict[tuple[str, str, int], dict[int, float]]:
    """Average R@1 by epoch, of every run; empty for a missing one."""
    return {
        (domain.name, row.name, seed): {
            entry["epoch"]: entry["mean_R@1"] for entry in results.metrics(row.name, domain, seed, "evaluation")
        }
        for domain in results.domains
        for row in results.study.rows
        for seed in results.seeds
    }


def _lead_by_seed(results: StudyResults) -> dict[str, float | None]:
    """Average R@1 of HN-CLIP minus that of the best other row, under every seed of several."""
    found: dict[str, float | None] = {}
    for column in results.columns:
        for seed in results.seeds if len(results.seeds) > 1 else ():
            recalls = [column.recall(row, MEAN, 1) for row in ("HN-CLIP", *_OTHERS)]
            known = [one.values[seed] for one in recalls if one is not None and seed in one.values]
            lead = rounded(known[0] - max(known[1:])) if len(known) == len(recalls) else None
            found[f"{column.name}, seed {seed}"] = lead
    return found


def _cosine(key: str, bound: float) -> Test:
    """The mean of a distribution of cosines, by domain."""

    def values(results: StudyResults) -> dict[str, float | None]:
        found = results.measured("geometry")
        return {one.name: found[one.name][key]["mean"] if one.name in found else None for one in results.domains}

    return exceeds(values, bound)


def _gradients(key: str, bound: float, *, epoch: int | None = None, show: str = ".0%") -> Test:
    """A number of the measured gradients of the runs with all data, by domain: of one epoch, or of all."""

    def values(results: StudyResults) -> dict[str, float | None]:
        found, numbers = gradient_entries(results), dict[str, float | None]()
        for domain in results.domains:
            value = None
            if runs := found.get((_WHOLE, domain.name)):
                summary = summarize_gradients({domain: runs})
                value = (summary.overall if epoch is None else summary.epochs[epoch])[key]
            numbers[domain.name] = value[1] if isinstance(value, list | tuple) else value  # of quartiles the median
        return numbers

    return exceeds(values, bound, show)


def _cosine_positive(results: StudyResults) -> dict[str, float | None]:
    """The share of measurements of all runs together, if none of them is missing."""
    found = gradient_entries(results)
    complete = len(found) == len(results.study.rows) * len(results.domains)
    return {"all runs": summarize_gradients(found).overall["cosine_positive"] if complete else None}


def _step_ratio(row: str, bound: float) -> Test:
    def values(results: StudyResults) -> dict[str, float | None]:
        found = {domain.name: step_timings(results).get(domain.name, {}) for domain in results.domains}
        return {name: one[row].ratio(one[PEER]) if {row, PEER} <= {*one} else None for name, one in found.items()}

    return exceeds(values, bound, ".1f")


_OTHERS = ("FineLIP", "GOAL", "StructXLIP")
_WHOLE = "HN-CLIP, 100 %"
_GAMMAS = ("γ 0.25", "γ 0.5", "γ 0.75", "γ 1")
_RIVALS = ("score margin", "HN-NCE", "HCL", "debiased", "max hinge", "sigmoid")
# To beat a method that fine-tuning made worse does not show that less data is needed.
_GOAL_LEARNT = gains(("GOAL, 100 %", "zero-shot")), "GOAL with all data is clearly above the untrained model"


def _better(row: str, *others: str, transfers: bool = False) -> Test:
    return gains(*((row, other) for other in others), transfers=transfers)


def _lead(other: str, k: int = 1, *, weight: int = 1) -> Sum:
    return Term(weight, "HN-CLIP", k), Term(-weight, other, k)


CLAIMS = (
    Claim(
        "Captions are nearly the same to the encoder: mean cosine 0.84 to 0.88 between any two.",
        "Figure 1, Table A1",
        "geometry",
        _cosine("pairwise", 0.84),
        only="data",
    ),
    Claim(
        "Every caption has a nearly identical hardest negative: mean cosine 0.92 to 0.94.",
        "Figure 1, Table A1",
        "geometry",
        _cosine("hardest", 0.92),
        only="data",
    ),
    Claim(
        "InfoNCE saturates: on 80 % of batches it is below 0.001 within the first epoch.",
        "abstract, section 2.4",
        "gradients",
        _gradients("infonce_solved", 0.8, epoch=1),
        only="data",
    ),
    Claim(
        "The gradient of InfoNCE is numerically zero in 47 % of measurements.",
        "abstract, section 2.4",
        "gradients",
        _gradients("infonce_zero", 0.47),
        only="data",
    ),
    Claim(
        "Where the gradient of InfoNCE is not zero, that of L_HN is at least 100 times as large (median).",
        "section 2.4, appendix C",
        "gradients",
        _gradients("ratio", 100, show=".3g"),
        only="data",
    ),
    Claim(
        "Both gradients have compatible directions: their cosine is positive in 98 % of measurements.",
        "section 2.4, appendix C",
        "gradients",
        exceeds(_cosine_positive, 0.98, ".0%"),
        only="data",
    ),
    Claim(
        "HN-CLIP is better than FineLIP, GOAL and StructXLIP on every benchmark.",
        "Table 1",
        "main",
        _better("HN-CLIP", *_OTHERS),
    ),
    Claim("HN-CLIP is better than fine-tuning with InfoNCE.", "Tables 2 and 3b", "main", _better("HN-CLIP", "InfoNCE")),
    Claim(
        "The lead over FineLIP, GOAL and StructXLIP is larger at R@1 than at R@10.",
        "section 3.2",
        "main",
        above(*([*_lead(other), *_lead(other, 10, weight=-1)] for other in _OTHERS)),
        given=(_better("HN-CLIP", *_OTHERS), "there is a clear lead at R@1"),
    ),
    Claim(
        "The first epoch of HN-CLIP exceeds the final accuracy of FineLIP, GOAL and StructXLIP.",
        "section 3.2, Figure 5",
        "convergence",
        exceeds(_first_epoch, show="+.1f"),
        given=(exceeds(_learnt), "training improves the other methods"),
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
        _better("HN-CLIP", *_OTHERS, transfers=True),
    ),
    Claim(
        "HN-CLIP with a fifth of the data is better than GOAL with all of it.",
        "Table A9, GOAL",
        "samples",
        gains(("HN-CLIP, 20 %", "GOAL, 100 %")),
        given=_GOAL_LEARNT,
    ),
    Claim(
        "The lead over GOAL widens as the data shrink to 20 %.",
        "section 3.4, Table A9, GOAL",
        "samples",
        above([Term(1, "HN-CLIP, 20 %"), Term(-1, "GOAL, 20 %"), Term(-1, _WHOLE), Term(1, "GOAL, 100 %")]),
        given=_GOAL_LEARNT,
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
        _better("Ḡ recomputed", "Ḡ frozen"),
    ),
    Claim(
        "HN-CLIP is best under every seed.",
        "Tables A8 and A11",
        "main",
        exceeds(_lead_by_seed, show="+.1f"),
    ),
    *(
        Claim(
            f"HN-CLIP trains {times} times as fast as {row}.",
            "abstract, Table A3",
            "efficiency",
            _step_ratio(row, times),
            only="hardware",
        )
        for row, times in (("GOAL", 2.4), ("StructXLIP", 5.4))
    ),
    Claim("Fine-tuning with InfoNCE improves on the untrained model.", None, "main", _better("InfoNCE", "zero-shot")),
    Claim(
        "Adaptive margins beat one fixed margin of the same mean.",
        None,
        "fixed-margin",
        _better("L_HN", "fixed margin γ·mean(Ḡ)"),
    ),
    Claim(
        "L_HN beats other losses that weight negatives.",
        None,
        "rivals",
        _better("L_HN", *_RIVALS),
    ),
    Claim("L_HN with 15 negatives beats InfoNCE with 127.", None, "negatives", _better("L_HN", "InfoNCE, batch")),
    Claim(
        "Masking duplicates helps where captions repeat.",
        None,
        "duplicates",
        gains(("InfoNCE", "InfoNCE, not masked"), ("L_HN", "L_HN, not masked")),
    ),
)
