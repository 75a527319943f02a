"""`hnclip encode`: images and captions into a directory of embeddings (`hnclip.encode.embeddings`).

Records are divided into shards by position, and no batch extends beyond its shard: a shard depends on its own records
only. Any number of processes share a directory without communication, and a killed one loses the shard it works on.
"""

from __future__ import annotations

import json
import logging
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pydantic
import torch

from hnclip.config import Count, Number, Opening, ReadConfig, option_words
from hnclip.core import Problem, Record
from hnclip.data.image_sources import FileImage, is_image_name
from hnclip.data.readers.columns import invalid_text
from hnclip.data.readers.folders import count_captioned
from hnclip.data.readers.locate import files_below
from hnclip.data.records import SPLITS, DataSet, normal_split
from hnclip.data.sources import is_data_name, local_path, open_data
from hnclip.data.validate import check_rows, check_share, drop_unreadable, write_problems
from hnclip.encode import embeddings as stored
from hnclip.encode.embeddings import IMAGES, MANIFEST, METADATA, SKIPPED, TEXTS, Manifest
from hnclip.encode.fingerprint import images_fingerprint, model_fingerprint, records_fingerprint
from hnclip.encode.loop import encode_captions, encode_images
from hnclip.models.load import load
from hnclip.util.console import progress
from hnclip.util.device import find_device
from hnclip.util.files import replace_file
from hnclip.util.text import counted, parse_share

log = logging.getLogger(__name__)

LEFTOVER = 3600  # seconds after which an unfinished file is deleted
Advance = Callable[[int], None]
NAMES = {"model", "source", "data", "command"}  # parts of a job that may differ from call to call


@pydantic.dataclasses.dataclass(frozen=True)
class EncodeSettings:
    """What is needed to write a shard; actors of Ray receive it pickled."""

    data: str
    """A source as for training, or any folder of images."""
    out: Path
    model: str = "bundled"
    """As `hnclip eval` takes it; of a run directory, its best epoch."""
    opening: Opening = Opening()
    read: ReadConfig = ReadConfig()
    split: str = "all"
    """One split of the data, or all."""
    only: Literal["both", "images", "captions"] = "both"
    dtype: Literal["float32", "float16"] = "float32"
    """Of the embeddings on disk."""
    shard_size: Count = 4096
    """Records per shard; an interruption loses at most the unfinished shard."""
    batch: Count = 128
    threads: Number = 0
    """Decoding threads of a process, and CPU threads of an actor; 0 leaves the choice to torch."""
    device: str = "auto"


@dataclass(frozen=True)
class EncodeResult:
    """What a call did, and the state of the directory.

    `encoded` and `kept` count the shards of this partition that were encoded now or existed already; `missing` are the
    shards of all partitions that do not exist yet, and `command` encodes them. `counts` are of a complete directory.
    """

    out: Path
    encoded: int
    kept: int
    missing: tuple[int, ...]
    shards: int
    command: str
    seconds: float
    counts: Mapping[str, int] | None

    def to_dict(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name != "counts"}
        return {**own, "out": str(self.out), "complete": self.counts is not None, **(self.counts or {})}

    def to_text(self) -> str:
        encoded = f"encoded {counted(self.encoded, 'shard')} in {self.seconds:.0f} s"
        lines = [encoded if self.encoded else "nothing to encode"]
        lines += [f"{counted(self.kept, 'shard')} existed already, checksums verified"] * bool(self.kept)
        if self.counts is None:
            missing = stored.missing_text(self.missing, self.shards)
            return "\n".join([*lines, f"{missing}: run the other partitions, or", f"  {self.command}"])
        images, captions, truncated, skipped = self.counts.values()
        lines.append(f"complete: {self.out}: {counted(images, 'image')}, {counted(captions, 'caption')}")
        lines += [f"{counted(skipped, 'record')} skipped, see {self.out / SKIPPED}"] * bool(skipped)
        lines += [f"{counted(truncated, 'caption')} truncated to the model's context"] * bool(truncated)
        return "\n".join(lines)


