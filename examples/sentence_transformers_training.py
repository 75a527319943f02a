"""L_HN in sentence-transformers: a loss for its trainer, plain and with gradient caching.

    python examples/sentence_transformers_training.py
    python examples/sentence_transformers_training.py --cached

fine-tunes the bundled model on generated scenes. The data set has two columns, first images, then captions, whatever
they are called, and a third, "label", if some pairs show the same image or carry the same caption. Needs
sentence-transformers 5.7 or newer, with its training extra.

On several devices give the losses `gather_across_devices=True`, and for the cached one give the trainer's arguments
`ddp_find_unused_parameters=True`: a mini-batch holds images or captions, so it passes one tower only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.losses import CachedLossMixin
from sentence_transformers.util import all_gather, all_gather_with_grad, get_rank
from torch import Tensor, nn

import hnclip
from hnclip.data.scenes import scene_records


class HardNegativeRankingLoss(nn.Module):
    """L_HN over the pairs of a batch.

    Args:
        model: what the trainer trains: any SentenceTransformer that embeds images and captions.
        gamma: strength of the caption-similarity margin; 0 is `MultipleNegativesRankingLoss` in both directions.
        scale: the inverse temperature, a constant as in every loss of sentence-transformers. None takes the model's
            own exp(logit_scale).
        gather_across_devices: the pairs of all processes are negatives; each process must hold equally many.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        gamma: float = 0.5,
        scale: float | None = None,
        gather_across_devices: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.gamma = gamma
        self.scale = constant_scale(model, scale)
        self.gather_across_devices = gather_across_devices

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        """The loss of one batch, as the trainer asks for it.

        Args:
            sentence_features: the preprocessed columns, images and captions.
            labels: the "label" column, if there is one: pairs with the same number, or with the same number in the
                same place of a list, are never negatives of each other.

        Shape:
            labels [B] or [B, K] integers.
        """
        image, text = (self.model(features)["sentence_embedding"] for features in sentence_features)  # [B, D] each
        return self.pair_loss(image, text, labels)

    def pair_loss(self, image: Tensor, text: Tensor, labels: Tensor | None) -> Tensor:
        """L_HN of this process's pairs, [B, D] each."""
        # A CLIP in sentence-transformers ends with its projection: its vectors are not of length 1.
        image, text = F.normalize(image, dim=-1), F.normalize(text, dim=-1)
        rows, offset = len(image), 0
        if self.gather_across_devices:
            image, text = all_gather_with_grad(image), all_gather_with_grad(text)  # [W·B, D] each
            labels = None if labels is None else all_gather(labels)  # [W·B]
            offset = get_rank() * rows
        return hnclip.hard_negative_loss(image, text, self.scale, self.gamma, offset=offset, rows=rows, ids=labels)

    def get_config_dict(self) -> dict[str, Any]:
        """What the model card says of this loss."""
        return {"gamma": self.gamma, "scale": self.scale, "gather_across_devices": self.gather_across_devices}


class CachedHardNegativeRankingLoss(CachedLossMixin, HardNegativeRankingLoss):
    """The same loss and gradients in the memory of `mini_batch_size` pairs; every pair is embedded twice.

    `CachedLossMixin` embeds without gradient, asks `calculate_loss` for the gradient of every embedding, and embeds
    again with the same random state to push it into the model.
    """

    def __init__(self, model: SentenceTransformer, mini_batch_size: int = 32, **options: Any) -> None:
        super().__init__(model, **options)
        self.mini_batch_size = mini_batch_size

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        return self.forward_cached(list(sentence_features), labels)

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """The loss from the embeddings of all mini-batches, images and captions."""
        image, text = (torch.cat(parts) for parts in reps)  # [B, D] each
        loss = self.pair_loss(image, text, labels)
        if with_backward:
            loss.backward()
        return loss.detach()

    def get_config_dict(self) -> dict[str, Any]:
        return {**super().get_config_dict(), "mini_batch_size": self.mini_batch_size}


def constant_scale(model: SentenceTransformer, scale: float | None) -> float:
    """`scale`, or the one the model was trained with; and the model's own is no parameter any more.

    A parameter that no loss reaches would stop DistributedDataParallel.
    """
    backbone = model[0].auto_model
    for name in ("logit_scale", "logit_bias"):
        if isinstance(parameter := getattr(backbone, name, None), nn.Parameter):
            parameter.requires_grad_(False)
    if scale is not None:
        return scale
    if not hasattr(backbone, "logit_scale"):
        raise ValueError("the model has no logit_scale of its own: give scale, for example 20")
    return backbone.logit_scale.exp().item()


def pairs(split: str, families: int) -> Dataset:
    """Generated scenes, four near-duplicates in each family."""
    records = scene_records("park", split, families=families)
    return Dataset.from_dict({"image": [r.image.load() for r in records], "caption": [r.captions[0] for r in records]})


def recall_at_1(model: SentenceTransformer, data: Dataset) -> float:
    """Percentage of captions that find their image first."""
    image, text = (model.encode(list(data[name]), convert_to_tensor=True) for name in ("image", "caption"))
    ranks = hnclip.retrieval_ranks(image, text, torch.arange(len(data)))
    return 100 * (ranks.text_to_image == 1).float().mean().item()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="L_HN in sentence-transformers")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--cached", action="store_true", help="gradient caching: 64 pairs in the memory of 16")
    options = parser.parse_args(arguments)

    with TemporaryDirectory() as folder:
        hnclip.save(hnclip.load("bundled"), Path(folder) / "model")
        model = SentenceTransformer(str(Path(folder) / "model"), local_files_only=True)
        if options.cached:
            loss, batch = CachedHardNegativeRankingLoss(model, mini_batch_size=16), 64
        else:
            loss, batch = HardNegativeRankingLoss(model), 16
        test = pairs("test", families=16)
        print(f"R@1 of {len(test)} captions before: {recall_at_1(model, test):.1f} %")
        trainer = SentenceTransformerTrainer(
            model,
            SentenceTransformerTrainingArguments(
                output_dir=folder,
                max_steps=options.steps,
                per_device_train_batch_size=batch,
                learning_rate=1e-4,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                dataloader_drop_last=True,  # one pair alone has no negatives
                dataloader_pin_memory=torch.accelerator.is_available(),
            ),
            train_dataset=pairs("train", families=64),
            loss=loss,
        )
        trainer.train()
        print(f"R@1 of {len(test)} captions after:  {recall_at_1(model, test):.1f} %")


if __name__ == "__main__":
    main(sys.argv[1:])
