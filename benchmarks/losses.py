"""Time and memory of L_HN, InfoNCE and the token term, forward and backward, compared with the losses that others use.

L_HN: `paper` is the paper's eleven lines, `eager` is `hard_negative_loss`, `tiled` is `tiled_hard_negative_loss`.
InfoNCE: `plain` is the same eleven lines without the margin, `open_clip` its `ClipLoss`, `sentence-transformers` the
second step of its `CachedMultipleNegativesRankingLoss` (`calculate_loss` with backward on given vectors, 32 rows at a
time), `tiled` is `clip_loss`. Encoders are not in the times. The scale has a gradient, except in sentence-transformers,
which takes a number. token: `checkpoint` multiplies the patches of a few images with all words, masks pads and takes
both maxima, under `torch.utils.checkpoint`; `eager` computes all at once; `tiled` is `token_loss`; `half pads` is the
same words in a tensor twice as wide. Ratios are against the first way of each loss.

MB is the rise of the peak resident size in a fresh process, inputs excluded; gradients are included, except those of
tokens. `of GEMM` is the time of the needed operations at the GEMM rate over the time of the way. Needed are 6·B²·D for
L_HN and InfoNCE, and for the token term one product of the patches and words that are no pads.

Public losses without a B × B matrix are absent: inf_cl 1.2 and siglip-kernel 0.1 need Triton on CUDA; liger-kernel 0.8
and cut-cross-entropy 25.1 have no contrastive loss, and DisCo-CLIP has no package.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from measure import Report, gemm_rate, log, machine, main, peak_memory, time_ways
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hnclip.losses import clip_loss, hard_negative_loss, tiled_hard_negative_loss, token_loss

Loss = Literal["L_HN", "InfoNCE", "token"]
Step = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Forward and backward on the inputs; returns the gradients of images and texts first."""
SCALE, GAMMA, TOKEN_SCALE = 50.0, 0.5, 20.0
SHORTEST = 60  # words of the shortest caption; the longest has WORDS, as DOCCI's in CLIP's tokens
WORDS, PATCHES = 248, 196
CHUNK = 2**25  # similarities of tokens at once, 128 MiB


@dataclass(frozen=True)
class Options:
    """Sizes and repetitions."""

    pairs: tuple[int, ...] = (512, 2048, 4096)
    """Batches. L_HN and InfoNCE: the eager ways hold 7 matrices of B × B, 8 GB at 16,384. token: 16 or 32."""
    width: int = 768
    losses: tuple[Loss, ...] = ("L_HN", "InfoNCE")
    """Of L_HN, InfoNCE and token."""
    turns: int = 5
    """Repetitions, at least."""
    seconds: float = 10.0
    """How long the turns of one batch go on, at least."""
    memory: bool = True
    """Also measure memory, in a process for each way."""
    device: str = "cpu"


def cross_entropy(logits: Tensor, other: Tensor) -> Tensor:
    target = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(other, target)) / 2


