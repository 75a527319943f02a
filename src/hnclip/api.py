"""The Python API: train and evaluate in one call each, with everything that the commands take as keyword arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hnclip.config import Fidelity, GlobalLoss, Opening, ReadConfig, RunOptions, TrainConfig, with_fields
from hnclip.data.records import DataSet
from hnclip.data.sources import is_own_data
from hnclip.objectives.registry import MethodChoice
from hnclip.recipes import NEEDS_MODEL, change_method, make_config
from hnclip.util.console import progress
from hnclip.util.device import find_device
from hnclip.util.text import did_you_mean

if TYPE_CHECKING:
    from hnclip.evaluation.retrieval import EvaluationResult
    from hnclip.models.dual_encoder import DualEncoder
    from hnclip.training.trainer import TrainResult

SECTIONS = {"read", "objective", "optim", "adapt", "speed"}


def train(
    data: str | Path | DataSet | None = None,
    *,
    model: str | Path | None = None,
    out: str | Path | None = None,
    method: MethodChoice | None = None,
    global_loss: GlobalLoss | None = None,
    fidelity: Fidelity | None = None,
    recipe: str | None = None,
    config: TrainConfig | None = None,
    options: RunOptions | None = None,
    on_step: Callable[[int], None] | None = None,
    **settings: Any,
) -> TrainResult:
    """Fine-tune a model on image–caption pairs, as `hnclip train` does.

    Args:
        data: a path or name as for `hnclip train` (hnclip docs data), or records. Generated scenes if not given.
        model: directory, checkpoint file, hub name or run, as for `hnclip.load`. Required for data of your own.
        out: directory of the run, runs/train if not given. `out/best` and `out/last` are models that `hnclip.load`
            opens; `hnclip.resume(out)` continues an interrupted run.
        method: hn_clip if not given, or a method that it is compared with: its terms and its own global loss.
        global_loss: replaces the global loss of the method.
        fidelity: a method as released, or with its errors corrected.
        recipe: the settings that all others override; if not given, demo for the bundled model, paper for any other.
        config, options: instead of a recipe, for example those of an earlier run.
        on_step: called after every optimiser step with the number of finished steps.
        settings: any field of `TrainConfig`, of its sections, and of `RunOptions`: `lr=1e-5, epochs=3, gamma=0.25,
            device="cuda"`; several fields of a section at once: `adapt={"method": "lora", "rank": 8}`.

    Returns:
        the directory of the run, its best and last epoch with their metrics, and what it took.

    Raises:
        ValueError: a setting, the data or the model cannot be used; nothing was written.

    Examples:
        >>> result = train("captions.csv", model="openai/clip-vit-base-patch16", epochs=3)  # doctest: +SKIP
        >>> result.best["mean_R@1"]  # doctest: +SKIP
        61.3
    """
    if not isinstance(model, str | Path | None):
        raise ValueError("train opens the model itself: give its name or directory (hnclip.save writes one)")
    given = {"model": model, "data": data.name if isinstance(data, DataSet) else data}
    named = {key: str(value) for key, value in given.items() if value is not None}
    chosen, running = split_settings(settings)
    if config is not None:
        base = change_method(config, method, global_loss, fidelity)
    else:
        adapt = chosen.get("adapt.method")
        base = make_config(recipe, named.get("model"), method, global_loss, fidelity, adapt=adapt)
        own = isinstance(data, DataSet) or is_own_data(named.get("data", base.data))
        if own and model is None and base.model == "bundled":
            raise ValueError(NEEDS_MODEL)

    from hnclip.training import runs

    records = data if isinstance(data, DataSet) else None
    running |= {} if out is None else {"out": str(out)}
    options = with_fields(options or RunOptions(), running)
    return runs.train(with_fields(base, chosen | named), options, data=records, on_step=on_step)


def split_settings(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings by name as dotted fields of `TrainConfig` and of `RunOptions`.

    >>> split_settings({"lr": 1e-5, "adapt": {"method": "lora"}, "device": "cpu"})
    ({'optim.lr': 1e-05, 'adapt.method': 'lora'}, {'device': 'cpu'})
    """
    found: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    known = _field_paths(TrainConfig()), _field_paths(RunOptions())
    for name, value in settings.items():
        place = next((place for place, paths in enumerate(known) if name in paths), None)
        if place is None:
            raise ValueError(f"there is no setting {name!r}{did_you_mean(name, [*known[0], *known[1]])}")
        path = known[place][name]
        section = path in SECTIONS and isinstance(value, Mapping)
        found[place].update({f"{path}.{key}": one for key, one in value.items()} if section else {path: value})
    return found


