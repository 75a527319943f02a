"""How the bundled model was made: short captions at 77 tokens, positions stretched to 248, then dense captions.

    python scripts/pretrain_bundled.py --out runs/pretrain

An endless stream of generated scenes (`hnclip.data.scenes.stream_records`) and plain InfoNCE stand in for the
pre-training of CLIP and Long-CLIP. The stream has the drawings of both domains but not their words, and no scene of any
split. The schedule is fixed; the recalls on validation splits in the log choose nothing. Every batch is a function of
the seed and the step.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import CLIPConfig, CLIPModel

from hnclip.analysis.captions import caption_similarity
from hnclip.config import OptimConfig
from hnclip.core import Batch
from hnclip.data.batching import prepare
from hnclip.data.scenes import scene_records, stream_records
from hnclip.data.scenes.world import DOMAINS
from hnclip.evaluation.retrieval import evaluate, prepare_gallery
from hnclip.losses import clip_loss
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import save, wrap
from hnclip.models.long_context import stretch
from hnclip.models.preprocessing import train_tokenizer
from hnclip.training.optimizer import build_optimizer, clamp_scale, learning_rate_factor, set_learning_rate

IMAGE_SIZE, PATCH, WIDTH, LAYERS, CONTEXT = 96, 16, 128, 4, 77
VOCABULARY = 1024  # tokens before missing bytes are added
SCALE_START, SCALE_MAX = 14.3, 100.0  # CLIP's
BATCH, WARMUP, WEIGHT_DECAY, CLIP_GRAD = 96, 100, 0.05, 1.0


@dataclass(frozen=True)
class Stage:
    """Steps on scenes with so many things, in families of so many members. The scale is learnt on short captions;
    dense ones start at CLIP's limit, as Long-CLIP does, and stay there."""

    name: str
    long: bool
    things: tuple[int, int]
    members: int
    steps: int
    lr: float
    scale_lr: float


STAGES = (
    Stage("short", long=False, things=(1, 3), members=1, steps=300, lr=1.5e-3, scale_lr=3e-3),
    Stage("short, near-duplicates", long=False, things=(1, 3), members=2, steps=1400, lr=1.5e-3, scale_lr=3e-3),
    Stage("long, near-duplicates", long=True, things=(3, 5), members=2, steps=2500, lr=1e-3, scale_lr=0.0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/pretrain"), help="directory to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="steps of each stage, to try the script")
    options = parser.parse_args()
    stages = [replace(stage, steps=options.steps) for stage in STAGES] if options.steps else STAGES
    pretrain(options.out, options.seed, stages)


def pretrain(out: Path, seed: int, stages: Any) -> None:
    """Run all stages; the model is `out`/model, its log `out`/pretrain.jsonl."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(_tokenizer_texts(seed), VOCABULARY)
    torch.manual_seed(seed)
    model = wrap(_tiny_clip(tokenizer), tokenizer)
    with (out / "pretrain.jsonl").open("w", encoding="utf-8") as log:
        for stage in stages:
            if stage.long and model.context == CONTEXT:
                stretch(model)
                model.backbone.logit_scale.data.fill_(math.log(SCALE_MAX))
            for entry in _train(model, stage, seed):
                print(json.dumps(entry), flush=True)
                log.write(json.dumps(entry) + "\n")
                log.flush()
    shutil.rmtree(out / "model", ignore_errors=True)
    save(model, out / "model")


def _train(model: DualEncoder, stage: Stage, seed: int) -> Iterator[dict[str, Any]]:
    """One stage; yields an entry of the log every twenty steps, with recalls at the end of the stage."""
    optim = OptimConfig(lr=stage.lr, scale_lr=stage.scale_lr, weight_decay=WEIGHT_DECAY, beta1=0.9, beta2=0.98)
    optimizer = build_optimizer(model, optim)
    started = time.perf_counter()
    for step, batch in enumerate(_stream(model, stage, seed), start=1):
        set_learning_rate(optimizer, learning_rate_factor(step - 1, total=stage.steps, warmup=WARMUP))
        embeddings = model(batch)
        image, text = embeddings.images["full"].vectors, embeddings.texts["caption"].vectors  # [B, D]
        loss = clip_loss(image, text, embeddings.scale, ids=embeddings.ids)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
        optimizer.step()
        clamp_scale(model.backbone.logit_scale, SCALE_MAX)
        if step % 20 == 0 or step == stage.steps:
            entry = {"stage": stage.name, "step": step, "loss": round(loss.item(), 4)}
            entry |= {"scale": round(model.scale.item(), 2), "minutes": round((time.perf_counter() - started) / 60, 2)}
            if step == stage.steps or (stage.long and step % 500 == 0):
                entry |= _evaluate(model)
            yield entry


def _stream(model: DualEncoder, stage: Stage, seed: int) -> Iterator[Batch]:
    """The batches of a stage."""

    def make(step: int) -> Batch:
        name = f"{seed}/{stage.name}/{step}"
        records = stream_records(name, BATCH, members=stage.members, long=stage.long, things=stage.things)
        return prepare(records, model.text_transform, model.image_transform).batch(range(len(records)))

    return map(make, range(stage.steps))


def _evaluate(model: DualEncoder) -> dict[str, float]:
    """Zero-shot retrieval on the validation splits."""
    found = {}
    for domain in DOMAINS:
        gallery = prepare_gallery(scene_records(domain, "validation"), model)
        evaluation = evaluate(model, gallery)
        similarity = caption_similarity(evaluation.text, gallery.owner)
        recall = evaluation.metrics["text_to_image"]
        found |= {f"{domain}_R@{k}": round(recall[f"R@{k}"], 2) for k in (1, 10)}
        found |= {
            f"{domain}_similarity": round(similarity["pairwise"], 3),
            f"{domain}_hardest": round(similarity["hardest"], 3),
        }
    model.train()
    return found


def _tokenizer_texts(seed: int) -> list[str]:
    """The vocabulary covers the stream and both domains, as that of CLIP covers words that its images hardly show."""
    records = [*stream_records(f"{seed}/words", 4000, long=False), *stream_records(f"{seed}/words", 4000)]
    records += [record for domain in DOMAINS for record in scene_records(domain, "train")]
    return [record.captions[0] for record in records]


def _tiny_clip(tokenizer: Any) -> CLIPModel:
    """A fresh CLIP of about 1.9 million parameters."""
    tower = {
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": WIDTH // 32,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    }
    text = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": CONTEXT,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = CLIPConfig(
        projection_dim=WIDTH,
        logit_scale_init_value=math.log(SCALE_START),
        text_config={**tower, **text},
        vision_config={**tower, "image_size": IMAGE_SIZE, "patch_size": PATCH},
    )
    return CLIPModel(config)


if __name__ == "__main__":
    main()
