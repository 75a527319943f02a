"""A training step of every method compared with plain fine-tuning: images per second, memory, inputs, preparation.

All on one model (CLIP with 248 positions and random weights, as in `hnclip bench step`) and one batch: each method
gets the views that it asks for, in the numbers and lengths that real data have. `plain` is InfoNCE on images and
captions. `times` is the time of a step over that of plain fine-tuning, `over HN-CLIP` over that of HN-CLIP, and
`official` what the paper measured of the released code over HN-CLIP, on its own machine (HN-CLIP, training efficiency).
Preparation is done once, for any number of epochs; it is timed on drawn images of 500 × 375 pixels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from hnclip.config import ObjectiveConfig, TrainConfig
from hnclip.core import Batch, TextBatch
from hnclip.data.batching import pad_texts
from hnclip.data.scenes import scene_records
from hnclip.measure import Report, load_file, machine, peak_memory, time_ways
from hnclip.models.adapters import add_adapters
from hnclip.models.dual_encoder import DualEncoder
from hnclip.objectives.base import Objective
from hnclip.objectives.registry import METHOD_CHOICES, apply_method, build_objective, build_readouts
from hnclip.training.data import needed_views
from hnclip.training.optimizer import build_optimizer
from hnclip.training.step import TrainStep

log = logging.getLogger("hnclip.bench")

PLAIN = "plain"
HN = "hn_clip"
OFFICIAL = {"goal": 2.4, "structxlip": 5.4}
# Tokens of views other than the caption, with start and end: a sentence, and a caption without a tenth of its words.
SENTENCE = 22
FILTERED = 0.9
SENTENCES = 8  # of a caption
CHUNKS = 64  # most spans of a caption in StructXLIP
step = load_file(Path(__file__).with_name("step.py"))


@dataclass(frozen=True)
class Options:
    """One optimiser step of every method."""

    model: str = "B/16"
    """B/16, or small to try this benchmark."""
    micro_batch: int = 16
    methods: tuple[str, ...] = (PLAIN, *METHOD_CHOICES)
    """Which to measure; plain and hn_clip are the peers of the ratios."""
    turns: int = 3
    """Repetitions; the median counts."""
    memory: bool = True
    """Also measure the memory of each, in processes of their own: what the first step adds to model and batch."""
    images: int = 4
    """Drawn images on which preparation is timed; 0 leaves it out."""
    device: str = "cpu"


def configuration(method: str) -> TrainConfig:
    plain = replace(TrainConfig(), objective=ObjectiveConfig(global_loss="infonce", token_weight=0.0))
    return plain if method == PLAIN else apply_method(plain, method)  # type: ignore[arg-type]


def build_batch(model: str, objective: Objective, encoder: DualEncoder, pairs: int) -> Batch:
    """The views and parts that an objective asks for, around the batch of `hnclip bench step`."""
    plain = step.build_batch(model, pairs)
    generator = torch.Generator().manual_seed(3)
    lengths = plain.texts["caption"].lengths
    side = plain.images["full"].shape[-1]
    grid = encoder.family.grid(encoder.backbone, side)

    def pixels() -> Tensor:
        return torch.randint(0, 256, (pairs, 3, side, side), dtype=torch.uint8, generator=generator)

    def text(view: str) -> TextBatch:
        if view == "caption":
            return plain.texts["caption"]
        shorter = [int(FILTERED * length) if view == "filtered" else SENTENCE for length in lengths.tolist()]
        rows = [
            [step.END - 1, *torch.randint(1, step.END - 1, (length - 2,), generator=generator).tolist(), step.END]
            for length in shorter
        ]
        return pad_texts(rows, step.END)

    def part(view: str) -> Tensor:
        if view in objective.image_views:
            patches = torch.zeros(pairs, 1, grid, grid, dtype=torch.bool)
            patches[:, :, : grid // 2, : grid // 2] = True  # a quarter of the image
            return patches.flatten(2)
        starts = torch.arange(1, CHUNKS + 1 if objective.parts[0].startswith("chunk") else 2)
        return torch.stack([starts, starts + 4], 1).expand(pairs, -1, -1).clone()

    from hnclip.data.parts import PARTS

    return replace(
        plain,
        images={view: plain.images["full"] if view == "full" else pixels() for view in objective.image_views},
        texts={view: text(view) for view in objective.text_views},
        parts={PARTS[name].view: part(PARTS[name].view) for name in objective.parts},
    )


def build_way(
    method: str, model: str, micro_batch: int, device: str, shared: DualEncoder | None = None
) -> Callable[[], object]:
    """A step of one method, ready to run. `shared` lends its backbone, to save the memory of one per method;
    adapters change it, so they need their own."""
    config = configuration(method)
    encoder: DualEncoder = step.build_model(model, device) if shared is None else _around(shared)
    if config.adapt.method != "full":
        add_adapters(
            encoder,
            method=config.adapt.method,
            rank=config.adapt.rank,
            alpha=config.adapt.alpha,
            dropout=0.0,
            towers="both",
            projections=False,
            train_scale=False,
        )
    objective = build_objective(config.objective)
    encoder.readouts.update(build_readouts(objective, encoder))
    batch = build_batch(model, objective, encoder, micro_batch)
    optim = replace(
        config.optim, lr=1e-6, scale_lr=1e-6, micro_batch=micro_batch, accumulate=1, precision="fp32", epochs=1
    )
    train_step = TrainStep(encoder, objective, build_optimizer(encoder, optim), optim, total=100)
    return lambda: train_step(batch, 50).read()


def _around(shared: DualEncoder) -> DualEncoder:
    """The same backbone, with readouts of its own."""
    return DualEncoder(shared.backbone, shared.text_transform, shared.image_transform).to(shared.device).train()


def work_of(**arguments: Any) -> Callable[[], object]:
    """For `peak_memory`: the first step."""
    return build_way(**arguments)


def extra_inputs(objective: Objective) -> str:
    """What a step reads in addition to image and caption."""
    images = len(objective.image_views) - 1
    texts = len(objective.text_views) - 1
    named = [f"{images} images" if images > 1 else "1 image"] if images else []
    named += [f"{texts} texts" if texts > 1 else "1 text"] if texts else []
    return ", ".join(named) or "none"


def run(options: Options) -> Report:
    for name in options.methods:
        if name not in (PLAIN, *METHOD_CHOICES):
            raise ValueError(f"there is no method {name!r}; there are {', '.join((PLAIN, *METHOD_CHOICES))}")
    if not {PLAIN, HN} <= set(options.methods):
        raise ValueError(f"the ratios need {PLAIN} and {HN} among --methods")
    if options.model not in step.SIZES:
        raise ValueError(f"model must be one of {', '.join(step.SIZES)}, got {options.model}")
    fixed: dict[str, Any] = {
        "model": options.model,
        "micro_batch": options.micro_batch,
        "device": options.device,
    }
    # Before models fill the memory of this process.
    megabytes = {}
    for name in options.methods if options.memory else ():
        log.info(f"{name}: memory")
        megabytes[name] = peak_memory(__file__, "work_of", method=name, **fixed) / 1e6
    prepared = preparation(options) if options.images else {}
    ways, shared = {}, step.build_model(options.model, options.device)
    for name in options.methods:
        log.info(f"{name}: building")
        adapted = configuration(name).adapt.method != "full"
        ways[name] = build_way(name, **fixed, shared=None if adapted else shared)
    log.info(f"{options.turns} turns of {len(ways)} methods")
    timings = time_ways(ways, turns=options.turns, device=options.device)
    rows = []
    for name, timing in timings.items():
        objective = build_objective(configuration(name).objective)
        row: dict[str, Any] = {
            "method": name,
            "seconds": timing,
            "images": options.micro_batch / timing.median,
            "times": timing.ratio(timings[PLAIN]),
            "rate": 1 / timing.ratio(timings[PLAIN]),
            "over": timing.ratio(timings[HN]),
            "official": OFFICIAL.get(name),
            "inputs": extra_inputs(objective),
            "prepare": sum(prepared.get(kind, 0.0) for kind in needed_views(objective)) or None,
        }
        if options.memory:
            row |= {"megabytes": megabytes[name], "memory": megabytes[name] / megabytes[PLAIN]}
        rows.append(row)
    columns = {
        "method": "method",
        "images": "images/s",
        "rate": "of plain",
        "times": "times plain",
        "over": "over HN-CLIP",
        "official": "official",
        "memory": "memory",
        "megabytes": "MB",
        "inputs": "extra inputs",
        "prepare": "ms to prepare",
    }
    notes = [f"preparing a image: {kind} {cost:.1f} ms" for kind, cost in prepared.items()]
    return Report("methods", columns, rows, machine(options.device), notes)


def preparation(options: Options) -> dict[str, float]:
    """Milliseconds that each kind of `hnclip prepare` takes for a image: regions are proposed by the default and
    matched to sentences by the model of the benchmark."""
    from hnclip.data.image_sources import EdgeImage
    from hnclip.data.lexicon import load_filter
    from hnclip.prepare.proposers import felzenszwalb, grid_cells, union

    log.info(f"preparing {options.images} images")
    encoder: DualEncoder = step.build_model(options.model, options.device).eval()
    find_boxes, shorten = union(felzenszwalb, grid_cells), load_filter("lexicon")
    generator = torch.Generator().manual_seed(5)
    scenes = scene_records("park", "train", families=options.images, members=1)
    images = [record.image.load().convert("RGB").resize((500, 375)) for record in scenes]

    @torch.inference_mode()
    def regions(image: Image.Image) -> None:
        crops = [image, *(image.crop(box) for box in find_boxes(image))]
        encoder.encode_images(encoder.preprocess_images(crops))
        words = torch.randint(1, step.END - 1, (SENTENCES, SENTENCE), generator=generator)
        encoder.encode_texts(pad_texts(words.tolist(), step.END).to(encoder.device))

    works: dict[str, Callable[[], object]] = {
        "regions": lambda: [regions(image) for image in images],
        "edges": lambda: [EdgeImage(record.image).apply(image) for record, image in zip(scenes, images)],
        "text": lambda: [shorten(record.captions[0]) for record in scenes],
    }
    timings = time_ways(works, turns=1, warmup=0, device=options.device)
    return {kind: 1000 * timing.median / len(images) for kind, timing in timings.items()}
