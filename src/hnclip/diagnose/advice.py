"""From numbers to advice: what each finding means for a run, and what to do about it.

Every function takes the numbers that it speaks of, so that what a report says can be checked against them. Thresholds
are stated here and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from hnclip.analysis.shown import Finding

FEW_CUT = 0.01  # share of cut captions that is no concern
ONE_NAT = 1.0  # margins that differ by less, times the scale, weigh all negatives within a factor of e
MOST_SOLVED = 0.5  # share of batches below the threshold at which InfoNCE is called saturated
PAPER_PAIRWISE, PAPER_HARDEST = (0.84, 0.88), (0.92, 0.94)  # table s1, with Long-CLIP-L


def likeness(pairwise: float, hardest: float) -> Finding:
    """How alike captions are, and their hardest companions."""
    number = f"{pairwise:.2f} in the mean, {hardest:.2f} to the nearest"
    low, high = PAPER_PAIRWISE
    beside = (
        f"On the paper's benchmarks, through Long-CLIP-L, these are {low}–{high} and "
        f"{PAPER_HARDEST[0]}–{PAPER_HARDEST[1]}."
    )
    if hardest >= PAPER_HARDEST[0]:
        meaning = f"To this model most captions have a near-duplicate: few candidates decide each query. {beside}"
        return Finding("note", "Captions are nearly alike", number, meaning, "Look at the pairs in the report.")
    meaning = f"To this model captions are told apart more easily than on the paper's benchmarks. {beside}"
    advice = "Cosines of other encoders live elsewhere: go by the probe rather than by this number."
    return Finding("note", "Captions are not nearly alike", number, meaning, advice)


def margins(mean: float, deviation: float, *, scale: float, gamma: float) -> Finding:
    """What L_HN would add to the negatives of real batches: γ·mean(Ḡ) for all alike, γ·std(Ḡ) that differs.

    Equal similarities make L_HN a fixed margin (frameworks: identity of eq. 2), so its own part is the deviation, seen
    through the scale as a factor between the weights of two negatives.
    """
    spread = scale * gamma * deviation
    number = f"margins of {gamma * mean:.3f} ± {gamma * deviation:.3f}"
    if spread < ONE_NAT:
        return Finding(
            "note",
            "The margins of L_HN are nearly equal",
            number,
            f"With γ {gamma:g} and the scale {scale:.0f} a negative one deviation harder than another weighs "
            f"{_factor(spread)} as much: on such captions L_HN is little more than a fixed margin.",
            "Compare it with one: --objective.global-loss fixed_margin --objective.parameters margin "
            f"{gamma * mean:.2f}.",
        )
    return Finding(
        "good",
        "The margins of L_HN tell negatives apart",
        number,
        f"With γ {gamma:g} and the scale {scale:.0f} a negative one deviation harder than another weighs "
        f"{_factor(spread)} as much in the gradient.",
        "Nothing to do.",
    )


def meetings(in_batch: float, hardest: float, deviation: float, *, source: str) -> Finding:
    """Whether near-duplicates meet in random batches: the hardest negative inside the batch and of all, means over
    pairs, and the deviation of the similarities in a batch, which is what their difference is seen against."""
    number = f"{in_batch:.2f} in the batch, {hardest:.2f} of all"
    means = "The mean cosine of a caption with its hardest negative, in the batch and among all."
    if hardest - in_batch <= deviation:
        return Finding(
            "good",
            "Hard negatives meet in random batches",
            number,
            f"{means} They differ by no more than the negatives of a batch do among themselves ({deviation:.2f}).",
            "Nothing to do: random batches will do.",
        )
    return Finding(
        "act",
        "Near-duplicates seldom meet",
        number,
        f"{means} A margin can only act on negatives that are in the batch, and random batches bring few of the "
        "hardest.",
        "Try --cluster 4, which deals near-duplicates into one batch"
        + (", or more negatives: --optim.negatives batch." if source == "micro" else "."),
    )


def start(micro: float, whole: float, hn: float, *, negatives: float, all_negatives: float, source: str) -> Finding:
    """How many batches InfoNCE has solved before the first step: shares below the threshold with the negatives of a
    micro-batch and of the whole batch, and of L_HN with those of a micro-batch. `source` says which the run has."""
    number = f"{micro:.0%} of micro-batches solved" if source == "micro" else f"{whole:.0%} of batches solved"
    measured = (
        f"InfoNCE has solved {micro:.0%} with {negatives:.0f} negatives and {whole:.0%} with {all_negatives:.0f}; L_HN "
        f"{hn:.0%} with {negatives:.0f}."
    )
    if (micro if source == "micro" else whole) < MOST_SOLVED:
        return Finding(
            "good",
            "InfoNCE is not saturated at the start",
            number,
            f"Most batches still have a loss to learn from. {measured}",
            "The paper's reason for a margin is not there yet; it may come with training: --probe-gradients shows it.",
        )
    if whole < MOST_SOLVED:
        return Finding(
            "act",
            "InfoNCE is saturated by its few negatives",
            number,
            f"Most batches have nothing left to learn from. {measured}",
            "Take all negatives of the batch first: --optim.negatives batch. It needs no margin.",
        )
    return Finding(
        "note",
        "InfoNCE is saturated from the start",
        number,
        "Most batches have nothing left to learn from, also with all negatives: this is the case that the paper "
        f"describes. {measured}",
        "A margin is made for this (--objective.global-loss hn); whether it helps here is for the probe to say. Or "
        "bring harder negatives together: --cluster 4.",
    )


def prediction(
    verdict: str, change: float, low: float, high: float, *, gamma: float, pairs: int, held_out: int
) -> Finding:
    """What heads on frozen features promise: the expected change of R@1, in points, of L_HN against InfoNCE."""
    number = f"{change:+.1f} R@1 [{low:+.1f}, {high:+.1f}]"
    how = (
        f"L_HN instead of InfoNCE in heads on frozen features: {pairs:,} training pairs, measured on {held_out:,} "
        "held-out pictures."
    )
    if verdict == "raises":
        advice = f"Use L_HN: --objective.global-loss hn --objective.gamma {gamma:g}."
        return Finding("act", "L_HN is expected to help", number, how, advice)
    if verdict == "lowers":
        advice = "Keep to InfoNCE: --objective.global-loss infonce."
        return Finding("act", "L_HN is expected to hurt", number, how, advice)
    advice = f"Either; if you try L_HN, begin with γ {gamma:g}, and compare with hnclip compare."
    return Finding("note", "No difference can be promised", number, f"{how} The interval contains 0.", advice)


def repeats(same_text: int, same_image: int | None, suspected: int | None, threshold: float) -> Iterator[Finding]:
    """Negatives that are none: a margin pushes them apart all the harder. None is what was not looked for."""
    looked_for = {"of equal captions": same_text, "of equal pictures": same_image}
    exact = {what: count for what, count in looked_for.items() if count is not None}
    if any(exact.values()):
        yield Finding(
            "act",
            "Pairs that repeat each other",
            ", ".join(f"{count:,} {'group' if count == 1 else 'groups'} {what}" for what, count in exact.items()),
            "No model can tell them apart. Training keeps them out of each other's negatives, but in evaluation one "
            "of them is counted as wrong.",
            "Merge the records, or write captions that tell them apart (hnclip data check lists them).",
        )
    if suspected:
        yield Finding(
            "act",
            "Suspected false negatives",
            f"{suspected:,} pair{'s' * (suspected > 1)} from {threshold:g} on",
            "Captions with so high a cosine. If two of them describe the same thing, a margin pushes apart what "
            "belongs together; if they differ in a detail, they are just what the margin is for.",
            "Look at the pairs in the report, and merge the records of those that say the same.",
        )
    if not any(exact.values()) and suspected == 0:
        kinds = "captions" if same_image is None else "captions or pictures"
        meaning = f"No equal {kinds}, no captions with a cosine of at least {threshold:g}."
        yield Finding("good", "Nothing that a margin must not push apart", "0 repeats", meaning, "Nothing to do.")


def cut(truncated: int, captions: int, context: int, alike: int) -> Finding | None:
    """Captions longer than the context: what was cut cannot tell anything apart. `alike` groups are equal up to it."""
    share = truncated / max(1, captions)
    if not truncated:
        return None
    return Finding(
        "note" if share <= FEW_CUT else "act",
        "Captions are cut",
        f"{share:.1%} of captions",
        f"{truncated:,} of {captions:,} are longer than {context} tokens. What stands behind the cut is not seen, in "
        "training and in search." + (f" Groups of captions that differ only there: {alike:,}." if alike else ""),
        "Use a model with a longer context (--context stretches CLIP's, docs/models.md).",
    )


def _factor(nats: float) -> str:
    return f"{math.exp(nats):.1f}×" if nats < math.log(1000) else "more than 1,000×"
