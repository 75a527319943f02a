"""Time and memory of the token loss, forward and backward: hnclip's tiles beside the ways that people write it.

`checkpoint` takes a few images at a time, multiplies their patches with all words, masks pads and takes both maxima,
under `torch.utils.checkpoint`, so that the backward pass does it again: four products in all. `kept` takes
chunks too, of which autograd keeps the arg-max indices, and dense products backward. `eager` is
`checkpoint` without chunks. Vectors are random. Ratios are against `checkpoint`.

MB is the rise of the peak resident size in a process of its own, less the two gradients that are the result; inputs are
there before. The share is the time of one product of the words and patches that count, at the machine's GEMM rate,
in the time of the way: 1 would be a loss that costs nothing but its similarities.

The last rows show what pads cost: the same words in a tensor twice as wide, as a ratio to the tight tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hnclip.losses import token_loss
from hnclip.measure import Report, Timing, gemm_rate, machine, peak_memory, time_ways

log = logging.getLogger("hnclip.bench")

SCALE = 20.0
COLUMNS = {
    "pairs": "pairs",
    "patches": "patches",
    "words": "words",
    "width": "width",
    "way": "way",
    "seconds": "seconds",
    "time_ratio": "× peer",
    "megabytes": "MB",
    "memory_ratio": "× peer",
    "share": "share of GEMM rate",
}


@dataclass(frozen=True)
class Case:
    """N pairs of so many patches and words; captions have between `shortest` and `words` words."""

    pairs: int
    patches: int
    words: int
    width: int
    shortest: int
    eager: bool
    """Whether all similarities at once fit into the memory of a small machine."""

    def flops(self) -> int:
        """Multiplications and additions of one product of all patches and words that count."""
        return 2 * self.pairs * self.patches * int(self.mask().sum()) * self.width

    def mask(self) -> Tensor:
        lengths = torch.linspace(self.shortest, self.words, self.pairs).long()  # [N]
        return torch.arange(self.words) < lengths[:, None]  # [N, Q]


CASES = {
    "micro-batch": Case(16, 196, 248, 512, 60, True),  # ViT-B/16, captions as long as DOCCI's
    "two": Case(32, 196, 248, 512, 60, True),
    "large": Case(128, 256, 248, 768, 248, False),  # ViT-L/14, and not one pad
}


@dataclass(frozen=True)
class Options:
    """The token loss at several sizes."""

    cases: tuple[str, ...] = tuple(CASES)
    """Of micro-batch (16 pairs), two (32 pairs) and large (128 pairs; minutes per turn)."""
    device: str = "cpu"
    turns: int = 7
    large_turns: int = 2


def inputs(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unit patches and words with gradient, and their masks; made in place, since freed memory would be used again."""
    generator = torch.Generator().manual_seed(0)
    patches = torch.randn(case.pairs, case.patches, case.width, generator=generator)
    words = torch.randn(case.pairs, case.words, case.width, generator=generator)
    for tokens in (patches, words):
        tokens /= torch.linalg.vector_norm(tokens, dim=2, keepdim=True)
    patch_mask = torch.ones(case.pairs, case.patches, dtype=torch.bool)
    moved = [t.to(device) for t in (patches, words, patch_mask, case.mask())]
    return moved[0].requires_grad_(), moved[1].requires_grad_(), moved[2], moved[3]


def ours(patches: Tensor, words: Tensor, patch_mask: Tensor, word_mask: Tensor) -> Tensor:
    return token_loss(patches, words, patch_mask, word_mask, SCALE)


def cross_entropy(image_to_text: Tensor, text_to_image: Tensor) -> Tensor:
    target = torch.arange(len(image_to_text), device=image_to_text.device)
    return (F.cross_entropy(SCALE * image_to_text, target) + F.cross_entropy(SCALE * text_to_image, target)) / 2


