"""What of L_HN's gain is adaptivity? Margins of four kinds, and two numbers of negatives, on frozen towers.

Crossed are {micro-batch, whole batch} with {InfoNCE, fixed margin m, L_HN γ, affine m + γ(Ḡ − mean)}. Every cell has
its own small grid of m, γ or both, and all have the same learning rates. Beside them stands the comparison at one
setting: micro-batches, L_HN at a given γ, and a fixed margin of γ·mean(Ḡ), as large as L_HN's own is on average.

Point and epoch of a cell are those with the best validation R@1, mean of both directions and of all seeds, so that all
seeds of a cell have the same. The test split is looked at when everything is chosen, once per chosen configuration.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch

from hnclip.analysis.head_probe import LEAST_HELD_OUT, recall_change
from hnclip.analysis.heads import TowerFeatures
from hnclip.config import Opening, ReadConfig
from hnclip.data.sources import open_data
from hnclip.data.validate import check_rows
from hnclip.evaluate.metrics import recall_at
from hnclip.evaluate.ranks import ARROWS, Ranks
from hnclip.models.load import load
from hnclip.studies.adaptivity_result import (
    FAMILIES,
    KS,
    NEGATIVES,
    SETTING,
    Adaptivity,
    Comparison,
    Family,
    Row,
    blocks,
    clear_marks,
    questions,
    row_key,
)
from hnclip.studies.frozen_features import Encoding, TextPool, frozen_features
from hnclip.studies.head_runs import Chosen, HeadRuns, Point, check_size
from hnclip.studies.tower_heads import HeadSettings, MarginLoss, Negatives
from hnclip.util.console import progress
from hnclip.util.device import find_device

log = logging.getLogger(__name__)

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class AdaptivityOptions:
    """The study's data, model and grids."""

    model: str
    """Anything that `hnclip.load` opens; its projections are not used."""
    data: str
    """Anything that `open_data` opens and that has a test split; without a validation split one is held out."""
    out: Path
    """Features and runs are kept here; a study that was stopped goes on."""
    read: ReadConfig = ReadConfig()  # noqa: RUF009, frozen
    opening: Opening = Opening()  # noqa: RUF009, frozen
    text: TextPool = "own"
    """own: what the text tower hands to its projection. mean: the mean of its last hidden states, for sentence encoders
    that are trained that way."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of the heads before training, the order of pairs and which caption a picture shows; the same in all cells."""
    rates: tuple[float, ...] = (0.001,)
    """Learning rates of every cell."""
    margins: tuple[float, ...] = (0.1, 0.2, 0.4, 0.8)
    """m of the fixed and of the affine margin: so the affine one at γ = 0 is the fixed one, grid and all."""
    gammas: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)
    """γ of L_HN."""
    affine_gammas: tuple[float, ...] = (0.25, 0.5, 1.0)
    """γ of the affine margin."""
    gamma: float = 0.5
    """γ of the comparison at one setting."""
    heads: HeadSettings = HeadSettings()  # noqa: RUF009, frozen
    batch: int = 64
    """Pictures or captions encoded at once."""
    device: str = "auto"

    def __post_init__(self) -> None:
        for name in ("rates", "margins", "gammas", "affine_gammas"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must name at least one value, and none twice, got {values}")
            if min(values) <= 0 or not all(map(math.isfinite, values)):
                raise ValueError(f"{name} must be positive, got {values}: 0 is InfoNCE, which has a cell of its own")
        if not (math.isfinite(self.gamma) and self.gamma > 0):
            raise ValueError(f"gamma must be positive, got {self.gamma}")

    def losses(self, family: Family) -> list[MarginLoss]:
        """The grid of a cell, without its learning rates."""
        if family == "infonce":
            return [MarginLoss()]
        if family == "fixed":
            return [MarginLoss(margin) for margin in self.margins]
        if family == "hn":
            return [MarginLoss(gamma=gamma) for gamma in self.gammas]
        return [MarginLoss(margin, gamma, centred=True) for margin in self.margins for gamma in self.affine_gammas]

    @property
    def runs(self) -> int:
        """Runs that the study asks for. Of the two rows at `gamma` the first may be among the cells' own."""
        points = len(NEGATIVES) * sum(len(self.losses(family)) for family in FAMILIES) + 2
        return points * len(self.rates) * len(self.seeds)


def with_grids(options: AdaptivityOptions, values: Mapping[str, Any]) -> AdaptivityOptions:
    """The options with grids, γ or the pooling of captions as somebody names them: `{"margins": [0.1, 0.3]}`."""
    known = ("text", "rates", "margins", "gammas", "affine_gammas", "gamma")
    changed: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"adaptivity has no setting {name}; it has {', '.join(known)}")
        if name == "text":
            good = value in get_args(TextPool)
        elif name == "gamma":
            good = isinstance(value, int | float)
        else:
            good = isinstance(value, list) and all(isinstance(each, int | float) for each in value)
        if not good:
            raise ValueError(f"{name} cannot be {value!r}; grids are lists, {name}=[0.1,0.2], and text is own or mean")
        changed[name] = tuple(map(float, value)) if isinstance(value, list) else value
    return replace(options, **changed)