def _field_paths(config: Any, prefix: str = "") -> dict[str, str]:
    """The dotted field of each name; of equal names the outer one."""
    paths = {spec.name: prefix + spec.name for spec in fields(config)}
    for name in SECTIONS & paths.keys():
        paths = {**_field_paths(getattr(config, name), f"{prefix}{name}."), **paths}
    return paths


def resume(
    out: str | Path,
    options: RunOptions | None = None,
    *,
    data: DataSet | None = None,
    on_step: Callable[[int], None] | None = None,
) -> TrainResult:
    """Continue the run in a directory from its last checkpoint, to the same weights as if it had never stopped.

    Args:
        options: where and how it continues; as it was started if not given.
        data: the records, if the run was started with records.
        on_step: as in `train`.
    """
    from hnclip.training import runs

    return runs.resume(Path(out), options, data=data, on_step=on_step)


def evaluate(
    model: str | Path | DualEncoder,
    data: str | Path | DataSet = "scenes/park",
    *,
    split: str | None = None,
    read: ReadConfig | None = None,
    opening: Opening | None = None,
    queries: str | Path | None = None,
    top: int = 10,
    batch: int = 128,
    device: str = "auto",
) -> EvaluationResult:
    """Retrieval metrics of a model on a split, in both directions, with bootstrap intervals, as `hnclip eval` does.

    Args:
        model: as for `hnclip.load`; of a run its best epoch.
        data: a path or name as for `hnclip train` (hnclip docs data), or records.
        split: the test split if not given, or all records if the data declare no splits.
        read: how to read the data; `opening`: how to open the model.
        queries: also write every query with its rank and its `top` candidates to this directory.
        batch: images or captions encoded at once.

    Examples:
        >>> evaluate("bundled", "scenes/park/small").metrics["text_to_image"]["R@1"]  # doctest: +SKIP
        18.6
    """
    results = evaluate_all(
        open_models(model, opening or Opening(), device)[:1],
        [data if isinstance(data, DataSet) else str(data)],
        split=split,
        read=read or ReadConfig(),
        queries=None if queries is None else Path(queries),
        top=top,
        batch=batch,
    )
    return results[0]


def evaluate_all(
    models: Sequence[tuple[str, Callable[[], DualEncoder]]],
    data: Sequence[str | DataSet],
    *,
    split: str | None = None,
    read: ReadConfig,
    queries: Path | None = None,
    top: int = 10,
    batch: int = 128,
) -> list[EvaluationResult]:
    """Several models, by name with what opens each, on several data sets: every model is compared on the records that
    all of them can use."""
    from hnclip.analysis.captions import caption_similarity
    from hnclip.evaluation.retrieval import evaluate_models, open_task

    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")
    tasks = [open_task(source, split, read) for source in data]
    with progress("evaluating, batches") as bar:
        return evaluate_models(
            models,
            tasks,
            read,
            batch=batch,
            queries=queries,
            top=top,
            caption_similarity=caption_similarity,
            progress=bar.iterate,
        )


def open_models(
    model: str | Path | DualEncoder, opening: Opening, device: str
) -> list[tuple[str, Callable[[], DualEncoder]]]:
    """The models that a name stands for (of a run its best and its last epoch), with what opens each."""
    from hnclip.models.load import load, models_of

    if not isinstance(model, str | Path):
        return [(model.name, lambda: model)]
    place = find_device(device)
    return [(name, partial(load, path, **vars(opening), device=place)) for name, path in models_of(str(model))]
