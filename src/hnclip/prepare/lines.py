"""The file of a manifest: lines of JSON that are only ever appended, by one writer at a time.

The first line says that this is a manifest. Then come lines of two sorts: `tool`, the settings of a preparation under a
short key, and one line for each record and kind of auxiliary input (`regions`, `edges`, `text`) with the key of the
tool that made it and a `mark` of what it was made from. A later line of the same record and kind replaces an earlier
one. So a process that is killed leaves at most a piece of a line at the end, which readers overlook and the next writer
cuts off, and whoever reads while another one writes sees the manifest as it was at some moment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from typing import IO, Any, Literal, get_args

from hnclip.util.files import exclusive_lock, replace_file

Kind = Literal["regions", "edges", "text"]
KINDS: tuple[Kind, ...] = get_args(Kind)

LAYOUT = 1  # of the file; another one is refused
BLOCK = 2**16  # bytes that are looked through at once for the end of the last line
FEW = 1000  # superseded lines that are not worth a new file

# The key of a line's content.
_CONTENT: dict[Kind, str] = {"regions": "regions", "edges": "method", "text": "captions"}


@dataclass(frozen=True)
class Entry:
    """What was prepared of one record.

    `content` is, of regions, a list of {"box", "sentence", "score", "source"}, best first; of edges the name of the
    method; of text the captions without their words of appearance, one for each caption.
    """

    id: str
    mark: str
    tool: str
    content: Any


@dataclass
class Manifest:
    """A manifest as it was read: settings by key, entries by kind and record, and how many lines others replaced."""

    tools: dict[str, dict[str, Any]] = field(default_factory=dict)
    entries: dict[Kind, dict[str, Entry]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    superseded: int = 0

    def take(self, kind: Kind, entry: Entry) -> None:
        self.superseded += entry.id in self.entries[kind]
        self.entries[kind][entry.id] = entry


def short_hash(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def tool_key(kind: Kind, settings: Mapping[str, Any]) -> str:
    """The short name of settings: the same for the same ones."""
    return short_hash(json.dumps({"of": kind, **settings}, sort_keys=True))


def read_manifest(path: Path) -> Manifest:
    """All of a manifest, as it is at this moment; an empty one if there is no file.

    Raises:
        ValueError: the file is no manifest, or a line of it is damaged.
    """
    manifest = Manifest()
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return manifest
    with file:
        for number, line in _lines(path, file):
            _read_line(path, number, line, manifest)
    return manifest


def _lines(path: Path, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """The whole lines behind the first one, with their numbers. They never change, whatever a writer does meanwhile."""
    end = _end_of_lines(file)
    first = file.readline() if end else b""
    if not _is_head(first):
        raise ValueError(f"{path} is not a manifest of hnclip prepare, or of another version: its first line is wrong")
    number, at = 1, len(first)
    while at < end:
        line = file.readline()
        number, at = number + 1, at + len(line)
        yield number, line


def _end_of_lines(file: IO[bytes]) -> int:
    """The length of the file up to its last line break."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - BLOCK)
        file.seek(start)
        if (found := file.read(end - start).rfind(b"\n")) >= 0:
            file.seek(0)
            return start + found + 1
        end = start
    file.seek(0)
    return 0


def _is_head(line: bytes) -> bool:
    try:
        found = json.loads(line)
    except ValueError:
        return False
    return isinstance(found, dict) and found.get("kind") == "manifest" and found.get("layout") == LAYOUT


def _read_line(path: Path, number: int, line: bytes, manifest: Manifest) -> None:
    try:
        found = json.loads(line)
        kind = found["kind"]
        if kind == "tool":
            _check(isinstance(found["name"], str) and isinstance(found["version"], str) and found["of"] in KINDS)
            manifest.tools[_text(found["key"])] = {name: found[name] for name in found if name not in ("kind", "key")}
            return
        _check(kind in KINDS and found["tool"] in manifest.tools)
        content = found[_CONTENT[kind]]
        _check_content(kind, content)
        manifest.take(kind, Entry(_text(found["id"]), _text(found["mark"]), found["tool"], content))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"line {number} of {path} is damaged. Take the line out, or remove the file, and start hnclip prepare "
            "again: it makes what is missing"
        ) from error


