"""The models of a training run: the best epoch and the last."""

from __future__ import annotations

import re
from pathlib import Path

from hnclip.models.model_card import read_training
from hnclip.train.loop import CONFIG, RESULT
from hnclip.util.files import read_json


def models_of(path: str) -> list[tuple[str, str]]:
    """What `--model` names, as (name for tables, path to load).

    A run directory gives its best epoch, chosen by validation, and its last; one model if they are the same epoch. Of
    an unfinished run these are the best and last so far. Everything else is one model by its own name.
    """
    run = Path(path)
    if not _is_run(run):
        return [(path, path)]
    epochs = {name: _epoch(run / name) for name in ("best", "last") if (run / name).is_dir()}
    finished = (run / RESULT).is_file()
    if not epochs:
        what = "best/ and last/ are gone" if finished else f"finish an epoch with hnclip train --resume {run}"
        raise ValueError(f"{run} is a run without a model: {what}")
    if len(epochs) == 2 and epochs["best"] is not None and epochs["best"] == epochs["last"]:
        epochs = {"best": epochs["best"]}
        labels = {"best": "best and last"}
    else:
        labels = {"best": "best", "last": "last"}
    state = "" if finished else " so far"
    return [
        (f"{run} ({labels[name]}{state}{'' if epoch is None else f', epoch {epoch}'})", str(run / name))
        for name, epoch in epochs.items()
    ]


def _is_run(directory: Path) -> bool:
    """Models have a config.json as well; that of a run says what was trained and how."""
    config = directory / CONFIG
    return config.is_file() and {"objective", "optim"} <= read_json(config).keys()


def _epoch(model: Path) -> int | None:
    """The epoch that a model of a run is from, as the model itself tells: the run may have gone on since."""
    training = read_training(model)
    named = [re.search(r", epoch (\d+)$", split) for split in (training.metrics if training else ())]
    return next((int(found[1]) for found in named if found), None)
