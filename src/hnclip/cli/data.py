"""`hnclip data check`, `hnclip data cache`, `hnclip prepare`, `hnclip encode`."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from pydantic.dataclasses import dataclass

from hnclip.cli.options import (
    Data,
    ModelOnData,
    ModelOpening,
    Output,
    OutputGroup,
    Printed,
    arguments_of,
)
from hnclip.config import Count, Number, Opening, ReadConfig
from hnclip.util.optional import large_import
from hnclip.util.text import parse_share

if TYPE_CHECKING:
    from hnclip.encode.shards import EncodeResult
    from hnclip.prepare.run import PrepareResult


@dataclass(frozen=True)
class Check:
    """Look for problems in data before training: missing or damaged images, empty, truncated or equal captions,
    near-duplicates, images in two splits. Exit code 1 if there are invalid records."""

    data: Data
    """As for `hnclip train` (hnclip docs data)."""
    model: str | None = None
    """Count the tokens of this model, and the captions that it would truncate."""
    images: bool = True
    """Also decode the images."""
    listed: Number = 5
    """Examples printed per problem; --json has all of them."""
    opening: ModelOpening = field(default_factory=Opening)
    read: ReadConfig = field(default_factory=ReadConfig)
    output: OutputGroup = field(default_factory=Output)

    def run(self) -> Printed:
        from hnclip.data.check import check_data
        from hnclip.data.sources import open_data
        from hnclip.report.data_check import check_report

        data = open_data(self.data, self.read)
        text_transform = image_transform = None
        if self.model is not None:
            from hnclip.models.load import load  # imports transformers, which takes seconds

            model = load(self.model, **vars(self.opening))
            text_transform, image_transform = model.text_transform, model.image_transform
        result = check_data(data, text_transform=text_transform, image_transform=image_transform, images=self.images)
        report = check_report(result, self.listed)
        return Printed(report.to_text(), report.data, 1 if result.errors else 0)


@dataclass(frozen=True)
class Cache:
    """List the caches of decoded images, one for each image geometry of a model, with their sizes; or delete some."""

    cache: Annotated[str | None, tyro.conf.arg(name="read.cache")] = None
    """The cache directory; $HNCLIP_CACHE or ~/.cache/hnclip if not given."""
    delete: Literal["old", "all"] | None = None
    """old: those of earlier versions, which are not used any more. Images are decoded again when they are needed."""
    output: OutputGroup = field(default_factory=Output)

    def run(self) -> Printed:
        from hnclip.data.image_cache import cache_directory, delete_cache, list_caches
        from hnclip.util.text import readable_size

        directory = cache_directory(self.cache)
        caches = list_caches(directory)
        deleted = [cache for cache in caches if self.delete == "all" or (self.delete and not cache.geometry)]
        for found in deleted:
            delete_cache(found)
        lines = []
        for found in caches:
            about = "of an earlier version, not used"
            if found.geometry:
                about = f"{found.geometry}: {found.images:,} images"
            done = "deleted " if found in deleted else ""
            lines.append(f"{done}{found.path}   {about}, {readable_size(found.bytes)}")
        if not caches:
            lines.append(f"{directory} holds no cached images")
        elif not self.delete and not all(found.geometry for found in caches):
            lines.append("hnclip data cache --delete old deletes those of earlier versions")
        rows = [{**vars(found), "path": str(found.path), "deleted": found in deleted} for found in caches]
        return Printed("\n".join(lines), {"directory": str(directory), "caches": rows})


@dataclass(frozen=True)
class PrepareRegions(ModelOnData):
    """Find regions of the images and the sentences of the captions that describe them. The same command continues
    after an interruption and updates records that have changed."""

    data: Data
    """As for `hnclip train` (hnclip docs data)."""
    model: str = "bundled"
    """Model that matches sentences to regions, as for `hnclip eval` (hnclip docs models)."""
    proposer: str = "auto"
    """sam, felzenszwalb, grid or felzenszwalb+grid. auto: sam if --weights are given, otherwise felzenszwalb+grid, for
    records without regions of their own."""
    weights: Path | None = None
    """Directory with SAM's weights, as saved by transformers."""
    sentences: Literal["careful", "dots"] = "careful"
    """How captions are split into sentences: careful knows decimals and abbreviations, dots is GOAL's split('.')."""
    split: str | None = None
    """Split to prepare; train if not given, all if the data declare no splits."""
    replace: bool = False
    """Overwrite a manifest instead of continuing it, for example with another proposer or model."""
    workers: Count | None = None
    """Images processed at once before they are encoded; the number of processors if not given."""

    def run(self) -> PrepareResult:
        from hnclip.prepare.run import prepare_regions as run

        return run(**arguments_of(self))


@dataclass(frozen=True)
class PrepareText:
    """Remove words of appearance (colours, materials, textures) from the captions, for example with a function of your
    own. The same command continues after an interruption and updates records that have changed."""

    data: Data
    """As for `hnclip train` (hnclip docs data)."""
    filter: str = "lexicon"
    """lexicon, lexicon:colours and the like for some of its lists, blunt for plain removal of words, or
    package.module:function for a function of your own that takes a caption and returns one."""
    split: str | None = None
    """Split to prepare; train if not given, all if the data declare no splits."""
    replace: bool = False
    """Overwrite a manifest instead of continuing it, for example with another filter."""
    workers: Count = 1
    """Records filtered at once, for a function that waits for a service."""
    read: ReadConfig = field(default_factory=ReadConfig)
    output: OutputGroup = field(default_factory=Output)

    def run(self) -> PrepareResult:
        from hnclip.prepare.run import prepare_text as run

        return run(**arguments_of(self))


@dataclass(frozen=True)
class Encode(ModelOnData):
    """Encode images and captions to a directory of embeddings in the layout of clip-retrieval. The same command resumes
    an interrupted one and encodes damaged files again. With --partition 1/N to N/N, N processes share the work; the
    result is bit-identical."""

    data: Data
    """As for `hnclip train` (hnclip docs data), or any folder of images."""
    out: Path
    """Directory to write, or to resume."""
    model: str = "bundled"
    """As for `hnclip eval` (hnclip docs models)."""
    split: str = "all"
    """all, or one split of the data."""
    only: Literal["both", "images", "captions"] = "both"
    """Encode only images or only captions."""
    partition: str = "1/1"
    """K/N: write only the K-th of N parts of the shards, for example 1/3, 2/3 and 3/3 in three processes."""
    shard_size: Count = 4096
    """Records per shard; an interruption loses at most the unfinished shard."""
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

    def __post_init__(self) -> None:
        parse_share(self.partition)
        if self.workers is not None and self.engine != "ray":
            raise ValueError("--workers requires --engine ray; otherwise start one process for each --partition")

    def run(self) -> EncodeResult:
        with large_import():
            from hnclip.encode.shards import encode as run

        return run(**arguments_of(self))
