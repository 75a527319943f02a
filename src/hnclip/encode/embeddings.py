"""Directories of embeddings, as `hnclip encode` writes them, in the layout of clip-retrieval.

    img_emb/img_emb_0.npy          [I, D] vectors of images
    text_emb/text_emb_0.npy        [T, D] vectors of captions
    metadata/metadata_0.parquet    a row for each image: id, image_path, caption (the first) and captions (all of them);
                                   .jsonl if pyarrow is not installed
    manifest/manifest_0.json       model, data and options; counts, problems, sizes and checksums of this shard
    skipped.jsonl                  problems of all shards, if there are any; written when all shards exist

The rows of text_emb are the captions of the rows of metadata, in their order. With one caption per image, row i is the
same pair in all files. A shard exists once its manifest does, which is written last.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from hnclip.util.files import read_json
from hnclip.util.optional import import_extra

FORMAT = 2  # of the files; raise it when they change
IMAGES, TEXTS, METADATA, MANIFEST, SKIPPED = "img_emb", "text_emb", "metadata", "manifest", "skipped.jsonl"

Manifest = dict[str, Any]


@dataclass(frozen=True)
class StoredEmbeddings:
    """A complete directory of embeddings.

    Shape:
        images: mapped arrays [n, D] of all shards, I rows together; empty if images were not encoded
        captions: the same, T rows
    """

    directory: Path
    manifests: Sequence[Manifest]
    images: tuple[np.ndarray, ...]
    captions: tuple[np.ndarray, ...]

    def records(self) -> Iterator[dict[str, Any]]:
        """For each row of `images`, and also if there are none: id, image_path, caption (the first) and captions."""
        for file in _files(self.directory, self.manifests, METADATA):
            if file.suffix == ".jsonl":
                yield from map(json.loads, file.read_text(encoding="ascii").splitlines())
            else:
                yield from import_extra("pyarrow.parquet", "Parquet files", "data").read_table(file).to_pylist()

    @property
    def counts(self) -> dict[str, int]:
        return total_counts(self.manifests)

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """[I]"""
        return tuple(record["id"] for record in self.records())

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """[T], the captions that `captions` are vectors of."""
        return tuple(text for record in self.records() for text in record["captions"])

    @cached_property
    def owners(self) -> np.ndarray:
        """[T], the row of each caption's image."""
        counts = [len(record["captions"]) for record in self.records()] if self.captions else []
        return np.repeat(np.arange(len(counts)), counts)


def open_embeddings(directory: str | Path, *, verify: bool = False) -> StoredEmbeddings:
    """Open what `hnclip encode` wrote. Nothing in it is executed.

    Args:
        verify: read every file and compare its checksum; otherwise only its size.

    Raises:
        ValueError: the directory holds no embeddings, is incomplete, or is damaged.
    """
    directory = Path(directory)
    found: dict[int, Manifest] = {}
    for file in manifest_files(directory):
        if (manifest := read_manifest(file)) is None:
            raise ValueError(f"{file} is damaged: run hnclip encode again with the same options")
        found[manifest["number"]] = manifest
    if not found:
        raise ValueError(f"{directory} holds no embeddings: run hnclip encode DATA --out {directory}")
    job = next(iter(found.values()))["job"]
    if job["format"] != FORMAT:
        raise ValueError(f"{directory} is of another version of hnclip: encode into another directory")
    shards = job["shards"]
    if missing := [number for number in range(shards) if number not in found]:
        raise ValueError(f"{directory} is incomplete: {missing_text(missing, shards)}; {_again(directory, job)}")
    manifests = [found[number] for number in range(len(found))]
    for manifest in manifests:
        if damage := find_damage(directory, manifest, verify=verify):
            raise ValueError(f"{damage}; {_again(directory, job)}")
    arrays: dict[str, tuple[np.ndarray, ...]] = {}
    for kind in (IMAGES, TEXTS):
        try:
            files = _files(directory, manifests, kind)
            arrays[kind] = tuple(np.load(file, "r", allow_pickle=False) for file in files)
        except (OSError, ValueError) as error:
            raise ValueError(f"{directory / kind} holds a damaged file: {error}; {_again(directory, job)}") from error
    return StoredEmbeddings(directory, manifests, arrays[IMAGES], arrays[TEXTS])


def _files(directory: Path, manifests: Sequence[Manifest], kind: str) -> list[Path]:
    names = (name for manifest in manifests for name in manifest["files"])
    return [directory / name for name in names if name.startswith(f"{kind}/")]


def _again(directory: Path, job: Mapping[str, Any]) -> str:
    return f"encode what is missing with: {job['command']} --out {quote(str(directory))}"


def missing_text(missing: Sequence[int], shards: int) -> str:
    shown = ", ".join(map(str, missing[:10])) + (" …" if len(missing) > 10 else "")
    return f"{len(missing)} of {shards} shards missing ({shown})"


def total_counts(manifests: Sequence[Manifest]) -> dict[str, int]:
    """Rows of images and captions, truncated captions and skipped records of these shards."""
    names = ("rows", "captions", "truncated", "skipped")
    return {name: sum(manifest["counts"][name] for manifest in manifests) for name in names}


def manifest_files(directory: Path) -> list[Path]:
    return sorted((directory / MANIFEST).glob("*.json"))


def manifest_bytes(content: Mapping[str, Any]) -> bytes:
    """The manifest of a shard with a checksum of its own."""
    return (json.dumps({**content, "checksum": _checksum(content)}, indent=1) + "\n").encode()


def read_manifest(file: Path) -> Manifest | None:
    """The manifest of a shard; None if it is damaged."""
    try:
        content = read_json(file)
    except ValueError:
        return None
    return content if content.pop("checksum", None) == _checksum(content) else None


def find_damage(directory: Path, manifest: Manifest, *, verify: bool) -> str:
    """What is wrong with the files of a shard; "" if nothing is. Without `verify` only sizes are compared."""
    for name, entry in manifest["files"].items():
        try:
            if (size := (directory / name).stat().st_size) != entry["bytes"]:
                return f"{directory / name} is damaged: it has {size:,} bytes instead of {entry['bytes']:,}"
            if verify and _file_checksum(directory / name) != entry["sha256"]:
                return f"{directory / name} is damaged: its checksum differs"
        except OSError as error:
            return f"{directory / name} cannot be read: {error.strerror}"
    return ""


def _file_checksum(file: Path) -> str:
    content = sha256()
    with file.open("rb") as handle:
        while part := handle.read(2**20):
            content.update(part)
    return content.hexdigest()


def _checksum(content: Mapping[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