def encode(
    data: str,
    out: str | Path,
    *,
    partition: str = "1/1",
    verify: bool = False,
    engine: Literal["local", "ray"] = "local",
    workers: int | None = None,
    **settings: Any,
) -> EncodeResult:
    """Encode the shards of a partition that do not exist yet or are damaged.

    Args:
        partition: "K/N": of the shards, numbered from 1, K, K + N, K + 2·N …
        verify: encode nothing; ValueError if a shard is missing or damaged.
        engine: "local" is this process, "ray" a pool of `workers` actors of Ray.
        settings: the other fields of `EncodeSettings`.
    """
    start, given = time.monotonic(), EncodeSettings(data, Path(out), **settings)
    out = given.out
    if verify:
        found = stored.open_embeddings(out, verify=True)
        shards, command = len(found.manifests), found.manifests[0]["job"]["command"]
        return EncodeResult(out, 0, shards, (), shards, command, time.monotonic() - start, found.counts)
    part, parts = parse_share(partition)
    if engine == "ray":
        from hnclip.encode.ray_engine import encode_with_ray, import_ray

        import_ray()  # before the model is loaded
    encoder = Encoder(given)
    job, shards = encoder.job, encoder.job["shards"]
    log.info(f"model: {job['source']}; data: {job['records']:,} records of {job['data']} in {counted(shards, 'shard')}")
    own = range(part, shards, parts)
    pending = encoder.pending(own)
    items = {number: encoder.count_items(number) for number in own}
    done = sum(items.values()) - sum(items[number] for number in pending)
    with progress("images and captions", sum(items.values()), done) as bar:
        if engine == "ray":
            for number in encode_with_ray(given, pending, workers):
                bar.advance(items[number])
        else:
            encoder.model.to(find_device(given.device))
            for number in pending:
                encoder.write(number, bar.advance)
    missing, counts = encoder.finish()
    command = f"{job['command']} --out {shlex.quote(str(out))}"
    seconds = time.monotonic() - start
    return EncodeResult(out, len(pending), len(own) - len(pending), missing, shards, command, seconds, counts)


