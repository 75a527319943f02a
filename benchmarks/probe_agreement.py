"""How well the head probe agrees with full fine-tuning: the change of R@1 that it predicts beside the one measured.

For every model, data set and source of negatives: features of the training and validation split are encoded once and
probed, then the model is fine-tuned whole, by the demo's recipe, with InfoNCE and with L_HN at every γ (no token term),
from the same seeds. Both changes, L_HN minus InfoNCE in R@1, mean of both directions, are of the validation split, with
95 % intervals over queries, families whole, and seeds. The last epoch is what the agreement is counted by; the best
epochs stand beside it, but were chosen by the split that measures, on both sides alike. Nothing of a full run is known
to the probe. Finished runs are used again, stopped ones are continued.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import torch

from hnclip.analysis.head_probe import Change, Features, Fit, ProbeSettings, head_probe, recall_change
from hnclip.config import AdaptConfig, ObjectiveConfig, ReadConfig, RunOptions, TrainConfig, to_json
from hnclip.encode.loop import encode_captions, encode_pixels
from hnclip.evaluate.bootstrap import Estimate
from hnclip.evaluate.ranks import Ranks
from hnclip.evaluate.retrieval import evaluate, group_numbers
from hnclip.measure import Report, machine
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load
from hnclip.objectives.registry import build_objective
from hnclip.recipes import demo
from hnclip.train.data import RunData, open_run_data
from hnclip.train.runs import train_or_continue
from hnclip.util.device import find_device

log = logging.getLogger("hnclip.bench")

EPOCHS = ("last", "best")
COLUMNS = {
    "model": "model",
    "data": "data",
    "negatives": "negatives",
    "gamma": "γ",
    "zero_shot": "zero-shot",
    "infonce": "InfoNCE",
    "predicted": "predicted",
    "last": "measured, last",
    "best": "measured, best",
    "signs": "signs",
}


@dataclass(frozen=True)
class Options:
    """Which settings, and how each is fine-tuned."""

    model: tuple[str, ...] = ("bundled",)
    """As for `hnclip train` (docs/models.md)."""
    data: tuple[str, ...] = ("scenes/park", "scenes/shelf")
    """As for `hnclip train` (docs/data.md)."""
    negatives: tuple[Literal["micro", "batch"], ...] = ("micro", "batch")
    """Where the negatives of a pair come from, in runs and probes alike."""
    gammas: tuple[float, ...] = (0.5,)
    """Strengths of L_HN, one row each."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of runs and probes."""
    epochs: int = 4
    """Of the runs."""
    lr: float = 1e-4
    """Highest learning rate of the runs, the same for both losses."""
    freeze_image: int | Literal["all"] = 0
    """As --adapt.freeze-image of `hnclip train`."""
    context: int | None = None
    """As --context of `hnclip train`."""
    limit: int | None = None
    """Only the first so many training pairs, in runs and probes alike."""
    read: ReadConfig = field(default_factory=ReadConfig)
    runs: Path = Path("runs/probe_agreement")
    """Directory of the runs."""
    device: str = "auto"


def run(options: Options) -> Report:
    rows: list[dict[str, Any]] = []
    for model in options.model:
        for data in options.data:
            base = configuration(options, model, data)
            opened = load(model, context=options.context).to(find_device(options.device))
            found = open_run_data(base, opened, build_objective(base.objective))
            features = encoded(opened, found)
            scale = float(opened.scale.detach())
            del opened
            for negatives in options.negatives:
                config = replace(base, optim=replace(base.optim, negatives=negatives))
                rows += compared(config, found, features, scale, options)
    return Report("probe_agreement", COLUMNS, rows, machine(find_device(options.device)), notes(rows))


def configuration(options: Options, model: str, data: str) -> TrainConfig:
    """InfoNCE by the demo's recipe; the losses and seeds of the runs come later."""
    recipe = demo("infonce")
    return replace(
        recipe,
        model=model,
        data=data,
        read=options.read,
        limit=options.limit,
        context=options.context,
        optim=replace(recipe.optim, epochs=options.epochs, lr=options.lr),
        adapt=AdaptConfig(freeze_image=options.freeze_image),
    )


def encoded(model: DualEncoder, data: RunData) -> tuple[Features, Features]:
    """Features of what a run trains on, and of what it is evaluated on."""
    pairs, gallery = data.pairs, data.validation
    train = Features(
        encode_pixels(model, pairs.images["full"]),
        encode_captions(model, pairs.texts["caption"]),
        pairs.owner,
        pairs.image_ids,
        pairs.caption_ids,
        group_numbers(pairs.records),
    )
    image, text = encode_pixels(model, gallery.pixels).cpu(), encode_captions(model, gallery.captions).cpu()
    ids = torch.arange(len(image)), torch.arange(len(text))  # nobody trains on these
    return train, Features(image, text, gallery.owner, *ids, group_numbers(gallery.records))