def paper(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    similarity = image @ text.t()  # [B, B]
    boost = GAMMA * (text @ text.t()).detach()  # [B, B]
    boost.fill_diagonal_(0.0)
    logits = scale * (similarity + boost)
    return cross_entropy(logits, logits.t())


def plain(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    logits = scale * (image @ text.t())  # [B, B]
    return cross_entropy(logits, logits.t())


def open_clip() -> Callable[..., Tensor]:
    """Its loss file alone: the package needs torchvision, its losses need torch only."""
    package = importlib.util.find_spec("open_clip")
    if package is None or package.origin is None:
        raise ValueError("open_clip is not installed; `pip install --no-deps open_clip_torch` is enough")
    spec = importlib.util.spec_from_file_location("open_clip_loss", Path(package.origin).with_name("loss.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ClipLoss()


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

    def step(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        image, text, _ = (leaf.detach().requires_grad_() for leaf in inputs)
        loss.calculate_loss([[image], [text]], with_backward=True)
        return [leaf.grad for leaf in (image, text) if leaf.grad is not None]

    return step


def scores(patches: Tensor, words: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of C images and N captions, [C, N] twice; all patches count."""
    similarity = torch.einsum("ipd,jqd->ijpq", patches, words)  # [C, N, P, Q]
    best_word = similarity.masked_fill(~mask[:, None, :], -torch.inf).amax(3)  # [C, N, P]
    best_patch = similarity.amax(2)  # [C, N, Q]
    return best_word.mean(2), (best_patch * (mask / mask.sum(1, keepdim=True))).sum(2)


def token_way(score: Callable[..., tuple[Tensor, Tensor]], chunked: bool = True) -> Step:
    def loss(patches: Tensor, words: Tensor, mask: Tensor) -> Tensor:
        chunk = max(1, CHUNK // (patches.shape[1] * mask.numel())) if chunked else len(patches)
        found = [score(part, words, mask) for part in patches.split(chunk)]
        image_to_text, text_to_image = (TOKEN_SCALE * torch.cat(part) for part in zip(*found))  # [N, N]
        return cross_entropy(image_to_text, text_to_image.T)

    return gradients(loss)


def tiled_tokens(patches: Tensor, words: Tensor, mask: Tensor) -> Tensor:
    every = torch.ones(patches.shape[:2], dtype=torch.bool, device=patches.device)
    return token_loss(patches, words, every, mask, TOKEN_SCALE)


def half_pads(patches: Tensor, words: Tensor, mask: Tensor) -> Tensor:
    count = words.shape[1]
    return tiled_tokens(patches, F.pad(words, (0, 0, 0, count)), F.pad(mask, (0, count)))


def gradients(loss: Callable[..., Tensor]) -> Step:
    return lambda inputs: torch.autograd.grad(loss(*inputs), [leaf for leaf in inputs if leaf.requires_grad])


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
    "token": {
        "checkpoint": lambda: token_way(partial(checkpoint, scores, use_reentrant=False)),
        "eager": lambda: token_way(scores, chunked=False),
        "tiled": lambda: gradients(tiled_tokens),
        "half pads": lambda: gradients(half_pads),
    },
}


def make_inputs(loss: Loss, pairs: int, width: int, device: str) -> list[Tensor]:
    """Unit vectors of images and texts, with a scale or the mask of the words. Made in place: memory that is freed here
    would be used again by the loss and not be counted as its own."""
    generator = torch.Generator().manual_seed(0)
    if loss == "token":
        image, text = (torch.randn(pairs, tokens, width, generator=generator) for tokens in (PATCHES, WORDS))
        lengths = torch.linspace(SHORTEST, WORDS, pairs).long()  # [N]
        rest = torch.arange(WORDS) < lengths[:, None]  # [N, Q]
    else:
        image, text = (torch.randn(pairs, width, generator=generator) for _ in range(2))
        image /= image.norm(dim=1, keepdim=True)
        text.mul_(3 / width**0.5).add_(image)
        rest = torch.tensor(SCALE)
    for vectors in (image, text):
        vectors /= torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    inputs = [leaf.to(device) for leaf in (image, text, rest)]
    return [leaf.requires_grad_() if leaf.is_floating_point() else leaf for leaf in inputs]


def work(loss: Loss, way: str, pairs: int, width: int, device: str) -> Callable[[], object]:
    """What is measured for its memory."""
    step = WAYS[loss][way]()
    step(make_inputs(loss, 2 if loss == "token" else 64, width, device))
    return partial(step, make_inputs(loss, pairs, width, device))


def run(options: Options) -> Report:
    rate = gemm_rate(device=options.device)
    rows: list[dict[str, Any]] = []
    for pairs in options.pairs:
        for loss in options.losses:
            log.info(f"{loss} of {pairs:,} pairs")
            inputs = make_inputs(loss, pairs, options.width, options.device)
            ways = {way: partial(make(), inputs) for way, make in WAYS[loss].items()}
            timings = time_ways(ways, turns=options.turns, seconds=options.seconds, device=options.device)
            case = {"loss": loss, "pairs": pairs, "width": options.width}
            memory, excluded, needed = {}, 0, 6 * pairs**2 * options.width
            if loss == "token":
                excluded = sum(tokens.nbytes for tokens in inputs[:2])
                needed = 2 * pairs * PATCHES * int(inputs[2].sum()) * options.width
            for way in ways if options.memory else ():
                memory[way] = peak_memory(__file__, "work", way=way, device=options.device, **case) - excluded
            first = next(iter(ways))
            for way, timing in timings.items():
                row = {**case, "way": way, "s": timing, "× peer": timing.ratios(timings[first])}
                if memory:
                    row |= {"MB": memory[way] / 1e6, "MB × peer": memory[way] / memory[first]}
                rows.append(row | {"of GEMM": needed / timing.median / rate})
    notes = [f"GEMM rate {rate / 1e9:,.0f} Gflop/s in float32"]
    return Report("losses", rows, machine(options.device), notes)


if __name__ == "__main__":
    main(Options, run)
