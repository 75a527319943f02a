"""Every method trained for minutes, with its own global term and with L_HN, beside the model that it starts from.

The same model, data, batches, rate and epochs for all: `hnclip train --method X --global-loss G`.

Recalls are of the last epoch, on pictures that training did not see and on those that it did; differences are from the
model before training, paired, with 95 % intervals. One seed: a difference between two rows may be the seed's. Runs are
kept and found again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from hnclip.config import RunOptions, TrainConfig, to_json
from hnclip.evaluation.compare import Comparison
from hnclip.evaluation.retrieval import comparisons, evaluate_models, open_task
from hnclip.measure import Report, machine
from hnclip.models.load import load
from hnclip.objectives.registry import METHOD_CHOICES, apply_method
from hnclip.recipes import demo
from hnclip.training.runs import train_or_continue
from hnclip.util.device import find_device

log = logging.getLogger("hnclip.bench")

START = "before training"
PLAIN = "plain"
PLACES = {"validation": "held out", "train": "trained on"}


@dataclass(frozen=True)
class Options:
    """What each method learns in minutes."""

    model: str = "bundled"
    data: str = "scenes/park/small"
    """As for `hnclip train`, with a validation split."""
    methods: tuple[str, ...] = (PLAIN, *METHOD_CHOICES)
    """plain is InfoNCE on pictures and captions; of FineLIP there is a third row, with InfoNCE beside its own term."""
    epochs: int = 2
    lr: float = 3e-4
    micro_batch: int = 16
    accumulate: int = 1
    gamma: float = 0.5
    cluster: int = 0
    """As --cluster of `hnclip train`."""
    limit: int | None = None
    """Only the first so many training pairs."""
    seed: int = 42
    runs: Path = Path("runs/methods")
    """Directory of the runs."""
    device: str = "auto"


def configurations(options: Options) -> dict[tuple[str, str], TrainConfig]:
    """The runs by method and global term."""
    recipe = demo("infonce")
    optim = replace(
        recipe.optim,
        epochs=options.epochs,
        lr=options.lr,
        micro_batch=options.micro_batch,
        accumulate=options.accumulate,
    )
    base = replace(
        recipe,
        model=options.model,
        data=options.data,
        cluster=options.cluster,
        limit=options.limit,
        seed=options.seed,
        optim=optim,
        objective=replace(recipe.objective, gamma=options.gamma),
    )
    found: dict[tuple[str, str], TrainConfig] = {}
    for name in options.methods:
        own = base if name == PLAIN else apply_method(base, name)  # type: ignore[arg-type]
        terms = ["none", "infonce", "hn"] if name == "finelip" else [own.objective.global_loss, "hn"]
        for term in dict.fromkeys(terms):
            objective = replace(own.objective, global_loss=term, gamma=options.gamma)  # type: ignore[arg-type]
            found[name, term] = replace(own, objective=objective)
    return found


def trained(name: str, term: str, config: TrainConfig, options: Options) -> Path:
    """The directory of the finished run: begun, continued or found. Other settings are another directory."""
    digest = sha256(to_json(config).encode()).hexdigest()[:10]
    out = options.runs / f"{name}-{term}-{digest}"
    log.info(f"run: {out}")
    return train_or_continue(config, RunOptions(out=out, device=options.device)).out


def run(options: Options) -> Report:
    for name in options.methods:
        if name not in (PLAIN, *METHOD_CHOICES):
            raise ValueError(f"there is no method {name!r}; there are {', '.join((PLAIN, *METHOD_CHOICES))}")
    device = find_device(options.device)
    made = configurations(options)
    outs = {f"{name} {term}": trained(name, term, config, options) for (name, term), config in made.items()}
    log.info("evaluating")
    models = [(START, lambda: load(options.model).to(device))]
    models += [(name, lambda out=out: load(str(out / "last")).to(device)) for name, out in outs.items()]  # type: ignore[misc]
    config = next(iter(made.values()))
    tasks = {split: open_task(config.data, split, config.read) for split in PLACES}
    results = {place: evaluate_models(models, [task], config.read) for place, task in tasks.items()}
    rows = [
        {"method": name, "term": term} for name, term in [(START, "–"), *(tuple(model.split(" ", 1)) for model in outs)]
    ]
    for place, found in results.items():
        changes: dict[tuple[str, str], Comparison] = {
            (each.result.model, each.comparison.direction): each.comparison for each in comparisons(found)
        }
        for row, result in zip(rows, found):
            row |= _cells(place, result.model, result.metrics, changes)
    columns = {"method": "method", "term": "global term"}
    for place, title in PLACES.items():
        for short, arrow in (("t2i", "T→I"), ("i2t", "I→T")):
            columns |= {f"{place}_{short}": f"{title} {arrow}", f"{place}_{short}_change": "change"}
    return Report("method_runs", columns, rows, machine(device))


def _cells(place: str, model: str, metrics: Any, changes: dict[tuple[str, str], Comparison]) -> dict[str, Any]:
    cells: dict[str, Any] = {}
    for short, direction in (("t2i", "text_to_image"), ("i2t", "image_to_text")):
        cells[f"{place}_{short}"] = metrics[direction]["R@1"]
        if (model, direction) in changes:
            change = changes[model, direction].difference
            cells[f"{place}_{short}_change"] = f"{change.mean:+.1f} [{change.low:+.1f}, {change.high:+.1f}]"
    return cells
