"""L_HN in open_clip's training, in one process or several.

    python examples/open_clip_training.py

compares gradients of two small towers: L_HN at γ = 0 with open_clip's own loss, and two processes with one. To train
with open_clip itself, put these lines into a script of your own and start it with open_clip's options, alone or under
torchrun:

    import sys

    import open_clip_train.main as training
    from open_clip_training import create_loss

    training.create_loss = create_loss
    training.main(sys.argv[1:])
"""

from __future__ import annotations

import gc
import importlib.util
import math
import warnings
from argparse import Namespace
from datetime import timedelta
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hnclip import HardNegativeLoss

WORLD, BATCH = 2, 16


@cache
def open_clip_loss() -> ModuleType:
    """open_clip/loss.py alone: the whole of open_clip needs torchvision, its losses need torch only."""
    package = importlib.util.find_spec("open_clip")
    if package is None or package.origin is None:
        raise ValueError(
            "open_clip is not installed; `pip install --no-deps open_clip_torch` is enough for this example"
        )
    spec = importlib.util.spec_from_file_location("open_clip_loss", Path(package.origin).with_name("loss.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
            image_features, text_features = open_clip_loss().gather_features(  # [W·B, D] each
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


class TwoTowers(nn.Module):
    """The smallest model that returns what open_clip's CLIP returns."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 32))
        self.text = nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 32))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        return {
            "image_features": F.normalize(self.visual(image), dim=-1),  # [B, 32]
            "text_features": F.normalize(self.text(text), dim=-1),  # [B, 32]
            "logit_scale": self.logit_scale.exp(),
        }


def pairs(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images [N, 48] and captions [N, 24] of scenes in families of four that differ a little."""
    generator = torch.Generator().manual_seed(seed)
    scene = torch.randn(count // 4, 12, generator=generator).repeat_interleave(4, dim=0)  # [N, 12]
    scene = scene + 0.3 * torch.randn(count, 12, generator=generator)
    views = torch.randn(12, 72, generator=torch.Generator().manual_seed(0))  # the same world for every seed
    return (scene @ views[:, :48]), (scene @ views[:, 48:])


def new_model() -> TwoTowers:
    torch.manual_seed(0)
    return TwoTowers()


def step_gradients(model: nn.Module, loss: nn.Module, image: Tensor, text: Tensor) -> tuple[float, dict[str, Tensor]]:
    """The loss of one batch and the gradient of every parameter."""
    model.zero_grad()
    value = loss(**model(image, text))
    value.backward()
    return value.item(), {name.removeprefix("module."): p.grad.clone() for name, p in model.named_parameters()}


def one_process(rank: int, folder: str) -> None:
    """Write the loss and gradients of a process that holds its share of the pairs into `folder`."""
    # open_clip gathers by a function that newer torch deprecates.
    warnings.filterwarnings("ignore", "torch.distributed.nn", FutureWarning)
    meeting, timeout = f"file://{folder}/meeting", timedelta(minutes=5)
    dist.init_process_group("gloo", init_method=meeting, timeout=timeout, rank=rank, world_size=WORLD)
    try:
        share = slice(rank * BATCH, (rank + 1) * BATCH)
        image, text = pairs(WORLD * BATCH)
        loss = create_loss(Namespace(rank=rank, world_size=WORLD))
        found = step_gradients(DistributedDataParallel(new_model()), loss, image[share], text[share])
        torch.save(found, Path(folder) / f"{rank}.pt")
        gc.collect()  # DDP is part of reference cycles, and aborts the process if it outlives its process group
    finally:
        dist.destroy_process_group()


def two_processes() -> list[tuple[float, dict[str, Tensor]]]:
    """Loss and gradients in each of two real processes, each with half of the pairs."""
    with TemporaryDirectory() as folder:
        mp.spawn(one_process, (folder,), nprocs=WORLD)
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(WORLD)]


def largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return max((left[name] - right[name]).abs().max().item() for name in left)


def main() -> None:
    batch = pairs(BATCH)
    theirs, their_gradients = step_gradients(new_model(), open_clip_loss().ClipLoss(), *batch)
    ours, our_gradients = step_gradients(new_model(), HardNegativeLoss(gamma=0), *batch)
    difference = largest_difference(their_gradients, our_gradients)
    print(f"ClipLoss {theirs:.6f}, gamma 0 {ours:.6f}, largest difference of any gradient {difference:.0e}")

    value, alone = step_gradients(new_model(), HardNegativeLoss(gamma=0.5), *pairs(WORLD * BATCH))
    found = two_processes()
    mean = sum(local for local, _ in found) / WORLD
    difference = max(largest_difference(alone, gradients) for _, gradients in found)
    print(f"one process {value:.6f}, two processes {mean:.6f}, largest difference of any gradient {difference:.0e}")


if __name__ == "__main__":
    main()
