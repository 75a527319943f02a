"""`--data` into records."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from hnclip.config import ReadConfig
from hnclip.core import Record
from hnclip.data.records import DataSet
from hnclip.data.scenes import FAMILIES, SMALL, scene_records, with_doubles
from hnclip.data.scenes.world import DOMAINS

if TYPE_CHECKING:
    from hnclip.data.benchmarks import Benchmark

_AS_IT_IS = ReadConfig()
SCENES = {
    "scenes": "park",
    **{f"scenes/{style}": style for style in DOMAINS},
    **{f"scenes/{style}/{size}": style for style in DOMAINS for size in ("small", "doubles")},
}


def open_data(source: str, read: ReadConfig = _AS_IT_IS, *, splits: Collection[str] | None = None) -> DataSet:
    """What a source holds, all splits of it.

    Args:
        source: in the order in which they are recognised: `scenes`, `scenes/park`, `scenes/shelf`, and of either
            style `scenes/park/small` and `scenes/park/doubles`; the name of a benchmark, alone or as NAME=FOLDER; a
            file, a directory, or a pattern of files; a Hugging Face dataset as `owner/name` or `owner/name:config`.
        read: how to read it, where it does not say so by itself.
        splits: of a benchmark read these alone, so that no other split's files are needed.

    Raises:
        ValueError: the source is not known, cannot be read, or holds no record.
    """
    if source in SCENES:
        return DataSet(source, tuple(open_records(source, "all")))

    from hnclip.data.benchmarks import BENCHMARKS, open_benchmark
    from hnclip.data.readers.huggingface import looks_like_hub_name, read_hub
    from hnclip.data.readers.paths import is_data_name, is_pattern, read_path, read_pattern

    name, _, folder = source.partition("=")
    if name in BENCHMARKS:
        images = None if read.images is None else Path(read.images).expanduser()
        wanted = None if splits is None or "all" in splits else _benchmark_splits(BENCHMARKS[name], splits)
        return open_benchmark(name, Path(folder).expanduser() if folder else None, images, splits=wanted)
    path = Path(source).expanduser()
    if path.exists():
        found = read_path(path, read)
    elif is_pattern(source):
        found = read_pattern(str(path), read)
    elif source.startswith("scenes/"):
        raise ValueError(f"domain must be one of {', '.join(DOMAINS)}, not {source.partition('/')[2]!r}")
    elif looks_like_hub_name(source) and not is_data_name(source) and not path.parent.is_dir():
        found = read_hub(source, read)
    else:
        missing = ", and there is no such file or directory" if path.name != source or is_data_name(source) else ""
        close = get_close_matches(name, [*SCENES, *BENCHMARKS], 1)
        meant = f" Did you mean {close[0]}?" if close else ""
        raise ValueError(f"data {source!r} is not known{missing}.{meant} {_understood(list(BENCHMARKS))}")
    records = found.records if read.splits else tuple(replace(record, split=None) for record in found.records)
    return DataSet(source, records, found.problems)


def open_records(source: str, split: str, read: ReadConfig = _AS_IT_IS) -> list[Record]:
    """The records of one split; "all" is every record. Of generated scenes no other split is made."""
    if source not in SCENES:
        return list(open_data(source, read, splits={split}).part(split, validation_share=read.validation_share))
    splits = list(FAMILIES) if split == "all" else [split]
    return [record for name in splits for record in _scenes(source, name)]


def _scenes(source: str, split: str) -> list[Record]:
    """Of small scenes, and of those with doubles, there is less to train and validate on; the test split is the same,
    and without doubles."""
    size = source.rpartition("/")[2]
    families = SMALL.get(split) if size in ("small", "doubles") else None
    records = scene_records(SCENES[source], split, families=families)
    return with_doubles(records) if size == "doubles" and split == "train" else records


def _benchmark_splits(benchmark: Benchmark, splits: Collection[str]) -> set[str]:
    """Those of the splits that a benchmark has; one that it lacks may be a validation split to be held out."""
    wanted = {*splits, "train"} if "validation" in splits and "validation" not in benchmark.splits else {*splits}
    found = wanted & benchmark.splits.keys()
    if not found:
        why = "".join(f"; {benchmark.absent[name]}" for name in sorted(splits) if name in benchmark.absent)
        have = ", ".join(benchmark.splits)
        raise ValueError(f"{benchmark.name} has no split {', '.join(sorted(splits))}: it has {have}{why}")
    return found


def _understood(benchmarks: list[str]) -> str:
    return (
        f"Data are one of: generated scenes ({', '.join(SCENES)}); a benchmark as NAME or NAME=FOLDER "
        f"({', '.join(benchmarks)}); a folder of pictures with .txt captions; a table (.csv, .tsv, .jsonl, .json, "
        ".parquet) or a folder with one; WebDataset shards (.tar, a folder or a pattern of them); a Hugging Face "
        "dataset, saved to disk or as owner/name"
    )
