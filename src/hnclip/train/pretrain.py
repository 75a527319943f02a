"""How the bundled model was made: short captions at 77 tokens, stretched to 248, then long captions.

    hnclip pretrain --out models/tiny

An endless stream of independent scenes of both styles (no families, no split of the benchmark), plain InfoNCE. It
stands in for CLIP's and Long-CLIP's pre-training: what it leaves is a model that solves easy negatives. Every batch is
a function of the seed and the step, and a killed run continues from its last checkpoint.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hnclip.data.batches import Batch, prepare
from hnclip.data.records import Record
from hnclip.data.scenes import SceneImage, scene_records
from hnclip.data.scenes.phrase import describe, describe_briefly
from hnclip.data.scenes.world import STYLES, sample_scene
from hnclip.evaluate.retrieval import evaluate, prepare_gallery
from hnclip.files import replace_directory, replace_file
from hnclip.losses import clip_loss
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.huggingface import wrap
from hnclip.models.load import save, stretch
from hnclip.models.tiny import tiny_clip
from hnclip.models.tokenizer import train_tokenizer
from hnclip.train.log import MetricsLog
from hnclip.train.optimizer import build_optimizer, clamp_scale, learning_rate_factor, set_learning_rate
from hnclip.train.prefetch import ahead


@dataclass(frozen=True)
class Stage:
    """One stretch of training: which text view of scenes with how many things, for how many steps, at which rate."""

    view: str
    things: tuple[int, int]
    steps: int
    lr: float
    scale_lr: float
    warmup: int


@dataclass(frozen=True)
class PretrainConfig:
    """The recipe. `vocabulary` counts tokens before missing bytes are added. The temperature is learnt in the short
    stage; the long one starts at CLIP's limit of `scale_max`, as Long-CLIP does, and stays there."""

    out: Path = Path("runs/pretrain")
    seed: int = 0
    batch: int = 64
    vocabulary: int = 1024
    short: Stage = Stage("short", things=(1, 3), steps=1200, lr=1.5e-3, scale_lr=3e-3, warmup=100)
    long: Stage = Stage("caption", things=(4, 6), steps=1300, lr=1.5e-3, scale_lr=0.0, warmup=100)
    scale_max: float = 100.0
    weight_decay: float = 0.05
    clip_grad: float = 1.0
    log_every: int = 20
    save_every: int = 100
    evaluate_every: int = 400


def pretrain(config: PretrainConfig, report: Callable[[str], None] = print) -> Path:
    """Run or continue the recipe; returns the directory of the finished model."""
    config.out.mkdir(parents=True, exist_ok=True)
    settings = json.loads(json.dumps(asdict(config) | {"out": None}))
    settings_file, state_file = config.out / "pretrain.json", config.out / "state.pt"
    if state_file.exists() and json.loads(settings_file.read_text()) != settings:
        raise ValueError(f"{config.out} holds a run with other settings; choose another --out or delete it")
    with replace_file(settings_file) as partial:
        partial.write_text(json.dumps(settings, indent=2) + "\n")

    tokenizer = _tokenizer(config)
    torch.manual_seed(config.seed)
    model = wrap(tiny_clip(tokenizer), tokenizer)
    state = torch.load(state_file, weights_only=True) if state_file.exists() else None
    at = state["stage"] if state else None
    with closing(MetricsLog(config.out, state["log_bytes"] if state else 0)) as log:
        for name, stage in (("short", config.short), ("long", config.long)):
            if name == "long":
                stretch(model)
                model.backbone.logit_scale.data.fill_(math.log(config.scale_max))
            if name == "short" and at == "long":
                continue  # done before the stop; the long stage's state has its weights
            _run_stage(name, stage, config, model, log, state if at == name else None, report)
    save(model, config.out / "model")
    return config.out / "model"


