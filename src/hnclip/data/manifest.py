"""What `hnclip prepare` made of a data source: one file of JSON lines for each kind, `regions` and `text`.

The first line is a header: format number, kind, data source, and the tool with its settings. Every other line belongs
to a record: its id, a mark (a hash of what the line was made from) and the content. One process at a time appends
lines; of two lines of a record the later one counts. A killed process leaves at most part of a line at the end, which
readers ignore and the next writer cuts off.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, Literal, get_args

from hnclip.config import ReadConfig
from hnclip.core import InvalidImage, Record, Region
from hnclip.data.image_cache import cache_directory
from hnclip.util.files import exclusive_lock, replace_file
from hnclip.util.text import slugify

FORMAT = 1
Kind = Literal["regions", "text"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass
class Manifest:
    """A manifest as it was read, or as it is being written.

    Args:
        by: what made it, for people. `tool` is the same for programs: name and all settings.
        entries: mark and content by the id of the record.
        size: bytes of the header and of all whole lines.
    """

    path: Path
    kind: Kind
    by: str = ""
    tool: dict[str, Any] = field(default_factory=dict)
    entries: dict[str, tuple[str, Any]] = field(default_factory=dict)
    size: int = 0
    file: IO[bytes] | None = None

    def current(self, record: Record) -> Any:
        """The content for a record, None if there is none or if the record has changed since."""
        try:
            mark, content = self.entries[record.id]
            return content if mark == record_mark(self.kind, record) else None
        except (KeyError, InvalidImage):
            return None

    def append(self, id: str, mark: str, content: Any) -> None:
        assert self.file is not None
        self.file.write(_encode({"id": id, "mark": mark, self.kind: content}))
        self.file.flush()
        self.entries[id] = (mark, content)


def manifest_path(read: ReadConfig, data: str, kind: Kind) -> Path:
    """The manifest of a data source: in the directory `--read.prepared`, or else in the cache directory, by a name that
    does not depend on the working directory."""
    if read.prepared is not None:
        return Path(read.prepared).expanduser() / f"{kind}.jsonl"
    benchmark, equals, folder = data.partition("=")
    if Path(data).expanduser().exists() or any(sign in data for sign in "*?[{"):
        data = os.path.abspath(os.path.expanduser(data))
    elif equals:
        data = f"{benchmark}={os.path.abspath(os.path.expanduser(folder))}"
    return cache_directory(read.cache) / "prepared" / f"{slugify(data)}-{_hash(data)}" / f"{kind}.jsonl"


def record_mark(kind: Kind, record: Record) -> str:
    """A hash of what an entry is made from: the captions, and for regions the image, by its file name, size and time of
    change, so that data can be moved if times are kept. InvalidImage if there is no image."""
    image = [record.image.key.replace("\\", "/").rpartition("/")[2], record.image.stamp()] if kind == "regions" else []
    return _hash(json.dumps([*image, *record.captions]))


def read_manifest(path: Path, kind: Kind) -> Manifest:
    """All whole lines of a manifest; an empty one if there is no file. ValueError if it has another kind or format, or
    a damaged line."""
    manifest = Manifest(path, kind)
    if not path.exists():
        return manifest
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                found = json.loads(line)
                if number > 1:
                    manifest.entries[found["id"]] = (found["mark"], found[kind])
                elif (found["format"], found["kind"]) == (FORMAT, kind):
                    manifest.by, manifest.tool = found["by"], found["tool"]
                else:
                    raise ValueError(f"format {found['format']!r}, kind {found['kind']!r}")
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"line {number} of {path} is not valid in a manifest of {kind} ({error}): delete the file, or "
                    f"overwrite it with hnclip prepare {kind} --replace"
                ) from error
            manifest.size += len(line)
    return manifest


@contextmanager
def write_manifest(
    path: Path, kind: Kind, *, by: str, tool: dict[str, Any], data: str, overwrite: bool = False
) -> Iterator[Manifest]:
    """Open a manifest for `append`: continue the one that this tool began, or create a new one. ValueError if another
    process is writing it, or if it was made with another tool or settings and `overwrite` is not set."""
    tool = json.loads(json.dumps(tool))  # as it is read again: lists, not tuples
    busy = f"another process is writing {path}: wait for it, or choose another --read.prepared"
    with exclusive_lock(path.with_name(f".{path.name}.lock"), busy):
        manifest = Manifest(path, kind) if overwrite else read_manifest(path, kind)
        if manifest.size and manifest.tool != tool:
            raise ValueError(
                f"{path} was made by {manifest.by} with other settings than this call ({by}): --replace overwrites "
                "it, --read.prepared names another directory"
            )
        if not manifest.size:
            header = _encode({"format": FORMAT, "kind": kind, "data": data, "by": by, "tool": tool})
            manifest.by, manifest.tool, manifest.size = by, tool, len(header)
            with replace_file(path) as partial:
                partial.write_bytes(header)
        with path.open("r+b") as manifest.file:
            manifest.file.truncate(manifest.size)
            manifest.file.seek(manifest.size)
            yield manifest


def apply_manifest(records: Sequence[Record], manifest: Manifest) -> tuple[list[Record], int, int]:
    """The records with their prepared regions or filtered captions, to how many of them the manifest was applied, and
    how many have changed since it was made. A record keeps its own regions if the manifest has none for it."""
    made, applied, changed = [], 0, 0
    for record in records:
        content = manifest.current(record)
        changed += content is None and record.id in manifest.entries
        applied += content is not None
        if content and manifest.kind == "text":
            record = replace(record, filtered=tuple(content))
        elif content:
            regions = (Region(tuple(each["box"]), each["sentence"], each["score"]) for each in content)
            record = replace(record, regions=tuple(regions))
        made.append(record)
    return made, applied, changed


def _hash(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _encode(line: dict[str, Any]) -> bytes:
    return json.dumps(line, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
