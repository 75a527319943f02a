from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from types import ModuleType

import open_clip_training as example
import pytest
import torch
from open_clip_training import BATCH, WORLD, GatheredHardNegativeLoss

from hnclip import HardNegativeLoss, hard_negative_loss

CLIP_LOSS = example.open_clip_loss().ClipLoss


def test_gamma_0_is_open_clips_loss():
    """In value and in every gradient, including that of the scale."""
    batch = example.pairs(BATCH)
    theirs, their_grads = example.step_gradients(example.new_model(), CLIP_LOSS(), *batch)
    ours, our_grads = example.step_gradients(example.new_model(), HardNegativeLoss(gamma=0), *batch)
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert "logit_scale" in our_grads
    torch.testing.assert_close(our_grads, their_grads)


def test_create_loss_takes_open_clips_arguments_and_call():
    loss = example.create_loss(Namespace(rank=0, world_size=1, local_loss=False, gather_with_grad=False))
    model_out = example.new_model()(*example.pairs(BATCH))
    result = loss(**model_out, output_dict=True)
    assert list(result) == ["contrastive_loss"]
    torch.testing.assert_close(result["contrastive_loss"], hard_negative_loss(*model_out.values(), gamma=0.5))


class Epoch:
    """The pairs as open_clip's loop takes them: two batches of BATCH."""

    num_batches, num_samples = 2, 2 * BATCH

    def __init__(self):
        self.dataloader = self

    def __iter__(self):
        image, text = example.pairs(2 * BATCH)
        return zip(image.split(BATCH), text.split(BATCH))

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

    def run(loss):
        model = example.new_model()
        args = Namespace(
            device="cpu", precision="fp32", distill=False, accum_freq=2, skip_scheduler=True, horovod=False,
            grad_clip_norm=None, rank=0, local_rank=0, log_local=False, log_every_n_steps=1, batch_size=BATCH,
            world_size=1, wandb=False,
        )  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        module.train_one_epoch(model, {"train": Epoch()}, loss, 0, optimizer, None, None, None, args)
        return {name: p.detach() for name, p in model.named_parameters()}

    yield run
    for name in set(sys.modules) - before:
        if name.startswith("open_clip_train"):
            del sys.modules[name]


def test_open_clips_accumulation_keeps_all_negatives(train_one_epoch):
    """Its loop caches features: the towers get the gradient of the whole batch, the scale that gradient twice."""
    loss = GatheredHardNegativeLoss()
    _, whole = example.step_gradients(example.new_model(), loss, *example.pairs(2 * BATCH))
    trained = train_one_epoch(loss)
    found = {name: (p.detach() - trained[name]) / 0.1 for name, p in example.new_model().named_parameters()}
    whole["logit_scale"] *= 2
    torch.testing.assert_close(found, whole, rtol=1e-3, atol=1e-5)


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
