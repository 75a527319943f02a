"""Galleries of vectors without pictures or models, as the evaluation hands them on."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from hnclip.core import Record
from hnclip.evaluate import retrieval_ranks, summarize
from hnclip.evaluate.retrieval import Evaluation


def gallery_of(owner: Tensor, groups: list[str | None] | None = None) -> SimpleNamespace:
    """Records r0, r1, … with as many captions as `owner` gives them."""
    counts = owner.bincount().tolist()
    records = [
        Record(f"r{i}", None, ("a caption",) * n, "test", group=groups[i] if groups else None)  # type: ignore[arg-type]
        for i, n in enumerate(counts)
    ]
    return SimpleNamespace(records=records, owner=owner, captions=[[0]] * len(owner), truncated=2)


def evaluation_of(image: Tensor, text: Tensor, owner: Tensor, *, intervals: bool = False) -> Evaluation:
    ranks = retrieval_ranks(image, text, owner)
    return Evaluation(image, text, ranks, summarize(ranks, intervals=intervals))


def model_on(owner: Tensor, noise: float, seed: int, *, width: int = 16) -> Evaluation:
    """A model of the same pictures whose captions lie near their own; the less noise, the better it is."""
    image = F.normalize(torch.randn(int(owner.max()) + 1, width, generator=torch.Generator().manual_seed(0)), dim=1)
    error = torch.randn(len(owner), width, generator=torch.Generator().manual_seed(seed))
    text = F.normalize(image[owner] + noise * error / width**0.5, dim=1)
    return evaluation_of(image, text, owner)


@st.composite
def tied_vectors(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Images, captions and owners from a few integer vectors: scores are equal or clearly apart, ties frequent."""
    vectors = torch.tensor(draw(st.lists(st.tuples(*[st.integers(-2, 2)] * 2).filter(any), min_size=1, max_size=5)))
    images = draw(st.integers(1, 9))
    texts = images + draw(st.integers(0, 9))
    pick = st.integers(0, len(vectors) - 1)
    image = vectors[draw(st.lists(pick, min_size=images, max_size=images))].float()  # [I, 2]
    text = vectors[draw(st.lists(pick, min_size=texts, max_size=texts))].float()  # [T, 2]
    extra = draw(st.lists(st.integers(0, images - 1), min_size=texts - images, max_size=texts - images))
    return image, text, torch.tensor(draw(st.permutations([*range(images), *extra])))
