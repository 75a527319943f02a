"""Embeddings of many views with gradients, some pairs without some of them, shards of them, and batches of records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hnclip.config import ObjectiveConfig
from hnclip.data.batches import Batch, prepare
from hnclip.data.records import Record
from hnclip.models.dual_encoder import DualEncoder
from hnclip.objectives.build import build_objective, build_readouts
from hnclip.objectives.embeddings import Embeddings, ViewEmbeddings
from hnclip.objectives.objective import Objective

N, D = 7, 6
IDS = torch.tensor([[0, 0], [0, 1], [2, 1], [3, 3], [4, 4], [5, 5], [6, 6]])


class Material:
    """Unit vectors of views as leaves, by name, and embeddings made of them."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.topic = torch.randn(N, D, generator=self.generator, dtype=torch.float64)
        self.dtype = dtype
        self.leaves: dict[str, Tensor] = {"scale": torch.tensor(6.0, dtype=dtype).requires_grad_()}

    def vectors(self, name: str, count: int | None = None) -> Tensor:
        """[N, D], or [N, count, D]; those of one pair resemble each other."""
        topic = self.topic if count is None else self.topic[:, None].expand(N, count, D)
        noise = torch.randn(topic.shape, generator=self.generator, dtype=torch.float64)
        self.leaves[name] = F.normalize(topic + noise, dim=-1).to(self.dtype).requires_grad_()
        return self.leaves[name]


def bools(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


def shards_of(embeddings: Embeddings, sizes: Sequence[int]) -> list[Embeddings]:
    """The same pairs as each process sees them."""
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [replace(embeddings, offset=start, rows=rows) for start, rows in zip(starts, sizes)]


def without(embeddings: Embeddings, view: str, present: Tensor | None) -> Embeddings:
    """The same with another account of who has this view."""

    def change(side: dict[str, ViewEmbeddings]) -> dict[str, ViewEmbeddings]:
        return {name: replace(found, present=present) if name == view else found for name, found in side.items()}

    return replace(embeddings, images=change(dict(embeddings.images)), texts=change(dict(embeddings.texts)))


def gradients(value: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Zeros where the value does not depend on a leaf."""
    if not value.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(value, leaves, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found)]


def twin_sym_ce(image: Sequence[Tensor], text: Sequence[Tensor], scale: Tensor, ids: Tensor) -> Tensor:
    """½[CE(rows) + CE(columns)] of s·V·Tᵀ, entry by entry; pairs that agree in an id are left out."""
    total = scale * 0
    n = len(image)
    for i in range(n):
        kept = [j for j in range(n) if j == i or not bool((ids[i] == ids[j]).any())]
        for queries, columns in ((image, text), (text, image)):
            logits = [scale * (queries[i] * columns[j]).sum() for j in kept]
            total = total - torch.log(logits[kept.index(i)].exp() / sum(logit.exp() for logit in logits))
    return total / (2 * n)


def make_batch(model: DualEncoder, config: ObjectiveConfig, records: Sequence[Record]) -> tuple[Objective, Batch]:
    """The objective of a configuration and a batch of records for it, its readouts put into the model."""
    made = build_objective(config)
    model.readouts.clear()
    model.readouts.update(build_readouts(config, model))
    data = prepare(
        records,
        model.text_transform,
        model.image_transform,
        image_views=made.image_views,
        text_views=made.text_views,
        parts=made.parts,
        grid=model.family.grid(model.backbone, model.image_size),
    )
    return made, data.batch(range(len(records)))