def _check_content(kind: Kind, content: Any) -> None:
    if kind == "edges":
        _text(content)
    elif kind == "text":
        _check(isinstance(content, list) and all(isinstance(caption, str) for caption in content))
    else:
        _check(isinstance(content, list))
        for region in content:
            left, top, right, bottom = region["box"]
            _check(all(type(edge) is int for edge in region["box"]) and left < right and top < bottom)
            _check(region["score"] is None or type(region["score"]) in (int, float))
            _text(region["sentence"]), _text(region["source"])


def _text(value: Any) -> str:
    _check(isinstance(value, str))
    return value


def _check(condition: bool) -> None:
    if not condition:
        raise ValueError


class ManifestWriter:
    """A manifest that this process alone writes. `manifest` is what it holds, also what was just added."""

    def __init__(self, path: Path, file: FileIO, manifest: Manifest) -> None:
        self.manifest = manifest
        self._path, self._file = path, file

    def tool(self, kind: Kind, settings: Mapping[str, Any]) -> str:
        """The key of these settings, which are written if they are new."""
        key = tool_key(kind, settings)
        if key not in self.manifest.tools:
            self._append([{"kind": "tool", "of": kind, "key": key, **settings}])
            self.manifest.tools[key] = {"of": kind, **settings}
        return key

    def add(self, kind: Kind, entries: Sequence[Entry]) -> None:
        """All of the entries, or, when the disk is full, none of them."""
        self._append([_to_line(kind, entry) for entry in entries])
        for entry in entries:
            self.manifest.take(kind, entry)

    def _append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        content = memoryview(b"".join(_encoded(line) for line in lines))
        before = self._file.seek(0, os.SEEK_END)
        try:
            while content:
                content = content[self._file.write(content) :]  # a disk that fills up takes a part
            os.fsync(self._file.fileno())
        except BaseException as error:  # Ctrl-C too: behind half a line the next one would be damage
            self._file.truncate(before)
            if isinstance(error, OSError):
                raise OSError(f"could not write {self._path} ({error}); what it held before is intact") from error
            raise


@contextmanager
def open_writer(path: Path, data: str) -> Iterator[ManifestWriter]:
    """Hold a manifest for this process, and make it if there is none.

    Lines that others have superseded stay until they are more than those that count; then the file is written anew.

    Args:
        data: what the source is, for people who look into the file.

    Raises:
        ValueError: another process writes it, the file is no manifest, or a line of it is damaged.
    """
    busy = f"another process is writing {path}; wait for it or choose another --out"
    with exclusive_lock(path.with_name(f".{path.name}.lock"), busy):
        manifest = read_manifest(path)
        if not path.exists():
            _write_anew(path, [_encoded({"kind": "manifest", "layout": LAYOUT, "data": data})])
        with path.open("r+b", buffering=0) as file:
            file.truncate(_end_of_lines(file))
            yield ManifestWriter(path, file, manifest)
        if manifest.superseded > max(FEW, sum(map(len, manifest.entries.values()))):
            with path.open("rb") as file:
                _write_anew(path, [file.readline(), *_counting(manifest)])


def _counting(manifest: Manifest) -> Iterator[bytes]:
    """The lines that no other one has superseded."""
    used = {entry.tool for entries in manifest.entries.values() for entry in entries.values()}
    for key, settings in manifest.tools.items():
        if key in used:
            yield _encoded({"kind": "tool", "of": settings["of"], "key": key, **settings})
    for kind in KINDS:
        for entry in manifest.entries[kind].values():
            yield _encoded(_to_line(kind, entry))


def _to_line(kind: Kind, entry: Entry) -> dict[str, Any]:
    return {"kind": kind, "id": entry.id, "mark": entry.mark, "tool": entry.tool, _CONTENT[kind]: entry.content}


def _encoded(line: Mapping[str, Any]) -> bytes:
    # Captions as people read them, unless they hold half of a surrogate pair, which UTF-8 does not.
    text = json.dumps(line, ensure_ascii=False)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(line).encode() + b"\n"


def _write_anew(path: Path, lines: Iterable[bytes]) -> None:
    with replace_file(path) as partial, partial.open("wb") as file:
        file.writelines(lines)
