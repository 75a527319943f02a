"""A whole training step, encoder to optimiser: hnclip, its options and the other methods, against the padded fp32 loop.

The model is CLIP ViT-B/16 with 248 positions and random weights; captions have the lengths of DOCCI's test captions in
CLIP's tokens (37 to 248, mean 140). `padded fp32 loop` does the step of HN-CLIP without any of hnclip: transformers'
CLIPModel in fp32, captions padded to 248, whole matrices, torch's plain AdamW. The ways that change one thing about
`hnclip` are compared with it: InfoNCE alone (plain fine-tuning), gradient caching (`cached`), negatives from the
`memory`, blocks that are recomputed or compiled, bf16. Methods are compared with `infonce`; each gets the views that it
asks for, with the numbers and lengths of real data, in the middle of a run, when all its terms are active.

`tokens` is text tokens computed per token of a caption, `of GEMM` the rate of multiplications and additions, counted by
torch, over that of a product of matrices in the same type. Memory is what the first step adds to model and batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from measure import Report, gemm_rate, log, machine, main, peak_memory, time_ways
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hnclip.config import ObjectiveConfig, SpeedConfig, TrainConfig
from hnclip.core import Batch, NegativePairs
from hnclip.data.batching import pad_texts
from hnclip.data.parts import CHUNKS, PARTS
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load, wrap
from hnclip.objectives.base import Objective
from hnclip.objectives.registry import METHOD_CHOICES, apply_method, build_objective
from hnclip.training.memory import PairMemory
from hnclip.training.optimizer import build_optimizer
from hnclip.training.setup import prepare_model
from hnclip.training.step import TrainStep

CONTEXT, END = 248, 49407
# Tokens of DOCCI's 5,100 test captions with start and end, cut at 248: every tenth of them.
LENGTHS = (37, 85, 99, 111, 121, 132, 145, 160, 180, 210, 248)
SENTENCE, FILTERED = 22, 0.9  # tokens of a sentence; share of a caption without words of appearance
SIZES = {
    # width, layers, heads of the image tower; the same of the text tower; side and patch of images; joint width
    "B/16": ((768, 12, 12), (512, 12, 8), (224, 16), 512),
    "small": ((192, 4, 3), (128, 4, 2), (64, 16), 64),
}
HNCLIP, PADDED, PLAIN = "hnclip", "padded fp32 loop", "infonce"
METHODS = tuple(name for name in METHOD_CHOICES if name != "hn_clip")
PEERS = {
    HNCLIP: PADDED,
    **dict.fromkeys((PLAIN, "cached", "memory", "recompute", "compile", "bf16"), HNCLIP),
    **dict.fromkeys(METHODS, PLAIN),
}


@dataclass(frozen=True)
class Options:
    """One optimiser step."""

    model: str = "B/16"
    """B/16, or small to try this benchmark."""
    micro_batch: int = 8
    accumulate: int = 2
    """Micro-batches per step; the paper has 16 × 8. Time is proportional, except for the optimiser's part."""
    ways: tuple[str, ...] = (PADDED, HNCLIP, "cached", "memory")
    """Of padded fp32 loop, hnclip, infonce, cached, memory, recompute, compile, bf16 and the methods."""
    methods: bool = False
    """infonce, hnclip and all other methods instead of --ways."""
    pairs_in_memory: int = 10_000
    """Pairs that `memory` compares with."""
    turns: int = 3
    processor_time: bool = False
    """Measure processor time of all threads instead of time: for a busy machine, with OMP_NUM_THREADS=1."""
    memory: bool = False
    """Also measure the memory of each way, in processes of their own."""
    device: str = "cpu"


def draw_texts(lengths: list[int], generator: torch.Generator) -> Any:
    """Random tokens between start and end."""
    drawn = (torch.randint(1, END - 1, (length - 2,), generator=generator).tolist() for length in lengths)
    return pad_texts([[END - 1, *tokens, END] for tokens in drawn], END)


def build_model(name: str, device: str) -> DualEncoder:
    from transformers import CLIPConfig, CLIPModel

    vision, text, (side, patch), joint = SIZES[name]

    def tower(width: int, layers: int, heads: int) -> dict[str, Any]:
        sizes = {"hidden_size": width, "intermediate_size": 4 * width}
        return sizes | {"num_hidden_layers": layers, "num_attention_heads": heads}

    special = {"bos_token_id": END - 1, "eos_token_id": END, "pad_token_id": END}
    config = CLIPConfig(
        projection_dim=joint,
        text_config={**tower(*text), "vocab_size": END + 1, "max_position_embeddings": CONTEXT, **special},
        vision_config={**tower(*vision), "image_size": side, "patch_size": patch},
    )
    torch.manual_seed(0)
    backbone = CLIPModel(config)
    backbone.text_model.eos_token_id = END
    return wrap(backbone, load("bundled").tokenizer).to(device).train()


