"""`hnclip diagnose`: what a model makes of the captions, before anything is trained; and what to do about it."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from PIL.Image import Image

from hnclip import recipes
from hnclip.analysis.false_negatives import FalseNegatives, find_false_negatives
from hnclip.analysis.geometry import CaptionGeometry, caption_geometry
from hnclip.analysis.hardness import (
    PAPER_EDGES,
    batch_similarity,
    buckets,
    hardest_in_batch,
    hardest_of_all,
    negative_similarities,
    quantile_edges,
)
from hnclip.analysis.head_probe import HeadProbe, ProbeSettings, head_probe
from hnclip.analysis.near_duplicates import near_duplicate_rows, pair_rows
from hnclip.analysis.saturation import batch_losses
from hnclip.analysis.shown import CompanionRow
from hnclip.config import RunOptions, TrainConfig
from hnclip.data.images import to_rgb
from hnclip.diagnose.epoch import Epoch, first_epoch
from hnclip.diagnose.found import Found, Gaps, Negatives, Start
from hnclip.diagnose.gradients import ProbedRun, gradients_at_start, probed_run
from hnclip.diagnose.material import Material, Source
from hnclip.diagnose.page import write_page
from hnclip.models.load import load, models_of
from hnclip.options import Diagnose
from hnclip.train.data import batch_sizes, too_small
from hnclip.util.console import Iterate, progress
from hnclip.util.device import find_device

log = logging.getLogger(__name__)

SHOWN_SUSPECTS = 5
THUMBNAIL = 480  # pixels: as large as the page or a figure shows a picture
_MARKS = {"act": "!", "note": "·", "good": "✓"}


@dataclass(frozen=True)
class Diagnosis:
    """What was found, and the page that shows it."""

    found: Found
    report: Path

    def to_dict(self) -> dict[str, Any]:
        return {**self.found.to_dict(), "report": str(self.report)}

    def to_text(self) -> str:
        """Findings with their numbers, gaps, and where the report is."""
        found = self.found
        lines = [f"{found.captions:,} captions of {found.records:,} pictures of {found.data} ({found.split})"]
        for finding in found.findings():
            lines += ["", f"{_MARKS[finding.level]} {finding.title}: {finding.number}"]
            lines += [f"  {text}" for text in (finding.meaning, f"→ {finding.advice}") if text]
        if found.gaps:
            lines += ["", "not measured:"]
            lines += [f"  {part}: {reason.partition(chr(10))[0]}" for part, reason in found.gaps.items()]
        return "\n".join([*lines, "", f"report: {self.report}"])


def diagnose(options: Diagnose) -> Diagnosis:
    """Look at the captions of a data set through a model, and write the report.

    A part that cannot be had, because pictures are missing or pairs too few, is a gap in the report. Only without two
    captions to compare there is no diagnosis.
    """
    path = models_of(options.model)[0][1]
    model = load(path, **vars(options.opening)).to(find_device(options.device))
    model.require_trained("a diagnosis")
    config = _config(options, path)
    source = Source(options, model)
    gaps = Gaps()
    # Before the captions: where a source has no splits, its pictures and captions are encoded together.
    training = gaps.attempt("probe", source.training) if options.probe else None
    captions = source.captions()
    with progress("comparing captions, tiles") as bar:
        geometry, repeats = _compare(captions, options, bar.iterate)
    epoch = gaps.attempt("batches", lambda: first_epoch(captions, config))
    if training is not None:
        train, held_out = training
        if reason := too_small(len(batch_sizes(len(train.records), config)), len(held_out.records)):
            log.warning(reason)
    scale = model.scale.item()
    probe = None
    if training is not None:
        log.info("training heads on the frozen features")
        with progress("training heads") as bar:
            probe = gaps.attempt("probe", lambda: _probe(*training, scale, config, bar.iterate))
    gradients, fractions = None, {}
    if options.gradients:
        gradients = gaps.attempt(
            "gradients",
            lambda: gradients_at_start(model, config, batches=options.batches),
        )

    def run_on(fraction: float) -> ProbedRun:
        out = options.out / f"fraction-{fraction:g}-{source.state('train')}"
        return probed_run(config, fraction, RunOptions(out=out, device=options.device))

    for fraction in options.fractions:
        name = f"{100 * fraction:g} %"
        if (run := gaps.attempt(f"gradients along a run on {name}", partial(run_on, fraction))) is not None:
            fractions[name] = run
    shown = _Shown(captions, geometry)
    found = Found(
        data=options.data,
        model=model.source,
        split=captions.split,
        records=len(captions.records),
        captions=len(captions.text),
        left_out=captions.left_out,
        truncated=captions.truncated,
        context=model.context,
        scale=scale,
        source=options.negatives,
        gamma=config.objective.gamma,
        names=[record.id for record in captions.records],
        owner=captions.owner.tolist(),
        cut_alike=_cut_alike(captions, repeats),
        geometry=geometry,
        repeats=repeats,
        near=shown.near(),
        hardest=shown.hardest(),
        suspected=shown.suspected(repeats),
        negatives=None if epoch is None else gaps.attempt("batches", lambda: _negatives(epoch, geometry, config)),
        start=None if training is None else gaps.attempt("start", lambda: _start(training[0], config, scale)),
        gradients=gradients,
        fractions=fractions,
        probe=probe,
        gaps=gaps,
    )
    return Diagnosis(found, write_page(options.out, found))


def _config(options: Diagnose, model: str) -> TrainConfig:
    """The run that is thought of: its batches, its γ, its data."""
    base = recipes.RECIPES[options.recipe]()
    tokenizer = options.opening.tokenizer
    return replace(
        base,
        **asdict(options.opening) | {"tokenizer": None if tokenizer is None else str(tokenizer)},
        model=model,
        data=options.data,
        read=options.read,
        objective=replace(base.objective, global_loss="hn", gamma=options.gamma, parameters={}),
        optim=replace(base.optim, negatives=options.negatives),
    )


def _compare(captions: Material, options: Diagnose, progress: Iterate) -> tuple[CaptionGeometry, FalseNegatives]:
    geometry = caption_geometry(captions.text, captions.owner, progress=progress)
    repeats = find_false_negatives(
        captions.text,
        captions.owner,
        captions.caption_ids,
        captions.image_ids,
        threshold=options.threshold,
        progress=progress,
    )
    return geometry, repeats


def _negatives(epoch: Epoch, geometry: CaptionGeometry, config: TrainConfig) -> Negatives:
    batches = epoch.evaluations(config.optim.negatives)
    similarities = negative_similarities(epoch.text, batches, epoch.ids)
    return Negatives(
        similarities=similarities,
        hardest=hardest_in_batch(epoch.text, batches, epoch.ids),
        hardest_of_all=hardest_of_all(epoch.text, epoch.ids),
        paper=buckets(similarities, PAPER_EDGES),
        quantiles=buckets(similarities, quantile_edges(geometry.pairwise)),
        batch=batch_similarity(epoch.text, batches[0][: config.optim.micro_batch]),
    )


def _start(train: Material, config: TrainConfig, scale: float) -> Start:
    epoch = first_epoch(train, config)
    features = train.features()
    micro, batch = (
        batch_losses(
            features.image,
            epoch.text,
            epoch.ids,
            epoch.evaluations(negatives),
            scale=scale,
            gamma=config.objective.gamma,
        )
        for negatives in ("micro", "batch")
    )
    return Start(micro, batch)


def _probe(train: Material, held_out: Material, scale: float, config: TrainConfig, progress: Iterate) -> HeadProbe:
    optim = config.optim
    gammas = {config.objective.gamma, *ProbeSettings().gammas} - {0.0}  # which is InfoNCE
    settings = ProbeSettings(
        gammas=tuple(sorted(gammas)),
        micro_batch=optim.micro_batch,
        accumulate=optim.accumulate,
        negatives="batch" if optim.negatives == "batch" else "micro",
    )
    return head_probe(train.features(), held_out.features(), scale=scale, settings=settings, progress=progress)


def _cut_alike(captions: Material, repeats: FalseNegatives) -> int:
    """Groups of captions that are the same to the model only because it reads no further."""
    texts = captions.captions

    def differ(group: tuple[int, ...]) -> bool:
        said = {" ".join(texts[row].split()).casefold() for row in group}
        return bool(captions.cut[group[0]]) and len(said) > 1

    return sum(map(differ, repeats.same_text))


class _Shown:
    """Captions of the material beside each other, with their pictures where there are any."""

    def __init__(self, captions: Material, geometry: CaptionGeometry) -> None:
        self.captions, self.geometry = captions, geometry
        self.texts, self.names = captions.captions, [record.id for record in captions.records]
        self._pictures: dict[int, Image | None] = {}

    def near(self) -> list[CompanionRow]:
        return self._rows(quantile=0.9, rows=4)

    def hardest(self) -> list[CompanionRow]:
        return self._rows(quantile=1.0, rows=2)

    def suspected(self, repeats: FalseNegatives) -> list[CompanionRow]:
        suspects = repeats.suspects[:SHOWN_SUSPECTS]
        return pair_rows(suspects, self.captions.owner, self.texts, names=self.names, picture=self._picture)

    def _rows(self, *, quantile: float, rows: int) -> list[CompanionRow]:
        return near_duplicate_rows(
            self.captions.text,
            self.captions.owner,
            self.texts,
            self.geometry,
            quantile=quantile,
            rows=rows,
            names=self.names,
            picture=self._picture,
        )

    def _picture(self, record: int) -> Image | None:
        """As large as it is shown; None where it is missing or damaged: captions alone are worth looking at."""
        if record not in self._pictures:
            try:
                picture = to_rgb(self.captions.records[record].image.load())
                picture.thumbnail((THUMBNAIL, THUMBNAIL))
                self._pictures[record] = picture
            except ValueError:  # a InvalidImage, or values without a meaning
                self._pictures[record] = None
        return self._pictures[record]