def scores(patches: Tensor, words: Tensor, word_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of C images and N captions, [C, N] twice; all patches count."""
    similarity = torch.einsum("ipd,jqd->ijpq", patches, words)  # [C, N, P, Q]
    best_word = similarity.masked_fill(~word_mask[:, None, :], -torch.inf).max(3).values  # [C, N, P]
    best_patch = similarity.max(2).values  # [C, N, Q]
    weights = word_mask / word_mask.sum(1, keepdim=True)  # [N, Q]
    return best_word.mean(2), (best_patch * weights).sum(2)


def eager(patches: Tensor, words: Tensor, _: Tensor, word_mask: Tensor) -> Tensor:
    image_to_text, text_to_image = scores(patches, words, word_mask)
    return cross_entropy(image_to_text, text_to_image.T)


def checkpointed(patches: Tensor, words: Tensor, _: Tensor, word_mask: Tensor) -> Tensor:
    # 2**25 similarities, 128 MiB: four images at a time of the large case.
    chunk = max(1, 2**25 // (patches.shape[1] * words.shape[0] * words.shape[1]))
    found = [checkpoint(scores, part, words, word_mask, use_reentrant=False) for part in patches.split(chunk)]
    return cross_entropy(torch.cat([i for i, _ in found]), torch.cat([t for _, t in found]).T)


def kept(patches: Tensor, words: Tensor, patch_mask: Tensor, word_mask: Tensor) -> Tensor:
    """Columns that nobody uses are dropped, gaps are copies of the first token."""
    image, image_weights = fill_gaps(patches, patch_mask)
    text, text_weights = fill_gaps(words, word_mask)
    image_rows, text_columns = [], []
    for similarity, weights in chunks(image, image_weights, text):  # [C, P, N, Q], [C, P]
        image_rows.append((similarity.max(dim=3).values * weights[:, :, None]).sum(1))  # [C, N]
        text_columns.append((similarity.max(dim=1).values * text_weights).sum(2))  # [C, N]
    return cross_entropy(torch.cat(image_rows), torch.cat(text_columns).T)


def fill_gaps(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    used = mask.any(0)  # [T]
    if not bool(used.all()):
        tokens, mask = tokens[:, used], mask[:, used]  # [N, T', D], [N, T']
    first = mask.int().argmax(1)  # [N]
    filler = tokens[torch.arange(len(tokens), device=tokens.device), first]  # [N, D]
    return torch.where(mask[:, :, None], tokens, filler[:, None, :]), mask / mask.sum(1, keepdim=True)


def chunks(image: Tensor, weights: Tensor, text: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    (_, p, _), (n, q, _) = image.shape, text.shape
    size = max(1, 2**25 // (p * n * q))
    flat = text.flatten(0, 1)  # [N·Q, D]
    for vectors, part in zip(image.split(size), weights.split(size)):
        yield (vectors.flatten(0, 1) @ flat.T).view(len(vectors), p, n, q), part


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "checkpoint": checkpointed,
    "kept": kept,
    "eager": eager,
    "hnclip": ours,
}
PEER = "checkpoint"


def step(way: str, given: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Forward and backward; the gradients."""
    return torch.autograd.grad(WAYS[way](*given), given[:2])


def work(way: str, case: dict[str, Any], device: str) -> Callable[[], object]:
    """What is measured for its memory."""
    step(way, inputs(Case(4, 49, 60, 64, 30, True), device))  # what the first call of any size allocates
    return partial(step, way, inputs(Case(**case), device))


def extra_megabytes(way: str, case: Case, device: str) -> float:
    gradients = 4 * case.pairs * (case.patches + case.words) * case.width
    return (peak_memory(__file__, "work", way=way, case=vars(case), device=device) - gradients) / 1e6


def difference(case: Case, device: str) -> float:
    """The largest difference of a gradient to the peer's, as a share of the largest gradient."""
    given = inputs(case, device)
    expected = step(PEER, given)
    return max(
        float((a - b).abs().max() / b.abs().max())
        for way in WAYS
        for a, b in zip(step(way, given), expected, strict=True)
    )


def measure(case: Case, options: Options, rate: float) -> list[dict[str, Any]]:
    """The rows of one size."""
    names = [name for name in WAYS if case.eager or name != "eager"]
    given = inputs(case, options.device)
    turns, warmup = (options.turns, 1) if case.eager else (options.large_turns, 0)
    ways = {name: partial(step, name, given) for name in names}
    timings = time_ways(ways, turns=turns, warmup=warmup, device=options.device)
    log.info(f"memory of {case.pairs} pairs")
    memory = {name: extra_megabytes(name, case, options.device) for name in names}
    return [
        {
            **vars(case),
            "way": name,
            "seconds": timings[name],
            "time_ratio": timings[name].ratios(timings[PEER]),
            "megabytes": memory[name],
            "memory_ratio": memory[name] / memory[PEER],
            "share": case.flops() / rate / timings[name].median,
        }
        for name in names
    ]


def cost_of_pads(case: Case, options: Options) -> list[dict[str, Any]]:
    """Two rows: words in a tensor that they fill, and in one twice as wide."""
    patches, words, patch_mask, word_mask = inputs(case, options.device)
    half = case.words // 2
    tight = (patches, words[:, :half].detach().clone().requires_grad_(), patch_mask, word_mask[:, :half])
    wide = (patches, words, patch_mask, word_mask & (torch.arange(case.words, device=words.device) < half))
    names = {"hnclip, tight": tight, "hnclip, half pads": wide}
    ways = {name: partial(step, "hnclip", given) for name, given in names.items()}
    timings: dict[str, Timing] = time_ways(ways, turns=options.turns, device=options.device)
    peer = timings["hnclip, tight"]
    return [
        {**vars(case), "way": name, "seconds": timing, "time_ratio": timing.ratios(peer)}
        for name, timing in timings.items()
    ]


def run(options: Options) -> Report:
    unknown = [name for name in options.cases if name not in CASES]
    if unknown:
        raise ValueError(f"there is no case {unknown[0]!r}; there are {', '.join(CASES)}")
    rate = gemm_rate(device=options.device)
    rows = []
    for name in options.cases:
        log.info(f"time of {CASES[name].pairs} pairs")
        rows.extend(measure(CASES[name], options, rate))
    log.info("pads")
    rows.extend(cost_of_pads(CASES["micro-batch"], options))
    notes = [
        f"GEMM rate {rate / 1e9:.0f} Gflop/s.",
        f"Gradients of all ways agree to {difference(CASES['micro-batch'], options.device):.1g} of the largest.",
    ]
    return Report("token_loss", COLUMNS, rows, machine(options.device), notes)
