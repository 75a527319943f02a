"""L_HN in open_clip's own trainer, with all of its options, in one process or several.

    python examples/open_clip_training.py --model ViT-B-16 --pretrained openai --train-data captions.csv
    torchrun --nproc-per-node 8 examples/open_clip_training.py --model ViT-B-16 …

Needs `pip install 'open_clip_torch[training]'`.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

from open_clip.loss import gather_features
from torch import Tensor, nn

from hnclip import HardNegativeLoss


class GatheredHardNegativeLoss(HardNegativeLoss):
    """L_HN over the pairs of all processes, in place of open_clip's `ClipLoss`.

    Each process takes its own pairs as queries and the pairs of all as columns, and gradients flow back through the
    gather: what open_clip calls `--local-loss --gather-with-grad`. DistributedDataParallel averages the gradients, so
    the step is that of one process with all pairs. Every process must hold equally many.

    Shape:
        image_features, text_features [B, D], normalised; logit_scale scalar, already exponentiated.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, gamma: float = 0.5) -> None:
        super().__init__(gamma)
        self.rank, self.world_size = rank, world_size

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        output_dict: bool = False,
        **options: Any,
    ) -> Tensor | dict[str, Tensor]:
        if self.world_size > 1:
            rows = len(image_features)
            image_features, text_features = gather_features(  # [W·B, D] each
                image_features,
                text_features,
                local_loss=True,
                gather_with_grad=True,
                rank=self.rank,
                world_size=self.world_size,
            )
            options |= {"offset": self.rank * rows, "rows": rows}
        return super().forward(image_features, text_features, logit_scale, output_dict, **options)


def create_loss(args: Namespace) -> nn.Module:
    """What open_clip_train.main calls once to get its loss, with its own arguments."""
    return GatheredHardNegativeLoss(rank=args.rank, world_size=args.world_size)


def main(arguments: list[str]) -> None:
    import open_clip_train.main as training

    training.create_loss = create_loss
    training.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
