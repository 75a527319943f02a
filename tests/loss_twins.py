"""Slow twins of the losses, written as their definitions read, and tools to compare value and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def make_pairs(n: int, d: int, seed: int = 0, scale: float = 10.0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Unit image and text vectors that resemble their partner, and a scale; all leaves with gradient."""
    generator = torch.Generator().manual_seed(seed)
    topic = torch.randn(n, d, generator=generator, dtype=torch.float64)
    image, text = (
        F.normalize(topic + torch.randn(n, d, generator=generator, dtype=torch.float64), dim=1) for _ in range(2)
    )
    return [t.to(dtype).requires_grad_() for t in (image, text, torch.tensor(scale))]


def make_tokens(n: int, p: int, q: int, d: int, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Unit patches and words and a scale with gradient; masks of uneven lengths without outer words."""
    generator = torch.Generator().manual_seed(seed)
    patches, words = (
        F.normalize(torch.randn(n, t, d, generator=generator, dtype=torch.float64), dim=2) for t in (p, q)
    )
    patch_mask = torch.rand(n, p, generator=generator) < 0.8
    patch_mask[:, 1] = True
    lengths = 1 + torch.arange(n) % (q - 2)
    position = torch.arange(q)
    word_mask = (position >= 1) & (position < 1 + lengths[:, None])
    leaves = [t.requires_grad_() for t in (patches, words, torch.tensor(7.0, dtype=torch.float64))]
    return leaves, [patch_mask, word_mask]


def value_and_grads(loss: Callable[..., Tensor], leaves: Sequence[Tensor], autocast: bool = False) -> list[Tensor]:
    """The loss and its gradient with respect to every leaf; zeros where it does not depend on one."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = loss(*leaves)
    grads = torch.autograd.grad(value, leaves, allow_unused=True)
    zeros = (torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads))
    return [value.detach(), *zeros]


def assert_equal(got: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = 1e-12) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def paper_loss(img_n: Tensor, txt_n: Tensor, scale: Tensor, gamma: float = 0.5) -> Tensor:
    """The paper's reference implementation."""
    B = img_n.shape[0]
    sim = img_n @ txt_n.t()
    txt_sim = (txt_n @ txt_n.t()).detach()
    boost = gamma * txt_sim
    boost.fill_diagonal_(0.0)
    logits = scale * (sim + boost)
    targets = torch.arange(B, device=sim.device)
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.t(), targets)) / 2.0


def info_nce(image: Tensor, text: Tensor, scale: Tensor, margin: float = 0.0) -> Tensor:
    """InfoNCE, with a margin that is subtracted from the positive."""
    logits, target = scale * (image @ text.T - margin * torch.eye(len(image)).to(image)), torch.arange(len(image))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def negatives_of(i: int, n: int, ids: Tensor | None) -> list[int]:
    """The pairs that agree with pair i in no id."""
    rows = [[j] for j in range(n)] if ids is None else ids.reshape(n, -1).tolist()
    return [j for j in range(n) if j != i and not any(a == b for a, b in zip(rows[i], rows[j]))]


def over_queries(image: Tensor, text: Tensor, ids: Tensor | None, term: Callable[..., Tensor]) -> Tensor:
    """Mean over queries of term(i, negatives, similarities to all columns), summed over both directions."""
    n = len(image)
    total = image.new_zeros(())
    for i in range(n):
        negatives = negatives_of(i, n, ids)
        for queries, columns in ((image, text), (text, image)):
            total = total + term(i, negatives, [(queries[i] * columns[j]).sum() for j in range(n)])
    return total / n


def twin_hard_negative(
    image: Tensor,
    text: Tensor,
    scale: Tensor,
    gamma: float = 0.5,
    margin: float = 0.0,
    center: float | str = 0.0,
    margin_text: Tensor | None = None,
    ids: Tensor | None = None,
) -> Tensor:
    source = (text if margin_text is None else margin_text).detach()
    n = len(text)
    if center == "mean":
        values = [(source[i] * source[j]).sum() for i in range(n) for j in negatives_of(i, n, ids)]
        center = float(sum(values) / len(values))

    def term(i: int, negatives: list[int], similarity: list[Tensor]) -> Tensor:
        positive = torch.exp(scale * similarity[i])
        total = positive
        for j in negatives:
            total = total + torch.exp(
                scale * (similarity[j] + margin + gamma * ((source[i] * source[j]).sum() - center))
            )
        return -torch.log(positive / total) / 2

    return over_queries(image, text, ids, term)


