"""The views of a run in addition to image and caption: prepared ones, those of the data, and made ones."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from hnclip.config import TrainConfig
from hnclip.core import Record
from hnclip.data.batching import PairData
from hnclip.objectives.base import Objective
from hnclip.prepare.manifest import KINDS, Kind, apply_manifest, manifest_path, read_manifest

log = logging.getLogger(__name__)


def needed_views(objective: Objective) -> set[Kind]:
    """What an objective needs of a record in addition to its image and captions: regions, text."""
    views = {*objective.image_views, *objective.text_views}
    needs = set[Kind]()
    found_in_regions = ("crop", "sentence", "edge_crop", "region")
    if any(name.startswith(found_in_regions) for name in (*views, *objective.parts)):
        needs.add("regions")
    if "filtered" in views or any(part.startswith("chunk") for part in objective.parts):
        needs.add("text")
    return needs


def with_views(config: TrainConfig, records: Sequence[Record], objective: Objective) -> tuple[Record, ...]:
    """The records with everything that the objective needs: what `hnclip prepare` made, then what the source has.
    Filtered captions are made for records that lack them.

    Raises:
        ValueError: regions are needed and no record has any, or all records have changed since they were prepared.
    """
    needs = needed_views(objective)
    if not needs:
        return tuple(records)
    if config.read.prepared is not None and not Path(config.read.prepared).expanduser().is_dir():
        raise ValueError(f"--read.prepared {config.read.prepared} does not exist: hnclip prepare --out creates it")
    found = list(records)
    for kind in KINDS:
        if kind in needs:
            found = _apply_prepared(config, kind, found)
    if lacking := sum(not record.filtered for record in found) if "text" in needs else 0:
        from hnclip.data.lexicon import load_filter

        name = "blunt:structxlip_colours" if config.objective.fidelity == "official" else "lexicon"
        change = load_filter(name)
        found = [
            record if record.filtered else replace(record, filtered=tuple(map(change, record.captions)))
            for record in found
        ]
        log.info(f"captions of {lacking} of {len(found)} records are filtered by {name}")
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


def _apply_prepared(config: TrainConfig, kind: Kind, records: list[Record]) -> list[Record]:
    """The records with their prepared regions or filtered captions, if there are any."""
    path = manifest_path(config.read, config.data, kind)
    if not path.exists():
        return records
    manifest = read_manifest(path, kind)
    found, applied, changed = apply_manifest(records, manifest)
    log.info(f"{kind} of {applied} of {len(records)} records prepared by {manifest.by} ({path})")
    if changed:
        message = (
            f"{changed} of {len(records)} records have changed since hnclip prepare {kind} {config.data}: run it again"
        )
        if not applied:  # a default would replace all that was prepared
            raise ValueError(f"{message}, or delete {path}")
        log.warning(message)
    return found


def log_absent_views(pairs: PairData) -> None:
    """Log which views and parts some pairs lack: their terms are averaged over the pairs that have them."""
    for view, present in pairs.present.items():
        log.info(f"view {view}: {int(present.sum())} of {len(present)} have it")
    for view, parts in pairs.parts.items():
        # Patches are marked, tokens counted from and to.
        there = (parts.any(-1) if parts.dtype == torch.bool else parts[..., 1] > parts[..., 0]).any(1)  # [rows]
        if not there.all():
            log.info(f"parts of view {view}: {int(there.sum())} of {len(there)} have them")
