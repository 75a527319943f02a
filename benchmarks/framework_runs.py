"""Every framework trained for minutes, with its own global term and with L_HN, beside the model that it starts from.

The same model, data, batches, rate and epochs for all: `hnclip train --objective X --global G`. Recalls are of the last
epoch, on the validation split and on the training pairs themselves; differences are from the model before training,
paired, with 95 % intervals over families. One seed: a difference between two rows may be the seed's. Runs are kept and
found again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from hnclip.config import ReadConfig, TrainConfig, to_json
from hnclip.evaluate.compare import Comparison
from hnclip.evaluate.protocol import comparisons, evaluate_models, open_task
from hnclip.frameworks import PLUGS, plugged
from hnclip.measure import Report, machine
from hnclip.models.load import load
from hnclip.recipes import demo
from hnclip.train.device import pick_device
from hnclip.train.loop import train_or_continue

START = "before training"
PLAIN = "plain"


@dataclass(frozen=True)
class Options:
    """What each framework learns in minutes."""

    model: str = "bundled"
    data: str = "scenes/park"
    frameworks: tuple[str, ...] = (PLAIN, *PLUGS)
    """plain is InfoNCE on pictures and captions; of FineLIP there is a third row, with InfoNCE beside its own term."""
    epochs: int = 2
    lr: float = 1e-4
    gamma: float = 0.5
    cluster: int = 4
    """As --cluster of `hnclip train`: near-duplicates meet in batches, as many as scenes have in a family."""
    limit: int | None = None
    """Only the first so many training pairs."""
    seed: int = 42
    runs: Path = Path("runs/frameworks")
    """Directory of the runs."""
    device: str = "auto"


def configurations(options: Options) -> dict[tuple[str, str], TrainConfig]:
    """The runs by framework and global term."""
    recipe = demo("infonce")
    optim = replace(recipe.optim, epochs=options.epochs, lr=options.lr)
    base = replace(
        recipe,
        model=options.model,
        data=options.data,
        cluster=options.cluster,
        limit=options.limit,
        seed=options.seed,
        device=options.device,
        optim=optim,
        objective=replace(recipe.objective, gamma=options.gamma),
    )
    found: dict[tuple[str, str], TrainConfig] = {}
    for name in options.frameworks:
        own = base if name == PLAIN else plugged(base, name)  # type: ignore[arg-type]
        terms = [own.objective.global_loss, "hn"]
        if name == "finelip":
            terms = ["none", "infonce", "hn"]
        for term in dict.fromkeys(terms):
            objective = replace(own.objective, global_loss=term, gamma=options.gamma)  # type: ignore[arg-type]
            found[name, term] = replace(own, objective=objective)
    return found


def trained(name: str, term: str, config: TrainConfig, runs: Path, say: Callable[[str], None]) -> Path:
    """The directory of the finished run: begun, continued or found. Other settings are another directory."""
    digest = sha256(to_json(replace(config, out=Path())).encode()).hexdigest()[:10]
    config = replace(config, out=runs / f"{name}-{term}-{digest}")
    say(f"run: {config.out}")
    return train_or_continue(config, quiet=True, report=say).out


def run(options: Options, say: Callable[[str], None]) -> Report:
    for name in options.frameworks:
        if name not in (PLAIN, *PLUGS):
            raise ValueError(f"there is no framework {name!r}; there are {', '.join((PLAIN, *PLUGS))}")
    device = pick_device(options.device)
    outs = {
        f"{name} {term}": trained(name, term, config, options.runs, say)
        for (name, term), config in configurations(options).items()
    }
    say("evaluating")
    models = [(START, lambda: load(options.model).to(device))]
    models += [(name, lambda out=out: load(str(out / "last")).to(device)) for name, out in outs.items()]  # type: ignore[misc]
    read = ReadConfig()
    results = evaluate_models(models, [open_task(options.data, split, read) for split in ("validation", "train")], read)
    changes: dict[tuple[str, str, str], Comparison] = {
        (found.model, found.split, found.comparison.direction): found.comparison for found in comparisons(results)
    }
    rows: list[dict[str, Any]] = []
    for result in results.results:
        if result.split != "validation":
            continue
        framework, _, term = (result.model, "", "–") if result.model == START else result.model.partition(" ")
        row: dict[str, Any] = {"framework": framework, "term": term}
        for other in results.results:
            if other.model != result.model:
                continue
            for short, direction in (("t2i", "text_to_image"), ("i2t", "image_to_text")):
                row[f"{other.split}_{short}"] = other.metrics[direction]["R@1"]
                if (found := changes.get((other.model, other.split, direction))) is not None:
                    difference = found.difference
                    row[f"{other.split}_{short}_change"] = (
                        f"{difference.mean:+.1f} [{difference.low:+.1f}, {difference.high:+.1f}]"
                    )
        rows.append(row)
    columns = {"framework": "framework", "term": "global term"}
    for split in ("validation", "train"):
        for short, arrow in (("t2i", "T→I"), ("i2t", "I→T")):
            columns[f"{split}_{short}"] = f"{split} {arrow}"
            columns[f"{split}_{short}_change"] = "change"
    return Report("framework_runs", columns, rows, machine(device))
