"""A directory of embeddings as it is written: shards that appear whole or not at all, in any order, by any process.

    job.json                what is encoded, by which model and how; written first
    shards/00000/           the first `shard_size` records
        images.npy          [I, D] vectors of pictures
        captions.npy        [T, D] vectors of captions
        owners.npy          [T] row of each caption's picture in this shard
        records.jsonl       a line for each row of images.npy: id, image, captions
        shard.json          counts, sizes and checksums, and what was left out
    left_out.jsonl          what was left out of all shards, if anything was
    manifest.json           all of the above; written when every shard is there

A shard depends on its own records alone, and is moved into place by one rename. So any number of processes share a
directory without talking to each other, a killed one loses the shard that it was working on, and of two that make the
same shard the first one counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from hnclip.core import Problem, Record
from hnclip.data.validate import write_problems
from hnclip.util.files import read_json, replace_directory, replace_file
from hnclip.util.text import counted

FORMAT = 1
JOB, MANIFEST, LEFT_OUT, SHARDS, SHARD = "job.json", "manifest.json", "left_out.jsonl", "shards", "shard.json"
IMAGES, CAPTIONS, OWNERS, RECORDS = "images.npy", "captions.npy", "owners.npy", "records.jsonl"
SHOWN = 10  # missing shards that a message names
TRIES = 3  # to write a shard that other processes write at the same time
_LEFTOVER = re.compile(r"\..+\.(new|old)-[0-9a-f]{8}")  # what a kill leaves of hnclip.files' renames


@dataclass(frozen=True)
class Job:
    """What a directory of embeddings holds, or will hold.

    Everything but the names and the command has to agree with the directory's own job before anything is added to it.
    """

    model: str
    source: str
    data: str
    command: str
    """What completes the directory, without --out."""
    model_fingerprint: str
    data_fingerprint: str
    split: str
    records: int
    only: str
    dtype: str
    width: int
    batch: int
    shard_size: int

    @property
    def shards(self) -> int:
        return -(-self.records // self.shard_size)

    def rows(self, shard: int) -> slice:
        """The records of a shard."""
        return slice(shard * self.shard_size, min(self.records, (shard + 1) * self.shard_size))

    @property
    def settings(self) -> dict[str, Any]:
        """What vectors depend on."""
        named = {"model", "source", "data", "command"}
        return {name: value for name, value in asdict(self).items() if name not in named}

    @property
    def fingerprint(self) -> str:
        return sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:32]

    def finish(self, directory: Path) -> str:
        """The command that completes a directory."""
        return f"{self.command} --out {shlex.quote(str(directory))}"


@dataclass(frozen=True)
class Shard:
    """The vectors of some records, those of them that could be used.

    Shape:
        images: [I, D], or None if they are not encoded
        captions: [T, D], or None
        owners: [T], rows of images
    """

    records: Sequence[Record]
    images: np.ndarray | None
    captions: np.ndarray | None
    owners: np.ndarray
    lost: int
    truncated: int
    problems: Sequence[Problem]


def shard_directory(directory: Path, number: int) -> Path:
    return directory / SHARDS / f"{number:05}"


def read_job(directory: Path) -> Job | None:
    """What the directory says that it holds, or None if it says nothing."""
    return job_of(directory / JOB) if (directory / JOB).exists() else None


def job_of(file: Path) -> Job:
    """The job in a job.json or manifest.json."""
    found = read_json(file)
    if found.get("format") != FORMAT:
        raise ValueError(
            f"{file} is of format {found.get('format')!r}, this version of hnclip knows format {FORMAT}: "
            "encode anew into another directory"
        )
    try:
        return Job(**{name: found[name] for name in Job.__dataclass_fields__})
    except KeyError as error:
        raise ValueError(f"{file} lacks {error}: it was not written by hnclip encode") from error


def claim(directory: Path, job: Job) -> None:
    """Write down what the directory is for, or refuse: it may hold something else. Before there is a shard, nothing can
    be mixed, and the job may change."""
    # Looked at before the job is: what another process of this job writes, it writes after its job.
    occupied = directory.is_dir() and any(not path.name.startswith(".") for path in directory.iterdir())
    known = read_job(directory)
    if known is None and occupied:
        raise ValueError(f"{directory} holds other files, and no {JOB} of an encoding: choose another directory")
    begun = any(path.name.isdigit() for path in (directory / SHARDS).glob("*"))
    if begun and known is not None and known.settings != job.settings:
        raise ValueError(_refusal(directory, known, job))
    try:
        if known != job:
            with replace_file(directory / JOB) as partial:
                partial.write_text(_json({"format": FORMAT, **asdict(job)}), encoding="utf-8")
        (directory / SHARDS).mkdir(exist_ok=True)
    except OSError as error:
        raise OSError(f"{directory} cannot be written ({error}): choose another directory with --out") from error


def _refusal(directory: Path, known: Job, job: Job) -> str:
    names = {
        "model_fingerprint": f"model {known.model} ({known.source}; weights or transforms differ), not {job.model}",
        "data_fingerprint": f"the records of {known.data} as they were then, not those of {job.data} as they are now",
    }
    differing = [
        names.get(name, f"--{name.replace('_', '-')} {value}, not {job.settings[name]}")
        for name, value in known.settings.items()
        if value != job.settings[name] and name not in ("records", "width")
    ]
    return f"{directory} holds embeddings of {'; '.join(differing)}: choose another directory, or remove this one"


def read_shard(directory: Path, number: int) -> dict[str, Any] | None:
    """A shard's shard.json, or None if there is no such shard, or one of its files is not as it was written."""
    place = shard_directory(directory, number)
    try:
        info = read_json(place / SHARD)
        sound = all((place / name).stat().st_size == file["bytes"] for name, file in info["files"].items())
    except (OSError, ValueError, KeyError):
        return None
    return info if sound else None