class Encoder:
    """Data and model of a job, opened once, by a process or an actor of Ray; writes one shard after the other."""

    def __init__(self, settings: EncodeSettings) -> None:
        self.settings, self.out = settings, settings.out
        self.data, self.only = open_records(settings)
        check_rows(self.data, largest=settings.read.max_bad)
        self.model = load(settings.model, **vars(settings.opening))
        self.model.require_trained("encoding")
        self.job: dict[str, Any] = {
            "format": stored.FORMAT,
            "model": settings.model,
            "source": self.model.source,
            "data": self.data.name,
            "command": _command(settings),
            "model_fingerprint": model_fingerprint(self.model, self.model.name),
            "data_fingerprint": records_fingerprint(self.data.records),
            "split": settings.split,
            "records": len(self.data.records),
            "only": self.only,
            "dtype": settings.dtype,
            "width": self.model.width,
            "batch": settings.batch,
            "shard_size": settings.shard_size,
            "shards": -(-len(self.data.records) // settings.shard_size),
        }
        self._own: dict[int, Manifest] = {}
        self._create_directory()

    def pending(self, numbers: Iterable[int]) -> list[int]:
        """Those of the shards that do not exist, are damaged, or whose images have changed."""
        missing = []
        for number in numbers:
            manifest, damage = self._find(number, self._stamp(number), verify=True)
            if manifest is None:
                missing.append(number)
            else:
                self._own[number] = manifest
            if damage:
                log.warning(f"{damage}; shard {number} is encoded again")
        self._check_skipped(self._own.values())
        return missing

    def count_items(self, number: int) -> int:
        """Images and captions of a shard that are encoded."""
        records = self._records(number)
        images = 0 if self.only == "captions" else len(records)
        return images + (0 if self.only == "images" else sum(len(record.captions) for record in records))

    def write(self, number: int, advance: Advance = lambda done: None) -> None:
        """Encode a shard and write its files, the manifest last, unless another process has done so by now."""
        stamp = self._stamp(number)  # before the images are read
        if self._find(number, stamp, verify=True)[0] is not None:
            return
        contents, counts, problems = self._encode(number, advance)
        manifest = {
            "number": number,
            "job": self.job,
            "images": stamp,
            "counts": counts,
            "problems": [asdict(problem) for problem in problems],
            "files": {
                name: {"bytes": len(content), "sha256": sha256(content).hexdigest()}
                for name, content in contents.items()
            },
        }
        try:
            (self.out / self._name(MANIFEST, number)).unlink(missing_ok=True)  # missing until it is written again
            for name, content in {**contents, self._name(MANIFEST, number): stored.manifest_bytes(manifest)}.items():
                with replace_file(self.out / name) as partial:
                    partial.write_bytes(content)
        except OSError as error:
            raise OSError(
                f"shard {number} of {self.out} could not be written ({error}); the other shards are intact, and the "
                "same command continues"
            ) from error
        self._own[number] = manifest
        self._check_skipped(self._own.values())

    def finish(self) -> tuple[tuple[int, ...], dict[str, int] | None]:
        """The missing shards, or the counts of all shards if none is missing; their problems are then listed."""
        shards = [self._find(number, None, verify=False)[0] for number in range(self.job["shards"])]
        manifests = [manifest for manifest in shards if manifest is not None]
        if len(manifests) < len(shards):
            return tuple(number for number, manifest in enumerate(shards) if manifest is None), None
        problems = [*self.data.problems, *self._check_skipped(manifests)]
        if problems:
            write_problems(self.out / SKIPPED, problems)
        else:
            (self.out / SKIPPED).unlink(missing_ok=True)
        for leftover in self.out.glob("*/.*.new-*"):  # of killed processes, and of those that write just now
            with suppress(FileNotFoundError):
                if time.time() - leftover.stat().st_mtime > LEFTOVER:
                    leftover.unlink()
        return (), stored.total_counts(manifests)

    def _create_directory(self) -> None:
        """Create the directory; ValueError if it holds anything else or embeddings of another job."""
        known = (self.out / MANIFEST).is_dir()
        if not known and self.out.is_dir() and any(not file.name.startswith(".") for file in self.out.iterdir()):
            raise ValueError(f"{self.out} holds other files: choose another directory with --out")
        (self.out / MANIFEST).mkdir(parents=True, exist_ok=True)
        for file in stored.manifest_files(self.out):
            with suppress(FileNotFoundError):
                self._check_job(stored.read_manifest(file))

    def _check_job(self, manifest: Manifest | None) -> None:
        known = self.job if manifest is None else manifest["job"]
        if different := [name for name in self.job if name not in NAMES and known.get(name) != self.job[name]]:
            names = ", ".join(name.removesuffix("_fingerprint").replace("_", "-") for name in different)
            raise ValueError(f"{self.out} holds embeddings that differ in {names}: choose another --out, or delete it")

    def _find(self, number: int, stamp: str | None, *, verify: bool) -> tuple[Manifest | None, str]:
        """The manifest of a shard that exists, is intact and has images of this stamp; and what is damaged."""
        file = self.out / self._name(MANIFEST, number)
        try:
            manifest = stored.read_manifest(file)
        except FileNotFoundError:
            return None, ""
        if manifest is None:
            return None, f"{file} is damaged"
        self._check_job(manifest)
        damage = stored.find_damage(self.out, manifest, verify=verify)
        return (None if damage or stamp not in (None, manifest["images"]) else manifest), damage

    def _records(self, number: int) -> Sequence[Record]:
        size = self.settings.shard_size
        return self.data.records[number * size : (number + 1) * size]

    def _name(self, kind: str, number: int, suffix: str = "json") -> str:
        """Numbers have as many digits as in clip-retrieval: sorted names are in the order of the shards."""
        return f"{kind}/{kind}_{number:0{len(str(self.job['shards']))}}.{suffix}"

    def _stamp(self, number: int) -> str:
        return "" if self.only == "captions" else images_fingerprint(self._records(number))

    def _encode(self, number: int, advance: Advance) -> tuple[dict[str, bytes], dict[str, int], list[Problem]]:
        """The files of a shard, counts and problems. Invalid records are skipped, as in training."""
        settings, model = self.settings, self.model
        records, problems = self._records(number), list[Problem]()
        total, contents, count, truncated = len(records), dict[str, bytes](), 0, 0
        if self.only != "images":
            records, problems = drop_unreadable(records, model.text_transform)
        if self.only != "captions":
            images = encode_images(
                model,
                [record.image for record in records],
                batch=settings.batch,
                workers=settings.threads or None,
                advance=advance,
            )
            problems += [replace(problem, where=records[index].id) for index, problem in images.problems.items()]
            records = [records[index] for index in images.kept]
            contents[self._name(IMAGES, number, "npy")] = _npy(images.vectors, settings.dtype)
        if self.only != "images":
            tokens = model.text_transform([caption for record in records for caption in record.captions])
            count, truncated = len(tokens), tokens.truncated

            def walk(steps: range) -> Iterator[int]:
                for step in steps:
                    yield step
                    advance(min(settings.batch, count - step))

            texts = encode_captions(model, tokens, batch=settings.batch, progress=walk)
            contents[self._name(TEXTS, number, "npy")] = _npy(texts, settings.dtype)
        suffix, metadata = _metadata(records)
        contents[self._name(METADATA, number, suffix)] = metadata
        counts = {"rows": len(records), "captions": count, "truncated": truncated, "skipped": total - len(records)}
        return contents, counts, problems

    def _check_skipped(self, manifests: Iterable[Manifest]) -> list[Problem]:
        """The problems of these shards; ValueError if they have too many invalid records for the whole of the data."""
        manifests = list(manifests)
        problems = [Problem(**problem) for manifest in manifests for problem in manifest["problems"]]
        largest = 0.0 if self.data.exact else self.settings.read.max_bad
        skipped, total = stored.total_counts(manifests)["skipped"], self.job["records"]
        check_share(skipped, total, problems, what="records", largest=largest, name=self.data.name)
        return problems


def open_records(settings: EncodeSettings) -> tuple[DataSet, str]:
    """The records of a split with the problems of the source, and what of them is encoded: both, images or captions.

    A directory of images has a record for each of them with --only images, and also if there are no captions. Its
    splits are the directories train, validation and test at the top.
    """
    source, read, only = settings.data, settings.read, settings.only
    folder = local_path(source)
    files = list(files_below(folder)) if folder is not None and folder.is_dir() else []
    images, captioned = count_captioned(files)
    if images and only == "both" and not captioned and not any(map(is_data_name, files)):
        log.info(f"{source} has no captions: only its images are encoded")
        only = "images"
    if folder is not None and images and only == "images":
        names = [file for file in files if is_image_name(file)]
        invalid = {file: reason for file in names if (reason := invalid_text(file))}
        problems = [Problem("bad text", ascii(file), reason) for file, reason in invalid.items()]
        splits = {file: normal_split(file.partition("/")[0]) for file in names if file not in invalid}
        records = [
            Record(file, FileImage(folder / file), (), split if split in SPLITS else None)
            for file, split in splits.items()
        ]
        data = DataSet(source, tuple(records), tuple(problems))
    else:
        data = open_data(source, read, splits={settings.split})
    return replace(data, records=data.part(settings.split, validation_share=read.validation_share)), only


def _npy(vectors: torch.Tensor, dtype: str) -> bytes:
    buffer = BytesIO()
    np.save(buffer, vectors.cpu().numpy().astype(dtype), allow_pickle=False)
    return buffer.getvalue()


def _metadata(records: Sequence[Record]) -> tuple[str, bytes]:
    """Suffix and content of a metadata file: Parquet, or JSON lines if pyarrow is not installed."""
    rows = [
        {
            "id": record.id,
            "image_path": record.image.key.encode(errors="backslashreplace").decode(),
            "caption": record.captions[0] if record.captions else None,
            "captions": list(record.captions),
        }
        for record in records
    ]
    try:
        pa, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        return "jsonl", b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    types = {"id": pa.string(), "image_path": pa.string(), "caption": pa.string(), "captions": pa.list_(pa.string())}
    buffer = BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows, pa.schema(types)), buffer)
    return "parquet", buffer.getvalue()


def _command(settings: EncodeSettings) -> str:
    """The command that encodes all shards, without --out."""
    words = ["hnclip", "encode", settings.data, "--model", settings.model]
    usual = EncodeSettings(data=settings.data, out=settings.out)
    for name in ("split", "only", "dtype", "shard_size", "batch"):
        if (value := getattr(settings, name)) != getattr(usual, name):
            words += [f"--{name.replace('_', '-')}", str(value)]
    words += option_words(settings.opening, usual.opening)
    return shlex.join([*words, *option_words(settings.read, usual.read, "read.")])