def _run_stage(
    name: str,
    stage: Stage,
    config: PretrainConfig,
    model: DualEncoder,
    log: MetricsLog,
    state: dict | None,
    report: Callable[[str], None],
) -> None:
    rates = {"lr": stage.lr, "scale_lr": stage.scale_lr, "weight_decay": config.weight_decay}
    optimizer = build_optimizer(model, betas=(0.9, 0.98), **rates)
    first = 0
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
        report(f"{name}: continuing at step {first} of {stage.steps}")
    started, seen = time.perf_counter(), 0
    for step, batch in enumerate(_stream(model, name, stage, config, first), start=first):
        set_learning_rate(optimizer, learning_rate_factor(step, total=stage.steps, warmup=stage.warmup))
        embeddings = model(batch)
        image, text = embeddings.images["full"].vectors, embeddings.texts["caption"].vectors
        loss = clip_loss(image, text, embeddings.scale, ids=embeddings.ids)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad)
        optimizer.step()
        clamp_scale(model.backbone.logit_scale, config.scale_max)
        seen += len(batch)
        done = step + 1
        if done % config.log_every == 0 or done == stage.steps:
            rate = seen / (time.perf_counter() - started)
            entry = {
                "kind": "step",
                "stage": name,
                "step": done,
                "loss": round(loss.item(), 4),
                "grad_norm": round(norm.item(), 3),
                "scale": round(model.scale.item(), 2),
                "pairs_per_second": round(rate, 1),
            }
            if done % config.evaluate_every == 0 or done == stage.steps:
                entry |= _evaluate(model, stage.view)
            log.write(entry)
            left = (stage.steps - done) * config.batch / rate / 60
            report(f"{name} {done}/{stage.steps}  {left:.0f} min left  {json.dumps(entry)}")
        if done % config.save_every == 0 or done == stage.steps:
            kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            with replace_file(config.out / "state.pt") as partial:
                torch.save({"stage": name, "step": done, "log_bytes": log.length, **kept}, partial)


def _stream_record(name: str, style: str, stage: Stage) -> Record:
    """A scene of its own and one text of it. The text is the record's only caption, whatever its length."""
    rng = random.Random(name)
    scene = sample_scene(STYLES[style], rng, stage.things)
    text = describe(scene, rng).text if stage.view == "caption" else describe_briefly(scene, rng)
    return Record(id=name, image=SceneImage(scene), captions=(text,), split="pretrain")


def _stream(model: DualEncoder, name: str, stage: Stage, config: PretrainConfig, first: int) -> Iterator[Batch]:
    """Batches from step `first` on, the next one drawn while the model works on the present one. Styles take turns, so
    that no negative is told apart by its style alone."""
    styles = sorted(STYLES)
    rows = range(config.batch)

    def make(step: int) -> Batch:
        prefix, style = f"pretrain/{config.seed}/{name}/{step}", styles[step % len(styles)]
        records = [_stream_record(f"{prefix}/{row}", style, stage) for row in rows]
        data = prepare(records, model.text_transform, model.image_transform)
        return data.batch(rows)

    return ahead(make, range(first, stage.steps))


def _tokenizer(config: PretrainConfig) -> Any:
    """Learnt from both kinds of text of both styles; kept with the run, because the weights belong to its ids."""
    from transformers import CLIPTokenizer

    directory = config.out / "tokenizer"
    if not directory.exists():
        names = [(f"tokenizer/{config.seed}/{i}", style) for i in range(4000) for style in sorted(STYLES)]
        texts = [_stream_record(*name, stage).captions[0] for name in names for stage in (config.short, config.long)]
        with replace_directory(directory) as partial:
            train_tokenizer(texts, config.vocabulary).save_pretrained(partial)
    return CLIPTokenizer.from_pretrained(directory)


def _evaluate(model: DualEncoder, view: str) -> dict[str, float]:
    """Recalls on the validation splits, to watch: the schedule is fixed and nothing is chosen by them."""
    found = {}
    for style in sorted(STYLES):
        records = scene_records(style, "validation")
        if view == "short":
            records = [replace(record, captions=(str(record.short),)) for record in records]
        metrics = evaluate(model, prepare_gallery(records, model)).metrics.text_to_image
        found[f"{style}_R@1"], found[f"{style}_R@10"] = (round(metrics.recall[k], 2) for k in (1, 10))
    return found


def brief(config: PretrainConfig, steps: int) -> PretrainConfig:
    """The same recipe in a few steps, for trying it out."""
    if steps < 1:
        raise ValueError(f"brief must be at least 1 step, got {steps}")
    return replace(
        config,
        short=replace(config.short, steps=steps, warmup=1),
        long=replace(config.long, steps=steps, warmup=1),
        save_every=max(1, steps // 2),
        evaluate_every=steps,
        log_every=1,
        batch=8,
    )
