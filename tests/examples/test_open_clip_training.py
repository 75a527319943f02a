from __future__ import annotations

import ast
import gc
import importlib.util
import sys
from argparse import Namespace
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import open_clip_training as example
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from open_clip_training import BATCH, WORLD, GatheredHardNegativeLoss
from torch.nn.parallel import DistributedDataParallel

from hnclip import HardNegativeLoss, hard_negative_loss

CLIP_LOSS = example.open_clip_loss().ClipLoss
MODES = [(local, grad) for local in (False, True) for grad in (False, True)]


def test_gamma_0_is_open_clips_loss():
    """In value and in every gradient, including that of the scale."""
    batch = example.pairs(BATCH)
    theirs, their_grads = example.step_gradients(example.new_model(), CLIP_LOSS(), *batch)
    ours, our_grads = example.step_gradients(example.new_model(), HardNegativeLoss(gamma=0), *batch)
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert "logit_scale" in our_grads
    torch.testing.assert_close(our_grads, their_grads)
    _, other = example.step_gradients(example.new_model(), HardNegativeLoss(gamma=0.5), *batch)
    assert example.largest_difference(other, their_grads) > 0.01


def test_create_loss_takes_open_clips_arguments_and_call():
    loss = example.create_loss(Namespace(rank=0, world_size=1, local_loss=False, gather_with_grad=False))
    model_out = example.new_model()(*example.pairs(BATCH))
    expected = hard_negative_loss(*model_out.values(), gamma=0.5)
    result = loss(**model_out, output_dict=True)
    assert list(result) == ["contrastive_loss"]
    torch.testing.assert_close(result["contrastive_loss"], expected)
    with pytest.raises(ValueError, match="logit_bias"):
        loss(**model_out, logit_bias=torch.zeros(()), output_dict=True)


def test_open_clips_main_can_be_given_another_create_loss():
    file = Path(importlib.util.find_spec("open_clip_train").origin).with_name("main.py")
    tree = ast.parse(file.read_text())
    imported = [name.name for node in tree.body if isinstance(node, ast.ImportFrom) for name in node.names]
    assert "create_loss" in imported
    assert ast.unparse(tree).count("create_loss(args)") == 1


class Epoch:
    """The pairs as open_clip's loop takes them: `batches` batches of BATCH."""

    def __init__(self, batches):
        image, text = example.pairs(batches * BATCH)
        self.batches = list(zip(image.split(BATCH), text.split(BATCH)))
        self.num_batches, self.num_samples, self.dataloader = batches, batches * BATCH, self

    def __iter__(self):
        return iter(self.batches)

    def set_epoch(self, epoch):
        pass


@pytest.fixture
def train_one_epoch(monkeypatch):
    """open_clip's own training loop, with a stand-in for the rest of the package, which needs torchvision."""
    package = ModuleType("open_clip")
    package.get_input_dtype = lambda precision: None
    package.__getattr__ = lambda name: None  # types and tables that only evaluation touches
    monkeypatch.setitem(sys.modules, "open_clip", package)
    before = set(sys.modules)
    module = importlib.import_module("open_clip_train.train")

    def run(loss, *, batches, accumulate=1):
        model = example.new_model()
        args = Namespace(
            device="cpu", precision="fp32", distill=False, accum_freq=accumulate, skip_scheduler=True, horovod=False,
            grad_clip_norm=None, rank=0, local_rank=0, log_local=False, log_every_n_steps=1, batch_size=BATCH,
            world_size=1, wandb=False,
        )  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        module.train_one_epoch(model, {"train": Epoch(batches)}, loss, 0, optimizer, None, None, None, args)
        return {name: p.detach() for name, p in model.named_parameters()}

    yield run
    for name in set(sys.modules) - before:
        if name.startswith("open_clip_train"):
            del sys.modules[name]


def test_open_clips_loop_with_gamma_0_trains_as_with_its_own_loss(train_one_epoch):
    theirs = train_one_epoch(CLIP_LOSS(), batches=3)
    torch.testing.assert_close(train_one_epoch(GatheredHardNegativeLoss(gamma=0), batches=3), theirs)


@pytest.mark.parametrize("loss", [CLIP_LOSS(), GatheredHardNegativeLoss()], ids=["ClipLoss", "L_HN"])
def test_open_clips_accumulation_keeps_all_negatives(train_one_epoch, loss):
    """Its loop caches features: the towers get the gradient of the whole batch, the scale that gradient twice."""
    _, whole = example.step_gradients(example.new_model(), loss, *example.pairs(2 * BATCH))
    trained = train_one_epoch(loss, batches=2, accumulate=2)
    found = {name: (p.detach() - trained[name]) / 0.1 for name, p in example.new_model().named_parameters()}
    whole["logit_scale"] *= 2
    torch.testing.assert_close(found, whole, rtol=1e-3, atol=1e-5)


def four_modes(rank, folder):
    """A process with open_clip's own loss in its four modes."""
    meeting, patience = f"file://{folder}/meeting", timedelta(minutes=5)
    dist.init_process_group("gloo", init_method=meeting, timeout=patience, rank=rank, world_size=WORLD)
    image, text = (side.split(BATCH)[rank] for side in example.pairs(WORLD * BATCH))
    found = {}
    for local, grad in MODES:
        loss = CLIP_LOSS(local_loss=local, gather_with_grad=grad, rank=rank, world_size=WORLD)
        _, found[local, grad] = example.step_gradients(DistributedDataParallel(example.new_model()), loss, image, text)
    torch.save(found, f"{folder}/{rank}.pt")
    gc.collect()  # DDP is part of reference cycles, and aborts the process if it outlives its process group
    dist.destroy_process_group()


def test_two_processes_are_one_batch(monkeypatch, capsys):
    value, alone = example.step_gradients(example.new_model(), HardNegativeLoss(), *example.pairs(WORLD * BATCH))
    found = example.two_processes()
    assert found[0][0] != found[1][0]
    assert (found[0][0] + found[1][0]) / WORLD == pytest.approx(value, rel=1e-6)
    for _, gradients in found:
        torch.testing.assert_close(gradients, alone, rtol=1e-4, atol=1e-6)
    monkeypatch.setattr(example, "two_processes", lambda: found)
    example.main()  # prints the same comparison
    assert "two processes" in capsys.readouterr().out


@pytest.mark.slow
def test_what_open_clips_modes_do_to_gradients(tmp_path):
    """With gradient through the gather both modes are exact. Without it the global loss moves the towers by
    1/W of their gradient, though not the scale, and the local loss in another direction."""
    mp.spawn(four_modes, (str(tmp_path),), nprocs=WORLD)
    _, alone = example.step_gradients(example.new_model(), CLIP_LOSS(), *example.pairs(WORLD * BATCH))
    close = {"rtol": 1e-4, "atol": 1e-6}
    for rank in range(WORLD):
        found = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(found[True, True], alone, **close)
        torch.testing.assert_close(found[False, True], alone, **close)
        shrunk = {name: grad if name == "logit_scale" else grad / WORLD for name, grad in alone.items()}
        torch.testing.assert_close(found[False, False], shrunk, **close)
        torch.testing.assert_close(found[True, False]["logit_scale"], alone["logit_scale"], **close)
        wrong, right = (grads["visual.2.weight"].flatten() for grads in (found[True, False], alone))
        assert torch.cosine_similarity(wrong, right, dim=0) < 0.99