def compared(
    config: TrainConfig,
    data: RunData,
    features: tuple[Features, Features],
    scale: float,
    options: Options,
) -> list[dict[str, Any]]:
    """One row for each γ."""
    optim = config.optim
    where = {"model": config.model, "data": config.data, "negatives": optim.negatives}
    log.info(f"probe: {', '.join(where.values())}")
    settings = ProbeSettings(
        seeds=options.seeds,
        gammas=options.gammas,
        micro_batch=optim.micro_batch,
        accumulate=optim.accumulate,
        negatives=optim.negatives,
    )
    probe = head_probe(*features, scale=scale, settings=settings)

    def tuned(objective: ObjectiveConfig) -> dict[str, list[Ranks]]:
        """Ranks of the last and the best epoch, one for each seed."""
        made = [fine_tuned(replace(config, objective=objective, seed=seed), options) for seed in options.seeds]
        return {
            name: [evaluate(load(out / name).to(find_device(options.device)), data.validation).ranks for out in made]
            for name in EPOCHS
        }

    infonce = tuned(config.objective)
    families = group_numbers(data.validation.records)
    rows = []
    for fit in probe.fits:
        hard = tuned(ObjectiveConfig(gamma=fit.loss.gamma, token_weight=0.0))
        measured = {name: recall_change(hard[name], infonce[name], families) for name in EPOCHS}
        rows.append({**where, **row(fit, measured), **levels(probe.zero_shot, infonce["last"])})
        rows[-1] |= {"probe": probe.to_dict(), "infonce_recall": recalls(infonce), "hn_recall": recalls(hard)}
        log.info(f"γ {fit.loss.gamma:g}: predicted {rows[-1]['predicted']}, measured {rows[-1]['last']}")
    return rows


def fine_tuned(config: TrainConfig, options: Options) -> Path:
    """The directory of the finished run: begun, continued or found. Other settings are another directory."""
    objective = config.objective
    loss = "infonce" if objective.global_loss == "infonce" else f"hn-{objective.gamma:g}"
    digest = sha256(to_json(config).encode()).hexdigest()[:10]
    out = options.runs / f"{loss}-{config.optim.negatives}-seed-{config.seed}-{digest}"
    log.info(f"run: {out}")
    return train_or_continue(config, RunOptions(out=out, device=options.device)).out


def row(fit: Fit, measured: Mapping[str, Change]) -> dict[str, Any]:
    """What was predicted and what was found, as cells and as numbers."""
    assert fit.change is not None
    return {
        "gamma": fit.loss.gamma,
        "predicted": cell(fit.change.mean),
        **{name: cell(change.mean) for name, change in measured.items()},
        "signs": signs(fit.change, measured["last"]),
        "predicted_change": fit.change.to_dict(),
        **{f"{name}_change": change.to_dict() for name, change in measured.items()},
    }


def cell(change: Estimate) -> str:
    return f"{change.mean:+.1f} [{change.low:+.1f}, {change.high:+.1f}]"


def signs(predicted: Change, measured: Change) -> str:
    """Whether two clear changes go the same way; which of them is not clear otherwise."""
    unclear = [name for name, change in (("probe", predicted), ("run", measured)) if change.verdict == "undecided"]
    if unclear:
        return f"{' and '.join(unclear)} unclear"
    return "agree" if predicted.verdict == measured.verdict else "differ"


def levels(zero_shot: Mapping[str, float], infonce: Sequence[Ranks]) -> dict[str, float]:
    """R@1 that the changes start from, mean of both directions."""
    return {
        "zero_shot": statistics.fmean(zero_shot.values()),
        "infonce": statistics.fmean(mean_recall(ranks) for ranks in infonce),
    }


def recalls(tuned: Mapping[str, Sequence[Ranks]]) -> dict[str, list[float]]:
    return {name: [mean_recall(ranks) for ranks in found] for name, found in tuned.items()}


def mean_recall(ranks: Ranks) -> float:
    hits = [(found == 1).double().mean() for found in (ranks.text_to_image, ranks.image_to_text)]
    return 100 * float(sum(hits)) / 2


def notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The agreement over all settings: signs, correlation and error of the size."""
    said = []
    for name in EPOCHS:
        pairs = [(row["predicted_change"], row[f"{name}_change"]) for row in rows]
        clear = [(a, b) for a, b in pairs if "undecided" not in (a["verdict"], b["verdict"])]
        agreeing = sum(a["verdict"] == b["verdict"] for a, b in clear)
        predicted, measured = ([change["mean"]["mean"] for change in side] for side in zip(*pairs))
        same = sum(a * b > 0 for a, b in zip(predicted, measured))
        error = statistics.fmean(abs(a - b) for a, b in zip(predicted, measured))
        said.append(
            f"{name} epoch: of {len(clear)} settings in which both intervals exclude 0 the signs agree in {agreeing}; "
            f"of all {len(pairs)} the estimates have the same sign in {same}; mean absolute error {error:.1f} points; "
            f"correlation {correlation(predicted, measured)}"
        )
    return said


def correlation(predicted: Sequence[float], measured: Sequence[float]) -> str:
    """Pearson's; two points always lie on a line."""
    if len(predicted) < 3 or len(set(predicted)) < 2 or len(set(measured)) < 2:
        return "needs three settings that differ"
    return f"{statistics.correlation(predicted, measured):+.2f}"
