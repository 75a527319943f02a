"""Base class of the objectives: the views that training must provide, and scalar terms of their embeddings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hnclip.core import Embeddings, ViewEmbeddings
from hnclip.losses.hard_negative import at_least_float32
from hnclip.models.readout import Readout, TowerOutput

if TYPE_CHECKING:
    from hnclip.models.dual_encoder import DualEncoder

Term = Callable[[Embeddings], Tensor]


@dataclass(frozen=True)
class TrainProgress:
    """A time in a run: after `step` optimiser steps, with `epoch_steps` in each of `epochs` epochs."""

    step: int
    epoch_steps: int
    epochs: int

    @property
    def epoch(self) -> int:
        """Number of finished epochs."""
        return self.step // self.epoch_steps

    @property
    def within(self) -> float:
        """Share of the current epoch that is done in the middle of the next step: 0.5 in an epoch of one step."""
        return (self.step % self.epoch_steps + 0.5) / self.epoch_steps


@dataclass(frozen=True)
class GlobalTerm:
    """The exchangeable term: a global loss on whole images and captions, and the source of its margins.

    Args:
        loss: one of `GLOBAL_LOSSES`, with its own parameters bound by `functools.partial`.
        margins: whether the loss computes margins from captions (L_HN, and the sigmoid loss with γ).
        frozen: compute them from the batch's `margin_text` instead of the live captions.
    """

    loss: Callable[..., Tensor]
    margins: bool = False
    frozen: bool = False

    def __call__(self, embeddings: Embeddings, text: Tensor | None = None) -> Tensor:
        """The term on the views `full` and `caption`.

        Args:
            text: vectors [N, D] to compare images with instead of the captions' own. Margins stay those of the whole
                captions.
        """
        image, captions = embeddings.images["full"].vectors, embeddings.texts["caption"].vectors  # [N, D] each
        margin_text = None
        if self.frozen:
            margin_text = embeddings.margin_text
            if margin_text is None:
                raise ValueError("a frozen margin needs batches with margin_text, this one has none")
        elif self.margins and text is not None:
            margin_text = captions
        text, ids = captions if text is None else text, embeddings.ids
        options: dict[str, Any] = {}
        if (memory := embeddings.memory) is not None:  # more columns, but no more queries: [N + M, ...]
            options["rows"] = len(image)
            image, text = torch.cat([image, memory.image]), torch.cat([text, memory.text])
            ids = None if ids is None else torch.cat([ids, memory.ids])
            if margin_text is not None and memory.margin_text is not None:
                margin_text = torch.cat([margin_text, memory.margin_text])
        if margin_text is not None:
            options["margin_text"] = margin_text
        return self.loss(image, text, embeddings.scale, ids=ids, **options)


def duplicate_ids(embeddings: Embeddings, view: ViewEmbeddings | None = None) -> Tensor | None:
    """Ids [N, K] by which a loss masks duplicates; equal texts of `view` are duplicates too."""
    ids = embeddings.ids
    if view is not None and view.ids is not None and ids is not None:
        return torch.cat([ids, view.ids[:, None]], dim=1)  # [N, K + 1]
    return ids


def tokens_of(view: ViewEmbeddings) -> tuple[Tensor, Tensor]:
    """Token vectors [N, T, D] of a view, or the output of its readout, and their mask [N, T]."""
    if view.tokens is None or view.mask is None:
        raise ValueError("this objective needs tokens: encode the batch with tokens=True and the objective's readouts")
    return view.tokens, view.mask


@dataclass(frozen=True)
class Objective(ABC):
    """L = L_global + Σ weight·factor·L_term: a function of embeddings that declares the views it needs.

    It does not depend on the rank or the process count, so that it works unchanged on plain, cached and gathered
    batches. The global term is injected and does not influence the others.

    Args:
        global_term: None leaves it out.
        weights: of the method's own terms by name. 0 leaves a term out, and the views and parts that only it needs.
        official: as the method's code was released; otherwise with its errors corrected (hnclip docs methods).
        factors: schedule of the weights at the current time; 1 where a term is not named.
    """

    global_term: GlobalTerm | None
    weights: Mapping[str, float] = field(default_factory=dict)
    official: bool = False
    factors: Mapping[str, float] = field(default_factory=dict)

    @property
    def image_views(self) -> tuple[str, ...]:
        """Names of the image views that it reads."""
        return ("full",)

    @property
    def text_views(self) -> tuple[str, ...]:
        """Names of the text views that it reads."""
        return ("caption",)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts of views that its readouts pool (`hnclip.data.parts`)."""
        return ()

    @property
    def tokens(self) -> bool:
        """Whether it reads token vectors, or the output of readouts."""
        return False

    def at(self, progress: TrainProgress) -> Objective:
        """The objective at this time: factors may follow a schedule."""
        return self

    def readouts(self, model: DualEncoder) -> Mapping[str, Readout]:
        """The modules that the method adds to the encoder in training, by view."""
        return {}

    @abstractmethod
    def own_terms(self) -> Mapping[str, Term]:
        """The method's own terms by name, without their weights."""

    def global_value(self, term: GlobalTerm, embeddings: Embeddings) -> Tensor:
        return term(embeddings)

    def __call__(self, embeddings: Embeddings) -> dict[str, Tensor]:
        """Weighted scalar terms by name; their sum is the loss, a mean over the queries."""
        terms = {} if self.global_term is None else {"global": self.global_value(self.global_term, embeddings)}
        for name, term in self.own_terms().items():
            if weight := self.weights.get(name, 0.0):
                terms[name] = weight * self.factors.get(name, 1.0) * term(embeddings)
        return terms


def weighted_sum(hidden: Tensor, weights: Tensor) -> Tensor:
    """[B, K, T] times [B, T, W] in at least float32, also under autocast."""
    with torch.autocast(hidden.device.type, enabled=False):
        dtype = at_least_float32(hidden)
        return (weights.to(dtype) @ hidden.to(dtype)).to(hidden.dtype)  # [B, K, W]


def span_mask(tower: TowerOutput) -> Tensor:
    """[B, K, T] bool: the tokens of each span of the view, without padding."""
    spans = tower.require_parts()  # [B, K, 2]
    position = torch.arange(tower.hidden.shape[1], device=tower.hidden.device)  # [T]
    within = (position >= spans[..., :1]) & (position < spans[..., 1:])  # [B, K, T]
    return within & tower.inside[:, None]


def project(tower: TowerOutput, pooled: Tensor) -> Tensor:
    """Pooled hidden states [B, K, W] in the joint space, of length 1: [B, K, D]."""
    vectors = tower.project(pooled)  # [B, K, D]
    return F.normalize(vectors.to(at_least_float32(vectors)), dim=-1)
