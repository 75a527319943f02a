"""Measurements that reports show: caption geometry, duplicates, retrievals that differ, the time of a training step.

Each is measured once, as a job of the plan, and stored as JSON (`MEASURES`); blocks of a report only read that.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import BytesIO
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hnclip.analysis.batches import batch_negatives, batch_similarity, buckets, first_epoch
from hnclip.analysis.captions import Histogram, caption_geometry
from hnclip.analysis.examples import count_differences, differing_examples
from hnclip.analysis.near_duplicates import near_duplicate_rows
from hnclip.core import Record
from hnclip.data.batching import prepare
from hnclip.data.image_cache import cache_directory
from hnclip.data.images import to_rgb
from hnclip.encode.loop import encode_captions
from hnclip.evaluation.published import published_statistics
from hnclip.evaluation.retrieval import EvaluationResult, drop_unusable, evaluate, open_task, prepare_gallery
from hnclip.report.caption_figures import (
    Distribution,
    Example,
    batch_figure,
    bucket_figure,
    motivation_figure,
    near_duplicate_figure,
    retrieval_figure,
    statistics_figure,
)
from hnclip.report.document import Block, CaptionedImage, CaptionRow, Figure, Table
from hnclip.studies.identity import open_start, training_records
from hnclip.studies.plan import MeasureJob
from hnclip.studies.results import StudyResults
from hnclip.studies.step_timer import measure_steps
from hnclip.studies.store import Store
from hnclip.util.text import slugify

_BINS = 2000  # of a stored histogram of cosines: 0.001 wide
_PIXELS, _EXAMPLES, _ROWS = 320, 4, 2  # of stored images; retrievals and near-duplicates that are shown of each domain


def measure_geometry(job: MeasureJob, store: Store) -> dict[str, Any]:
    """How similar the training captions of a domain are to the model before training."""
    config = job.config
    model = open_start(config, store.options.device)
    records, _ = training_records(config)
    pairs = prepare(records, model.text_transform, model.image_transform, image_views=())
    text = encode_captions(model, pairs.texts["caption"], batch=store.options.evaluate_batch).cpu()  # [T, D]
    geometry = caption_geometry(text, pairs.owner)
    epoch = first_epoch(pairs, config)
    groups = epoch.groups(config.optim.negatives)
    chosen = text[epoch.chosen]  # [N, D]
    near = near_duplicate_rows(text, records, geometry, rows=_ROWS)
    return {
        "train": len(records),
        "test": {gallery: len(open_task(gallery, None, config.read).records) for gallery in job.domain.galleries},
        "words": float(np.mean([len(caption.split()) for record in records for caption in record.captions])),
        "pairwise": _histogram_json(geometry.pairwise),
        "hardest": _histogram_json(geometry.hardest),
        "negatives": buckets(batch_negatives(chosen, groups, epoch.ids).similarities).to_dict(),
        "batch": batch_similarity(chosen, groups[0].rows[: config.optim.micro_batch].tolist()).tolist(),
        "near_duplicates": [[_captioned_json(item) for item in (row.query, *row.negatives)] for row in near],
    }


def measure_duplicates(job: MeasureJob, store: Store) -> dict[str, Any]:
    """How many training pairs have the caption (the same to the model) or the image (the same file) of another one."""
    records, _ = training_records(job.config)
    model = open_start(job.config, "cpu")
    pairs = prepare(records, model.text_transform, model.image_transform, cache=cache_directory(job.config.read.cache))
    image, caption = _shared(pairs.image_ids, torch.arange(len(pairs))), _shared(pairs.caption_ids, pairs.owner)  # [N]
    counts = {"caption": caption, "image": image, "either": caption | image}
    return {"pairs": len(pairs), **{name: int(mask.sum()) for name, mask in counts.items()}}


def _shared(ids: Tensor, owner: Tensor) -> Tensor:
    """Whether a record has an id that another record has too.

    Shape:
        ids [T], owner [T], the record of each; the result [N] bool
    """
    own, owner = torch.unique(torch.stack([ids, owner]), dim=1)  # a record counts once for each of its ids
    several = own.bincount()[own] > 1
    return torch.zeros(int(owner.max()) + 1, dtype=torch.bool).index_fill(0, owner[several], True)


def measure_retrievals(job: MeasureJob, store: Store) -> dict[str, Any]:
    """For how many test captions only one of two runs ranks the right image first, and some of them."""
    read, runs = job.config.read, job.runs[:2]
    evaluations: dict[str, EvaluationResult] = {}
    records: Sequence[Record] = ()
    for run in runs:
        model = store.open_model(run)
        # Both start from one model, so both can use the same records.
        records = records or drop_unusable(open_task(job.domain.galleries[0], None, read), model, read).records
        gallery = prepare_gallery(records, model, cache=cache_directory(read.cache))
        evaluations[str(len(evaluations))] = evaluate(model, gallery, batch=store.options.evaluate_batch)
        del model  # before the next one is opened
    examples = differing_examples(evaluations, records, limit=_EXAMPLES)
    return {
        "runs": [run.identity for run in runs],
        "counts": list(count_differences(evaluations).values()),
        "examples": [
            {
                "caption": one.caption,
                "right": _image_json(one.right),
                "answers": [[_image_json(image), correct] for image, correct in one.answers.values()],
            }
            for one in examples
        ],
    }


MEASURES: dict[str, Callable[[MeasureJob, Store], dict[str, Any]]] = {
    "geometry": measure_geometry,
    "duplicates": measure_duplicates,
    "retrievals": measure_retrievals,
    "step_time": measure_steps,
}
"""What does a `MeasureJob`, by its kind. The result is stored as JSON."""


def geometry(results: StudyResults) -> list[Block]:
    """The paper's figures of caption geometry, all domains together, and its Table A1."""
    found = results.measured("geometry")
    if not found:
        return []
    distributions = {
        name: (_distribution(one["pairwise"]), _distribution(one["hardest"])) for name, one in found.items()
    }
    about = "training captions of different images, to the model before training"
    shares = {name: one["negatives"]["shares"] for name, one in found.items()}
    labels = next(iter(found.values()))["negatives"]["labels"]
    blocks: list[Block] = [
        Figure(
            "geometry-distributions",
            "Caption similarity",
            partial(motivation_figure, distributions),
            f"Cosines between {about}: (a) of all pairs, (b) of every caption and its hardest negative.",
        ),
        Figure("geometry-means", "Mean caption similarity", partial(statistics_figure, distributions), f"Of {about}."),
        _statistics(results, found),
        Figure(
            "geometry-negatives",
            "In-batch negatives by the cosine of their captions",
            partial(bucket_figure, shares, labels),
            "Negatives in the batches of one epoch. The edges are the paper's, for the cosines of Long-CLIP.",
        ),
        Figure(
            "geometry-batch",
            "One training batch",
            partial(batch_figure, {name: np.array(one["batch"]) for name, one in found.items()}),
            "Cosines Ḡ of the captions of the first micro-batch. L_HN adds γ times these to the scores of negatives.",
        ),
    ]
    for name, one in found.items():
        rows = [[_captioned(item) for item in row] for row in one["near_duplicates"]]
        draw = partial(near_duplicate_figure, [CaptionRow(first, tuple(rest)) for first, *rest in rows])
        caption = "Captions around the 90 % quantile of hardest negatives, with their nearest negatives."
        blocks.append(Figure(slugify("geometry-pairs", name), f"Near-duplicate captions: {name}", draw, caption))
    return blocks


