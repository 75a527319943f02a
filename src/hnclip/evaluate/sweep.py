"""Several models on several data sets, to choose one of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from hnclip.config import ReadConfig
from hnclip.evaluate.protocol import evaluate_task, open_task
from hnclip.util.console import Iterate

if TYPE_CHECKING:
    from hnclip.models.dual_encoder import DualEncoder

Name = TypeVar("Name")


def sweep(
    models: Iterable[tuple[Name, DualEncoder]],
    data: Sequence[str],
    read: ReadConfig,
    *,
    split: str = "validation",
    batch: int = 128,
    progress: Iterate = iter,
) -> dict[Name, dict[str, Any]]:
    """Metrics of every model on every data set, `{name: {data: metrics}}`.

    The models come one after another: one may be made from the last. The default split is the one for choosing; a
    choice made on the test split is no result.
    """
    tasks = {source: open_task(source, split, read) for source in data}
    return {
        name: {
            source: dict(evaluate_task(str(name), model, task, read, batch=batch, progress=progress).metrics)
            for source, task in tasks.items()
        }
        for name, model in models
    }
