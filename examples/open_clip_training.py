"""L_HN in open_clip's training, in one process or several.

    python examples/open_clip_training.py

trains two small towers with open_clip's own loss and with L_HN, and shows that they agree where they must: at γ = 0,
and in two processes as in one. To train with open_clip itself, put these lines into a script of your own and start it
with open_clip's options, alone or under torchrun:

    import sys

    import open_clip_train.main as training
    from open_clip_training import create_loss

    training.create_loss = create_loss
    training.main(sys.argv[1:])
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import math
import sys
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

    Each process takes its own pairs as queries and everybody's as columns, and gradients flow back through the
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
    """Pictures [N, 48] and captions [N, 24] of scenes in families of four that differ a little."""
    generator = torch.Generator().manual_seed(seed)
    scene = torch.randn(count // 4, 12, generator=generator).repeat_interleave(4, dim=0)  # [N, 12]
    scene = scene + 0.3 * torch.randn(count, 12, generator=generator)
    views = torch.randn(12, 72, generator=torch.Generator().manual_seed(0))  # the same world for every seed
    return (scene @ views[:, :48]), (scene @ views[:, 48:])


def new_model() -> TwoTowers:
    torch.manual_seed(0)
    return TwoTowers()


def train(loss: nn.Module, steps: int) -> list[float]:
    """open_clip's training step, repeated; the loss of every step."""
    model, history = new_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        model_out = model(*pairs(BATCH, seed=step))
        total_loss = sum(loss(**model_out, output_dict=True).values())  # open_clip_train's own call
        optimizer.zero_grad()
        total_loss.backward()
        optimizer.step()
        history.append(total_loss.item())
    return history


def step_gradients(model: nn.Module, loss: nn.Module, image: Tensor, text: Tensor) -> tuple[float, dict[str, Tensor]]:
    """The loss of one batch and the gradient of every parameter."""
    model.zero_grad()
    value = loss(**model(image, text))
    value.backward()
    return value.item(), {name.removeprefix("module."): p.grad.clone() for name, p in model.named_parameters()}


def one_of_several(rank: int, folder: str) -> None:
    """A process that holds its share of the pairs; what it finds goes into `folder`."""
    # open_clip gathers by a function that newer torch announces the end of.
    warnings.filterwarnings("ignore", "torch.distributed.nn", FutureWarning)
    meeting, patience = f"file://{folder}/meeting", timedelta(minutes=1)
    dist.init_process_group("gloo", init_method=meeting, timeout=patience, rank=rank, world_size=WORLD)
    try:
        share = slice(rank * BATCH, (rank + 1) * BATCH)
        image, text = pairs(WORLD * BATCH)
        loss = create_loss(Namespace(rank=rank, world_size=WORLD))
        found = step_gradients(DistributedDataParallel(new_model()), loss, image[share], text[share])
        torch.save(found, Path(folder) / f"{rank}.pt")
        gc.collect()  # DDP is part of reference cycles, and aborts the process if it outlives its process group
    finally:
        dist.destroy_process_group()


def several_processes() -> list[tuple[float, dict[str, Tensor]]]:
    """Loss and gradients in each of two real processes, each with half of the pairs."""
    with TemporaryDirectory() as folder:
        mp.spawn(one_of_several, (folder,), nprocs=WORLD)
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(WORLD)]


def largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return max((left[name] - right[name]).abs().max().item() for name in left)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="L_HN in open_clip's training")
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args(arguments).steps

    losses = {
        "open_clip's ClipLoss": open_clip_loss().ClipLoss(),
        "L_HN, gamma 0": HardNegativeLoss(gamma=0),
        "L_HN, gamma 0.5": HardNegativeLoss(gamma=0.5),
    }
    histories = {name: train(loss, steps) for name, loss in losses.items()}
    print("step  " + "  ".join(f"{name:>20}" for name in losses))
    for step in range(0, steps, max(1, steps // 5)):
        print(f"{step:4}  " + "  ".join(f"{history[step]:20.6f}" for history in histories.values()))

    batch = pairs(BATCH)
    _, theirs = step_gradients(new_model(), losses["open_clip's ClipLoss"], *batch)
    _, ours = step_gradients(new_model(), losses["L_HN, gamma 0"], *batch)
    print(f"\nClipLoss and gamma 0: largest difference of any gradient {largest_difference(theirs, ours):.0e}")

    value, alone = step_gradients(new_model(), losses["L_HN, gamma 0.5"], *pairs(WORLD * BATCH))
    found = several_processes()
    mean = sum(local for local, _ in found) / WORLD
    difference = max(largest_difference(alone, gradients) for _, gradients in found)
    print(f"one process:   loss {value:.6f}")
    print(f"two processes: loss {mean:.6f}, largest difference of any gradient {difference:.0e}")


if __name__ == "__main__":
    main(sys.argv[1:])
