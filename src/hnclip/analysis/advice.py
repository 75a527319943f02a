"""Findings and advice: what a number means for a run, and what to try.

Every function takes the numbers that it speaks of. All thresholds are here. No advice promises a gain: two runs and
`hnclip compare` measure one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hnclip.analysis.batches import CLUSTER, BatchLosses, BatchNegatives
from hnclip.report.document import Finding, Level
from hnclip.training.step import SATURATED
from hnclip.util.text import counted

TOO_FEW = 100  # records: a share of fewer is uncertain by more than 10 points (95 %)
CLEAR, DEVIATIONS = 2.0, 3.0  # times the chance, and its standard deviations above it, that a retrieval must reach
FEW = 0.01  # share of invalid records from which training refuses the data; of truncated captions that is no concern
SMALL = 0.5  # deviations of a query's negatives that clusters must add to the hardest one to be worth a run
ONE_NAT = 1.0  # margins that differ by less, times the scale, weigh negatives within a factor of e
HALF = 0.5  # share of a query's weight from which one negative decides
SATURATION = 0.5  # share of loss evaluations below SATURATED from which InfoNCE is called saturated
PAPER_PAIRWISE, PAPER_HARDEST = (0.84, 0.88), (0.92, 0.94)  # table s1, with Long-CLIP-L

TOO_FEW_TITLE = "Too few records to conclude anything"
CHANCE_TITLE = "The model is at chance on these data"


def too_few(records: int) -> Finding | None:
    if records >= TOO_FEW:
        return None
    meaning = f"A share of fewer than {TOO_FEW} records is uncertain by more than 10 points."
    return Finding("act", TOO_FEW_TITLE, counted(records, "record"), meaning, "Use more data.")


def retrieval(share: float, chance: float, images: int) -> Finding:
    """Whether the model can relate the images and captions at all.

    Args:
        share: of captions whose image is among the nearest; `chance` is the share of images that are. It must be
            clearly above chance: captions of one image are not independent, so the deviation of chance is that of as
            many queries as there are images.
    """
    number = f"{share:.0%} of captions, where chance is {chance:.0%}"
    meaning = f"Captions whose image is among the nearest {chance:.0%} of {images:,}."
    if share >= max(CLEAR * chance, chance + DEVIATIONS * math.sqrt(chance * (1 - chance) / images)):
        return Finding("good", "The model knows these images", number, meaning)
    meaning += " Losses and gradients say nothing about a model that knows these images."
    advice = "Try another --model, and look at some pairs: does each caption describe its image?"
    return Finding("act", CHANCE_TITLE, number, meaning, advice)


def invalid(count: int, total: int, example: str) -> Finding | None:
    if not count:
        return None
    meaning = f"They are not analysed, and training refuses more than {FEW:.0%}. The first problem: {example}"
    number, advice = f"{count:,} of {total:,}", "hnclip data check lists them."
    level: Level = "note" if count <= FEW * total else "act"
    return Finding(level, "Invalid records", number, meaning, advice)


def truncated(count: int, captions: int, context: int, equal: int) -> Finding | None:
    """Captions longer than the context; `equal` groups of them differ only beyond it."""
    if not count:
        return None
    meaning = f"{count:,} of {captions:,} are longer than {context} tokens. The rest is not read."
    if equal:
        meaning += f" {counted(equal, 'group')} of captions differ only there."
    advice = "Use a model with a longer context (--context stretches CLIP's, hnclip docs models)."
    level: Level = "note" if count <= FEW * captions else "act"
    return Finding(level, "Truncated captions", f"{count / captions:.1%} of captions", meaning, advice)


def similarity(pairwise: float, hardest: float) -> Finding:
    """Mean cosine of all pairs of captions, and of each with its hardest negative."""
    high = hardest >= PAPER_HARDEST[0]
    return Finding(
        "note",
        "Most captions have a near-duplicate" if high else "Captions are less similar than on the paper's benchmarks",
        f"{pairwise:.2f} on average, {hardest:.2f} to the hardest negative",
        f"Cosines of captions of different images. To Long-CLIP-L, those of the paper's benchmarks are "
        f"{PAPER_PAIRWISE[0]} to {PAPER_PAIRWISE[1]} and {PAPER_HARDEST[0]} to {PAPER_HARDEST[1]}; other encoders have "
        "other ranges.",
    )


def duplicates(counts: Mapping[str, int], suspected: int, threshold: float, captions: int) -> list[Finding]:
    """Groups of records with equal captions or images (`counts`, of what was compared), and suspected pairs."""
    found = []
    if any(counts.values()):
        number = ", ".join(f"{counted(count, 'group')} of equal {what}" for what, count in counts.items())
        meaning = "No model can tell them apart. Training masks them; in an evaluation one of them counts as wrong."
        advice = "Merge the records, or write captions that differ (report.json and hnclip data check list them)."
        found.append(Finding("act", "Duplicates", number, meaning, advice))
    if suspected:
        number = f"{counted(suspected, 'pair')} from {threshold:g} on"
        meaning = (
            "Captions of different records with so high a cosine are negatives with the largest margins: right if they "
            "differ in a detail, wrong if they describe the same."
        )
        advice = "Look at the pairs, and merge the records of those that describe the same."
        if suspected > captions:
            meaning = f"They are more than the {captions:,} captions: to this encoder so high a cosine is not unusual."
            advice = "Raise --threshold, or use a model that knows such captions."
        found.append(Finding("act", "Suspected false negatives", number, meaning, advice))
    if not found:
        meaning = f"No equal {' or '.join(counts)}, and no captions with a cosine of {threshold:g} or more."
        found.append(Finding("good", "No duplicates", "0", meaning))
    return found


def negatives(losses: Mapping[str, BatchLosses], planned: str) -> Finding:
    """Micro, batch or memory negatives: the fewest that leave InfoNCE something to learn.

    Args:
        losses: by kind of negatives, from few to many.
    """
    number = ", ".join(f"{one.infonce_saturated:.0%} with {one.negatives:,.0f}" for one in losses.values())
    meaning = f"Shares of batches on which InfoNCE is below {SATURATED:g}, by negatives of a query."
    kinds = [*losses]
    enough = [kind for kind in kinds[kinds.index(planned) :] if losses[kind].infonce_saturated < SATURATION]
    level: Level = "act" if enough[:1] != [planned] else "good"
    title = f"Negatives: InfoNCE is saturated with {planned} negatives"
    if not enough:
        advice = (
            "More negatives do not change it. Compare InfoNCE with L_HN (--global-loss hn), which the paper "
            "proposes for this case, and with a lower scale."
        )
    elif enough[0] != planned:
        size = " --optim.memory N" if enough[0] == "memory" else ""
        advice = f"Try --optim.negatives {enough[0]}{size} before a margin."
    else:
        title, advice = f"Negatives: {planned} negatives do not saturate InfoNCE", ""
        if planned == "micro":
            advice = (
                "If memory allows, also compare --optim.negatives batch: on the generated scenes 127 negatives gained "
                "more than any margin (hnclip docs scenes); on photographs this was not measured."
            )
    return Finding(level, title, number, meaning, advice)


def clusters(batch: BatchNegatives, clustered: float, of_all: float) -> Finding:
    """Whether clusters bring harder negatives into the batch than there are in random ones.

    Args:
        clustered, of_all: mean cosine of a caption with its hardest negative in batches of clusters, and of all.
    """
    number = f"{batch.hardest:.2f}, in clusters {clustered:.2f}, of all {of_all:.2f}"
    meaning = (
        f"Mean cosine of a caption with its hardest negative in random batches, in those of --cluster {CLUSTER}, and "
        f"of all. The deviation among the negatives of a query is {batch.spread:.2f}."
    )
    if clustered - batch.hardest < SMALL * batch.spread:
        return Finding("good", "Clusters: random batches hold nearly as hard negatives", number, meaning)
    advice = (
        f"A loss learns only from negatives that are in the batch: compare random batches with --cluster {CLUSTER}, or "
        "with more negatives. What clusters gain was not measured; the paper has none."
    )
    return Finding("note", "Clusters: they bring harder negatives into the batch", number, meaning, advice)


def gamma(planned: float, batch: BatchNegatives, scale: float, decides: float | None, weight: float) -> Finding:
    """The range of γ in which margins tell negatives apart and no single negative decides.

    Logits are s·(S + γ·Ḡ): two negatives that are one deviation of Ḡ apart differ by s·γ·spread nats. If that is small,
    L_HN is nearly a fixed margin.

    Args:
        decides: γ from which margins alone give the hardest negative half of a query's weight; None if none does.
        weight: the share that it gets with the planned γ.
    """
    low = ONE_NAT / (scale * max(batch.spread, 1e-9))
    high = decides if decides is not None and decides > low else math.inf
    number = f"γ {low:.2g} to {high:.2g}" if high < math.inf else f"γ from {low:.2g} on"
    meaning = (
        f"Below, negatives that are one deviation of Ḡ ({batch.spread:.3f}) apart differ by less than {ONE_NAT:g} nat "
        f"at scale {scale:.0f}: nearly a fixed margin. Above, margins alone give the hardest of {batch.count:,.0f} "
        f"negatives half of the weight. With γ {planned:g} it is {scale * planned * batch.spread:.1f} nats, and "
        f"{weight:.0%} of the weight."
    )
    margin = planned * batch.similarities.mean
    control = f"--global-loss fixed_margin --objective.parameters margin {margin:.2g}"
    if planned == 0:
        advice = f"γ 0 is InfoNCE. Compare it with γ {low:.2g}."
    elif planned < low:
        advice = f"γ {planned:g} is below the range. Compare it with γ {low:.2g} and with {control}"
    elif planned > high:
        advice = (
            f"γ {planned:g} is above the range. So is γ 0.5 on the generated scenes, where it was as good as its mean "
            f"margin (hnclip docs scenes). Compare it with γ {math.sqrt(low * high):.2g} and with {control}"
        )
    else:
        advice = f"The control for γ {planned:g} is its mean margin: {control}"
    level: Level = "good" if low <= planned <= high else "note"
    return Finding(level, "γ: where margins tell negatives apart", number, meaning, advice)


def scale(losses: Sequence[BatchLosses]) -> Finding:
    """Whether the scale saturates InfoNCE.

    Args:
        losses: at the model's own scale, then at lower ones.
    """
    number = ", ".join(f"{one.infonce_saturated:.0%} at {one.scale:.3g}" for one in losses)
    meaning = f"Shares of batches on which InfoNCE is below {SATURATED:g}, by scale; the first is the model's own."
    enough = next((one.scale for one in losses if one.infonce_saturated < SATURATION), None)
    if enough == losses[0].scale:
        return Finding("good", "Scale: it does not saturate InfoNCE", number, meaning)
    advice = "Lower scales do not change it."
    if enough is not None:
        advice = (
            f"Compare --optim.scale {enough:.3g} --optim.scale-lr 0. On the generated scenes a lower scale showed "
            "no clear gain (hnclip docs scenes)."
        )
    return Finding("note", "Scale: it saturates InfoNCE", number, meaning, advice)