def build_batch(name: str, pairs: int, objective: Objective, encoder: DualEncoder) -> Batch:
    """Random pairs with the views and parts that an objective asks for."""
    generator = torch.Generator().manual_seed(1)
    side = SIZES[name][2][0]
    grid = encoder.family.grid(encoder.backbone, side)
    place = torch.rand(pairs, generator=generator) * (len(LENGTHS) - 1)
    knots, low = torch.tensor(LENGTHS, dtype=torch.float), place.floor().long()
    lengths = (knots[low] + (place - low) * (knots[low + 1] - knots[low])).round().long().tolist()

    def text(view: str) -> Any:
        other = [int(FILTERED * length) if view == "filtered" else SENTENCE for length in lengths]
        return draw_texts(lengths if view == "caption" else other, generator)

    def part(view: str) -> Tensor:
        if view in objective.image_views:
            patches = torch.zeros(pairs, 1, grid, grid, dtype=torch.bool)
            patches[:, :, : grid // 2, : grid // 2] = True  # a quarter of the image
            return patches.flatten(2)
        starts = torch.arange(1, CHUNKS + 1 if objective.parts[0].startswith("chunk") else 2)
        return torch.stack([starts, starts + 4], 1).expand(pairs, -1, -1).clone()

    size, number = (pairs, 3, side, side), torch.arange(pairs)
    texts = {view: text(view) for view in objective.text_views}
    return Batch(
        {view: torch.randint(0, 256, size, dtype=torch.uint8, generator=generator) for view in objective.image_views},
        texts,
        torch.stack([number, number], 1),
        parts={PARTS[name].view: part(PARTS[name].view) for name in objective.parts},
    )


def padded_loop(model: DualEncoder, batch: Batch, micro_batch: int) -> Callable[[], None]:
    """The step as one writes it first: micro-batches, everything padded, losses of whole matrices."""
    backbone, device = model.backbone, model.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.01)
    texts = batch.texts["caption"]
    ids = F.pad(texts.ids, (0, CONTEXT - texts.ids.shape[1]), value=END)
    place = torch.arange(CONTEXT)[None]
    mask = (place >= 1) & (place < texts.lengths[:, None] - 1)

    def loss(pixels: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        image = backbone.get_image_features(pixel_values=model.normalize_pixels(pixels))
        text = backbone.get_text_features(input_ids=ids)
        patches = backbone.visual_projection(backbone.vision_model.post_layernorm(image.last_hidden_state[:, 1:]))
        words = backbone.text_projection(text.last_hidden_state)
        i, t, p, w = (F.normalize(x, dim=-1) for x in (image.pooler_output, text.pooler_output, patches, words))
        scale, right = backbone.logit_scale.exp(), torch.arange(len(i), device=i.device)
        margins = 0.5 * (t.detach() @ t.detach().T)
        margins.fill_diagonal_(0)
        logits = scale * (i @ t.T + margins)
        total = (F.cross_entropy(logits, right) + F.cross_entropy(logits.T, right)) / 2
        similar = torch.einsum("ipd,jwd->ijpw", p, w)
        best_word = similar.masked_fill(~mask[None, :, None], -1e4).amax(3).mean(2)
        best_patch = (similar.amax(2) * mask).sum(2) / mask.sum(1)
        return total + (F.cross_entropy(scale * best_word, right) + F.cross_entropy(scale * best_patch.T, right)) / 2

    def step() -> None:
        optimizer.zero_grad()
        for rows in range(0, len(batch), micro_batch):
            part = slice(rows, rows + micro_batch)
            pieces = batch.images["full"][part], ids[part], mask[part]
            (loss(*(piece.to(device) for piece in pieces)) * micro_batch / len(batch)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def build_step(
    way: str, model: str, micro_batch: int, accumulate: int, device: str, pairs_in_memory: int, shared: Any = None
) -> tuple[DualEncoder, Callable[[], Any]]:
    """The model and a step of one way. `shared` lends its backbone to the ways that leave it as it is."""
    config = TrainConfig()
    if way == PLAIN or way in METHODS:
        config = replace(config, objective=ObjectiveConfig(global_loss="infonce", token_weight=0.0))
        config = apply_method(config, way) if way in METHODS else config  # type: ignore[arg-type]
    speed = SpeedConfig(recompute=way == "recompute", compile=way == "compile")
    if shared is None or speed != SpeedConfig() or config.adapt.method != "full":
        encoder = build_model(model, device)
    else:  # with readouts of its own
        encoder = DualEncoder(shared.backbone, shared.text_transform, shared.image_transform).to(device).train()
    objective = prepare_model(config, speed, encoder)
    batch = build_batch(model, micro_batch * accumulate, objective, encoder)
    if way == PADDED:
        return encoder, padded_loop(encoder, batch, micro_batch)
    optim = replace(
        config.optim,
        lr=1e-6,
        scale_lr=1e-6,
        micro_batch=micro_batch,
        accumulate=accumulate,
        epochs=1,
        negatives={"cached": "batch", "memory": "memory"}.get(way, "micro"),  # type: ignore[arg-type]
        memory=pairs_in_memory if way == "memory" else 0,
        precision="bf16" if way == "bf16" else "fp32",
    )
    memory = full_memory(SIZES[model][3], pairs_in_memory, device) if way == "memory" else None
    step = TrainStep(encoder, objective, build_optimizer(encoder, optim), optim, total=100, memory=memory)
    return encoder, lambda: step(batch, 50).read()


def build_way(**arguments: Any) -> Callable[[], object]:
    """A step, ready to run. `peak_memory` measures the first one: a second one would find memory that the first
    freed."""
    return build_step(**arguments)[1]


def full_memory(width: int, pairs: int, device: str) -> PairMemory:
    """Random unit vectors of pairs that are not in the batch."""
    generator, rows = torch.Generator().manual_seed(4), 10**6 + torch.arange(pairs)
    image, text = (F.normalize(torch.randn(pairs, width, generator=generator), dim=1).to(device) for _ in range(2))
    ids = torch.stack([rows, rows], 1).to(device)
    return PairMemory(pairs, NegativePairs(image, text, ids), rows)


def count(step: Callable[[], object], model: DualEncoder) -> tuple[float, int]:
    """Multiplications and additions of a step, and the text tokens that pass its first block."""
    tokens = 0

    def add(module: object, given: tuple[Tensor, ...], output: object) -> None:
        nonlocal tokens
        if torch.is_grad_enabled():  # the first pass of gradient caching encodes the same tokens once more
            tokens += given[0].shape[:-1].numel()

    hook = model.backbone.text_model.encoder.layers[0].mlp.register_forward_hook(add)
    with FlopCounterMode(display=False) as counter:
        step()
    hook.remove()
    return counter.get_total_flops(), tokens


def run(options: Options) -> Report:
    if options.model not in SIZES:
        raise ValueError(f"model must be one of {', '.join(SIZES)}, got {options.model}")
    names = (PLAIN, HNCLIP, *METHODS) if options.methods else options.ways
    if unknown := {*names} - {PADDED, *PEERS}:
        raise ValueError(f"there is no way {unknown.pop()!r}; there are {', '.join((PADDED, *PEERS))}")
    keys = ("model", "micro_batch", "accumulate", "device", "pairs_in_memory")
    fixed: dict[str, Any] = {key: getattr(options, key) for key in keys}
    memory = {}
    for way in names if options.memory else ():  # before models fill the memory of this process
        log.info(f"{way}: memory")
        memory[way] = peak_memory(__file__, "build_way", way=way, **fixed)
    rate = gemm_rate(device=options.device)
    common, rows = build_model(options.model, options.device), {way: {"way": way} for way in names}
    ways: dict[str, Callable[[], object]] = {}
    pairs = options.micro_batch * options.accumulate
    texts = build_batch(options.model, pairs, build_objective(ObjectiveConfig()), common).texts
    needed = int(texts["caption"].lengths.sum())
    for way, row in rows.items():
        log.info(f"{way}: first step")
        model, ways[way] = build_step(way, **fixed, shared=common)
        if way == "compile":
            start = time.perf_counter()
            ways[way]()
            row["compiling s"] = time.perf_counter() - start
            ways[way]()  # the second length of captions compiles once more
        else:
            flops, tokens = count(ways[way], model)
            row |= {"tokens": tokens / needed, "Tflop": flops / 1e12}
    log.info(f"{options.turns} turns of {len(ways)} ways")
    clock = time.process_time if options.processor_time else time.perf_counter
    timings = time_ways(ways, turns=options.turns, warmup=0, device=options.device, clock=clock)
    for way, timing in timings.items():
        row, peer = rows[way], PLAIN if options.methods else PEERS.get(way, way)
        row |= {"s": timing, "pairs/s": pairs / timing.median}
        if peer in timings and peer != way:
            row |= {"peer": peer, "× peer": timing.ratios(timings[peer])}
        if options.methods:
            row["× hnclip"] = timing.ratios(timings[HNCLIP])
        if "Tflop" in row:
            full = gemm_rate(torch.bfloat16, options.device) if way == "bf16" else rate
            row["of GEMM"] = 1e12 * row["Tflop"] / timing.median / full
        if way in memory:
            row |= {"MB": memory[way] / 1e6, "MB × peer": memory[way] / memory.get(peer, memory[way])}
    notes = [f"GEMM rate {rate / 1e9:.0f} Gflop/s in float32"]
    return Report("step", list(rows.values()), machine(options.device), notes)


if __name__ == "__main__":
    main(Options, run)
