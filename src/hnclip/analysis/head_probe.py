"""A probe that predicts: does L_HN raise R@1 here? Heads on frozen features answer before any tower is trained."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hnclip.analysis.heads import (
    LEAST_TRAIN,
    Features,
    HeadLoss,
    PairRows,
    ProbeSettings,
    deal_epochs,
    train_heads,
    turned,
)
from hnclip.config import SCALE_MAX
from hnclip.evaluate.bootstrap import Estimate, crossed_bootstrap
from hnclip.evaluate.metrics import recall_at
from hnclip.evaluate.ranks import ARROWS, Ranks, retrieval_ranks
from hnclip.losses.hard_negative import negative_statistics
from hnclip.util.console import Iterate
from hnclip.util.tables import text_table

__all__ = ["Change", "Features", "Fit", "HeadProbe", "ProbeSettings", "head_probe", "recall_change"]

Verdict = Literal["raises", "lowers", "undecided"]
LEAST_HELD_OUT = 16  # pictures: a recall among fewer says nothing


@dataclass(frozen=True)
class Change:
    """R@1 of one way of training minus that of another, in points: per direction, and the mean of both."""

    text_to_image: Estimate
    image_to_text: Estimate
    mean: Estimate

    @property
    def verdict(self) -> Verdict:
        """By the mean of both directions: a change whose interval holds 0 is undecided."""
        if self.mean.low > 0:
            return "raises"
        return "lowers" if self.mean.high < 0 else "undecided"

    def to_dict(self) -> dict[str, Any]:
        estimates = {name: getattr(self, name)._asdict() for name in (*ARROWS, "mean")}
        return {**estimates, "verdict": self.verdict}


def recall_change(ours: Sequence[Ranks], base: Sequence[Ranks], families: Tensor) -> Change:
    """How R@1 differs between two ways of training, with 95 % intervals that allow for other queries, families whole,
    and for other seeds.

    Args:
        ours, base: ranks among the same pictures, one for each seed, in the same order.
        families: label of every picture.

    Shape:
        families [N].
    """
    owner = base[0].owner
    if len(ours) != len(base) or any(not torch.equal(ranks.owner, owner) for ranks in (*ours, *base)):
        raise ValueError("ours and base must be ranks of the same captions and pictures, one of each for every seed")

    def differences(direction: str) -> Tensor:
        hits = [[100.0 * (getattr(ranks, direction) == 1) for ranks in side] for side in (ours, base)]
        return torch.stack(hits[0], dim=1) - torch.stack(hits[1], dim=1)  # [n, S]

    groups = {"text_to_image": families[owner], "image_to_text": families}
    return Change(*crossed_bootstrap([differences(name) for name in ARROWS], [groups[name] for name in ARROWS]))


@dataclass(frozen=True)
class Fit:
    """Heads of one loss, with the rate and epoch that the choosing pairs prefer, and what they do on held-out pairs.

    Attributes:
        choosing: what was chosen by, the mean reciprocal rank among the choosing pictures, of both directions and all
            seeds, in percent. It says more than R@1 of so few queries, where a few of them decide.
        recall: R@1 on held-out pairs by direction, one for each seed.
        change: against InfoNCE; None of InfoNCE itself.
    """

    loss: HeadLoss
    rate: float
    epoch: int
    choosing: float
    recall: Mapping[str, tuple[float, ...]]
    change: Change | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.loss.name,
            **self.loss._asdict(),
            "rate": self.rate,
            "epoch": self.epoch,
            "choosing_reciprocal_rank": self.choosing,
            "R@1": {name: list(values) for name, values in self.recall.items()},
            "change": None if self.change is None else self.change.to_dict(),
        }


@dataclass(frozen=True)
class HeadProbe:
    """What heads on a model's features say about training it with L_HN instead of InfoNCE.

    Attributes:
        pairs, choosing, held_out: training pictures, how many of them were held back for choosing (others for each
            seed), and pictures that measured.
        left_out: training pictures beyond `ProbeSettings.most`.
        zero_shot: R@1 of the model as it is, on held-out pairs, by direction.
        infonce, fits: the heads of InfoNCE, and of L_HN at every γ.
        control: those of a fixed margin for all negatives, as large as L_HN's mean at the chosen γ: what is left of its
            gain if it does not matter which negatives are hard. None if that mean is not positive.
        gamma: chosen by the choosing pairs.
    """

    settings: ProbeSettings
    scale: float
    pairs: int
    choosing: int
    held_out: int
    left_out: int
    zero_shot: Mapping[str, float]
    infonce: Fit
    fits: tuple[Fit, ...]
    control: Fit | None
    gamma: float
    seconds: float

    @property
    def best(self) -> Fit:
        """L_HN at the chosen γ."""
        return next(fit for fit in self.fits if fit.loss.gamma == self.gamma)

    @property
    def change(self) -> Change:
        """The expected change of R@1: L_HN at the chosen γ minus InfoNCE."""
        assert self.best.change is not None
        return self.best.change

    @property
    def mean(self) -> Estimate:
        """Of both directions."""
        return self.change.mean

    @property
    def verdict(self) -> Verdict:
        return self.change.verdict

    def to_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "gamma": self.gamma,
            "change": self.change.to_dict(),
            "zero_shot_R@1": dict(self.zero_shot),
            "infonce": self.infonce.to_dict(),
            "hn": [fit.to_dict() for fit in self.fits],
            "control": None if self.control is None else self.control.to_dict(),
            "scale": self.scale,
            "pairs": self.pairs,
            "choosing": self.choosing,
            "held_out": self.held_out,
            "left_out": self.left_out,
            "settings": asdict(self.settings),
            "seconds": self.seconds,
        }

    def sentence(self) -> str:
        """What is expected, with its interval."""
        mean, low, high = self.change.mean[:3]
        found = f"{mean:+.1f} points of R@1 [{low:+.1f}, {high:+.1f}]"
        expected = {
            "raises": "is expected to raise retrieval",
            "lowers": "is expected to lower retrieval",
            "undecided": "is not expected to change retrieval by more than these pairs can tell",
        }[self.verdict]
        return f"L_HN with γ {self.gamma:g} instead of InfoNCE {expected}: {found}"

    def rows(self) -> list[list[str]]:
        """A header, then the model itself and one row per loss: R@1 on held-out pairs, mean of the seeds."""
        header = ["heads", *(f"{arrow} R@1" for arrow in ARROWS.values()), "change of the mean", "rate", "epoch"]
        rows = [header, ["none (zero-shot)", *(f"{self.zero_shot[name]:.1f}" for name in ARROWS), "", "", ""]]
        for fit in (self.infonce, *self.fits, *((self.control,) if self.control else ())):
            change = "" if fit.change is None else "{:+.1f} [{:+.1f}, {:+.1f}]".format(*fit.change.mean)
            recalls = [f"{fmean(fit.recall[name]):.1f}" for name in ARROWS]
            rows.append([fit.loss.name, *recalls, change, f"{fit.rate:g}", str(fit.epoch)])
        return rows

    def to_text(self) -> str:
        headers, *rows = self.rows()
        settings = self.settings
        left_out = f" ({self.left_out:,} more left out at random)" if self.left_out else ""
        batches = f"{settings.micro_batch} × {settings.accumulate}, negatives from the {NEGATIVES[settings.negatives]}"
        return "\n".join(
            [
                f"{self.pairs:,} training pictures{left_out}, of which {self.choosing:,}, others for each seed, only "
                f"chose rate, epoch and γ; {self.held_out:,} measured",
                f"batches of {batches}; scale {self.scale:.4g}; seeds {', '.join(map(str, settings.seeds))}",
                "",
                text_table(headers, rows),
                "",
                self.sentence(),
            ]
        )


NEGATIVES = {"micro": "micro-batch", "batch": "whole batch"}


def head_probe(
    train: Features,
    held_out: Features,
    *,
    scale: float,
    settings: ProbeSettings = ProbeSettings(),  # noqa: B008, frozen
    progress: Iterate = iter,
) -> HeadProbe:
    """Train heads under InfoNCE and under L_HN, and compare their R@1 on pairs that decided nothing.

    Learning rate and epoch of every loss, each from the same grid, and γ are those with the best reciprocal ranks on a
    share of the training pairs that no head is trained on. `held_out` is looked at once all that is settled. Both sides
    have the same seeds, batches and captions. Random numbers come from generators of its own.

    Args:
        train, held_out: features of both, by the same model; pictures of the one must not be in the other.
        scale: the model's inverse temperature; above 100 it is clamped, as in training.
        progress: walks through the trainings.

    Relations:
        Before the first step heads are the identity, so `zero_shot` is what the model itself does.

    Raises:
        ValueError: too few pairs or families, features of different widths or that are not finite.
    """
    started = time.perf_counter()
    _check(train, held_out, scale)
    scale = min(scale, SCALE_MAX)
    kept = _some(train, settings.most)
    chooser = _Chooser(_parts(kept, settings), scale, settings)

    losses = [HeadLoss(), *(HeadLoss(gamma) for gamma in settings.gammas)]
    walk = progress(range(len(losses) * chooser.trainings))
    infonce, *hard = (chooser.choose(loss, walk) for loss in losses)
    _end(walk)
    best = max(hard, key=lambda chosen: chosen.score)  # of equals the smallest γ as listed
    margin = best.loss.gamma * _mean_similarity(kept)
    control = None
    if margin > 0:
        walk = progress(range(chooser.trainings))
        control = chooser.choose(HeadLoss(margin=margin), walk)
        _end(walk)

    # From here on nothing is chosen.
    base = [_ranks(held_out, heads) for heads in infonce.heads]

    def measured(chosen: _Chosen) -> Fit:
        ranks = base if chosen is infonce else [_ranks(held_out, heads) for heads in chosen.heads]
        change = None if chosen is infonce else recall_change(ranks, base, held_out.families.cpu())
        recall = {name: tuple(recall_at(getattr(found, name), 1) for found in ranks) for name in ARROWS}
        return Fit(chosen.loss, chosen.rate, chosen.epoch, chosen.score, recall, change)

    zero_shot = retrieval_ranks(held_out.image, held_out.text, held_out.owner)
    return HeadProbe(
        settings=settings,
        scale=scale,
        pairs=len(kept),
        choosing=len(chooser.parts[0].choosing),
        held_out=len(held_out),
        left_out=len(train) - len(kept),
        zero_shot={name: recall_at(getattr(zero_shot, name), 1) for name in ARROWS},
        infonce=measured(infonce),
        fits=tuple(map(measured, hard)),
        control=None if control is None else measured(control),
        gamma=best.loss.gamma,
        seconds=time.perf_counter() - started,
    )


@dataclass(frozen=True)
class _Chosen:
    """What the choosing pairs prefer for a loss: a rate, an epoch, and the heads of every seed then, [2, D, D] each."""

    loss: HeadLoss
    rate: float
    epoch: int
    score: float
    heads: tuple[Tensor, ...]


class _Part(NamedTuple):
    """What one seed trains on, in batches by epoch, and what it chooses by."""

    fitting: Features
    choosing: Features
    epochs: list[list[PairRows]]


def _parts(features: Features, settings: ProbeSettings) -> list[_Part]:
    parts = []
    for turn, seed in enumerate(settings.seeds):
        fitting, choosing = _split(features, settings.choosing, turn)
        parts.append(_Part(fitting, choosing, deal_epochs(fitting, seed, settings)))
    return parts


@dataclass(frozen=True)
class _Chooser:
    """Trains every loss alike, and never sees held-out pairs."""

    parts: Sequence[_Part]
    scale: float
    settings: ProbeSettings

    @property
    def trainings(self) -> int:
        """Of each loss."""
        return len(self.settings.rates) * len(self.parts)

    def choose(self, loss: HeadLoss, walk: Iterator[int]) -> _Chosen:
        """Try all rates with all seeds, one step of `walk` each; of equals the lower rate and the earlier epoch."""
        best: _Chosen | None = None
        for rate in sorted(self.settings.rates):
            after = []
            for part in self.parts:
                next(walk)
                after.append(
                    train_heads(part.fitting, part.epochs, loss, scale=self.scale, rate=rate, settings=self.settings)
                )
            for epoch, heads in enumerate(zip(*after), start=1):
                score = fmean(map(_score, self.parts, heads))
                if best is None or score > best.score:
                    best = _Chosen(loss, rate, epoch, score, heads)
        assert best is not None  # settings have at least one rate and epoch
        return best


def _score(part: _Part, heads: Tensor) -> float:
    ranks = _ranks(part.choosing, heads)
    return fmean(100 * float(getattr(ranks, name).double().reciprocal().mean()) for name in ARROWS)


def _end(walk: Iterator[int]) -> None:
    """Past its last step, where a progress bar counts it."""
    for _ in walk:
        raise AssertionError("fewer trainings than announced")


def _ranks(features: Features, heads: Tensor) -> Ranks:
    return retrieval_ranks(
        turned(features.image.float(), heads[0]), turned(features.text.float(), heads[1]), features.owner
    )


def _check(train: Features, held_out: Features, scale: float) -> None:
    widths = train.image.shape[1], held_out.image.shape[1]
    if widths[0] != widths[1]:
        raise ValueError(
            f"train features are {widths[0]} wide and held-out features {widths[1]}: encode both with the same model"
        )
    for name, features, least in (("train", train, LEAST_TRAIN), ("held-out", held_out, LEAST_HELD_OUT)):
        if len(features) < least:
            raise ValueError(f"the probe needs at least {least} {name} pairs to say anything, got {len(features)}")
        if len(features.families.unique()) < 2:
            raise ValueError(
                f"all {name} pairs are one family of near-duplicates: give pairs of several, or leave groups out"
            )
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale must be finite and greater than 0, got {scale}: give exp(logit_scale) of the model")


def _some(features: Features, most: int) -> Features:
    """At most so many pictures. Single ones are drawn, not families: a batch then holds as many near-duplicates as one
    of all pictures does."""
    if len(features) <= most:
        return features
    drawn = torch.randperm(len(features), generator=torch.Generator().manual_seed(0))[:most]
    return features.take(drawn.sort().values)


def _split(features: Features, share: float, turn: int) -> tuple[Features, Features]:
    """Pictures to train on, and at least this share of them to choose with, families whole. Every turn holds back
    others, until all have been: three turns choose by three times as many pictures as one."""
    _, family = features.families.cpu().unique(return_inverse=True)  # [N]
    sizes = family.bincount()  # [F]
    order = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(0))  # [F]
    place = (sizes[order].cumsum(0) - sizes[order]) / len(features)  # [F] in [0, 1)
    order = order[((place - turn * share) % 1).argsort(stable=True)]  # [F], from the turn's place on
    before = sizes[order].cumsum(0) - sizes[order]  # [F]
    held_back = order[before < share * len(features)][: len(sizes) - 1]
    chooses = torch.isin(family, held_back)  # [N]
    return features.take((~chooses).nonzero().flatten()), features.take(chooses.nonzero().flatten())


def _mean_similarity(features: Features) -> float:
    """Mean of Ḡ over the negatives in a batch of all pairs, each with its first caption."""
    first = torch.full((len(features),), len(features.text)).scatter_reduce(
        0, features.owner.cpu(), torch.arange(len(features.text)), "amin"
    )  # [N]
    text = torch.nn.functional.normalize(features.text[first].float(), dim=1)  # [N, D]
    ids = torch.stack([features.image_ids.cpu(), features.caption_ids.cpu()[first]], dim=1).to(text.device)  # [N, 2]
    return float(negative_statistics(text, text, ids)[0])