def twin_smoothed(
    image: Tensor, text: Tensor, scale: Tensor, smoothing: float = 0.1, ids: Tensor | None = None
) -> Tensor:
    def term(i: int, negatives: list[int], similarity: list[Tensor]) -> Tensor:
        columns = [i, *negatives]
        total = sum(torch.exp(scale * similarity[j]) for j in columns)
        loss = image.new_zeros(())
        for j in columns:
            label = smoothing / len(columns) + (1 - smoothing if j == i else 0.0)
            loss = loss - label * torch.log(torch.exp(scale * similarity[j]) / total)
        return loss / 2

    return over_queries(image, text, ids, term)


def twin_score_margin(
    image: Tensor, text: Tensor, scale: Tensor, strength: float = 9.0, ids: Tensor | None = None
) -> Tensor:
    def term(i: int, negatives: list[int], similarity: list[Tensor]) -> Tensor:
        positive = torch.exp(scale * similarity[i])
        raised = [torch.exp(scale * similarity[j] + strength * similarity[j].detach()) for j in negatives]
        return -torch.log(positive / (positive + sum(raised))) / 2

    return over_queries(image, text, ids, term)


def twin_hn_nce(
    image: Tensor, text: Tensor, scale: Tensor, alpha: float = 1.0, beta: float = 0.25, ids: Tensor | None = None
) -> Tensor:
    def term(i: int, negatives: list[int], similarity: list[Tensor]) -> Tensor:
        positive = torch.exp(scale * similarity[i])
        normaliser = sum(torch.exp(beta * scale * similarity[k]) for k in negatives)
        total = alpha * positive
        for j in negatives:
            weight = len(negatives) * torch.exp(beta * scale * similarity[j]) / normaliser
            total = total + weight * torch.exp(scale * similarity[j])
        return -torch.log(positive / total) / 2

    return over_queries(image, text, ids, term)


def twin_hcl(
    image: Tensor, text: Tensor, scale: Tensor, beta: float = 1.0, tau_plus: float = 0.0, ids: Tensor | None = None
) -> Tensor:
    def term(i: int, negatives: list[int], similarity: list[Tensor]) -> Tensor:
        count = len(negatives)
        positive = torch.exp(scale * similarity[i])
        importance = {j: torch.exp(beta * scale * similarity[j]) for j in negatives}
        weighted = sum(importance[j] * torch.exp(scale * similarity[j]) for j in negatives)
        reweighted = weighted / (sum(importance.values()) / count)
        debiased = (reweighted - tau_plus * count * positive) / (1 - tau_plus)
        return -torch.log(positive / (positive + torch.maximum(debiased, count * torch.exp(-scale)))) / 2

    return over_queries(image, text, ids, term)


def twin_max_hinge(
    image: Tensor, text: Tensor, scale: Tensor, margin: float = 0.2, ids: Tensor | None = None
) -> Tensor:
    def term(i: int, negatives: list[int], similarity: list[Tensor]) -> Tensor:
        hardest = max(negatives, key=lambda j: similarity[j].item())
        return torch.clamp(margin + similarity[hardest] - similarity[i], min=0)

    return over_queries(image, text, ids, term)


def twin_sigmoid(
    image: Tensor,
    text: Tensor,
    scale: Tensor,
    bias: float | Tensor | None = None,
    gamma: float = 0.0,
    margin_text: Tensor | None = None,
    ids: Tensor | None = None,
) -> Tensor:
    n, source = len(image), text if margin_text is None else margin_text
    if bias is None:
        values = [(image[i] * text[j]).sum().item() for i in range(n) for j in negatives_of(i, n, ids)]
        bias = -scale.item() * sum(values) / len(values) - math.log(len(values) / n)
    total = image.new_zeros(())
    for i in range(n):
        total = total - torch.log(torch.sigmoid(scale * (image[i] * text[i]).sum() + bias))
        for j in negatives_of(i, n, ids):
            boost = gamma * (source[i] * source[j]).sum().detach()
            total = total - torch.log(torch.sigmoid(-(scale * ((image[i] * text[j]).sum() + boost) + bias)))
    return total / n
