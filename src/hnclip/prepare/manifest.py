"""What was prepared of a data source: where it is kept, and how records come by it again."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from hnclip.data.records import BadPicture, ImageSource, Record, Region
from hnclip.prepare.lines import KINDS, Entry, Kind, Manifest, read_manifest, short_hash

TRUTH = "truth"  # the tool of regions that a record brought along

# Where a record carries what was prepared.
_FIELDS: dict[Kind, str] = {"regions": "regions", "edges": "edges", "text": "filtered"}


@dataclass(frozen=True)
class Prepared:
    """What a manifest had for some records, counted by kind.

    Args:
        found: records that have it from the manifest now.
        own: those that brought their own and keep it.
        stale: those whose picture or captions have changed since, or whose method of edges is another version now.
        missing: those of which nothing was prepared.
        tools: the settings that the found ones were made with.
    """

    path: Path
    found: Mapping[Kind, int]
    own: Mapping[Kind, int]
    stale: Mapping[Kind, int]
    missing: Mapping[Kind, int]
    tools: Mapping[Kind, tuple[Mapping[str, Any], ...]]

    def to_text(self) -> str:
        """One line for people; kinds of which there is nothing are left out."""
        parts = []
        for kind in KINDS:
            counts = [self.found[kind], self.own[kind], self.stale[kind], self.missing[kind]]
            if not any(counts[:3]):
                continue
            by = " and ".join(dict.fromkeys(str(tool["name"]) for tool in self.tools[kind]))
            words = [f"{counts[0]:,} of {sum(counts):,} records{f' by {by}' if by else ''}"]
            words += [f"{self.own[kind]:,} bring their own"] if self.own[kind] else []
            words += [f"{self.stale[kind]:,} stale"] if self.stale[kind] else []
            parts.append(f"{kind} {', '.join(words)}")
        return f"prepared: {'; '.join(parts) or 'nothing'} ({self.path})"


def manifest_path(cache: Path, data: str) -> Path:
    """Where the manifest of a data source is kept in a cache directory.

    A file, a folder or a pattern is known by its absolute path; scenes, benchmarks with their folder, and hub names by
    name.
    """
    identity = data_identity(data)
    slug = re.sub(r"[^A-Za-z0-9]+", "-", Path(identity).name).strip("-")[:40] or "data"
    return cache / "views" / f"{slug}-{short_hash(identity)}.jsonl"


def data_identity(data: str) -> str:
    """One name for one data source, wherever the command is called."""
    from hnclip.data.benchmarks import BENCHMARKS
    from hnclip.data.readers.paths import is_pattern

    name, _, folder = data.partition("=")
    if name in BENCHMARKS:
        return f"{name}={_absolute(folder)}" if folder else name
    if data == "scenes":
        return "scenes/park"
    return _absolute(data) if Path(data).expanduser().exists() or is_pattern(data) else data


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def mark_of(kind: Kind, record: Record) -> str:
    """What an entry depends on beside its tool, as a short name: the picture as it is now, unread, and the captions.

    Raises:
        BadPicture: there is no picture.
    """
    parts: list[Any] = []
    if kind != "text":
        parts.append((record.image.key, record.image.stamp()))
    if kind != "edges":
        parts.append(record.captions)
    return short_hash(repr(parts))


def region_content(regions: Iterable[Region], sources: Iterable[str]) -> list[dict[str, Any]]:
    """Regions as a manifest keeps them."""
    return [
        {"box": list(region.box), "sentence": region.sentence, "score": region.score, "source": source}
        for region, source in zip(regions, sources)
    ]


def apply_manifest(records: Sequence[Record], path: Path) -> tuple[list[Record], Prepared]:
    """The records with what was prepared of them: `regions`, `edges`, `filtered`.

    Entries count where picture and captions are still those that they were made from. A record that brings regions or
    an edge map of its own keeps them unless the manifest has some for it. Edge maps are not stored: they are made
    when they are looked at, by the same method, and then lie in the picture cache. A manifest that does not exist has
    nothing.

    Args:
        records: of any split. One that lost a caption since it was read counts as changed.

    Raises:
        ValueError: the file is damaged or no manifest, or a method of edges cannot be used here.
    """
    manifest = read_manifest(path)
    counts = {name: dict.fromkeys(KINDS, 0) for name in ("found", "own", "stale", "missing")}
    used: dict[Kind, dict[str, Mapping[str, Any]]] = {kind: {} for kind in KINDS}
    edges = cache(lambda tool: _edges(manifest.tools[tool]))
    made = []
    for record in records:
        changes: dict[str, Any] = {}
        for kind in KINDS:
            entry = _current(manifest, kind, record)
            change = None if entry is None else _change(kind, record, entry, manifest.tools[entry.tool], edges)
            if entry is not None and change is not None:
                changes |= change
                used[kind][entry.tool] = manifest.tools[entry.tool]
                outcome = "found"
            elif getattr(record, _FIELDS[kind]):
                outcome = "own"
            else:
                outcome = "stale" if record.id in manifest.entries[kind] else "missing"
            counts[outcome][kind] += 1
        made.append(replace(record, **changes) if changes else record)
    tools = {kind: tuple(found.values()) for kind, found in used.items()}
    return made, Prepared(path, **counts, tools=tools)


def current_entry(manifest: Manifest, kind: Kind, record: Record) -> Entry | None:
    """The entry of a record if it was made from what the record is now.

    Raises:
        BadPicture: there is an entry, but no picture any more.
    """
    found = manifest.entries[kind].get(record.id)
    return found if found is not None and found.mark == mark_of(kind, record) else None


def _current(manifest: Manifest, kind: Kind, record: Record) -> Entry | None:
    try:
        return current_entry(manifest, kind, record)
    except BadPicture:  # training leaves the record out, and says so
        return None


def _change(
    kind: Kind,
    record: Record,
    entry: Entry,
    tool: Mapping[str, Any],
    edges: Callable[[str], Callable[[ImageSource], ImageSource] | None],
) -> dict[str, Any] | None:
    """The fields that an entry fills; None if there is nothing in it that would count."""
    if kind == "text":
        return {"filtered": tuple(entry.content)}
    if kind == "edges":
        edges_of = edges(entry.tool)
        return None if edges_of is None else {"edges": edges_of(record.image)}
    if tool["name"] == TRUTH and record.regions:  # what the source says now, with all that it says
        return {}
    if record.regions and not entry.content:
        return None
    regions = [Region(tuple(region["box"]), region["sentence"], region["score"]) for region in entry.content]
    return {"regions": tuple(regions)}


def _edges(tool: Mapping[str, Any]) -> Callable[[ImageSource], ImageSource] | None:
    """What makes the edge map of a picture; None if the method is another version now."""
    from hnclip.data.views.derived import edges_of
    from hnclip.data.views.edges import edge_method

    weights = tool.get("weights")
    method = edge_method(tool["name"], weights=None if weights is None else Path(weights))
    return (lambda image: edges_of(image, method)) if method.version == tool["version"] else None
