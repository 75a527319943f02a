"""Trained heads as cached runs: the same settings on the same features are trained once, whoever asks.

    CACHE/runs/KEY.json             what a run does on validation after every epoch
    CACHE/tests/KEY.safetensors     ranks on test of a run after a chosen epoch

Validation alone chooses: `HeadRuns` has no test features until `measure` is given them. Heads themselves are not kept,
because of all runs a few are chosen, and a run that is trained again is the same run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hnclip.analysis.head_probe import LEAST_HELD_OUT
from hnclip.analysis.heads import LEAST_TRAIN, PairRows, TowerFeatures, deal_epochs
from hnclip.evaluate.metrics import recall_at
from hnclip.evaluate.ranks import ARROWS, Ranks
from hnclip.studies.identity import code_fingerprint
from hnclip.studies.tower_heads import (
    HeadSettings,
    MarginLoss,
    Negatives,
    TowerHeads,
    scaled,
    train_tower_heads,
)
from hnclip.util.files import read_json, replace_file

_CPU = torch.device("cpu")
# What the digits of a run depend on beside its settings and features.
_CODE = (
    "analysis/heads.py",
    "data/sampler.py",
    "losses/hard_negative.py",
    "studies/tower_heads.py",
    "train/optimizer.py",
)


@dataclass(frozen=True)
class Point:
    """A point of a grid: what is the same for all seeds."""

    loss: MarginLoss
    negatives: Negatives
    rate: float


@dataclass(frozen=True)
class HeadRun:
    """What a run did. Shape: of each list one entry per epoch; `validation` is the mean R@1 of both directions in
    percent, `scale` the inverse temperature, `similarity` the mean of Ḡ over the negatives of all steps until then."""

    validation: tuple[float, ...]
    scale: tuple[float, ...]
    similarity: tuple[float, ...]


@dataclass(frozen=True)
class Chosen:
    """The point and epoch of a grid with the best validation, mean of the seeds, and the runs of that point."""

    point: Point
    epoch: int
    validation: float
    runs: tuple[HeadRun, ...]

    def mean(self, what: str) -> float:
        """`scale` or `similarity` at the chosen epoch, mean of the seeds."""
        return fmean(getattr(run, what)[self.epoch - 1] for run in self.runs)


@dataclass
class HeadRuns:
    """Runs on one training and one validation split, and the directory that keeps them.

    Args:
        train, validation: features as the towers made them, by the same model.
        advance: called after each point of a grid with the number of its runs and its description.
    """

    train: TowerFeatures
    validation: TowerFeatures
    settings: HeadSettings
    seeds: tuple[int, ...]
    cache: Path
    device: torch.device = _CPU
    advance: Callable[[int, str], None] = lambda done, text: None
    tried: list[Chosen] = field(default_factory=list)
    """Every point that was asked for, at its best epoch."""
    _epochs: dict[int, list[list[PairRows]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must name at least one value, and none twice, got {self.seeds}")
        check_size("train", self.train, LEAST_TRAIN)
        check_size("validation", self.validation, LEAST_HELD_OUT)
        self._train, self._validation = self._ready(self.train), self._ready(self.validation)

    def _ready(self, features: TowerFeatures) -> TowerFeatures:
        """As heads see them, on the device."""
        for side in ("image", "text"):
            widths = getattr(self.train, side).shape[1], getattr(features, side).shape[1]
            if widths[0] != widths[1]:
                raise ValueError(f"{side} features are {widths[0]} and {widths[1]} wide: encode all with one model")
        return on_device(scaled(features), self.device)

    def choose(self, points: Sequence[Point]) -> Chosen:
        """The best point and epoch by the mean of the seeds' validation; of equals the first point as listed, and its
        earlier epoch."""
        if not points:
            raise ValueError("a grid must have at least one point")
        found = []
        for point in points:
            runs = tuple(self.run(point, seed) for seed in self.seeds)
            scores = [fmean(values) for values in zip(*(run.validation for run in runs))]  # one per epoch
            found.append(Chosen(point, scores.index(max(scores)) + 1, max(scores), runs))
            self.advance(len(runs), f"{point.negatives}, {point.loss.name}, rate {point.rate:g}")
        self.tried += found
        return max(found, key=lambda chosen: chosen.validation)

    def run(self, point: Point, seed: int) -> HeadRun:
        """A run, trained unless it was before."""
        file = self.cache / "runs" / f"{self._key(point, seed)}.json"
        if file.is_file():
            return HeadRun(**{name: tuple(values) for name, values in read_json(file)["run"].items()})
        found = list(self._heads(point, seed, self.settings.epochs))
        run = HeadRun(
            tuple(_recall(heads.ranks(self._validation)) for heads in found),
            tuple(heads.scale for heads in found),
            tuple(heads.similarity for heads in found),
        )
        with replace_file(file) as partial:
            content = {**asdict(point), "seed": seed, **asdict(self.settings), "run": asdict(run)}
            partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return run

    def measure(self, chosen: Chosen, test: TowerFeatures) -> list[Ranks]:
        """Ranks among test pairs, one for each seed, of the heads that were chosen."""
        check_size("test", test, LEAST_HELD_OUT)
        return [self._measure(chosen, test, seed, run) for seed, run in zip(self.seeds, chosen.runs)]

    def _measure(self, chosen: Chosen, test: TowerFeatures, seed: int, run: HeadRun) -> Ranks:
        name = _digest([self._key(chosen.point, seed), chosen.epoch, _fingerprint(test)])
        file = self.cache / "tests" / f"{name}.safetensors"
        if not file.is_file():
            heads = self._heads(chosen.point, seed, chosen.epoch)[-1]
            if _recall(heads.ranks(self._validation)) != run.validation[chosen.epoch - 1]:
                raise ValueError(
                    f"a run of seed {seed} that was trained again differs from the one in {self.cache / 'runs'}: that "
                    "one was made on another machine or with other threads; remove that directory and start again"
                )
            found = heads.ranks(self._ready(test))
            with replace_file(file) as partial:
                save_file({name: getattr(found, name) for name in (*ARROWS, "owner")}, partial)
        return Ranks(**load_file(file))

    def _heads(self, point: Point, seed: int, epochs: int) -> list[TowerHeads]:
        """After each of the first epochs."""
        if seed not in self._epochs:
            self._epochs[seed] = deal_epochs(self.train, seed, self.settings)
        training = train_tower_heads(
            self._train,
            self._epochs[seed],
            point.loss,
            negatives=point.negatives,
            rate=point.rate,
            seed=seed,
            settings=self.settings,
        )
        return [heads for heads, _ in zip(training, range(epochs))]

    def _key(self, point: Point, seed: int) -> str:
        return _digest([asdict(point), seed, asdict(self.settings), self._material])

    @cached_property
    def _material(self) -> list[str]:
        features = _fingerprint(self.train), _fingerprint(self.validation)
        return [*features, code_fingerprint(_CODE), torch.__version__, self.device.type]


def check_size(name: str, features: TowerFeatures, least: int) -> None:
    """ValueError if a split is too small to say anything."""
    if len(features) < least:
        raise ValueError(f"the {name} split has {len(features)} pictures that can be used; at least {least} are needed")
    if len(features.families.unique()) < 2:
        raise ValueError(f"all pictures of the {name} split are one family of near-duplicates: give several, or none")


def on_device(features: TowerFeatures, device: torch.device) -> TowerFeatures:
    """The same with vectors there; who belongs to whom stays where batches are dealt."""
    return replace(features, image=features.image.to(device), text=features.text.to(device))


def _recall(ranks: Ranks) -> float:
    """Mean R@1 of both directions."""
    return fmean(recall_at(getattr(ranks, name), 1) for name in ARROWS)


def _fingerprint(features: TowerFeatures) -> str:
    content = sha256()
    for name in ("image", "text", "owner", "image_ids", "caption_ids"):
        tensor: Tensor = getattr(features, name)
        content.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        content.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


def _digest(content: Any) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
