from __future__ import annotations

import gc
import importlib.util
import math
import sys
import warnings
from argparse import Namespace
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hnclip import HardNegativeLoss, hard_negative_loss

# All of open_clip needs torchvision, its losses and its training loop need torch only: they find a package that was
# not executed, where types and tables that only evaluation uses are None.
package = importlib.util.module_from_spec(importlib.util.find_spec("open_clip"))
package.get_input_dtype = package.__getattr__ = lambda name: None
sys.modules["open_clip"] = package
import open_clip_training as example  # noqa: E402
from open_clip.loss import ClipLoss  # noqa: E402
from open_clip_train.train import train_one_epoch  # noqa: E402

del sys.modules["open_clip"]

WORLD, BATCH = 2, 16


class TwoTowers(nn.Module):
    """The smallest model that returns what open_clip's CLIP returns."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.visual, self.text = nn.Linear(48, 32), nn.Linear(24, 32)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, image, text):
        return {
            "image_features": F.normalize(self.visual(image), dim=-1),  # [B, 32]
            "text_features": F.normalize(self.text(text), dim=-1),  # [B, 32]
            "logit_scale": self.logit_scale.exp(),
        }


def pairs(count):
    """Images [N, 48] and captions [N, 24] in families of four that differ a little."""
    generator = torch.Generator().manual_seed(0)
    scene = torch.randn(count // 4, 12, generator=generator).repeat_interleave(4, dim=0)  # [N, 12]
    scene = scene + 0.3 * torch.randn(count, 12, generator=generator)
    views = torch.randn(12, 72, generator=generator)
    return scene @ views[:, :48], scene @ views[:, 48:]


def step_gradients(loss, image, text, wrap=lambda model: model):
    """The loss of one batch and the gradient of every parameter."""
    model = wrap(TwoTowers())
    value = loss(**model(image, text))
    value.backward()
    return value.item(), {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}


def test_gamma_0_is_open_clips_loss():
    """In value and in every gradient, including that of the scale."""
    theirs, their_grads = step_gradients(ClipLoss(), *pairs(BATCH))
    ours, our_grads = step_gradients(HardNegativeLoss(gamma=0), *pairs(BATCH))
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert "logit_scale" in our_grads
    torch.testing.assert_close(our_grads, their_grads)


def test_the_trainer_gets_the_loss_and_calls_it_as_its_own(monkeypatch):
    trainer, args = ModuleType("open_clip_train.main"), []
    trainer.main = args.append
    monkeypatch.setitem(sys.modules, "open_clip_train.main", trainer)
    example.main(["--model", "ViT-B-16"])
    assert args == [["--model", "ViT-B-16"]]
    loss = trainer.create_loss(Namespace(rank=0, world_size=1, local_loss=False, gather_with_grad=False))
    model_out = TwoTowers()(*pairs(BATCH))
    result = loss(**model_out, output_dict=True)
    assert list(result) == ["contrastive_loss"]
    torch.testing.assert_close(result["contrastive_loss"], hard_negative_loss(*model_out.values(), gamma=0.5))


class Epoch:
    """The pairs as open_clip's loop takes them: two batches of BATCH."""

    num_batches, num_samples = 2, 2 * BATCH

    def __init__(self):
        self.dataloader = self

    def __iter__(self):
        image, text = pairs(2 * BATCH)
        return zip(image.split(BATCH), text.split(BATCH))

    def set_epoch(self, epoch):
        pass


def test_open_clips_accumulation_keeps_all_negatives():
    """Its own loop caches features: the towers get the gradient of the whole batch, the scale that gradient twice."""
    loss, model = example.GatheredHardNegativeLoss(), TwoTowers()
    args = Namespace(
        device="cpu", precision="fp32", distill=False, accum_freq=2, skip_scheduler=True, horovod=False,
        grad_clip_norm=None, rank=0, local_rank=0, log_local=False, log_every_n_steps=1, batch_size=BATCH,
        world_size=1, wandb=False,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_one_epoch(model, {"train": Epoch()}, loss, 0, optimizer, None, None, None, args)
    trained = dict(model.named_parameters())
    found = {name: (p.detach() - trained[name].detach()) / 0.1 for name, p in TwoTowers().named_parameters()}
    _, whole = step_gradients(loss, *pairs(2 * BATCH))
    whole["logit_scale"] *= 2
    torch.testing.assert_close(found, whole, rtol=1e-3, atol=1e-5)


def one_process(rank, folder):
    # open_clip gathers by a function that newer torch deprecates.
    warnings.filterwarnings("ignore", "torch.distributed.nn", FutureWarning)
    meeting, timeout = f"file://{folder}/meeting", timedelta(minutes=5)
    dist.init_process_group("gloo", init_method=meeting, timeout=timeout, rank=rank, world_size=WORLD)
    share = slice(rank * BATCH, (rank + 1) * BATCH)
    image, text = pairs(WORLD * BATCH)
    loss = example.create_loss(Namespace(rank=rank, world_size=WORLD))
    torch.save(step_gradients(loss, image[share], text[share], DistributedDataParallel), f"{folder}/{rank}.pt")
    gc.collect()  # DDP is part of reference cycles, and aborts the process if it outlives its process group
    dist.destroy_process_group()


def test_two_processes_are_one_batch(tmp_path):
    value, alone = step_gradients(HardNegativeLoss(), *pairs(WORLD * BATCH))
    mp.spawn(one_process, (str(tmp_path),), nprocs=WORLD)
    found = [torch.load(Path(tmp_path) / f"{rank}.pt") for rank in range(WORLD)]
    assert found[0][0] != found[1][0]
    assert (found[0][0] + found[1][0]) / WORLD == pytest.approx(value, rel=1e-6)
    for _, gradients in found:
        torch.testing.assert_close(gradients, alone, rtol=1e-4, atol=1e-6)
