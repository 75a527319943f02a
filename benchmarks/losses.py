"""Time and memory of L_HN and InfoNCE, forward and backward: hnclip's tiles beside the losses that others use.

L_HN: `paper` is the paper's eleven lines, `eager` is `hard_negative_loss`, `tiled` is `tiled_hard_negative_loss`.
InfoNCE: `plain` is the same eleven lines without the margin, `open_clip` its `ClipLoss` from its file alone,
`sentence-transformers` the second step of its `CachedMultipleNegativesRankingLoss` (`calculate_loss` with backward, on
vectors that are given, in both directions, 32 rows at a time, its default), `tiled` is `clip_loss`. Encoders and the
other two steps of a cached loss are not in the times. The scale has a gradient, but not in sentence-transformers, which
takes a number. Ratios are against the first way of the same loss.

MB is the rise of the peak resident size in a process of its own, both gradients included; inputs are there before.
Needed operations are 6·B²·D for either loss, one product for the logits (Ḡ shares it) and one for each gradient; the
share is the time they take at the machine's GEMM rate in the time of the way. Tiles do 8·B²·D, and so does `eager`.

Public losses that hold no B × B matrix are absent: inf_cl 1.2 (Inf-CLIP) needs Triton and refuses tensors that are not
on CUDA; siglip-kernel 0.1 needs Triton and is a sigmoid loss. liger-kernel 0.8 and cut-cross-entropy 25.1 have no
contrastive loss, and DisCo-CLIP has no package.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hnclip.losses import clip_loss, hard_negative_loss, tiled_hard_negative_loss
from hnclip.measure import Report, gemm_rate, load_file, machine, peak_memory, time_ways

log = logging.getLogger("hnclip.bench")

Loss = Literal["L_HN", "InfoNCE"]
Step = Callable[[Sequence[Tensor]], object]
SCALE, GAMMA = 50.0, 0.5
COLUMNS = {
    "pairs": "pairs",
    "width": "width",
    "loss": "loss",
    "way": "way",
    "seconds": "seconds",
    "time_ratio": "× peer",
    "megabytes": "MB",
    "memory_ratio": "× peer",
    "share": "share of GEMM rate",
}


@dataclass(frozen=True)
class Options:
    """Sizes and repetitions."""

    pairs: tuple[int, ...] = (512, 2048, 4096)
    """Batches. The eager ways hold 7 matrices of B × B: 0.5 GB at 4,096, 8 GB at 16,384."""
    width: int = 768
    losses: tuple[Loss, ...] = get_args(Loss)
    turns: int = 5
    """Repetitions, at least."""
    seconds: float = 10.0
    """How long the turns of one batch go on, at least."""
    device: str = "cpu"


def paper(image: Tensor, text: Tensor, scale: Tensor, gamma: float = GAMMA) -> Tensor:
    count = image.shape[0]
    similarity = image @ text.t()  # [B, B]
    text_similarity = (text @ text.t()).detach()  # [B, B]
    boost = gamma * text_similarity
    boost.fill_diagonal_(0.0)
    logits = scale * (similarity + boost)
    target = torch.arange(count, device=logits.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


def plain(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    logits = scale * (image @ text.t())  # [B, B]
    target = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


def open_clip() -> Callable[..., Tensor]:
    """Its loss file alone: the package needs torchvision, its losses need torch only."""
    package = importlib.util.find_spec("open_clip")
    if package is None or package.origin is None:
        raise ValueError("open_clip is not installed; `pip install --no-deps open_clip_torch` is enough")
    return load_file(Path(package.origin).with_name("loss.py")).ClipLoss()


def sentence_transformers() -> Step:
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
    from sentence_transformers.util import dot_score

    loss = CachedMultipleNegativesRankingLoss(
        nn.Sequential(nn.Identity()),
        scale=SCALE,
        similarity_fct=dot_score,
        directions=("query_to_doc", "doc_to_query"),
        partition_mode="per_direction",
    )

    def step(leaves: Sequence[Tensor]) -> Tensor:
        image, text, _ = (leaf.detach().requires_grad_() for leaf in leaves)
        return loss.calculate_loss([[image], [text]], with_backward=True)

    return step


def gradients(loss: Callable[..., Tensor]) -> Step:
    """Forward and backward of a loss of (image, text, scale)."""
    return lambda leaves: torch.autograd.grad(loss(*leaves), leaves)


WAYS: dict[Loss, dict[str, Callable[[], Step]]] = {
    "L_HN": {
        "paper": lambda: gradients(paper),
        "eager": lambda: gradients(lambda *x: hard_negative_loss(*x, GAMMA)),
        "tiled": lambda: gradients(lambda *x: tiled_hard_negative_loss(*x, GAMMA)),
    },
    "InfoNCE": {
        "plain": lambda: gradients(plain),
        "open_clip": lambda: gradients(open_clip()),
        "sentence-transformers": sentence_transformers,
        "tiled": lambda: gradients(clip_loss),
    },
}


def make_leaves(pairs: int, width: int, device: str) -> list[Tensor]:
    """Unit vectors of pictures and of captions that resemble them, and a scale; made in place, so that nothing that is
    freed here serves the loss later."""
    generator = torch.Generator().manual_seed(0)
    image, text = (torch.randn(pairs, width, generator=generator) for _ in range(2))
    image /= image.norm(dim=1, keepdim=True)
    text.mul_(3 / width**0.5).add_(image)
    text /= text.norm(dim=1, keepdim=True)
    return [leaf.to(device).requires_grad_() for leaf in (image, text, torch.tensor(SCALE))]


def work(loss: Loss, way: str, pairs: int, width: int, device: str) -> Callable[[], object]:
    step = WAYS[loss][way]()
    step(make_leaves(64, width, device))
    leaves = make_leaves(pairs, width, device)
    return lambda: step(leaves)


def run(options: Options) -> Report:
    rate = gemm_rate(torch.float32, options.device)
    rows: list[dict[str, Any]] = []
    for pairs in options.pairs:
        for loss in options.losses:
            log.info(f"{loss} of {pairs:,} pairs: time")
            leaves = make_leaves(pairs, options.width, options.device)
            ways = {way: partial(make(), leaves) for way, make in WAYS[loss].items()}
            timings = time_ways(ways, turns=options.turns, seconds=options.seconds, device=options.device)
            log.info(f"{loss} of {pairs:,} pairs: memory")
            case = {"loss": loss, "pairs": pairs, "width": options.width}
            memory = {way: peak_memory(__file__, "work", way=way, device=options.device, **case) for way in ways}
            first = next(iter(ways))
            rows += [
                {
                    **case,
                    "way": way,
                    "seconds": timing,
                    "time_ratio": timing.ratios(timings[first]),
                    "megabytes": memory[way] / 1e6,
                    "memory_ratio": memory[way] / memory[first],
                    "share": 6 * pairs**2 * options.width / timing.median / rate,
                }
                for way, timing in timings.items()
            ]
    notes = [f"GEMM rate {rate / 1e9:,.0f} Gflop/s in float32; seconds are medians ± half the quartile range"]
    return Report("losses", COLUMNS, rows, machine(options.device), notes)
