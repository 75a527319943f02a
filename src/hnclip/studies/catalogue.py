"""Every table and figure of the paper, and controls that it lacks, as data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hnclip.config import GlobalLoss
from hnclip.studies.spec import Study, Variant

DEEP = (1, 5, 10, 25, 50)  # ranks of the main comparison
MEMORY = 1024  # pairs of the memory in the study of the margin family

ZERO_SHOT = Variant("zero-shot", trained=False, published=("Long-CLIP", "released checkpoint"))
HN_CLIP = Variant("HN-CLIP", method="hn_clip", published=("HN-CLIP", ""))
FINELIP = Variant("FineLIP", method="finelip", published=("FineLIP", ""))
GOAL = Variant("GOAL", method="goal", published=("GOAL", ""))
SMARTCLIP = Variant("SmartCLIP", method="smartclip")
STRUCTXLIP = Variant("StructXLIP", method="structxlip", published=("StructXLIP", ""))
LORA = Variant("LoRA", method="lora", published=("LoRA", "with InfoNCE"))
DORA = Variant("DoRA", method="dora", published=("DoRA", "with InfoNCE"))


def _alone(name: str, loss: GlobalLoss | None = None, *against: str, **more: Any) -> Variant:
    """A global term alone, without the token term: L_HN, or the loss that is named."""
    changes = {"objective.token_weight": 0.0, **more.pop("set", {})}
    return Variant(name, method="hn_clip", global_loss=loss, set=changes, against=against, **more)


def _against(variant: Variant, *others: str, **more: Any) -> Variant:
    return replace(variant, against=others, **more)


INFONCE = _alone("InfoNCE", "infonce", published=("Long-CLIP", "fine-tuned with InfoNCE"))
L_HN = _alone("L_HN", None, "InfoNCE", published=("Long-CLIP", "with L_HN"))
MAIN = (
    *(ZERO_SHOT, INFONCE, FINELIP, GOAL, STRUCTXLIP),
    _against(HN_CLIP, "InfoNCE", "FineLIP", "GOAL", "StructXLIP"),
)


def _with_hn(variant: Variant) -> Variant:
    """A method with L_HN as its global loss."""
    published = variant.published and (variant.published[0], "with L_HN")
    name = f"{variant.name} + L_HN"
    return replace(variant, name=name, global_loss="hn", against=(variant.name,), published=published)


_FRACTIONS = (0.05, 0.2, 0.5, 1.0)


def _at(variant: Variant, fraction: float, *others: str) -> Variant:
    """A row trained on a share of the data."""
    percent = f"{100 * fraction:g} %"
    return replace(
        variant,
        name=f"{variant.name}, {percent}",
        set={**variant.set, "fraction": fraction},
        against=tuple(f"{other}, {percent}" for other in others),
        series=variant.name,
        x=fraction,
        published=variant.published and (variant.published[0], f"{percent} of the training data"),
    )


def _gamma(gamma: float) -> Variant:
    return replace(
        HN_CLIP,
        name=f"γ {gamma:g}",
        set={"objective.gamma": gamma},
        against=("γ 0",) if gamma else (),
        series="HN-CLIP",
        x=gamma,
        published=("HN-CLIP", f"γ = {gamma:g}" if gamma != 1 else "γ = 1.0"),
    )


def _fixed_scale(scale: float) -> Variant:
    changes = {"optim.scale": scale, "optim.scale_lr": 0.0}
    return _alone(f"InfoNCE, scale {scale:g}", "infonce", "InfoNCE", set=changes)


def _memory(gamma: float) -> Variant:
    """L_HN with further negatives from a memory; γ 0 is InfoNCE."""
    changes = {"optim.negatives": "memory", "optim.memory": MEMORY, "objective.gamma": gamma}
    other = "memory, γ 0" if gamma else "InfoNCE"
    return _alone(f"memory, γ {gamma:g}", None, other, set=changes, series="memory", x=gamma)


FIXED = _alone("fixed margin γ·mean(Ḡ)", "fixed_margin", "InfoNCE", matched=True)
_BATCH = {"optim.negatives": "batch"}  # 127 negatives instead of 15
INFONCE_BATCH = _alone("InfoNCE, batch", "infonce", "InfoNCE", set=_BATCH)
L_HN_BATCH = _alone("L_HN, batch", None, "InfoNCE, batch", set=_BATCH)

_STUDIES = (
    Study(
        "main",
        "Main comparison",
        "Does HN-CLIP retrieve better than other ways of fine-tuning the same model?",
        MAIN,
        parts=("recalls", "seeds"),
        ks=DEEP,
        seeds=3,
        tables=("1", "2", "A8", "A11"),
    ),
    Study(
        "plug",
        "Plug-and-play",
        "Does a method gain when L_HN replaces its global loss, and nothing else changes?",
        (
            *(INFONCE, L_HN),
            *(row for method in (FINELIP, GOAL, STRUCTXLIP, LORA, DORA) for row in (method, _with_hn(method))),
        ),
        tables=("A4",),
    ),
    Study(
        "gamma",
        "Boost strength γ",
        "How sensitive is HN-CLIP to γ?",
        tuple(map(_gamma, (0.0, 0.25, 0.5, 0.75, 1.0))),
        parts=("recalls", "curve"),
        seeds=3,
        tables=("A6",),
    ),
    Study(
        "components",
        "Loss components",
        "What does each of the two terms contribute?",
        (
            replace(INFONCE, published=("HN-CLIP", "InfoNCE alone")),
            _against(
                HN_CLIP,
                "InfoNCE",
                name="InfoNCE + L_tok",
                set={"objective.gamma": 0.0},
                published=("HN-CLIP", "InfoNCE and L_tok"),
            ),
            replace(L_HN, published=("HN-CLIP", "L_HN alone")),
            _against(HN_CLIP, "InfoNCE", "L_HN", name="L_HN + L_tok", published=("HN-CLIP", "L_HN and L_tok")),
        ),
        tables=("A5",),
    ),
    Study(
        "frozen",
        "Ḡ recomputed or frozen",
        "Must caption similarities follow the encoder as it learns?",
        (
            _against(HN_CLIP, "Ḡ frozen", name="Ḡ recomputed", published=("HN-CLIP", "Ḡ recomputed")),
            replace(
                HN_CLIP,
                name="Ḡ frozen",
                set={"objective.margin_source": "frozen"},
                published=("HN-CLIP", "Ḡ frozen at the start"),
            ),
        ),
        parts=("recalls", "epochs"),
        tables=("A2",),
    ),
    Study(
        "cross-domain",
        "Cross-domain matrix",
        "Does what was learnt on one domain hold for images and captions of another?",
        MAIN,
        columns="all",
        ks=DEEP,
        tables=("A7", "A10"),
    ),
    Study(
        "samples",
        "Sample efficiency",
        "How much of the data is needed? Smaller shares lie inside larger ones, the same for every method.",
        (
            ZERO_SHOT,
            *(
                _at(method, fraction, *others)
                for fraction in _FRACTIONS
                for method, *others in ((INFONCE,), (GOAL,), (HN_CLIP, "InfoNCE", "GOAL"))
            ),
        ),
        parts=("recalls", "samples"),
        tables=("A9",),
    ),
    Study(
        "convergence",
        "Convergence",
        "How fast does each method reach its accuracy, in either direction?",
        MAIN[1:],
        parts=("convergence",),
    ),
    Study(
        "efficiency",
        "Training efficiency",
        "What does a training step cost?",
        (INFONCE, _memory(0.0), FINELIP, GOAL, SMARTCLIP, STRUCTXLIP, HN_CLIP),
        parts=("step_time",),
    ),
    Study(
        "gradients",
        "Gradient dynamics across data scales",
        "Does InfoNCE run out of gradient, and does L_HN not?",
        tuple(_at(HN_CLIP, fraction) for fraction in _FRACTIONS),
        parts=("gradients",),
        probe=True,
    ),
    Study(
        "geometry",
        "Caption geometry",
        "How similar are the captions to the model before training?",
        (),
        parts=("geometry",),
    ),
    Study(
        "retrievals",
        "Retrievals that differ",
        "What do the differences look like?",
        (INFONCE, _against(HN_CLIP, "InfoNCE")),
        parts=("retrievals",),
    ),
    Study(
        "fixed-margin",
        "Control: the same margin for every negative",
        "Does the adaptivity of the margin matter, or only its size?",
        (INFONCE, FIXED, _against(L_HN, "InfoNCE", FIXED.name)),
        seeds=3,
    ),
    Study(
        "family",
        "Control: margin, adaptivity, scale, number of negatives",
        "Which of these do the data need?",
        (  # Each comparison answers one question.
            ZERO_SHOT,
            INFONCE,
            FIXED,  # a margin
            _alone("adaptive part alone", None, "InfoNCE", set={"objective.center": "mean"}),  # adaptivity, no margin
            # L_HN is both: the first comparison shows what adaptivity adds to a margin, the second the reverse.
            _against(L_HN, FIXED.name, "adaptive part alone", "InfoNCE"),
            _against(HN_CLIP, "InfoNCE", "L_HN"),  # the token term
            *map(_fixed_scale, (20.0, 50.0, 100.0)),  # scale
            INFONCE_BATCH,  # more negatives
            L_HN_BATCH,  # the margin, given more negatives
            *map(_memory, (0.0, 0.25, 0.5)),  # even more negatives, and the margin, given these
        ),
        seeds=3,
    ),
    Study(
        "rivals",
        "Control: rival hard-negative losses",
        "Do other losses that weight negatives do as well?",
        (
            INFONCE,
            _alone("score margin", "score_margin", "L_HN"),
            _alone("HN-NCE", "hn_nce", "L_HN"),
            _alone("HCL", "hcl", "L_HN"),
            _alone("debiased", "debiased", "L_HN"),
            _alone("max hinge", "max_hinge", "L_HN"),
            _alone("sigmoid", "sigmoid", "L_HN"),
            L_HN,
        ),
    ),
    Study(
        "negatives",
        "Control: negatives of the micro-batch or of the batch",
        "Do more negatives replace the margin?",
        (
            *(INFONCE, INFONCE_BATCH),
            _against(L_HN, "InfoNCE", "InfoNCE, batch"),
            _against(L_HN_BATCH, "InfoNCE, batch", "L_HN"),
        ),
    ),
    Study(
        "duplicates",
        "Control: masking of duplicates",
        "Does it matter that the same caption or image is a negative of itself?",
        (
            _alone("InfoNCE, not masked", "infonce", set={"objective.mask_duplicates": False}),
            _against(INFONCE, "InfoNCE, not masked"),
            _alone("L_HN, not masked", set={"objective.mask_duplicates": False}),
            _against(L_HN, "L_HN, not masked"),
        ),
        parts=("duplicates", "recalls"),
    ),
    Study(
        "held-out",
        "Control: held-out images alone",
        "How much of a recall is due to training pairs in the gallery, as in Long-DCI?",
        (ZERO_SHOT, INFONCE, _against(HN_CLIP, "InfoNCE")),
        parts=("held_out",),
        whole=True,
    ),
    Study(
        "selection",
        "Control: how the epoch is chosen",
        "How much does choosing the epoch on the test split flatter a result?",
        (INFONCE, HN_CLIP),
        parts=("selection",),
        watch=True,
    ),
)

STUDIES: dict[str, Study] = {study.name: study for study in _STUDIES}

# Data of the studies in docs/results.md (recipe `results`): controls have one domain.
RESULTS_DATA: dict[str, tuple[str, ...]] = {
    "all": ("scenes/park", "scenes/shelf"),
    **dict.fromkeys(("rivals", "negatives", "selection"), ("scenes/park",)),
    "duplicates": ("scenes/park/doubles",),
}
RESULTS_FIELDS = {"duplicates": {"optim.accumulate": 2}}  # more steps for fewer pairs
