"""The batches of an epoch as a run would deal them, of captions whose pictures need not be at hand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hnclip.config import TrainConfig
from hnclip.data.sampler import choose_captions, cut_batches, epoch_order
from hnclip.diagnose.material import Material
from hnclip.train.data import batch_sizes
from hnclip.train.step import chunk_slices


@dataclass(frozen=True)
class Epoch:
    """N pairs, one caption of each record, and who meets whom.

    `evaluations` are the rows of each evaluation of a loss: a micro-batch, or the whole batch of an optimiser step.

    Shape:
        chosen: [N], the row of each record's caption; text: [N, D]; ids: [N, 2], picture and caption
    """

    chosen: Tensor
    text: Tensor
    ids: Tensor
    batches: list[list[int]]
    micro_batches: list[list[int]]

    def evaluations(self, negatives: str) -> list[list[int]]:
        return self.batches if negatives == "batch" else self.micro_batches


def first_epoch(material: Material, config: TrainConfig) -> Epoch:
    """The first epoch of a run with this configuration on these records, its batches random."""
    count = len(material.records)
    if count < 2:
        raise ValueError(f"{count} record is no batch: a pair needs another one to be told from")
    captions = material.owner.bincount(minlength=count)  # [N]
    chosen = captions.cumsum(0) - captions + choose_captions(captions, config.seed, 0)  # [N]
    pictures = torch.arange(count) if material.image_ids is None else material.image_ids
    ids = torch.stack([pictures, material.caption_ids[chosen]], dim=1)  # [N, 2]
    batches = cut_batches(epoch_order(count, config.seed, 0), batch_sizes(count, config))
    micro = config.optim.micro_batch
    return Epoch(
        chosen=chosen,
        text=material.text[chosen],
        ids=ids,
        batches=batches,
        micro_batches=[rows[part] for rows in batches for part in chunk_slices(len(rows), micro)],
    )
