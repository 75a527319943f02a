from __future__ import annotations

from dataclasses import replace

import lightning
import lightning_training as example
import pytest
import torch
from lightning_training import HardNegativeModule
from torch.utils.data import DataLoader

import hnclip
from hnclip.data.scenes import scene_records

# A type that torch 2.13 renames, and advice for machines with many cores.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning:lightning.pytorch.utilities._pytree"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning:lightning.pytorch"),
]
LEARNING_RATE = 0.1


class Descent(HardNegativeModule):
    """Plain gradient descent: a step shows the gradient."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


@pytest.fixture
def model(no_dropout_directory):
    return hnclip.load(no_dropout_directory)


@pytest.fixture
def data(model):
    """Eight pairs, one image twice. Lengths differ: every second caption is short."""
    records = scene_records("park", "train", families=2, members=4)
    records[1] = replace(records[1], image=records[4].image)
    return example.prepare(model, [replace(r, captions=(r.short,)) if i % 2 else r for i, r in enumerate(records)])


def fit(model, data, batch, **options):
    """Weights after one step, and the loss."""
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        **options,
    )
    trainer.fit(Descent(model, token_weight=0.5).train(), DataLoader(data, batch))
    return {name: p.detach() for name, p in model.named_parameters()}, trainer.callback_metrics["loss"].item()


def plain_step(model, data):
    """The same step without Lightning."""
    pixels, captions, ids = zip(*data)
    image = model.encode_images(torch.stack(pixels), tokens=True)
    text = model.encode_texts(model.tokenize(captions), tokens=True)
    ids = torch.tensor(ids)
    loss = hnclip.hard_negative_loss(image.vectors, text.vectors, model.scale, 0.5, ids=ids)
    loss = loss + 0.5 * hnclip.token_loss(image.tokens, text.tokens, image.mask, text.mask, model.scale, ids=ids)
    parameters = dict(model.named_parameters())
    grads = torch.autograd.grad(loss, list(parameters.values()))
    stepped = [(p - LEARNING_RATE * grad).detach() for p, grad in zip(parameters.values(), grads)]
    return dict(zip(parameters, stepped)), loss.item()


def test_one_device_does_the_plain_step(model, data):
    assert [number for _, _, number in data] == [0, 1, 2, 3, 1, 4, 5, 6]  # of the images
    expected, loss = plain_step(model, data)
    found, found_loss = fit(model, data, batch=8, devices=1)
    assert found_loss == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_two_devices_are_one_batch(model, data):
    """Two real processes with four pairs each, words of different lengths, reach the weights of one process."""
    expected, _ = plain_step(model, data)
    found, _ = fit(model, data, batch=4, devices=2, strategy="ddp_spawn")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_the_script_runs(monkeypatch, capsys, tmp_path):
    def few(*args, families=8):
        return scene_records(*args, families=families, members=4)

    monkeypatch.setattr(example, "scene_records", few)
    example.main(["--steps", "2"])
    assert "R@1 before" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
