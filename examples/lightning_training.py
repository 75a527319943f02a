"""L_HN and the token term in Lightning, on one device or several.

    python examples/lightning_training.py
    python examples/lightning_training.py --devices 2

fine-tunes the bundled model on generated scenes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

import hnclip
from hnclip.core import Record
from hnclip.data.scenes import scene_records


class HardNegativeModule(lightning.LightningModule):
    """L_HN + λ·L_tok for an hnclip model, whose negatives are the pairs of all devices.

    Every device takes its own pairs as queries and all pairs as columns. Lightning averages the gradients, so the
    step is that of one device with all pairs. Every device must hold equally many.

    Args:
        model: from `hnclip.load`.
        gamma: strength of the caption-similarity margin.
        token_weight: λ, the weight of the token term.
    """

    def __init__(
        self, model: hnclip.DualEncoder, *, gamma: float = 0.5, token_weight: float = 1.0, lr: float = 1e-4
    ) -> None:
        super().__init__()
        self.model = model
        self.gamma, self.token_weight, self.lr = gamma, token_weight, lr

    def training_step(self, batch: tuple[Tensor, Sequence[str], Tensor], index: int) -> Tensor:
        """
        Shape:
            batch: images [B, 3, S, S] uint8, B captions, ids [B] that number the images.
        """
        pixels, captions, ids = batch
        image = self.model.encode_images(pixels, tokens=True)
        text = self.model.encode_texts(self.model.tokenize(captions), tokens=True)
        # Collectives need equal shapes, and every device pads its captions to its own longest.
        length = torch.tensor([text.tokens.shape[1]], device=ids.device)
        missing = int(self.gather(length).max() - length)
        words, word_mask = F.pad(text.tokens, (0, 0, 0, missing)), F.pad(text.mask, (0, missing))  # [B, T, D], [B, T]

        pairs = {"ids": self.gather(ids), "offset": self.global_rank * len(ids), "rows": len(ids)}
        vectors = [self.gather(tensor) for tensor in (image.vectors, text.vectors)]  # [W·B, D] each
        tokens = [self.gather(tensor) for tensor in (image.tokens, words, image.mask, word_mask)]
        loss = hnclip.hard_negative_loss(*vectors, self.model.scale, self.gamma, **pairs)
        loss = loss + self.token_weight * hnclip.token_loss(*tokens, self.model.scale, **pairs)
        self.log("loss", loss, prog_bar=True, batch_size=len(ids))
        return loss

    def gather(self, tensor: Tensor) -> Tensor:
        """[B, …] of every device as [W·B, …], in rank order and with gradient; alone, the tensor itself."""
        every = self.all_gather(tensor, sync_grads=tensor.requires_grad)
        return every.flatten(0, 1) if every.ndim > tensor.ndim else every

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def prepare(model: hnclip.DualEncoder, records: Sequence[Record]) -> list[tuple[Tensor, str, int]]:
    """Image [3, S, S], caption and image number of every record: a list is all the data set Lightning needs."""
    pixels = model.preprocess_images([record.image.load() for record in records])  # [N, 3, S, S]
    numbers: dict[str, int] = {}
    ids = [numbers.setdefault(record.image.key, len(numbers)) for record in records]
    return list(zip(pixels, [record.captions[0] for record in records], ids))


@torch.no_grad()
def recall_at_1(model: hnclip.DualEncoder, data: Sequence[tuple[Tensor, str, int]]) -> float:
    """Percentage of captions that find their own image first."""
    model.eval()
    pixels, captions, _ = zip(*data)
    image = model.encode_images(torch.stack(pixels).to(model.device)).vectors  # [N, D]
    text = model.encode_texts(model.tokenize(captions)).vectors  # [N, D]
    ranks = hnclip.retrieval_ranks(image, text, torch.arange(len(data)))
    return 100 * (ranks.text_to_image == 1).float().mean().item()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="L_HN and the token term in Lightning")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--devices", type=int, default=1)
    options = parser.parse_args(arguments)

    lightning.seed_everything(0)
    model = hnclip.load("bundled")
    train = prepare(model, scene_records("park", "train"))
    test = prepare(model, scene_records("park", "test", families=32))
    before = recall_at_1(model, test)
    trainer = lightning.Trainer(
        devices=options.devices,
        strategy="auto" if options.devices == 1 else "ddp_spawn",
        max_steps=options.steps,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    # Lightning trains in the mode it finds, and models come from disk ready to be used, without dropout.
    trainer.fit(HardNegativeModule(model).train(), DataLoader(train, 16, shuffle=True, drop_last=True))
    print(f"loss of the last step: {trainer.callback_metrics['loss'].item():.3f}")
    print(f"R@1 before: {before:.1f} %, after: {recall_at_1(model, test):.1f} %")


if __name__ == "__main__":
    main(sys.argv[1:])
