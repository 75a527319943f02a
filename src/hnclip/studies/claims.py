"""The paper's claims, as data, each with the study that tests it and how; and the questions of the controls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hnclip.studies.catalogue import STUDIES
from hnclip.studies.checks import (
    NOT_ABOVE_UNTRAINED,
    Check,
    Number,
    Provided,
    Term,
    best_under_every_seed,
    better,
    first_epoch_beats_last,
    gains,
    numbers,
    positive,
    same,
)

_OTHERS = ("FineLIP", "GOAL", "StructXLIP")
_GAMMAS = ("γ 0.25", "γ 0.5", "γ 0.75", "γ 1")
_WHOLE = "HN-CLIP, 100 %"  # the runs with all the data, as the paper's of these numbers
_SHARES = tuple(row.name for row in STUDIES["gradients"].rows)
# To beat a method that fine-tuning made worse is no sign of needing less data.
_GOAL_LEARNT = Provided([[Term(1, "GOAL, 100 %"), Term(-1, "zero-shot")]], NOT_ABOVE_UNTRAINED)


@dataclass(frozen=True)
class Claim:
    """What is claimed, where the paper says it (None for a question that it does not ask), and how it is tested."""

    text: str
    where: str | None
    study: str
    check: Check


def _dynamics(name: str, measurements: str = "measurements") -> Any:
    """A number of `Dynamics` from the show of gradients, of the runs with all the data, by place."""

    def values(data: Mapping[str, Any]) -> dict[str, Number]:
        runs = data["gradients"]["runs"]
        whole = {place: found for place, found in runs.items() if place.endswith(", 100 %")}
        return {place: Number(found[name], found[measurements]) for place, found in whole.items()}

    return values


def _all_dynamics(name: str) -> Any:
    """The same of all runs together."""

    def values(data: Mapping[str, Any]) -> dict[str, Number]:
        found = data["gradients"].get("all")
        return {} if found is None else {"all runs": Number(found[name], found["measurements"])}

    return values


def _ratio(row: str) -> Any:
    """A row's time over HN-CLIP's, from the show of efficiency."""

    def values(data: Mapping[str, Any]) -> dict[str, Number]:
        rows = {found["row"]: found for found in data["efficiency"]["rows"]}
        return {row: Number(rows[row]["over_hn_clip"] if row in rows else None)}

    return values


def _geometry(name: str) -> Any:
    def values(data: Mapping[str, Any]) -> dict[str, Number]:
        return {domain: Number(found[name]) for domain, found in data["geometry"]["domains"].items()}

    return values


FINE_TUNING = Claim(
    "Fine-tuning with plain InfoNCE improves on the model as it comes.",
    None,
    "main",
    better("InfoNCE", "zero-shot"),
)

CLAIMS = (
    Claim(
        "Captions are nearly alike to the encoder: mean cosine 0.84 to 0.88 between any two (the paper: of its test "
        "captions; here of the training captions).",
        "Figure 1, Table A1",
        "geometry",
        numbers("mean cosine", _geometry("pairwise"), at_least=0.84),
    ),
    Claim(
        "Every caption has a nearly identical companion: mean cosine 0.92 to 0.94 with the hardest one (the paper: of "
        "its test captions; here of the training captions).",
        "Figure 1, Table A1",
        "geometry",
        numbers("mean cosine with the hardest", _geometry("hardest"), at_least=0.92),
    ),
    Claim(
        "InfoNCE saturates: on 80 % of batches it is below 0.001 within the first epoch.",
        "abstract, section 2.4",
        "gradients",
        numbers(
            "share of batches below 0.001",
            _dynamics("infonce_solved_first_epoch", "measurements_first_epoch"),
            at_least=0.8,
            logs=("gradients", [_WHOLE]),
        ),
    ),
    Claim(
        "The gradient of InfoNCE is numerically zero in 47 % of measurements.",
        "abstract, section 2.4",
        "gradients",
        numbers("share of zero gradients", _dynamics("infonce_zero"), at_least=0.47, logs=("gradients", [_WHOLE])),
    ),
    Claim(
        "Where the gradient of InfoNCE is not zero, that of L_HN is 100 times as large or more (median).",
        "section 2.4, appendix C",
        "gradients",
        numbers(
            "median ratio of norms",
            _dynamics("ratio"),
            at_least=100,
            form="{:.3g}",
            logs=("gradients", [_WHOLE]),
        ),
    ),
    Claim(
        "Both gradients point into compatible directions: their cosine is positive on 98 % of measurements.",
        "section 2.4, appendix C",
        "gradients",
        numbers(
            "share of positive cosines",
            _all_dynamics("cosine_positive"),
            at_least=0.98,
            logs=("gradients", _SHARES),
        ),
    ),
    Claim(
        "HN-CLIP is better than FineLIP, GOAL and StructXLIP on every benchmark.",
        "abstract, Table 1",
        "main",
        better("HN-CLIP", *_OTHERS),
    ),
    Claim(
        "HN-CLIP is better than plain fine-tuning with InfoNCE.",
        "Tables 2 and 3b",
        "main",
        better("HN-CLIP", "InfoNCE"),
    ),
    Claim(
        "The lead over FineLIP, GOAL and StructXLIP is largest at R@1 and smaller at deeper ranks (here R@10).",
        "section 3.2",
        "ranks",
        positive(
            *(
                [Term(1, "HN-CLIP", 1), Term(-1, other, 1), Term(-1, "HN-CLIP", 10), Term(1, other, 10)]
                for other in _OTHERS
            ),
            provided=Provided(
                [[Term(1, "HN-CLIP"), Term(-1, other)] for other in _OTHERS], "there is no clear lead at R@1 here"
            ),
        ),
    ),
    Claim(
        "The first epoch of HN-CLIP exceeds the final accuracy of FineLIP, GOAL and StructXLIP.",
        "section 3.2, Figure 5",
        "convergence",
        first_epoch_beats_last("HN-CLIP", *_OTHERS),
    ),
    Claim(
        "L_HN improves all six frameworks.",
        "abstract, Table 2",
        "plug",
        gains(("L_HN", "InfoNCE"), *((f"{name} + L_HN", name) for name in (*_OTHERS, "LoRA", "DoRA"))),
    ),
    Claim(
        "What was learnt on one domain leads on the other as well.",
        "section 3.4, Tables A7 and A10",
        "transfer",
        better("HN-CLIP", *_OTHERS),
    ),
    Claim(
        "A fifth of the data is enough to beat GOAL trained on all of it.",
        "abstract, Figure 6, Table A9",
        "samples",
        better("HN-CLIP, 20 %", "GOAL, 100 %", provided=_GOAL_LEARNT),
    ),
    Claim(
        "The lead over GOAL widens as data shrink to 20 %.",
        "section 3.4, Table A9",
        "samples",
        positive(
            [Term(1, "HN-CLIP, 20 %"), Term(-1, "GOAL, 20 %"), Term(-1, "HN-CLIP, 100 %"), Term(1, "GOAL, 100 %")],
            provided=_GOAL_LEARNT,
        ),
    ),
    Claim(
        "Every γ from 0.25 to 1 beats γ = 0 in-domain.",
        "section 3.5, Table 3a",
        "gamma",
        gains(*((gamma, "γ 0") for gamma in _GAMMAS)),
    ),
    Claim(
        "Which γ it is matters little: 0.25 and 1 are alike (within 1 point, which is this project's reading).",
        "section 3.5, Table 3a",
        "gamma",
        same("γ 0.25", "γ 1"),
    ),
    Claim(
        "The token term on its own leaves accuracy where InfoNCE left it (within 1 point, which is this project's "
        "reading).",
        "section 3.5, Table 3b",
        "components",
        same("InfoNCE + L_tok", "InfoNCE"),
    ),
    Claim(
        "L_HN on its own brings the bulk of the gain (at least half of it).",
        "section 3.5, Table 3b",
        "components",
        positive(
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
        "seeds",
        best_under_every_seed("HN-CLIP", *_OTHERS),
    ),
    Claim(
        "HN-CLIP trains 2.4 times as fast as GOAL.",
        "abstract, Table A3",
        "efficiency",
        numbers("time of a step over HN-CLIP's", _ratio("GOAL"), at_least=2.4),
    ),
    Claim(
        "HN-CLIP trains 5.4 times as fast as StructXLIP.",
        "abstract, Table A3",
        "efficiency",
        numbers("time of a step over HN-CLIP's", _ratio("StructXLIP"), at_least=5.4),
    ),
    FINE_TUNING,
    Claim(
        "Adaptive margins beat one fixed margin of the same mean.",
        None,
        "fixed-margin",
        better("L_HN", "fixed margin γ·mean(Ḡ)"),
    ),
    Claim(
        "L_HN beats rival losses that weigh negatives.",
        None,
        "rivals",
        better("L_HN", "score margin", "HN-NCE", "HCL", "debiased", "max hinge", "sigmoid"),
    ),
    Claim(
        "L_HN with 15 negatives beats InfoNCE with 127.",
        None,
        "negatives",
        better("L_HN", "InfoNCE, batch"),
    ),
    Claim(
        "Masking duplicates helps where captions repeat.",
        None,
        "duplicates",
        gains(("InfoNCE", "InfoNCE, not masked"), ("L_HN", "L_HN, not masked")),
    ),
)
