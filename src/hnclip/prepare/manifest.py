"""What was prepared of a data source: where it is kept, and how records come by it again."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from hnclip.core import ImageSource, InvalidImage, Record, Region
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
        stale_tools: those that the stale ones were made with.

    Kinds that nobody asked for count nothing.
    """

    path: Path
    found: Mapping[Kind, int]
    own: Mapping[Kind, int]
    stale: Mapping[Kind, int]
    missing: Mapping[Kind, int]
    tools: Mapping[Kind, tuple[Mapping[str, Any], ...]]
    stale_tools: Mapping[Kind, tuple[Mapping[str, Any], ...]]

    def to_text(self) -> str:
        """One line for people; kinds of which there is nothing are left out."""
        parts = []
        for kind in KINDS:
            counts = [self.found[kind], self.own[kind], self.stale[kind], self.missing[kind]]
            if not any(counts[:3]):
                continue
            by = _names(self.tools[kind])
            words = [f"{counts[0]:,} of {sum(counts):,} records{f' by {by}' if by else ''}"]
            words += [f"{self.own[kind]:,} bring their own"] if self.own[kind] else []
            words += [f"{self.stale[kind]:,} stale"] if self.stale[kind] else []
            parts.append(f"{kind} {', '.join(words)}")
        return f"prepared: {'; '.join(parts) or 'nothing'} ({self.path})"

    def stale_reason(self, kind: Kind) -> str:
        """Who prepared what is stale of a kind, and why it does not count; "" if nothing is."""
        if not self.stale[kind]:
            return ""
        total = sum(counts[kind] for counts in (self.found, self.own, self.stale, self.missing))
        changed = {
            "regions": "their pictures or captions have changed since",
            "edges": "their pictures, or the version of the method, have changed since",
            "text": "their captions have changed since",
        }
        by = _names(self.stale_tools[kind])
        return f"{kind} of {self.stale[kind]:,} of {total:,} records, by {by}, are stale: {changed[kind]} ({self.path})"


def _names(tools: Iterable[Mapping[str, Any]]) -> str:
    return " and ".join(dict.fromkeys(str(tool["name"]) for tool in tools))


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
    from hnclip.data.sources import SCENES

    if data in SCENES:
        return f"scenes/{SCENES[data]}"
    name, _, folder = data.partition("=")
    if name in BENCHMARKS:
        return f"{name}={_absolute(folder)}" if folder else name
    return _absolute(data) if Path(data).expanduser().exists() or is_pattern(data) else data


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def mark_of(kind: Kind, record: Record) -> str:
    """What an entry depends on beside its tool, as a short name: the picture as it is now, unread, and the captions.

    Of the picture size and time count, and its own name but not the directories before it: data may be moved, if their
    times are kept.

    Raises:
        InvalidImage: there is no picture.
    """
    parts: list[Any] = []
    if kind != "text":
        parts.append((re.split(r"[/\\]", record.image.key)[-1], record.image.stamp()))
    if kind != "edges":
        parts.append(record.captions)
    return short_hash(repr(parts))


def region_content(regions: Iterable[Region], sources: Iterable[str]) -> list[dict[str, Any]]:
    """Regions as a manifest keeps them."""
    return [
        {"box": list(region.box), "sentence": region.sentence, "score": region.score, "source": source}
        for region, source in zip(regions, sources)
    ]


def apply_manifest(
    records: Sequence[Record], path: Path, kinds: Collection[Kind] = KINDS
) -> tuple[list[Record], Prepared]:
    """The records with what was prepared of them: `regions`, `edges`, `filtered`.

    Entries count where picture and captions are still those that they were made from. A record that brings regions or
    an edge map of its own keeps them unless the manifest has some for it; with edges of the manifest its regions give
    up their own maps too, so that the maps of a record are of one kind. Edge maps are not stored: they are made when
    they are looked at, by the same method, and then lie in the picture cache. A manifest that does not exist has
    nothing.

    Args:
        records: of any split. One that lost a caption since it was read counts as changed.
        kinds: that are looked at; what is wrong with another one does not matter.

    Raises:
        ValueError: the file is damaged or no manifest, or a method of edges cannot be used here.
    """
    manifest = read_manifest(path)
    counts = {name: dict.fromkeys(KINDS, 0) for name in ("found", "own", "stale", "missing")}
    used: dict[Kind, dict[str, Mapping[str, Any]]] = {kind: {} for kind in KINDS}
    stale: dict[Kind, dict[str, Mapping[str, Any]]] = {kind: {} for kind in KINDS}
    edges = cache(lambda tool: _edges(path, manifest.tools[tool]))
    made = []
    for record in records:
        changes: dict[str, Any] = {}
        for kind in (kind for kind in KINDS if kind in kinds):
            there = manifest.entries[kind].get(record.id)
            entry = _current(manifest, kind, record)
            change = None if entry is None else _change(kind, record, entry, manifest.tools[entry.tool], edges)
            if entry is not None and change is not None:
                changes |= change
                used[kind][entry.tool] = manifest.tools[entry.tool]
                outcome = "found"
            elif getattr(record, _FIELDS[kind]):
                outcome = "own"
            elif there is not None:
                stale[kind][there.tool] = manifest.tools[there.tool]
                outcome = "stale"
            else:
                outcome = "missing"
            counts[outcome][kind] += 1
        made.append(_changed(record, changes) if changes else record)
    tools, stale_tools = ({kind: tuple(found.values()) for kind, found in each.items()} for each in (used, stale))
    return made, Prepared(path, **counts, tools=tools, stale_tools=stale_tools)


def _changed(record: Record, changes: Mapping[str, Any]) -> Record:
    made = replace(record, **changes)
    if "edges" in changes and any(region.edges for region in made.regions):
        made = replace(made, regions=tuple(replace(region, edges=None) for region in made.regions))
    return made


def current_entry(manifest: Manifest, kind: Kind, record: Record) -> Entry | None:
    """The entry of a record if it was made from what the record is now.

    Raises:
        InvalidImage: there is an entry, but no picture any more.
    """
    found = manifest.entries[kind].get(record.id)
    return found if found is not None and found.mark == mark_of(kind, record) else None


def _current(manifest: Manifest, kind: Kind, record: Record) -> Entry | None:
    try:
        return current_entry(manifest, kind, record)
    except InvalidImage:  # training leaves the record out, and says so
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
        EdgeImage = edges(entry.tool)
        return None if EdgeImage is None else {"edges": EdgeImage(record.image)}
    if tool["name"] == TRUTH and record.regions:  # what the source says now, with all that it says
        return {}
    if record.regions and not entry.content:
        return None
    regions = [Region(tuple(region["box"]), region["sentence"], region["score"]) for region in entry.content]
    return {"regions": tuple(regions)}


def _edges(path: Path, tool: Mapping[str, Any]) -> Callable[[ImageSource], ImageSource] | None:
    """What makes the edge map of a picture; None if the method is another version now."""
    from hnclip.data.derived_images import EdgeImage
    from hnclip.data.views.edges import edge_method

    weights = tool.get("weights")
    try:
        method = edge_method(tool["name"], weights=None if weights is None else Path(weights))
    except ValueError as error:
        raise ValueError(
            f"the edges in {path} are by {tool['name']}, which cannot be used here: {error}. Bring that back, or "
            "prepare others in their place: hnclip prepare edges DATA --method canny"
        ) from error
    return (lambda image: EdgeImage(image, method)) if method.version == tool["version"] else None