def _statistics(results: StudyResults, found: Mapping[str, Mapping[str, Any]]) -> Table:
    lines: list[tuple[str, ...]] = []
    for name, one in found.items():
        tests = " / ".join(f"{count:,}" for count in one["test"].values())
        cosines = [f"{one[key]['mean']:.2f}" for key in ("pairwise", "hardest")]
        lines.append((name, f"{one['train']:,}", tests, f"{one['words']:.0f}", *cosines))
    note = "Mean cosines between captions of different images to the model before training; ours of training captions"
    galleries = [gallery.partition("=")[0] for domain in results.domains for gallery in domain.galleries]
    paper = {name: printed for name in galleries if (printed := published_statistics(name)) is not None}
    if paper:
        note += ", the paper's of test captions to Long-CLIP-L"
        lines.append(())
    for name, (train, test, words, *means) in paper.items():
        cells = (f"{train:,}", f"{test:,}", str(words), *(f"{mean:.2f}" for mean in means))
        lines.append((f"paper, Table A1: {name}", *cells))
    headers = ("", "train", "test", "words", "mean cosine, all pairs", "hardest negative")
    return Table(headers, lines, title="Caption statistics", notes=[f"{note}."])


def duplicates(results: StudyResults) -> list[Block]:
    """How many training pairs share a caption or an image with another one."""
    keys, headers = ("pairs", "caption", "image", "either"), ("", "pairs", "same caption", "same image", "either")
    lines = [(name, *(f"{one[key]:,}" for key in keys)) for name, one in results.measured("duplicates").items()]
    notes = ["Captions are the same if they are to the model, images if their files are."]
    title = "Training pairs that share a caption or an image with another one"
    return [Table(headers, lines, title=title, notes=notes)] if lines else []


