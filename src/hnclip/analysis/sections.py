"""The sections of a diagnosis: numbers from vectors, findings and advice from numbers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from torch import Tensor

from hnclip.analysis import advice
from hnclip.analysis.batches import (
    SAMPLE,
    BatchLosses,
    Epoch,
    batch_losses,
    batch_negatives,
    batch_similarity,
    buckets,
    clustered_epoch,
    hardest_weight,
    quantile_edges,
)
from hnclip.analysis.captions import CaptionGeometry
from hnclip.analysis.gradients import gradient_summary
from hnclip.analysis.near_duplicates import near_duplicate_rows, suspect_rows
from hnclip.config import TrainConfig
from hnclip.core import NegativePairs, Problem, Record
from hnclip.data.batching import PairData
from hnclip.evaluation.metrics import recall_at
from hnclip.evaluation.ranks import ARROWS, retrieval_ranks
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.parameters import train_mode
from hnclip.report.caption_figures import Distribution, batch_figure, motivation_figure
from hnclip.report.document import Block, CaptionRows, Figure, Finding, Table, Text
from hnclip.report.results import recall_table
from hnclip.report.run_figures import gradient_figure
from hnclip.training.gradient_probe import probe_gradients
from hnclip.training.memory import PairMemory
from hnclip.training.setup import choose_precision
from hnclip.training.step import SATURATED, split_batch
from hnclip.util.console import progress
from hnclip.util.text import shorten

NEAREST = 0.1  # the share of images among which the right one should be
LOWER_SCALES = (0.5, 0.2)  # parts of the model's scale that are compared with it
STRENGTHS = np.logspace(-1, 4, 101).tolist()  # values of s·γ that are compared
SUSPECTS = 5  # pairs that the page shows; the JSON has all
Negatives = Literal["micro", "batch", "memory"]
KINDS = {"micro": "the micro-batch", "batch": "the batch", "memory": "memory, at the start"}


@dataclass(frozen=True)
class Analysed:
    """N records with T captions to a model, and the first epoch of the planned run.

    Args:
        recipe, config, negatives: of the planned run; the configuration has a memory, so that all kinds of negatives
            can be compared.
        threshold: as of `diagnose`.
        batches: on which gradients are measured; 0 measures none.
        total, chosen: records of the split, and of the random part of them that was read; `problems` are of those that
            are not among `records`, or of their captions.
        no_images: why there is no `image`; "" if there is.

    Shape:
        text [T, D], image [N, D] or None; unit vectors, on the CPU
    """

    recipe: str
    config: TrainConfig
    negatives: Negatives
    threshold: float
    batches: int
    model: DualEncoder
    split: str
    total: int
    chosen: int
    problems: Sequence[Problem]
    pairs: PairData
    text: Tensor
    image: Tensor | None
    no_images: str
    geometry: CaptionGeometry
    epoch: Epoch

    @property
    def records(self) -> Sequence[Record]:
        return self.pairs.records

    @property
    def gamma(self) -> float:
        return self.config.objective.gamma

    @property
    def scale(self) -> float:
        return self.model.scale.item()

    def require_images(self) -> Tensor:
        if self.image is None:
            raise ValueError(self.no_images)
        return self.image


@dataclass(frozen=True)
class SectionResult:
    """What a section shows, its numbers, and what follows from them; or why it is missing."""

    blocks: Sequence[Block] = ()
    numbers: Any = None
    findings: Sequence[Finding] = ()
    advice: Sequence[Finding] = ()
    missing: str = ""


def data_findings(found: Analysed) -> list[Finding]:
    """Whether the data can be used, and are enough."""
    example = next((f"{problem.kind}: {problem.where}: {problem.detail}" for problem in found.problems), "")
    cut = found.pairs.texts["caption"].truncated
    findings = (
        advice.too_few(len(found.records)),
        advice.invalid(found.chosen - len(found.records), found.chosen, shorten(example, 200)),
        advice.truncated(cut, len(found.text), found.model.context, len(_cut_groups(found))),
    )
    return [finding for finding in findings if finding is not None]


def no_conclusions(findings: Sequence[Finding]) -> str:
    """Why nothing can be advised; "" if something can."""
    blocking = (advice.TOO_FEW_TITLE, advice.CHANCE_TITLE)
    return "; ".join(f"{finding.title}: {finding.number}" for finding in findings if finding.title in blocking)


def _retrieval(found: Analysed) -> SectionResult:
    image = found.require_images()
    ranks = retrieval_ranks(image, found.text, found.pairs.owner)
    near = max(1, round(NEAREST * len(image)))
    share, chance = recall_at(ranks.text_to_image, near) / 100, near / len(image)
    recalls = {way: {f"R@{k}": recall_at(getattr(ranks, way), k) for k in (1, 5, 10)} for way in ARROWS}
    note = f"Recall in percent among all {len(image):,} images and their captions; chance is {100 / len(image):.2g} %."
    return SectionResult(
        [replace(recall_table({"before training": recalls}), notes=[note])],
        {"share_in_nearest": share, "chance": chance, **recalls},
        [advice.retrieval(share, chance, len(image))],
    )


def _similarity(found: Analysed) -> SectionResult:
    pairwise, hardest = found.geometry.pairwise, found.geometry.hardest
    distributions = (Distribution(pairwise.counts, pairwise.edges), Distribution(hardest.counts, hardest.edges))
    return SectionResult(
        [
            Figure(
                "caption-similarity",
                "Caption similarity",
                lambda: motivation_figure({found.config.data: distributions}),
                "Cosines of captions of different images: (a) all pairs, (b) each caption and its hardest negative.",
            )
        ],
        found.geometry.to_dict(),
        [advice.similarity(pairwise.mean, hardest.mean)],
    )


def _near_duplicates(found: Analysed) -> SectionResult:
    near = near_duplicate_rows(found.text, found.records, found.geometry)
    hardest = near_duplicate_rows(found.text, found.records, found.geometry, quantile=1.0, rows=2)
    return SectionResult(
        [
            Text("Captions whose hardest negative is around the 90 % quantile. Shared words are marked."),
            CaptionRows(near),
            Text("The most similar of all:"),
            CaptionRows(hardest),
        ],
        {
            name: [[{"label": item.label, "caption": item.caption} for item in row.items] for row in rows]
            for name, rows in {"near": near, "hardest": hardest}.items()
        },
    )


def _duplicates(found: Analysed) -> SectionResult:
    records, owner, cut = found.records, found.pairs.owner.tolist(), _cut_groups(found)
    ids = [record.id for record in records]
    same_text = [group for group in _groups(found.pairs.caption_ids.tolist(), owner) if group not in cut]
    same_image = None if found.image is None else _groups(found.pairs.image_ids.tolist(), range(len(records)))
    counts = {"captions": len(same_text)} | ({} if same_image is None else {"images": len(same_image)})
    suspected, suspects, threshold = found.geometry.suspected, found.geometry.suspects, found.threshold
    blocks: list[Block] = [
        Text(
            "Equal captions and equal images are no negatives of each other in training, as are captions that differ "
            "only beyond the model's context; suspected pairs are negatives. All are in report.json."
        )
    ]
    if suspects:
        blocks += [Text("The most similar suspects:"), CaptionRows(suspect_rows(suspects[:SUSPECTS], records))]
    return SectionResult(
        blocks,
        {
            "equal_captions": [[ids[owner[row]] for row in group] for group in same_text],
            "equal_captions_up_to_the_context": [[ids[owner[row]] for row in group] for group in cut],
            "equal_images": None if same_image is None else [[ids[row] for row in group] for group in same_image],
            "threshold": threshold,
            "suspected": suspected,
            "suspects": [
                {"first": ids[owner[one]], "second": ids[owner[two]], "cosine": cosine} for one, two, cosine in suspects
            ],
        },
        advice.duplicates(counts, suspected, threshold, len(found.text)),
    )


def _groups(ids: Sequence[int], owner: Sequence[int]) -> list[tuple[int, ...]]:
    """Places of equal ids that belong to more than one record."""
    places: dict[int, list[int]] = defaultdict(list)
    for place, number in enumerate(ids):
        places[number].append(place)
    return [tuple(group) for group in places.values() if len({owner[place] for place in group}) > 1]


def _cut_groups(found: Analysed) -> list[tuple[int, ...]]:
    """Groups of captions that are equal to the model only because it reads no further."""
    captions = [caption for record in found.records for caption in record.captions]
    lengths = found.pairs.texts["caption"].lengths
    return [
        group
        for group in _groups(found.pairs.caption_ids.tolist(), found.pairs.owner.tolist())
        if lengths[group[0]] >= found.model.context
        and len({" ".join(captions[row].split()).casefold() for row in group}) > 1
    ]


def _negatives(found: Analysed) -> SectionResult:
    epoch, gamma, data = found.epoch, found.gamma, found.config.data
    text, groups = found.text[epoch.chosen], epoch.groups(found.negatives)  # [N, D]
    batch = batch_negatives(text, groups, epoch.ids)
    of_all = batch_negatives(text, epoch.groups("all"), epoch.ids).hardest
    clusters = clustered_epoch(epoch, text, found.config.seed).groups(found.negatives)
    clustered = batch_negatives(text, clusters, epoch.ids).hardest
    sample = groups[: max(1, SAMPLE // groups[0].queries)]
    *weights, weight = hardest_weight(text, sample, epoch.ids, [*STRENGTHS, gamma * found.scale])
    decides = next((one / found.scale for one, share in zip(STRENGTHS, weights) if share >= advice.HALF), None)
    paper = buckets(batch.similarities)
    quantiles = buckets(batch.similarities, quantile_edges(found.geometry.pairwise))
    matrix = batch_similarity(text, epoch.batches[0][: epoch.micro_batch])
    tables = [
        Table(
            ["cosine of captions", *one.labels],
            [["share of negatives", *(f"{100 * share:.1f} %" for share in one.shares)]],
            notes=[note],
        )
        for note, one in (
            ("The paper's edges, which fit the cosines of Long-CLIP.", paper),
            ("Edges at the median, the 90 % and the 99 % quantile of all pairs, for any encoder.", quantiles),
        )
    ]
    return SectionResult(
        [
            Text(f"The first epoch of the recipe {found.recipe}, with {batch.count:,.0f} negatives of a query."),
            *tables,
            Figure(
                "one-batch",
                "One batch",
                lambda: batch_figure({data: matrix.numpy()}),
                f"Ḡ of {len(matrix)} pairs: γ times it is what L_HN adds to the scores of the negatives.",
            ),
        ],
        {
            **vars(batch),
            "similarities": batch.similarities.to_dict(),
            "hardest_in_clusters": clustered,
            "hardest_of_all": of_all,
            "hardest_weight": weight,
            "buckets": paper.to_dict(),
            "quantile_buckets": quantiles.to_dict(),
            "batch": matrix.tolist(),
        },
        advice=[
            advice.clusters(batch, clustered, of_all),
            advice.gamma(gamma, batch, found.scale, decides, weight),
        ],
    )


def _losses(found: Analysed) -> SectionResult:
    epoch, gamma, planned = found.epoch, found.gamma, found.negatives

    def measure(kind: str, part: float = 1.0) -> BatchLosses:
        pairs = (found.require_images(), found.text[epoch.chosen], epoch.ids)
        return batch_losses(*pairs, epoch.groups(kind), scale=part * found.scale, gamma=gamma)

    losses, lower = {kind: measure(kind) for kind in KINDS}, [measure(planned, part) for part in LOWER_SCALES]
    rows = [
        [
            KINDS[kind],
            f"{one.negatives:,.0f}",
            f"{one.scale:.3g}",
            f"{one.infonce_quartiles[1]:.3g}",
            f"{one.infonce_saturated:.0%}",
            f"{one.hn_quartiles[1]:.3g}",
            f"{one.hn_saturated:.0%}",
        ]
        for kind, one in [*losses.items(), *((planned, one) for one in lower)]
    ]
    headers = ["negatives from", "for a query", "scale", "InfoNCE", "saturated", "L_HN", "saturated"]
    note = f"Medians at the model's own weights, in float64; L_HN with γ {gamma:g}. Saturated: below {SATURATED:g}."
    return SectionResult(
        [Table(headers, [*rows[: len(losses)], [], *rows[len(losses) :]], notes=[note])],
        {**{kind: vars(one) for kind, one in losses.items()}, "lower_scales": [vars(one) for one in lower]},
        advice=[advice.negatives(losses, planned), advice.scale([losses[planned], *lower])],
    )


def _gradients(found: Analysed) -> SectionResult:
    """Gradients of both losses by all parameters, on the first batches of the epoch."""
    model, epoch, image = found.model, found.epoch, found.require_images()
    if not found.batches:
        raise ValueError("--gradients measures them")
    memory = _memory(found, image) if found.negatives == "memory" else None
    optim = replace(
        found.config.optim,
        precision=choose_precision(found.config.optim.precision, model.device),
        negatives=found.negatives,
        memory=0 if memory is None else SAMPLE,
    )
    pairs = found.pairs.draw(found.config.seed, 0)
    train_mode(model)
    entries = []
    with progress("measuring gradients, batches") as bar:
        for number in bar.iterate(range(min(found.batches, len(epoch.batches)))):
            rows, groups = split_batch(epoch.batches[number], optim)
            entry = probe_gradients(model, pairs.batch(rows), optim, groups, memory, gamma=found.gamma)
            if not math.isfinite(entry["infonce_norm"] + entry["hn_norm"]):
                raise ValueError(f"a gradient of batch {number + 1} is not a number")
            entries.append({"epoch": 1, "step": number, **entry})
    model.eval()
    summary = gradient_summary(entries)
    figure = Figure(
        "gradients",
        "Gradients before the first step",
        lambda: gradient_figure(entries, None),
        "Both losses and their gradients by all parameters; a step is a batch.",
    )
    return SectionResult([summary.table(), figure], {"summary": vars(summary), "measurements": entries})


def _memory(found: Analysed, image: Tensor) -> PairMemory:
    """The memory of the planned run at its start."""
    rows, model = found.epoch.memory, found.model
    text = found.text[found.epoch.chosen[rows]]  # [M, D]
    image, text = (vectors.to(model.device, model.dtype) for vectors in (image[rows], text))
    return PairMemory(len(rows), NegativePairs(image, text, found.epoch.ids[rows].to(model.device)), rows)


SECTIONS: dict[str, tuple[str, Callable[[Analysed], SectionResult]]] = {
    "retrieval": ("Retrieval", _retrieval),
    "similarity": ("Similarity of captions", _similarity),
    "near_duplicates": ("Near-duplicates", _near_duplicates),
    "duplicates": ("Duplicates and suspected false negatives", _duplicates),
    "negatives": ("Negatives of a batch", _negatives),
    "losses": ("Losses before the first step", _losses),
    "gradients": ("Gradients before the first step", _gradients),
}
