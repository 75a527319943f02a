"""How alike the training captions of each domain are to the model before training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from statistics import mean

import torch
from PIL.Image import Image
from torch import Tensor

from hnclip.analysis.figures import (
    batch_figure,
    bucket_figure,
    motivation_figure,
    near_duplicate_figure,
    statistics_figure,
)
from hnclip.analysis.geometry import CaptionGeometry, caption_geometry
from hnclip.analysis.hardness import Buckets, batch_similarity, buckets, negative_similarities
from hnclip.analysis.near_duplicates import near_duplicate_rows
from hnclip.analysis.shown import CompanionRow
from hnclip.config import TrainConfig
from hnclip.core import Record
from hnclip.data.batching import text_numbers
from hnclip.data.images import to_rgb
from hnclip.data.texts import Tokens
from hnclip.diagnose.epoch import first_epoch
from hnclip.diagnose.material import Material
from hnclip.encode.loop import encode_captions
from hnclip.evaluate.published import published_statistics
from hnclip.evaluate.retrieval import open_task
from hnclip.models.dual_encoder import DualEncoder
from hnclip.studies.findings import Findings
from hnclip.studies.identity import Trained, model_fingerprint, training_fingerprint
from hnclip.studies.matched import open_start
from hnclip.studies.paper_rows import BENCHMARKS
from hnclip.studies.parts import FigurePart, Part, Shown, TablePart
from hnclip.util.files import replace_file
from hnclip.util.text import slugify

ROWS = 2  # near-duplicates that are shown of each domain
THUMBNAIL = 480  # pixels: as large as a figure shows a picture


@dataclass(frozen=True)
class _Domain:
    """What was found of a domain."""

    records: tuple[Record, ...]
    words: float
    test: int
    geometry: CaptionGeometry
    negatives: Buckets
    batch: Tensor
    near: list[CompanionRow]


def show(findings: Findings) -> Shown:
    """The paper's figures of caption geometry, all domains together, and its table A1."""
    base = replace(findings.setting.base, seed=findings.seeds[0])
    model = open_start(base, findings.store.options.device)
    found = {}
    for domain in findings.domains:
        config = replace(base, data=domain.data)
        found[domain.name] = _look(config, domain.galleries[0], model, findings.store.directory / "measures")
    distributions = {name: (one.geometry.pairwise, one.geometry.hardest) for name, one in found.items()}
    labels = next(iter(found.values())).negatives.labels
    about = "training captions of different pictures, to the model before training"
    parts: list[Part] = [
        FigurePart(
            "geometry-distributions",
            "Caption similarity",
            motivation_figure(distributions),
            f"Cosines between {about}: (a) of all pairs, (b) of every caption and its hardest companion.",
        ),
        FigurePart(
            "geometry-means",
            "Mean caption similarity",
            statistics_figure(distributions),
            f"Mean cosine between {about}: (A) of all pairs, (B) of every caption and its hardest companion.",
        ),
        _statistics(found),
        FigurePart(
            "geometry-negatives",
            "Hardness of in-batch negatives",
            bucket_figure({name: one.negatives.shares for name, one in found.items()}, labels),
            "Negatives of one epoch as training deals them, by the cosine of their captions. The edges are the "
            "paper's, made for Long-CLIP's cosines.",
        ),
        FigurePart(
            "geometry-batch",
            "One training batch",
            batch_figure({name: one.batch.numpy() for name, one in found.items()}),
            "Cosines Ḡ of the captions of the first micro-batch: times γ, this is what L_HN adds to the scores of the "
            "negatives.",
        ),
    ]
    for name, one in found.items():
        parts.append(
            FigurePart(
                slugify("geometry-pairs", name),
                f"Near-duplicate captions: {name}",
                near_duplicate_figure(one.near),
                "Captions around the 90 % quantile of the hardest companions, beside their nearest; shared words on a "
                "tint.",
            )
        )
    data = {
        name: {
            "train": len(one.records),
            "test": one.test,
            "words": one.words,
            "pairwise": one.geometry.pairwise.mean,
            "hardest": one.geometry.hardest.mean,
            "distributions": one.geometry.to_dict(),
            "negatives": one.negatives.to_dict(),
            "batch": one.batch.tolist(),
        }
        for name, one in found.items()
    }
    return Shown(tuple(parts), {"domains": data})


def _look(config: TrainConfig, gallery: str, model: DualEncoder, measures: Path) -> _Domain:
    records = Trained.by(config).records()
    captions = [caption for record in records for caption in record.captions]
    tokens = model.text_transform(captions)
    owner = torch.tensor([number for number, record in enumerate(records) for _ in record.captions])  # [T]
    text = caption_vectors(config, model, tokens, measures)  # [T, D]
    cut = torch.tensor([len(row) >= model.context for row in tokens])  # [T]
    epoch = first_epoch(Material("train", records, owner, text, text_numbers(tokens), cut), config)
    batches = epoch.evaluations(config.optim.negatives)
    geometry = caption_geometry(text, owner)
    return _Domain(
        records=records,
        words=mean(len(caption.split()) for caption in captions),
        test=len(open_task(gallery, None, config.read).records),
        geometry=geometry,
        negatives=buckets(negative_similarities(epoch.text, batches, epoch.ids)),
        batch=batch_similarity(epoch.text, batches[0][: config.optim.micro_batch]),
        near=near_duplicate_rows(
            text,
            owner,
            captions,
            geometry,
            rows=ROWS,
            names=[record.id for record in records],
            picture=lambda number: _picture(records[number]),
        ),
    )


def caption_vectors(config: TrainConfig, model: DualEncoder, tokens: Sequence[Tokens], directory: Path) -> Tensor:
    """[T, D]: the training captions to the encoder before training; read where they were encoded before.

    Args:
        config: of a run that would start from `model`.
        tokens: of the captions.
        directory: where vectors are kept.
    """
    from safetensors.torch import load_file, save_file

    opening = (config.context, config.keep, config.ratio, config.activation)
    content = (model_fingerprint(config.model, config.tokenizer), training_fingerprint(config), opening)
    path = directory / f"captions-{sha256(repr(content).encode()).hexdigest()[:10]}.safetensors"
    if path.exists():
        return load_file(path)["text"]
    text = encode_captions(model, tokens).cpu()
    with replace_file(path) as partial:
        save_file({"text": text}, partial)
    return text


def _statistics(found: dict[str, _Domain]) -> TablePart:
    measured = [
        (
            name,
            f"{len(one.records):,}",
            f"{one.test:,}",
            f"{one.words:.0f}",
            f"{one.geometry.pairwise.mean:.2f}",
            f"{one.geometry.hardest.mean:.2f}",
        )
        for name, one in found.items()
    ]
    paper = []
    for name in BENCHMARKS:
        if (said := published_statistics(name)) is not None:
            counts = (f"{said.train:,}", f"{said.test:,}", str(said.words))
            paper.append((f"paper: {name}", *counts, f"{said.pairwise:.2f}", f"{said.hardest:.2f}"))
    return TablePart(
        title="Caption statistics",
        headers=("data", "train", "test", "words", "mean cosine, all pairs", "hardest companion"),
        rows=(*measured, (), *paper),
        notes=(
            "Mean cosines between captions of different pictures to the model before training. Ours are of training "
            "captions. The paper's, of its Table A1, are of test captions and of Long-CLIP-L, another encoder: they do "
            "not compare with others.",
        ),
    )


def _picture(record: Record) -> Image | None:
    """As large as it is shown; None where it is missing or damaged."""
    try:
        picture = to_rgb(record.image.load())
    except (ValueError, OSError):
        return None
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    return picture
