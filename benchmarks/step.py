"""A whole HN-CLIP training step, encoder to optimiser, compared with the straightforward padded fp32 loop.

The model is CLIP ViT-B/16 with 248 positions, random weights; captions have the lengths of DOCCI's test captions in
CLIP's tokens (37 to 248, mean 140), drawn by quantiles. `padded fp32 loop` does the same step without any of hnclip:
transformers' CLIPModel in fp32, captions padded to 248 as in the trainers of Long-CLIP and its followers, the losses of
the paper written out, torch's plain AdamW. `long-clip` also encodes a second, short caption padded to 248 for each
image, as the Long-CLIP trainer does. SDPA attention for all.

`hnclip` takes its negatives from the micro-batch. The ways that change one thing about it are compared with it: InfoNCE
alone, gradient caching (`cached`, negatives from the batch), `memory` negatives, recomputed or compiled blocks, bf16.
`× peer` is the time of a step over that of its peer. `tokens` is text tokens computed per token needed. `of GEMM` is
the rate of multiplications and additions, counted by torch while a step runs, over the measured rate of a plain product
of matrices in the same type.

With --against another checkout of hnclip takes turns with this one, each in a process of its own; the
`benchmarks/step.py` of each builds the step.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from checkouts import steps_in_turn
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hnclip.config import ObjectiveConfig, OptimConfig
from hnclip.core import Batch, Embeddings, ViewEmbeddings
from hnclip.data.batching import pad_texts
from hnclip.losses import GLOBAL_LOSSES, token_loss
from hnclip.measure import Report, Timing, gemm_rate, machine, peak_memory, time_ways
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load, wrap
from hnclip.objectives.registry import build_objective
from hnclip.training.memory import PairMemory
from hnclip.training.optimizer import build_optimizer
from hnclip.training.setup import compile_blocks, fast_bf16, recompute_activations
from hnclip.training.step import TrainStep

log = logging.getLogger("hnclip.bench")

CONTEXT = 248
# Tokens of DOCCI's 5,100 test captions with start and end, cut at 248: every tenth of them.
LENGTHS = (37, 85, 99, 111, 121, 132, 145, 160, 180, 210, 248)
END = 49407
SIZES = {
    # width, layers, heads of the image tower; the same of the text tower; side and patch of images; joint width
    "B/16": ((768, 12, 12), (512, 12, 8), (224, 16), 512),
    "small": ((192, 4, 3), (128, 4, 2), (64, 16), 64),
}
HNCLIP, PADDED, OTHER = "hnclip", "padded fp32 loop", "other checkout"
PEERS = {
    PADDED: PADDED,
    "long-clip": PADDED,
    HNCLIP: PADDED,
    **dict.fromkeys(("infonce", "cached", "memory", "recompute", "compile", "bf16"), HNCLIP),
}


@dataclass(frozen=True)
class Options:
    """One optimiser step of HN-CLIP."""

    model: str = "B/16"
    """B/16, or small to try this benchmark."""
    micro_batch: int = 8
    accumulate: int = 2
    """Micro-batches per step; the paper has 16 × 8. Time is proportional, except for the optimiser's part."""
    ways: tuple[str, ...] = (PADDED, HNCLIP, "cached", "memory")
    """Of padded fp32 loop, long-clip, hnclip, infonce, cached, memory, recompute, compile and bf16, which is added
    where the device computes it in hardware."""
    pairs_in_memory: int = 10_000
    """Pairs that `memory` compares with."""
    against: Path | None = None
    """Another checkout of hnclip: only its step and this one's are measured."""
    against_way: str = HNCLIP
    """The way that both checkouts measure."""
    turns: int = 3
    """Repetitions; the median counts. 0 measures memory alone."""
    processor_time: bool = False
    """Measure processor time of all threads instead of time: for a busy machine, with OMP_NUM_THREADS=1."""
    memory: bool = False
    """Also measure the memory of each way, in processes of their own: what the first step adds to model and batch, so
    gradients (1 × the weights) and the optimiser's state (2 ×) with it."""
    device: str = "cpu"


