"""`hnclip diagnose`: what a data set is to a model before anything is trained, and what to try.

One pipeline: open the model once, encode captions and images once, compute the sections of the report.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from hnclip import recipes
from hnclip.analysis.batches import SAMPLE, first_epoch
from hnclip.analysis.captions import LARGEST, caption_geometry
from hnclip.analysis.sections import (
    KINDS,
    SECTIONS,
    Analysed,
    Negatives,
    SectionResult,
    data_findings,
    no_conclusions,
)
from hnclip.config import Opening, ReadConfig, with_fields
from hnclip.core import Problem, Record
from hnclip.data.batching import PairData, prepare
from hnclip.data.image_cache import cache_directory
from hnclip.data.sources import open_data
from hnclip.data.validate import drop_invalid, drop_unreadable
from hnclip.encode.fingerprint import images_fingerprint, model_fingerprint, records_fingerprint
from hnclip.encode.loop import encode_captions, encode_pixels
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load
from hnclip.report.document import Findings, Missing, Report, Section, Text
from hnclip.util.console import progress
from hnclip.util.files import replace_file
from hnclip.util.text import counted

FORMAT = 1  # of the stored vectors; raise it when they change
LEAST_IMAGES = 0.5  # share of records with an image; below it, only captions are analysed


@dataclass(frozen=True)
class DiagnoseResult:
    """The whole report, and the file of its page."""

    report: Report
    page: Path

    def to_dict(self) -> dict[str, Any]:
        return {**self.report.data, "report": str(self.page)}

    def to_text(self) -> str:
        """Findings, what is missing, and advice."""
        first, *_, last = self.report.sections
        missing = [f"{name}: {reason}" for name, reason in self.report.data["missing"].items()]
        sections = [first, *([Section("Not measured", [Text(*missing)])] if missing else []), last]
        return f"{replace(self.report, sections=sections).to_text()}\n\nreport: {self.page}"


def diagnose(
    data: str | Path,
    *,
    model: str | Path = "bundled",
    out: str | Path = "runs/diagnose",
    opening: Opening | None = None,
    read: ReadConfig | None = None,
    split: str | None = None,
    images: bool = True,
    gradients: bool = False,
    batches: int = 16,
    recipe: str = "demo",
    negatives: Negatives = "micro",
    gamma: float = 0.5,
    threshold: float = 0.98,
    batch: int = 128,
    device: str = "auto",
) -> DiagnoseResult:
    """Analyse a split with a model, and write report.html, report.json and the figures. Sections that cannot be
    computed, because images are missing or no pairs differ, name the reason.

    Args:
        data: as of `open_data`, read with `read`. Without images, only the captions are analysed.
        model, opening, device: as of `load`; of a run directory its best epoch.
        out: directory of the report, and of the embeddings, which later calls reuse.
        split: the training split if not given, or all records if there are no splits.
        images: also encode the images, for retrieval, losses and gradients.
        gradients: measure the gradients of both losses with respect to all parameters, on so many `batches`.
        recipe, negatives, gamma: settings of the planned run.
        threshold: captions with at least this cosine are reported as suspected duplicates.
        batch: images or captions encoded at once.
    """
    data, model, out = str(data), str(model), Path(out)
    for name, number in (("batch", batch), ("batches", batches)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold must be a cosine above 0 and at most 1, got {threshold}")
    for name, value, choices in (("recipe", recipe, recipes.RECIPES), ("negatives", negatives, KINDS)):
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    planned = {"data": data, "objective.gamma": gamma, "optim.negatives": "memory", "optim.memory": SAMPLE}
    config = with_fields(recipes.RECIPES[recipe](), planned)
    encoder = load(model, **vars(opening or Opening()), device=device)
    encoder.require_trained("a diagnosis")
    read = read or ReadConfig()
    split, every = _choose_records(data, split, read)
    chosen = _at_most(every, LARGEST)
    records, problems, no_images = _drop_invalid(encoder, read, chosen, images=images)
    if not records:
        raise ValueError(f"{data} has no caption that can be read: hnclip data check {data} says why")
    views, cache = () if no_images else ("full",), cache_directory(read.cache)
    pairs = prepare(records, encoder.text_transform, encoder.image_transform, image_views=views, cache=cache)
    text, image = _encode(encoder, pairs, out / "features", batch)
    if image is not None and not image.isfinite().all():
        image, no_images = None, "the model returned NaN or infinity for some images: check its weights and precision"
    ids = torch.stack([pairs.image_ids[pairs.owner], pairs.caption_ids], dim=1)  # [T, 2]
    with progress("comparing captions, tiles") as bar:
        geometry = caption_geometry(text, pairs.owner, ids=ids, threshold=threshold, progress=bar.iterate)
    found = Analysed(
        recipe=recipe,
        config=config,
        negatives=negatives,
        threshold=threshold,
        batches=batches if gradients else 0,
        model=encoder,
        split=split,
        total=len(every),
        chosen=len(chosen),
        problems=problems,
        pairs=pairs,
        text=text,
        image=image,
        no_images=no_images,
        geometry=geometry,
        epoch=first_epoch(pairs, config),
    )
    report = _report(found)
    report.write(out)
    return DiagnoseResult(report, out / "report.html")


def _report(found: Analysed) -> Report:
    data, model = found.config.data, found.model
    parts = {name: _compute(section, found) for name, (_, section) in SECTIONS.items()}
    findings = [*data_findings(found), *(finding for part in parts.values() for finding in part.findings)]
    findings.sort(key=lambda finding: ("act", "note", "good").index(finding.level))
    reason = no_conclusions(findings)
    advice = [] if reason else [finding for part in parts.values() for finding in part.advice]
    captions, records = counted(len(found.text), "caption"), counted(len(found.records), "record")
    summary = [f"{captions} of {records} of {data} ({found.split}), to {model.source}."]
    if found.chosen < found.total:
        summary.append(
            f"A random part of {found.total:,} records was read, with at most {LARGEST:,} captions. Among all of them "
            "there are more duplicates, and hardest negatives are more similar."
        )
    return Report(
        title=f"Diagnosis of {data}",
        summary=summary,
        sections=[
            Section("Findings", [Findings(findings)]),
            *(
                Section(heading, [Missing(parts[name].missing)] if parts[name].missing else parts[name].blocks)
                for name, (heading, _) in SECTIONS.items()
            ),
            Section("Advice for a run", [Text(f"None. {reason}") if reason else Findings(advice)]),
        ],
        data={
            "data": data,
            "model": model.source,
            "split": found.split,
            "records": len(found.records),
            "captions": len(found.text),
            "skipped": found.chosen - len(found.records),
            "scale": found.scale,
            "context": model.context,
            "findings": [asdict(finding) for finding in findings],
            "advice": [asdict(finding) for finding in advice],
            "missing": {SECTIONS[name][0]: part.missing for name, part in parts.items() if part.missing},
            **{name: part.numbers for name, part in parts.items()},
        },
    )


def _compute(section: Callable[[Analysed], SectionResult], found: Analysed) -> SectionResult:
    try:
        return section(found)
    except ValueError as error:
        return SectionResult(missing=str(error))


def _choose_records(source: str, split: str | None, read: ReadConfig) -> tuple[str, Sequence[Record]]:
    """The given split; otherwise what a run would train on, or all records if there are no splits."""
    data = open_data(source, read, splits={split} if split else {"train", "validation"})
    declared = data.splits()
    chosen = split or next((split for split in ("train", "validation") if split in declared), "all")
    if chosen == "all" and declared and not split:
        raise ValueError(
            f"{data.name} has neither training nor validation records: choose one of {', '.join(declared)} with --split"
        )
    return chosen, data.part(chosen, validation_share=read.validation_share)


def _at_most(records: Sequence[Record], captions: int) -> Sequence[Record]:
    """Random records, in their order, with at most so many captions."""
    order = torch.randperm(len(records), generator=torch.Generator().manual_seed(0)).tolist()
    counts = np.cumsum([len(records[row].captions) for row in order])
    return [records[row] for row in sorted(order[: int((counts <= captions).sum())])]


def _drop_invalid(
    model: DualEncoder, read: ReadConfig, records: Sequence[Record], *, images: bool
) -> tuple[Sequence[Record], Sequence[Problem], str]:
    """Valid records, the problems of the others, and why images are not used; "" if they are."""
    readable, problems = drop_unreadable(records, model.text_transform)
    if not images:
        return readable, problems, "images were not asked for (--no-images)"
    cache = cache_directory(read.cache)
    with progress("reading images") as bar:
        valid = drop_invalid(readable, model.text_transform, model.image_transform, cache=cache, progress=bar.iterate)
    if len(valid.records) >= LEAST_IMAGES * len(readable):
        return valid.records, [*problems, *valid.problems], ""
    first, lost = valid.problems[0], len(readable) - len(valid.records)
    reason = f"{lost:,} of {counted(len(readable), 'image')} cannot be read, the first: {first.kind}: {first.detail}"
    return readable, problems, reason


def _encode(model: DualEncoder, pairs: PairData, directory: Path, batch: int) -> tuple[Tensor, Tensor | None]:
    """Vectors of all captions and images; those that an earlier call stored in the directory are read."""
    name, captions = model_fingerprint(model, model.name), records_fingerprint(pairs.records)

    def encode(what: str, key: str, compute: Callable[..., Tensor], views: Any) -> Tensor:
        digest = sha256(json.dumps([FORMAT, name, key]).encode()).hexdigest()[:16]
        path = directory / f"{what}-{digest}.npz"
        with suppress(OSError, ValueError, KeyError, BadZipFile), path.open("rb") as file:  # not there, or damaged
            return torch.from_numpy(np.load(file)["vectors"])
        with progress(f"encoding {what}, batches") as bar:
            vectors = compute(model, views, batch=batch, progress=bar.iterate).cpu()
        with replace_file(path) as partial, partial.open("wb") as new:
            np.savez(new, vectors=vectors.numpy())
        return vectors

    text = encode("captions", captions, encode_captions, pairs.texts["caption"])
    if "full" not in pairs.images:
        return text, None
    return text, encode("images", captions + images_fingerprint(pairs.records), encode_pixels, pairs.images["full"])
