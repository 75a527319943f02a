"""Shards by a pool of Ray actors, each of which opens data and model once and writes whole shards.

Actors write into the same directory and read data and model by the same paths: several machines need a shared disk.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from hnclip.encode.shards import Encoder, EncodeSettings
from hnclip.util.device import find_device
from hnclip.util.optional import import_extra


class ShardActor:
    """A worker of Ray Data; its rows are numbers of shards.

    Args:
        folder: where relative paths of the settings start.
    """

    def __init__(self, settings: EncodeSettings, folder: str) -> None:
        os.chdir(folder)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self.encoder = Encoder(settings)
        self.encoder.model.to(find_device(settings.device))

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        """Write these shards. Errors are returned as a column, because Ray wraps exceptions in its own."""
        errors = []
        for number in rows["shard"]:
            try:
                self.encoder.write(int(number))
                errors.append("")
            except (ValueError, OSError, RuntimeError) as error:
                errors.append(str(error) or repr(error))
        return {"shard": rows["shard"], "error": errors}


def encode_with_ray(settings: EncodeSettings, pending: Sequence[int], workers: int | None) -> Iterator[int]:
    """Write these shards with this number of actors; yields the number of each that is done."""
    if not pending:
        return
    ray = import_ray()
    started = not ray.is_initialized()
    if started:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)  # or the cluster of RAY_ADDRESS
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False
        workers, cpus, gpus = divide_resources(ray.cluster_resources(), settings, workers, len(pending))
        numbers = ray.data.from_items([{"shard": number} for number in pending], override_num_blocks=len(pending))
        done = numbers.map_batches(
            ShardActor,
            fn_constructor_args=(replace(settings, threads=settings.threads or cpus), os.getcwd()),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=workers),
            num_cpus=cpus,
            num_gpus=gpus,
        )
        for row in done.iter_rows():
            if row["error"]:
                raise RuntimeError(row["error"])
            yield int(row["shard"])
    except ray.exceptions.RayError as error:
        raise RuntimeError(f"Ray failed; the same command continues: {error}") from error
    finally:
        if started:
            ray.shutdown()


def divide_resources(
    resources: dict[str, float], settings: EncodeSettings, wanted: int | None, shards: int
) -> tuple[int, int, int]:
    """The number of actors, and the CPUs and GPUs of each."""
    gpus = 0 if settings.device == "cpu" else int(resources.get("GPU", 0))
    cpus = max(1, int(resources.get("CPU", 1)))
    workers = wanted or gpus or max(1, cpus // (settings.threads or 4))
    # Actors beyond the resources would wait for others to end, which they never do.
    workers = min(workers, shards, gpus or workers, max(1, cpus // (settings.threads or 1)))
    return workers, settings.threads or max(1, cpus // workers), int(gpus > 0)


def import_ray() -> Any:
    """Ray with Ray Data; ValueError with the command that installs them."""
    import_extra("ray.data", "actors of Ray", "scale")
    return import_extra("ray", "actors of Ray", "scale")