def caption_lengths(count: int, generator: torch.Generator) -> list[int]:
    """Lengths with the distribution of DOCCI's captions."""
    place = torch.rand(count, generator=generator) * (len(LENGTHS) - 1)
    low = place.floor().long()
    knots = torch.tensor(LENGTHS, dtype=torch.float)
    return (knots[low] + (place - low) * (knots[low + 1] - knots[low])).round().long().tolist()


def build_model(name: str, device: str) -> DualEncoder:
    from transformers import CLIPConfig, CLIPModel

    (vision, text, (side, patch), joint), torch_seed = SIZES[name], 0

    def tower(sizes: tuple[int, int, int]) -> dict[str, Any]:
        width, layers, heads = sizes
        return {
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
        }

    special = {"bos_token_id": END - 1, "eos_token_id": END, "pad_token_id": END}
    config = CLIPConfig(
        projection_dim=joint,
        text_config={**tower(text), "vocab_size": END + 1, "max_position_embeddings": CONTEXT, **special},
        vision_config={**tower(vision), "image_size": side, "patch_size": patch},
    )
    torch.manual_seed(torch_seed)
    backbone = CLIPModel(config)
    backbone.text_model.eos_token_id = END
    return wrap(backbone, load("bundled").tokenizer).to(device).train()