def adaptivity(options: AdaptivityOptions) -> Adaptivity:
    """Encode what is not encoded, train what is not trained, choose on validation, measure on test.

    Raises:
        ValueError: the data have no test split, or a split is too small or cannot be encoded.
    """
    device = find_device(options.device)
    splits = open_features(options, device)
    return cross(splits, options, device=device)


def open_features(options: AdaptivityOptions, device: torch.device) -> dict[str, TowerFeatures]:
    """Features of the three splits, as the towers make them."""
    data = open_data(options.data, options.read, splits=set(SPLITS))
    check_rows(data, largest=options.read.max_bad)
    records = {split: data.part(split, validation_share=options.read.validation_share) for split in SPLITS}
    for split, found in records.items():
        if not found:
            raise ValueError(f"{data.name} has no records in its {split} split, and the study needs all of {SPLITS}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # joined towers draw projections: nobody uses them, but the cache knows models by weights
        model = load(options.model, **vars(options.opening)).eval().to(device)
    log.info(f"model: {model.source}; data: " + ", ".join(f"{name} {len(found):,}" for name, found in records.items()))
    return {
        split: frozen_features(
            model,
            found,
            options.out / "features",
            encoding=Encoding(options.text, options.batch),
            name=f"{data.name} ({split})",
            max_bad=0.0 if data.exact else options.read.max_bad,
        )
        for split, found in records.items()
    }


def cross(
    splits: Mapping[str, TowerFeatures],
    options: AdaptivityOptions,
    *,
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> Adaptivity:
    """The study on features: `adaptivity` behind its towers."""
    started = time.monotonic()
    test = splits["test"]
    check_size("test", test, LEAST_HELD_OUT)  # before the long part
    with progress("training heads", options.runs) as bar:
        runs = HeadRuns(
            train=splits["train"],
            validation=splits["validation"],
            settings=options.heads,
            seeds=options.seeds,
            cache=options.out,
            device=device,
            advance=bar.advance,
        )
        chosen = _choose(runs, options)
    # From here on nothing is chosen.
    log.info(f"measuring {len(chosen)} chosen configurations on {len(test):,} test images")
    ranks = {key: runs.measure(found, test) for key, found in chosen.items()}
    families = test.families.cpu()
    rows = tuple(_row(key, chosen[key], ranks[key]) for key in chosen)
    marks = {
        block: clear_marks({key: ranks[key] for key in keys}, families) for block, keys in blocks(set(chosen)).items()
    }
    return Adaptivity(
        rows=rows,
        comparisons=tuple(
            Comparison(question, ours, base, recall_change(ranks[ours], ranks[base], families))
            for question, ours, base in questions(set(chosen))
        ),
        marks=marks,
        pictures={split: len(features) for split, features in splits.items()},
        captions={split: len(features.text) for split, features in splits.items()},
        settings=json.loads(json.dumps(asdict(options), default=str)),
        grid=tuple(
            {**asdict(tried.point), "epoch": tried.epoch, "validation": tried.validation} for tried in runs.tried
        ),
        seconds=time.monotonic() - started,
    )


def _choose(runs: HeadRuns, options: AdaptivityOptions) -> dict[str, Chosen]:
    """Of every row, by its key, what validation prefers."""

    def best(negatives: Negatives, losses: Sequence[MarginLoss]) -> Chosen:
        return runs.choose([Point(loss, negatives, rate) for loss in losses for rate in sorted(options.rates)])

    chosen = {
        row_key(negatives, family): best(negatives, options.losses(family))
        for negatives in NEGATIVES
        for family in FAMILIES
    }
    chosen[row_key(SETTING, "hn")] = hn = best("micro", [MarginLoss(gamma=options.gamma)])
    margin = options.gamma * hn.mean("similarity")
    if margin > 0:  # else L_HN pushes no negative away on average, and there is nothing to imitate
        chosen[row_key(SETTING, "fixed")] = best("micro", [MarginLoss(margin)])
    return chosen


def _row(key: str, chosen: Chosen, ranks: Sequence[Ranks]) -> Row:
    recall = {name: {k: tuple(recall_at(getattr(r, name), k) for r in ranks) for k in KS} for name in ARROWS}
    point = chosen.point
    return Row(
        key=key,
        negatives=point.negatives,
        loss=point.loss,
        rate=point.rate,
        epoch=chosen.epoch,
        validation=chosen.validation,
        scale=chosen.mean("scale"),
        similarity=chosen.mean("similarity"),
        recall=recall,
    )