def write_shard(directory: Path, number: int, shard: Shard, about: Mapping[str, Any]) -> dict[str, Any]:
    """Put a shard in place, unless another process has done so by now. Returns what shard.json holds.

    Args:
        about: more for shard.json.
    """
    place = shard_directory(directory, number)
    contents: dict[str, bytes] = {RECORDS: b"".join(_line(record) for record in shard.records)}
    if shard.images is not None:
        contents[IMAGES] = _npy(shard.images)
    if shard.captions is not None:
        contents |= {CAPTIONS: _npy(shard.captions), OWNERS: _npy(shard.owners)}
    info = {
        **about,
        "records": len(shard.records) + shard.lost,
        "rows": len(shard.records),
        "captions": 0 if shard.captions is None else len(shard.captions),
        "truncated": shard.truncated,
        "problems": [asdict(problem) for problem in shard.problems],
        "files": {
            name: {"bytes": len(content), "sha256": sha256(content).hexdigest()}
            for name, content in sorted(contents.items())
        },
    }
    for left in reversed(range(TRIES)):
        try:
            with replace_directory(place) as partial:
                for name, content in contents.items():
                    (partial / name).write_bytes(content)
                (partial / SHARD).write_text(_json(info), encoding="utf-8")
                if read_shard(directory, number) is not None:
                    raise FileExistsError(place)
            break
        except OSError as error:
            if read_shard(directory, number) is not None:
                break
            # Who finds all shards in place clears away what others still write. One that is replaced at that moment is
            # in nobody's place: then it is written again.
            if left and isinstance(error, FileNotFoundError):
                continue
            raise OSError(
                f"could not write shard {number} of {directory} ({error}); the shards before it are intact: mend "
                "that, and the same command goes on"
            ) from error
    return info


def remove_shard(directory: Path, number: int) -> None:
    """Make room for a shard whose pictures have changed, or that is damaged. The directory is incomplete from now on,
    also for readers; those that have it open keep what they see."""
    (directory / MANIFEST).unlink(missing_ok=True)
    place = shard_directory(directory, number)
    old = place.with_name(f".{place.name}.old-{secrets.token_hex(4)}")
    with contextlib.suppress(FileNotFoundError):
        os.replace(place, old)  # at once, so that no other process meets half of it
        shutil.rmtree(old, ignore_errors=True)


def missing_shards(directory: Path, job: Job) -> list[int]:
    return [number for number in range(job.shards) if read_shard(directory, number) is None]


def missing_text(missing: Sequence[int], shards: int) -> str:
    shown = ", ".join(map(str, missing[:SHOWN])) + (" …" if len(missing) > SHOWN else "")
    return f"{len(missing)} of {counted(shards, 'shard')} missing ({shown})"


def write_manifest(
    directory: Path, job: Job, shards: Sequence[Mapping[str, Any]], problems: Sequence[Problem]
) -> dict[str, Any]:
    """Declare the directory complete. Several processes may do this at once: they all write the same."""
    manifest = {
        "format": FORMAT,
        **asdict(job),
        "rows": sum(shard["rows"] for shard in shards),
        "captions": sum(shard["captions"] for shard in shards),
        "truncated": sum(shard["truncated"] for shard in shards),
        "left_out": sum(shard["records"] - shard["rows"] for shard in shards),
        "shards": [{name: shard[name] for name in ("rows", "captions", "files")} for shard in shards],
    }
    text = _json(manifest)
    if _has(directory / MANIFEST, text):
        return manifest
    _clear_leftovers(directory)
    try:
        if problems:
            write_problems(directory / LEFT_OUT, problems)
        else:
            (directory / LEFT_OUT).unlink(missing_ok=True)
        with replace_file(directory / MANIFEST) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        if not _has(directory / MANIFEST, text):  # another process was quicker
            raise OSError(
                f"could not write {directory / MANIFEST} ({error}); all shards are there: mend that, and the same "
                "command goes on"
            ) from error
    return manifest


def _has(file: Path, text: str) -> bool:
    return file.is_file() and file.read_bytes() == text.encode()


def _clear_leftovers(directory: Path) -> None:
    """Shards that killed processes left unfinished; one that is still writing a shard finds it in place already."""
    for path in (directory / SHARDS).glob(".*"):
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _line(record: Record) -> bytes:
    row = {"id": record.id, "image": record.image.key, "captions": record.captions}
    return json.dumps(row).encode() + b"\n"  # ASCII, whatever the names


def _npy(array: np.ndarray) -> bytes:
    buffer = BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=1) + "\n"
