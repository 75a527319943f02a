"""The paper's claims, and questions that it does not ask, as data: how each is tested, by the study that tests it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any, Literal

from hnclip.studies.figures import ALL, gradient_summaries
from hnclip.studies.paper import runs_on_paper_data
from hnclip.studies.results import MEAN, StudyResults, Term, rounded
from hnclip.studies.step_timer import PEER, step_timings
from hnclip.studies.verdicts import Judgement, Sum, Test, Values, above, exceeds, gains, judge, within


@dataclass(frozen=True)
class Claim:
    """What is claimed, where the paper says so (None for a question that it does not ask), and how it is tested.

    Args:
        only: the claim is a number of the paper's model and data, or of its hardware, which others do not refute.
        given: what must hold first, and in words; otherwise the claim is undecided.
    """

    text: str
    where: str | None
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


_OTHERS = ("FineLIP", "GOAL", "StructXLIP")
_WHOLE = "HN-CLIP, 100 %"
_GAMMAS = ("γ 0.25", "γ 0.5", "γ 0.75", "γ 1")
_RIVALS = ("score margin", "HN-NCE", "HCL", "debiased", "max hinge", "sigmoid")


def _better(row: str, *others: str, transfers: bool = False) -> Test:
    return gains(*((row, other) for other in others), transfers=transfers)


def _lead(other: str, k: int, sign: int = 1) -> Sum:
    return Term(sign, "HN-CLIP", k), Term(-sign, other, k)


def _by_epoch(lead: Callable[[Mapping[int, float], Mapping[int, float]], float]) -> Values:
    """A difference of the validation R@1 of HN-CLIP and of each other method, given by epoch, in every run."""

    def values(results: StudyResults) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        for domain in results.domains:
            for seed in results.seeds:
                logs = [results.metrics(row, domain, seed, "evaluation") for row in ("HN-CLIP", *_OTHERS)]
                ours, *theirs = [{entry["epoch"]: entry["mean_R@1"] for entry in log} for log in logs]
                for row, log in zip(_OTHERS, theirs):
                    difference = rounded(lead(ours, log)) if ours and log else None
                    found[f"{domain.name}, {row}, seed {seed}"] = difference
        return found

    return values


def _lead_by_seed(results: StudyResults) -> dict[str, float | None]:
    """Average R@1 of HN-CLIP minus that of the best other method, under every seed of several."""
    found: dict[str, float | None] = {}
    for column in results.columns:
        for seed in results.seeds if len(results.seeds) > 1 else ():
            recalls = [column.recall(row, MEAN, 1) for row in ("HN-CLIP", *_OTHERS)]
            known = [one.values[seed] for one in recalls if one is not None and seed in one.values]
            lead = rounded(known[0] - max(known[1:])) if len(known) == len(recalls) else None
            found[f"{column.name}, seed {seed}"] = lead
    return found


def _measured(kind: str, *keys: str) -> Values:
    """A number of a measurement, by domain."""

    def values(results: StudyResults) -> dict[str, Any]:
        found = results.measured(kind)
        return {
            one.name: reduce(getitem, keys, found[one.name]) if one.name in found else None for one in results.domains
        }

    return values


def _gradients(key: str, epoch: int | None = None) -> Values:
    """A number of the measured gradients of the runs with all data, by domain: of one epoch, or of all."""

    def values(results: StudyResults) -> dict[str, float | None]:
        found = gradient_summaries(results)
        numbers: dict[str, float | None] = {}
        for domain in results.domains:
            summary = found.get((_WHOLE, domain.name))
            value = None if summary is None else (summary.epochs[epoch] if epoch else summary.overall)[key]
            numbers[domain.name] = value[1] if isinstance(value, list) else value  # of quartiles the median
        return numbers

    return values


def _cosine_positive(results: StudyResults) -> dict[str, float | None]:
    """The share of measurements of all runs together, if none of them is missing."""
    found = gradient_summaries(results)
    complete = len(found) == len(results.study.rows) * len(results.domains) + 1
    return {"all runs": found[ALL].overall["cosine_positive"] if complete else None}


def _step_ratio(row: str) -> Values:
    def values(results: StudyResults) -> dict[str, float | None]:
        found = {domain.name: step_timings(results).get(domain.name, {}) for domain in results.domains}
        return {name: one[row].ratio(one[PEER]) if {row, PEER} <= {*one} else None for name, one in found.items()}

    return values


_LEARNT = exceeds(_by_epoch(lambda _, theirs: theirs[max(theirs)] - theirs[0])), "training improves the other methods"
_LEADS = _better("HN-CLIP", *_OTHERS), "there is a clear lead at R@1"
_REPEATED = exceeds(_measured("duplicates", "either")), "training pairs share captions or images"
# To beat a method that fine-tuning made worse does not show that less data is needed.
_GOAL_LEARNT = gains(("GOAL, 100 %", "zero-shot")), "GOAL with all data is clearly above the untrained model"

CLAIMS: dict[str, tuple[Claim, ...]] = {
    "main": (
        Claim("HN-CLIP is better than FineLIP, GOAL and StructXLIP.", "Table 1", _better("HN-CLIP", *_OTHERS)),
        Claim("HN-CLIP is better than InfoNCE.", "Tables 2 and 3b", _better("HN-CLIP", "InfoNCE")),
        Claim(
            "The lead over FineLIP, GOAL and StructXLIP is larger at R@1 than at R@10.",
            "section 3.2",
            above(*([*_lead(other, 1), *_lead(other, 10, -1)] for other in _OTHERS)),
            given=_LEADS,
        ),
        Claim("HN-CLIP is best under every seed.", "Tables A8 and A11", exceeds(_lead_by_seed, show="+.1f")),
        Claim("Fine-tuning with InfoNCE improves on the untrained model.", None, _better("InfoNCE", "zero-shot")),
    ),
    "plug": (
        Claim(
            "L_HN improves all six methods.",
            "abstract, Table 2",
            gains(("L_HN", "InfoNCE"), *((f"{name} + L_HN", name) for name in (*_OTHERS, "LoRA", "DoRA"))),
        ),
    ),
    "gamma": (
        Claim("Every γ from 0.25 to 1 is better than γ = 0.", "Table 3a", gains(*((one, "γ 0") for one in _GAMMAS))),
        Claim(
            "The choice of γ matters little: 0.25 and 1 differ by at most 1 point (the bound is this project's).",
            "section 3.5, Table 3a",
            within("γ 0.25", "γ 1"),
        ),
    ),
    "components": (
        Claim(
            "The token term alone leaves R@1 where InfoNCE left it: within 1 point (the bound is this project's).",
            "section 3.5, Table 3b",
            within("InfoNCE + L_tok", "InfoNCE"),
        ),
        Claim(
            "L_HN alone contributes at least half of the gain.",
            "section 3.5, Table 3b",
            above(
                [Term(1, "L_HN"), Term(-1, "InfoNCE")],
                [Term(1, "L_HN + L_tok"), Term(-1, "InfoNCE")],
                [Term(1, "L_HN"), Term(-0.5, "InfoNCE"), Term(-0.5, "L_HN + L_tok")],
            ),
        ),
    ),
    "frozen": (
        Claim("Ḡ must be recomputed: frozen is worse.", "section 3.5, Table 3c", _better("Ḡ recomputed", "Ḡ frozen")),
    ),
    "cross-domain": (
        Claim(
            "Trained on one domain, HN-CLIP leads on the other.",
            "section 3.4, Tables A7 and A10",
            _better("HN-CLIP", *_OTHERS, transfers=True),
        ),
    ),
    "samples": (
        Claim(
            "HN-CLIP with a fifth of the data is better than GOAL with all of it.",
            "Table A9, GOAL",
            gains(("HN-CLIP, 20 %", "GOAL, 100 %")),
            given=_GOAL_LEARNT,
        ),
        Claim(
            "The lead over GOAL widens as the data shrink to 20 %.",
            "section 3.4, Table A9, GOAL",
            above([Term(1, "HN-CLIP, 20 %"), Term(-1, "GOAL, 20 %"), Term(-1, _WHOLE), Term(1, "GOAL, 100 %")]),
            given=_GOAL_LEARNT,
        ),
    ),
    "convergence": (
        Claim(
            "The first epoch of HN-CLIP exceeds the final R@1 of FineLIP, GOAL and StructXLIP.",
            "section 3.2, Figure 5",
            exceeds(_by_epoch(lambda ours, theirs: ours[1] - theirs[max(theirs)]), show="+.1f"),
            given=_LEARNT,
        ),
    ),
    "efficiency": tuple(
        Claim(
            f"HN-CLIP trains {times} times as fast as {row}.",
            "abstract, Table A3",
            exceeds(_step_ratio(row), times, ".1f"),
            only="hardware",
        )
        for row, times in (("GOAL", 2.4), ("StructXLIP", 5.4))
    ),
    "gradients": tuple(
        Claim(text, where, exceeds(values, bound, show), only="data")
        for text, where, values, bound, show in (
            (
                "InfoNCE is below 0.001 on 80 % of the batches of epoch 1.",
                "abstract, section 2.4",
                _gradients("infonce_solved", 1),
                0.8,
                ".0%",
            ),
            (
                "The gradient of InfoNCE is zero in 47 % of measurements.",
                "abstract, section 2.4",
                _gradients("infonce_zero"),
                0.47,
                ".0%",
            ),
            (
                "Where InfoNCE's gradient is not zero, L_HN's is 100 times as large.",
                "section 2.4",
                _gradients("ratio"),
                100,
                ".3g",
            ),
            (
                "The cosine of both gradients is positive in 98 % of measurements.",
                "appendix C",
                _cosine_positive,
                0.98,
                ".0%",
            ),
        )
    ),
    "geometry": tuple(
        Claim(text, "Figure 1, Table A1", exceeds(_measured("geometry", key, "mean"), bound), only="data")
        for text, key, bound in (
            ("The mean cosine between any two captions is 0.84 to 0.88.", "pairwise", 0.84),
            ("The mean cosine of a caption and its hardest negative is 0.92 to 0.94.", "hardest", 0.92),
        )
    ),
    "fixed-margin": (
        Claim("Adaptive margins beat a fixed one of the same mean.", None, _better("L_HN", "fixed margin γ·mean(Ḡ)")),
    ),
    "rivals": (Claim("L_HN beats other losses that weight negatives.", None, _better("L_HN", *_RIVALS)),),
    "negatives": (Claim("L_HN with 15 negatives beats InfoNCE with 127.", None, _better("L_HN", "InfoNCE, batch")),),
    "duplicates": (
        Claim(
            "Masking duplicates helps where captions repeat.",
            None,
            gains(("InfoNCE", "InfoNCE, not masked"), ("L_HN", "L_HN, not masked")),
            given=_REPEATED,
        ),
    ),
}
"""By the study that tests them."""
