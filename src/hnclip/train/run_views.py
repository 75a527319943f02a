"""The views of a run beside picture and caption: prepared ones, those that the data bring along, and made ones."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from hnclip.config import TrainConfig
from hnclip.core import Record
from hnclip.data.batching import PairData
from hnclip.data.image_cache import cache_directory
from hnclip.objectives.base import Objective
from hnclip.prepare.lines import Kind

log = logging.getLogger(__name__)


def needed_views(objective: Objective) -> set[Kind]:
    """What an objective needs of a record beside its picture and captions: kinds of `hnclip prepare`."""
    views = {*objective.image_views, *objective.text_views}
    needs = set[Kind]()
    found_in_regions = ("crop", "sentence", "edge_crop", "region")
    if any(name.startswith(found_in_regions) for name in (*views, *objective.parts)):
        needs.add("regions")
    if any(view.startswith("edge") for view in views):
        needs.add("edges")
    if "filtered" in views or any(part.startswith("chunk") for part in objective.parts):
        needs.add("text")
    return needs


def with_views(config: TrainConfig, records: Sequence[Record], objective: Objective) -> tuple[Record, ...]:
    """The same records with all that the objective looks at. Of the manifest of `hnclip prepare` first, then what the
    source has of its own; edges and filtered captions that nobody has are made here, by the defaults of `prepare`.

    Raises:
        ValueError: regions are needed and no record has any.
    """
    needs = needed_views(objective)
    if not needs:
        return tuple(records)
    from hnclip.prepare.manifest import apply_manifest, manifest_path

    path = manifest_path(cache_directory(config.read.cache), config.data)
    if config.read.prepared is not None:
        path = Path(config.read.prepared).expanduser()
        if not path.exists():
            raise ValueError(f"--read.prepared {path} does not exist: hnclip prepare writes it")
    found = list(records)
    if path.exists():
        found, prepared = apply_manifest(records, path, needs)
        log.info(prepared.to_text())
        for kind in sorted(needs):
            # Otherwise a default would silently take the place of what somebody prepared.
            if prepared.stale[kind] and not (prepared.found[kind] or prepared.own[kind]):
                raise ValueError(
                    f"{prepared.stale_reason(kind)}. Run hnclip prepare {kind} {config.data} again, or delete the file"
                )
    if "text" in needs and not any(record.filtered for record in found):
        from hnclip.data.lexicon import load_filter

        name = "blunt:structxlip_colours" if config.objective.fidelity == "official" else "lexicon"
        shorten = load_filter(name)
        found = [replace(record, filtered=tuple(shorten(text) for text in record.captions)) for record in found]
        log.info(f"captions are filtered here: {name}")
    if "regions" in needs:
        count = sum(bool(record.regions) for record in found)
        if not count:
            raise ValueError(
                f"{config.objective.method} needs regions and no record of {config.data} has any: run "
                f"hnclip prepare regions {config.data} first, with the same --read options; if that found none, with "
                "another --model or --proposer"
            )
        log.info(f"{count} of {len(found)} training records have regions")
    return tuple(found)


def log_absent_views(pairs: PairData) -> None:
    """Log which views and parts not all pairs have: their terms count over those that have them."""
    for view, present in pairs.present.items():
        log.info(f"view {view}: {int(present.sum())} of {len(present)} have it")
    for view, parts in pairs.parts.items():
        # Patches are marked, tokens counted from and to.
        there = (parts.any(-1) if parts.dtype == torch.bool else parts[..., 1] > parts[..., 0]).any(1)  # [rows]
        if not there.all():
            log.info(f"parts of view {view}: {int(there.sum())} of {len(there)} have them")