def retrievals(results: StudyResults) -> list[Block]:
    """Of two rows: how many captions only one of them retrieves for, and some examples of each domain."""
    found = results.measured("retrievals")
    if not found:
        return []
    rows, seed = [row.name for row in results.study.rows[:2]], results.seeds[0]
    headers = ("test captions of", "both", *(f"only {row}" for row in rows), "neither")
    lines = [(name, *(f"{count:,}" for count in one["counts"])) for name, one in found.items()]
    title = f"Text→image: whether {rows[0]} and {rows[1]} rank the right image first, in captions"
    blocks: list[Block] = [Table(headers, lines, title=title, notes=[f"Seed {seed}."])]
    for name, one in found.items():
        if one["examples"]:
            draw = partial(_draw_examples, one["examples"], rows)
            caption = f"Captions whose image only one of {rows[0]} and {rows[1]} ranks first; seed {seed}."
            blocks.append(Figure(slugify("retrievals", name), f"Retrievals that differ: {name}", draw, caption))
    return blocks


def _draw_examples(examples: Sequence[Mapping[str, Any]], rows: Sequence[str]) -> Any:
    drawn = []
    for one in examples:
        answers = {row: (_image(image), correct) for row, (image, correct) in zip(rows, one["answers"])}
        drawn.append(Example(one["caption"], _image(one["right"]), answers))
    return retrieval_figure(drawn)


def _histogram_json(histogram: Histogram) -> dict[str, Any]:
    return {"mean": histogram.mean, "counts": histogram.counts.reshape(_BINS, -1).sum(1).tolist()}


def _distribution(stored: Mapping[str, Any]) -> Distribution:
    return Distribution(np.array(stored["counts"]), np.linspace(-1, 1, _BINS + 1))


def _captioned_json(item: CaptionedImage) -> list[Any]:
    return [item.label, item.text, None if item.image is None else _image_json(item.image)]


def _captioned(stored: Sequence[Any]) -> CaptionedImage:
    label, text, image = stored
    passage = tuple((piece, bool(highlighted)) for piece, highlighted in text)
    cosine = label.partition(": ")[0]  # what follows is the id of the record
    return CaptionedImage(cosine, passage, None if image is None else _image(image))


def _image_json(image: Image.Image) -> str:
    """A small JPEG."""
    small = to_rgb(image)
    small.thumbnail((_PIXELS, _PIXELS))
    buffer = BytesIO()
    small.save(buffer, "JPEG", quality=85)
    return base64.b64encode(buffer.getvalue()).decode()


def _image(stored: str) -> Image.Image:
    return Image.open(BytesIO(base64.b64decode(stored)))