def build_batch(name: str, pairs: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    side = SIZES[name][2][0]
    ids = [
        [END - 1, *torch.randint(1, END - 1, (length - 2,), generator=generator).tolist(), END]
        for length in caption_lengths(pairs, generator)
    ]
    pixels = torch.randint(0, 256, (pairs, 3, side, side), dtype=torch.uint8, generator=generator)
    number = torch.arange(pairs)
    return Batch({"full": pixels}, {"caption": pad_texts(ids, END)}, torch.stack([number, number], 1))


def straightforward(model: DualEncoder, batch: Batch, micro_batch: int, *, short: bool) -> Callable[[], None]:
    """The step as one writes it first: micro-batches, everything padded, losses of whole matrices."""
    backbone, device = model.backbone, model.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.01)
    texts = batch.texts["caption"]
    ids = F.pad(texts.ids, (0, CONTEXT - texts.ids.shape[1]), value=END)
    mask = torch.arange(CONTEXT)[None]
    mask = (mask >= 1) & (mask < texts.lengths[:, None] - 1)

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
        total = total + (F.cross_entropy(scale * best_word, right) + F.cross_entropy(scale * best_patch.T, right)) / 2
        if short:  # Long-CLIP: short captions, as long as the long ones, against the images' main components
            other = F.normalize(backbone.get_text_features(input_ids=ids.roll(7, 1)).pooler_output, dim=-1)
            few = scale * i @ other.T
            total = total + (F.cross_entropy(few, right) + F.cross_entropy(few.T, right)) / 2
        return total

    def step() -> None:
        optimizer.zero_grad()
        for rows in range(0, len(batch), micro_batch):
            part = slice(rows, rows + micro_batch)
            pieces = batch.images["full"][part], ids[part], mask[part]
            (loss(*(piece.to(device) for piece in pieces)) * micro_batch / len(batch)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def build_way(
    way: str,
    model: str,
    micro_batch: int,
    accumulate: int,
    device: str,
    shared: DualEncoder | None = None,
    pairs_in_memory: int = 10_000,
) -> Callable[[], object]:
    """A step of one way, ready to run. `shared` saves the memory of one model per way. `--against` calls this function
    of another checkout with the first five arguments."""
    encoder, batch = shared or build_model(model, device), build_batch(model, micro_batch * accumulate)
    if way in (PADDED, "long-clip"):
        return straightforward(encoder, batch, micro_batch, short=way == "long-clip")
    plain = ObjectiveConfig(global_loss="infonce", token_weight=0.0)
    optim = OptimConfig(
        lr=1e-6,
        micro_batch=micro_batch,
        accumulate=accumulate,
        negatives={"cached": "batch", "memory": "memory"}.get(way, "micro"),  # type: ignore[arg-type]
        memory=pairs_in_memory if way == "memory" else 0,
        precision="bf16" if way == "bf16" else "fp32",
    )
    step = TrainStep(
        encoder,
        build_objective(plain if way == "infonce" else ObjectiveConfig()),
        build_optimizer(encoder, optim),
        optim,
        total=10**6,
        memory=full_memory(SIZES[model][3], pairs_in_memory, device) if way == "memory" else None,
    )
    if way == "recompute":
        recompute_activations(encoder)
    if way == "compile":
        compile_blocks(encoder)
    return lambda: step(batch, 0).read()


def full_memory(width: int, pairs: int, device: str) -> PairMemory:
    """Random unit vectors of pairs that are not in the batch."""
    generator, rows = torch.Generator().manual_seed(4), 10**6 + torch.arange(pairs)
    image, text = (F.normalize(torch.randn(pairs, width, generator=generator), dim=1).to(device) for _ in range(2))
    ids = torch.stack([rows, rows], 1).to(device)
    views = {"full": ViewEmbeddings(image)}, {"caption": ViewEmbeddings(text)}
    return PairMemory(pairs, Embeddings(*views, torch.tensor(1.0, device=device), ids=ids), rows)


def work_of(**arguments: Any) -> Callable[[], object]:
    """For `peak_memory`. The first step is the one to measure: what it frees the C library would keep, and a second
    one would seem to need less."""
    return build_way(**arguments)


def count(step: Callable[[], object], model: DualEncoder) -> tuple[float, int]:
    """Multiplications and additions of a step, and the text tokens that pass its first block."""
    tokens = 0

    def see(module: object, given: tuple[Tensor, ...], output: object) -> None:
        nonlocal tokens
        if torch.is_grad_enabled():  # the first pass of gradient caching encodes the same tokens once more
            tokens += given[0].shape[:-1].numel()

    hook = model.backbone.text_model.encoder.layers[0].mlp.fc1.register_forward_hook(see)
    with FlopCounterMode(display=False) as counter:
        step()
    hook.remove()
    return counter.get_total_flops(), tokens


def losses_alone(options: Options) -> dict[str, Callable[[], None]]:
    """The terms of the objective on the embeddings of a micro-batch, forward and backward."""
    batch = build_batch(options.model, options.micro_batch)
    width, (side, patch) = SIZES[options.model][3], SIZES[options.model][2]
    lengths, pairs = batch.texts["caption"].lengths, options.micro_batch
    generator = torch.Generator().manual_seed(2)

    def unit(*shape: int) -> Tensor:
        vectors = torch.randn(*shape, generator=generator).to(options.device)
        return F.normalize(vectors, dim=-1).requires_grad_()

    image, text = unit(pairs, width), unit(pairs, width)
    patches, words = unit(pairs, (side // patch) ** 2, width), unit(pairs, int(lengths.max()), width)
    place = torch.arange(words.shape[1])[None]
    word_mask = ((place >= 1) & (place < lengths[:, None] - 1)).to(options.device)
    patch_mask = torch.ones(patches.shape[:2], dtype=torch.bool, device=options.device)
    scale = torch.tensor(50.0, device=options.device, requires_grad=True)
    return {
        "InfoNCE": lambda: GLOBAL_LOSSES["infonce"](image, text, scale).backward(),
        "L_HN": lambda: GLOBAL_LOSSES["hn"](image, text, scale).backward(),
        "token": lambda: token_loss(patches, words, patch_mask, word_mask, scale).backward(),
    }


def run(options: Options) -> Report:
    if options.model not in SIZES:
        raise ValueError(f"model must be one of {', '.join(SIZES)}, got {options.model}")
    for way in options.ways:
        if way not in PEERS:
            raise ValueError(f"there is no way {way!r}; there are {', '.join(PEERS)}")
    if options.against is not None:
        return compare_checkouts(options, options.against)
    fixed: dict[str, Any] = {
        "model": options.model,
        "micro_batch": options.micro_batch,
        "accumulate": options.accumulate,
        "device": options.device,
        "pairs_in_memory": options.pairs_in_memory,
    }
    extra = ["bf16"] if fast_bf16(torch.device(options.device)) and HNCLIP in options.ways else []
    wanted = list(dict.fromkeys([*options.ways, *extra]))
    rows: dict[str, dict[str, Any]] = {way: {"way": way} for way in wanted}
    notes = time_steps(options, fixed, rows) if options.turns else []
    for way, row in rows.items() if options.memory or not options.turns else ():
        log.info(f"{way}: memory")
        row["megabytes"] = peak_memory(__file__, "work_of", way=way, **fixed) / 1e6
    columns = {
        "way": "way",
        "seconds": "s",
        "pairs": "pairs/s",
        "peer": "peer",
        "ratio": "× peer",
        "tokens": "tokens",
        "tflop": "Tflop",
        "share": "of GEMM",
        "megabytes": "MB",
    }
    return Report("step", columns, list(rows.values()), machine(options.device), notes)


def time_steps(options: Options, fixed: dict[str, Any], rows: dict[str, dict[str, Any]]) -> list[str]:
    """Add times, ratios and flops to the rows; returns notes."""
    log.info("the rate of plain products of matrices")
    rate = gemm_rate(torch.float32, options.device)
    pairs = options.micro_batch * options.accumulate
    needed = int(build_batch(options.model, pairs).texts["caption"].lengths.sum())
    common = build_model(options.model, options.device)  # for the ways that leave the model as it is
    ways: dict[str, Callable[[], object]] = {}
    compiling = 0.0
    for way, row in rows.items():
        log.info(f"{way}: first step")
        model = build_model(options.model, options.device) if way in ("recompute", "compile") else common
        ways[way] = build_way(way, **fixed, shared=model)
        if way == "compile":
            compiling = time_ways({way: ways[way]}, turns=1, warmup=0, device=options.device)[way].median
            ways[way]()  # the second length of captions compiles once more
        else:
            flops, tokens = count(ways[way], model)
            row |= {"tokens": tokens / needed, "tflop": flops / 1e12}
    log.info(f"{options.turns} turns of {len(ways)} ways")
    clock = time.process_time if options.processor_time else time.perf_counter
    timings = time_ways(ways, turns=options.turns, warmup=0, device=options.device, clock=clock)
    for way, timing in timings.items():
        row, peer = rows[way], PEERS[way]
        row |= {"seconds": timing, "pairs": pairs / timing.median}
        if peer in timings and peer != way:
            row |= {"peer": peer, "ratio": timing.ratios(timings[peer])}
        if "tflop" in row:
            full = gemm_rate(torch.bfloat16, options.device) if way == "bf16" else rate
            row["share"] = 1e12 * row["tflop"] / timing.median / full
    notes = [f"products of matrices: {rate / 1e9:.0f} Gflop/s in fp32"]
    notes += share_of_losses(options, timings[HNCLIP].median) if HNCLIP in timings else []
    if compiling and HNCLIP in timings:
        saved = timings[HNCLIP].median - timings["compile"].median
        more = compiling - timings["compile"].median
        even = f"pays after {math.ceil(more / saved):,} steps" if saved > 0 else "does not pay"
        notes.append(f"compiling takes {more:.0f} s and saves {saved:.2f} s of a step: it {even}")
    return notes


def compare_checkouts(options: Options, other: Path) -> Report:
    """The same way of another checkout and of this one."""
    fixed = {"way": options.against_way, "model": options.model, "device": options.device}
    fixed |= {"micro_batch": options.micro_batch, "accumulate": options.accumulate}
    checkouts = {OTHER: other.resolve(), HNCLIP: Path(__file__).resolve().parents[1]}
    taken = steps_in_turn(checkouts, fixed, max(1, options.turns))
    kind = "processor" if options.processor_time else "seconds"
    timings = {name: Timing(tuple(found[kind] for found in turns[1:])) for name, turns in taken.items()}
    rows = [
        {"way": name, "loss": taken[name][0]["loss"], "seconds": timing, "ratio": timing.ratios(timings[OTHER])}
        for name, timing in timings.items()
    ]
    columns = {"way": "checkout", "loss": "loss of the first step", "seconds": "s", "ratio": f"× {OTHER}"}
    return Report("step", columns, rows, machine(options.device), [f"{OTHER}: {other}; way: {options.against_way}"])


def share_of_losses(options: Options, step: float) -> list[str]:
    """What the terms cost, as shares of a whole step of hnclip."""
    alone = time_ways(losses_alone(options), turns=20, warmup=3, device=options.device)
    per_step = {name: timing.median * options.accumulate for name, timing in alone.items()}
    margin = (per_step["L_HN"] - per_step["InfoNCE"]) / step
    token = per_step["token"] / step
    return [f"of a step: L_HN instead of InfoNCE {margin:.3%}, the token loss {token:.2%} (forward and backward)"]
