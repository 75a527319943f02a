"""Galleries of vectors without images or models, as the evaluation hands them on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from hnclip.core import Record
from hnclip.evaluation.retrieval import EvaluationResult, rank_gallery


def gallery_of(owner: Tensor, groups: list[str | None] | None = None) -> Any:
    """Records r0, r1, … with as many captions as `owner` gives them."""
    counts = owner.bincount().tolist()
    records = [
        Record(f"r{i}", None, ("a caption",) * n, "test", group=groups[i] if groups else None)  # type: ignore[arg-type]
        for i, n in enumerate(counts)
    ]
    return SimpleNamespace(records=records, owner=owner, texts={"caption": SimpleNamespace(truncated=2)})


def model_on(gallery: Any, noise: float, seed: int) -> EvaluationResult:
    """The result of a model whose captions lie near their images; the less noise, the better."""
    images = int(gallery.owner.max()) + 1
    image = F.normalize(torch.randn(images, 16, generator=torch.Generator().manual_seed(0)), dim=1)
    error = torch.randn(len(gallery.owner), 16, generator=torch.Generator().manual_seed(seed))
    return rank_gallery(image, F.normalize(image[gallery.owner] + noise * error / 4, dim=1), gallery)


@st.composite
def tied_vectors(draw: st.DrawFn, largest: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    """Images, captions and owners from a few integer vectors: scores are equal or clearly apart, ties frequent."""
    width = draw(st.integers(1, 3))
    entry = st.lists(st.integers(-2, 2), min_size=width, max_size=width).filter(any)
    vectors = torch.tensor(draw(st.lists(entry, min_size=1, max_size=5)), dtype=torch.float32)  # [V, D]
    images = draw(st.integers(1, largest))
    texts = images + draw(st.integers(0, largest))
    pick = st.integers(0, len(vectors) - 1)
    image = vectors[draw(st.lists(pick, min_size=images, max_size=images))]  # [I, D]
    text = vectors[draw(st.lists(pick, min_size=texts, max_size=texts))]  # [T, D]
    extra = draw(st.lists(st.integers(0, images - 1), min_size=texts - images, max_size=texts - images))
    return image, text, torch.tensor(draw(st.permutations([*range(images), *extra])))
