"""Options of bulk encoding. No heavy import: the command line builds its help from them."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from pydantic.dataclasses import dataclass

from hnclip.config import Count, Number, Opening, ReadConfig


@dataclass(frozen=True)
class EncodeOptions:
    """What is encoded, with which model, where to and by which processes."""

    data: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA")]
    """As for `hnclip train` (docs/data.md), or any folder of images."""
    out: Path
    """Directory to write, or to resume."""
    opening: Annotated[Opening, tyro.conf.arg(name="")] = field(default_factory=Opening)
    read: ReadConfig = field(default_factory=ReadConfig)
    model: str = "bundled"
    """As for `hnclip eval` (docs/models.md); for a run directory, its best epoch."""
    split: str = "all"
    """all, or one split of the data."""
    only: Literal["both", "images", "captions"] = "both"
    """Encode only images or only captions."""
    partition: str = "0/1"
    """K/N: write only the shards K, K + N, K + 2·N …"""
    shard_size: Count = 4096
    """Records per shard; an interruption loses at most the unfinished shard."""
    batch: Count = 128
    """Images or captions encoded at once."""
    dtype: Literal["float32", "float16"] = "float32"
    """Data type of the embeddings on disk."""
    verify: bool = False
    """Encode nothing; compare every file of --out with its checksum."""
    engine: Literal["local", "ray"] = "local"
    """local: in this process. ray: in a pool of Ray actors (pip install 'hnclip[scale]')."""
    workers: Count | None = None
    """Actors of the ray engine; if not given, one per GPU of the cluster, or one per four CPUs."""
    threads: Number = 0
    """CPU threads per process or actor; 0 leaves the choice to torch, and with ray divides the CPUs among the
    actors."""
    device: str = "auto"
    """auto uses an accelerator if there is one; or cpu, cuda, mps …"""

    def __post_init__(self) -> None:
        part, parts = self.part
        if part >= parts:
            raise ValueError(
                f"--partition must be K/N with K from 0 to N - 1, for example 0/3, 1/3, 2/3; got {self.partition!r}"
            )
        if self.workers is not None and self.engine != "ray":
            raise ValueError("--workers requires --engine ray; otherwise start one process per --partition")

    @property
    def part(self) -> tuple[int, int]:
        """K and N of the partition; (0, 0) if it is malformed."""
        part, slash, parts = self.partition.partition("/")
        return (int(part), int(parts)) if slash and part.isdecimal() and parts.isdecimal() else (0, 0)
