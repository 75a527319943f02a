"""The report of a diagnosis: what was found, what it means, what to do; then the numbers and pictures behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from hnclip.analysis.figures import (
    batch_figure,
    bucket_figure,
    gradient_figure,
    motivation_figure,
    near_duplicate_figure,
    scale_grid_figure,
)
from hnclip.analysis.gradient_dynamics import gradient_dynamics
from hnclip.analysis.histogram import Histogram
from hnclip.analysis.near_duplicates import NAME, shorten
from hnclip.analysis.report import (
    Beside,
    Block,
    Companions,
    Drawing,
    Findings,
    Gap,
    Section,
    Table,
    Text,
    write_report,
)
from hnclip.analysis.saturation import BatchLosses
from hnclip.diagnose.found import Found
from hnclip.train.step import SATURATED

NOT_SEARCHED = "not looked for"
SHOWN = 10  # groups, and records of each, that the page lists
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def write_page(out: Path, found: Found) -> Path:
    """`report.html`, `report.json` and the figures, in `out`."""
    return write_report(
        out,
        title=f"Diagnosis of {found.data}",
        summary=[
            f"{found.captions:,} captions of {found.records:,} pictures ({found.split}), seen through {found.model}.",
            "Nothing of the model was changed. Numbers are of this model and these captions; another encoder sees "
            "other near-duplicates.",
        ],
        sections=[
            Section("What was found, and what to do", [Findings(found.findings()), *_left_out(found)]),
            Section("How alike the captions are", list(_geometry(found))),
            Section("Negatives in a batch", list(_negatives(found))),
            Section("Near-duplicates", list(_near_duplicates(found))),
            Section("What a margin must not push apart", list(_repeats(found))),
            Section("Losses before the first step", list(_start(found))),
            Section("Gradients", list(_gradients(found))),
            Section("What heads on frozen features promise", list(_probe(found))),
        ],
        data=found.to_dict(),
    )


def _left_out(found: Found) -> Iterator[Block]:
    if found.left_out:
        yield Text(
            f"{found.left_out:,} records could not be used and are in none of these numbers; "
            "hnclip data check lists them."
        )


def _geometry(found: Found) -> Iterator[Block]:
    pairwise, hardest = found.geometry.pairwise, found.geometry.hardest
    yield Drawing(
        "Caption similarity",
        motivation_figure({found.data: (pairwise, hardest)}),
        "Cosines between captions of different pictures: (a) all pairs, (b) each caption with its most similar "
        "companion. The pairs in (b) would get the largest margins.",
    )
    yield Table(
        [
            ["cosine", "mean", *(f"{100 * share:g} %" for share in _QUANTILES), "values"],
            _quantiles("any two captions", pairwise),
            _quantiles("the most similar companion", hardest),
        ],
        _sampled(pairwise, hardest),
    )


def _quantiles(name: str, histogram: Histogram) -> list[str]:
    values = (histogram.mean, *(histogram.quantile(share) for share in _QUANTILES))
    return [name, *(f"{value:.3f}" for value in values), f"{histogram.total:,}"]


def _sampled(pairwise: Histogram, hardest: Histogram) -> str:
    if not pairwise.error and not hardest.error:
        return "Every pair was compared."
    said = [
        f"{name} to ±{100 * histogram.error:.2g} points"
        for name, histogram in (("all pairs", pairwise), ("companions", hardest))
        if histogram.error
    ]
    return f"Too many pairs to compare all: shares are from a sample, {' and '.join(said)} with 95 % confidence."


def _negatives(found: Found) -> Iterator[Block]:
    negatives = found.negatives
    if negatives is None:
        yield Gap(found.gaps["batches"])
        return
    yield Text(
        "One epoch of batches as training would deal them. Each negative of a pair would get γ times the similarity of "
        f"its caption as a margin: {found.gamma * negatives.similarities.mean:.3f} in the mean with γ {found.gamma:g}."
    )
    for buckets, note in (
        (negatives.paper, "Edges as in the paper, which are made for Long-CLIP's cosines."),
        (negatives.quantiles, "Edges at the median, the 90 % and the 99 % quantile of all pairs, for any encoder."),
    ):
        shares = [f"{100 * share:.1f} %" for share in buckets.shares]
        yield Table([["negatives with a caption similarity", *buckets.labels], ["share", *shares]], note)
    yield Drawing(
        "Hardness of negatives",
        bucket_figure({found.data: negatives.paper.shares}, negatives.paper.labels),
        "In-batch negatives by the similarity of their captions.",
    )
    yield Drawing(
        "One batch",
        batch_figure({found.data: negatives.batch.numpy()}),
        f"The similarities Ḡ of {len(negatives.batch)} pairs that meet in the first batch: times γ, this is what L_HN "
        "adds to the scores of the negatives.",
    )


def _near_duplicates(found: Found) -> Iterator[Block]:
    yield Text(
        "Captions around the 90 % quantile of the hardest companions: striking, not extreme. Shared words marked."
    )
    yield Companions(found.near)
    yield Text("The most similar of all:")
    yield Companions(found.hardest)
    if found.near:
        yield Beside("Near-duplicates", near_duplicate_figure(found.near))


def _repeats(found: Found) -> Iterator[Block]:
    repeats = found.repeats
    pictures = NOT_SEARCHED if repeats.same_image is None else f"{len(repeats.same_image):,}"
    suspected = NOT_SEARCHED if repeats.suspected_count is None else f"{repeats.suspected_count:,}"
    yield Table(
        [
            ["what", "count", "in training"],
            ["groups of records with one caption", f"{len(repeats.same_text):,}", "never each other's negatives"],
            ["groups of records with one picture", pictures, "never each other's negatives"],
            [
                f"other pairs of captions with a cosine of at least {repeats.threshold:g}",
                suspected,
                "negatives, with the largest margins",
            ],
        ]
    )
    for what, groups in (("one caption", found.same_text), ("one picture", found.same_image or [])):
        if groups:
            listed = [
                ["group", "records"],
                *([str(number), _listed(ids)] for number, ids in enumerate(groups[:SHOWN], 1)),
            ]
            more = f"The first {SHOWN} of {len(groups):,}; report.json has all." if len(groups) > SHOWN else ""
            yield Text(f"Records with {what}, to the model:")
            yield Table(listed, more)
    if found.suspected:
        yield Text("The suspected pairs that are most alike:")
        yield Companions(found.suspected)


def _listed(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - SHOWN:,} more" if len(ids) > SHOWN else ""
    return ", ".join(shorten(name, NAME) for name in ids[:SHOWN]) + more


def _start(found: Found) -> Iterator[Block]:
    if found.start is None:
        yield Gap(found.gaps.get("start", _no_pictures(found)))
        return
    yield Table(
        [
            ["negatives from", "per pair", "batches", "InfoNCE, median", "solved", "L_HN, median", "solved"],
            _losses("the micro-batch", found.start.micro),
            _losses("the whole batch", found.start.batch),
        ],
        f"One epoch at the model's own weights, in float64. Solved: a loss below {SATURATED:g}.",
    )


def _no_pictures(found: Found) -> str:
    """Why what the probe needs is not there."""
    return found.gaps.get("probe", "pictures were not looked at (--no-probe)")


def _losses(name: str, losses: BatchLosses) -> list[str]:
    return [
        name,
        f"{losses.negatives:.0f}",
        f"{len(losses.infonce):,}",
        f"{losses.infonce.median():.2g}",
        f"{losses.infonce_saturated:.0%}",
        f"{losses.hn.median():.2g}",
        f"{losses.hn_saturated:.0%}",
    ]


def _gradients(found: Found) -> Iterator[Block]:
    if found.gradients is not None:
        dynamics = gradient_dynamics(found.gradients)
        yield Text("At the model's own weights, on the first batches of an epoch, by all parameters.")
        yield Table(dynamics.rows(), _sentence(dynamics.notes()))
        yield Drawing(
            "Gradients at the start",
            gradient_figure(found.gradients, None, unit="batch"),
            "Both losses and their gradients, batch by batch. Saturation is the share of loss evaluations, one for "
            "each micro-batch where negatives come from those.",
        )
    else:
        reason = "gradients were not asked for: --gradients measures them at the model's weights"
        yield Gap(found.gaps.get("gradients", reason))
    if found.fractions:
        yield from _runs(found)
    for part, reason in found.gaps.items():
        if part.startswith("gradients along"):
            yield Gap(f"{part}: {reason}")


def _runs(found: Found) -> Iterator[Block]:
    runs = {name: gradient_dynamics(run.gradients) for name, run in found.fractions.items()}
    header = ["training pairs", *next(iter(runs.values())).rows()[0][1:]]
    last, run = list(found.fractions.items())[-1]
    yield Text("Along runs with L_HN on shares of the training pairs, at every fifth step.")
    yield Table(
        [header, *([name, *dynamics.rows()[-1][1:]] for name, dynamics in runs.items())], _sentence(runs[last].notes())
    )
    yield Drawing(
        "Gradients along runs",
        scale_grid_figure({(name, found.data): run.gradients for name, run in found.fractions.items()}),
        "Losses, gradient norms and their ratio, cosine between the gradients, over the steps of each run.",
    )
    yield Drawing(
        "Gradients by epoch",
        gradient_figure(run.gradients, run.evaluations),
        f"The run on {last}: medians and quartiles of its epochs, and retrieval on the validation split.",
    )


def _sentence(notes: list[str]) -> str:
    said = "; ".join(notes)
    return f"{said[:1].upper()}{said[1:]}."


def _probe(found: Found) -> Iterator[Block]:
    if found.probe is None:
        yield Gap(_no_pictures(found))
        return
    yield Text(
        "Both towers stay as they are; a linear map behind each is trained on their vectors, once with InfoNCE and "
        "once with L_HN, from the same seeds and batches. What was chosen (learning rate, epoch, γ) was chosen on "
        "training pairs; the held-out pairs measured only. How far such a promise can be trusted is in "
        "docs/diagnose.md."
    )
    yield Table(found.probe.rows(), f"{found.probe.sentence()}.")
