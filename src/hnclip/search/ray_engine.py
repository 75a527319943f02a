"""Shards by a pool of Ray actors: each opens data and model once and makes whole shards, as a process does without Ray.

Actors write into the same directory, and read the same data and model by the same paths: on several machines these have
to lie on a disk that all of them share.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from hnclip.options import Encode
from hnclip.search.encode import Encoder
from hnclip.util.device import find_device


class ShardMaker:
    """What an actor runs; rows of Ray Data are numbers of shards."""

    def __init__(self, options: Encode, folder: str) -> None:
        """
        Args:
            folder: where relative paths of the options start.
        """
        os.chdir(folder)
        self.encoder = Encoder(options)
        self.encoder.model.to(find_device(options.device))

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        """Make the shards of these rows; what went wrong comes back as a row too, since Ray wraps errors in its own."""
        errors = []
        for number in rows["shard"]:
            try:
                self.encoder.make(int(number), advance=lambda done: None)
                errors.append("")
            except (ValueError, OSError, RuntimeError) as error:
                errors.append(str(error) or repr(error))
        return {"shard": rows["shard"], "error": errors}


def ray_shards(options: Encode, pending: Sequence[int]) -> Iterator[int]:
    """Make these shards, and give the number of each that is done."""
    if not pending:
        return
    ray = import_ray()
    started = not ray.is_initialized()
    if started:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)  # or the cluster of RAY_ADDRESS
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # the plan and its end are for those who write it
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False
        workers, processors, gpus = _share(ray.cluster_resources(), options, len(pending))
        made = ray.data.from_items(
            [{"shard": number} for number in pending], override_num_blocks=len(pending)
        ).map_batches(
            ShardMaker,
            fn_constructor_args=(replace(options, threads=options.threads or processors), os.getcwd()),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=workers),
            num_cpus=processors,
            num_gpus=gpus,
        )
        for row in made.iter_rows():
            if row["error"]:
                raise RuntimeError(row["error"])
            yield int(row["shard"])
    except ray.exceptions.RayError as error:
        raise RuntimeError(f"the ray engine failed, the same command goes on: {error}") from error
    finally:
        if started:
            ray.shutdown()


def _share(resources: dict[str, float], options: Encode, shards: int) -> tuple[int, int, int]:
    """Actors, and the processors and GPUs of each."""
    gpus = 0 if options.device == "cpu" else int(resources.get("GPU", 0))
    processors = max(1, int(resources.get("CPU", 1)))
    workers = options.workers or gpus or max(1, processors // (options.threads or 4))
    # More than can be there at once would wait for the first to end, and they never do.
    workers = min(workers, shards, gpus or workers, max(1, processors // (options.threads or 1)))
    return workers, options.threads or max(1, processors // workers), int(gpus > 0)


def import_ray() -> Any:
    """Ray with Ray Data, or a ValueError that says how to get them."""
    try:
        import_module("ray.data")
        return import_module("ray")
    except ImportError as error:
        raise ValueError(
            "the ray engine needs the package ray: pip install 'hnclip[scale]'. Without it start a process for each "
            "--partition"
        ) from error
