"""Several models on several data sets, each data set decoded once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from hnclip.data.sources import open_records
from hnclip.evaluate.retrieval import Gallery, Progress, evaluate, prepare_gallery

if TYPE_CHECKING:
    from hnclip.models.dual_encoder import DualEncoder

Name = TypeVar("Name")


def sweep(
    models: Iterable[tuple[Name, DualEncoder]],
    data: Sequence[str],
    *,
    split: str = "validation",
    batch: int = 128,
    progress: Progress = iter,
) -> dict[Name, dict[str, Any]]:
    """Metrics of every model on every data set, `{name: {data: metrics}}`.

    The models come one after another and must take the same pictures and captions: one may be made from the last. The
    default split is the one for choosing; a choice made on the test split is no result.
    """
    galleries: dict[str, Gallery] = {}
    results: dict[Name, dict[str, Any]] = {}
    for name, model in models:
        for source in data:
            if source not in galleries:
                galleries[source] = prepare_gallery(open_records(source, split), model)
        results[name] = {
            source: evaluate(model, gallery, batch=batch, progress=progress).metrics.to_dict()
            for source, gallery in galleries.items()
        }
    return results
