"""The probe against autograd, against the step it precedes, and in closed form where floats end."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from small import PAIRS, config_for, options_for, small_batch, small_encoder, steps, train_scenes
from torch import nn

from hnclip.config import ObjectiveConfig, OptimConfig
from hnclip.core import Batch, Embeddings, TextBatch, ViewEmbeddings
from hnclip.losses import GLOBAL_LOSSES, hard_negative_loss
from hnclip.objectives.base import GlobalTerm
from hnclip.objectives.hn_clip import HNClip
from hnclip.training.checkpoint import load_checkpoint
from hnclip.training.gradient_probe import probe_gradients
from hnclip.training.log import read_metrics
from hnclip.training.optimizer import build_optimizer
from hnclip.training.step import TrainStep


@pytest.fixture(scope="module")
def data():
    """A batch and a tokenizer."""
    return small_batch()


def twin(model, batch, sizes, gamma):
    """The loss and its gradient as one long vector, from one graph of all micro-batches; γ = 0 is InfoNCE."""
    parameters, start, loss = [p for p in model.parameters() if p.requires_grad], 0, 0.0
    for size in sizes:
        part = batch[start : start + size]
        e = model(part)
        vectors = e.images["full"].vectors, e.texts["caption"].vectors
        loss = loss + size / len(batch) * hard_negative_loss(*vectors, e.scale, gamma=gamma, ids=part.ids)
        start += size
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    return loss.item(), torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, grads)]
    )


@pytest.mark.parametrize(
    ("negatives", "micro", "sizes", "frozen"),
    [("micro", 4, [4, 4, 3], False), ("micro", 5, [5, 6], True), ("batch", 4, [PAIRS], False)],
)
def test_losses_norms_and_cosine_are_those_of_autograd(data, negatives, micro, sizes, frozen):
    """The last micro-batch is uneven, two pairs are no negatives, and a frozen tower counts nowhere."""
    batch, tokenizer = data
    model = small_encoder(tokenizer)
    model.backbone.vision_model.requires_grad_(not frozen)
    found = probe_gradients(model, batch, OptimConfig(micro_batch=micro, negatives=negatives), gamma=0.7)
    (infonce, first), (hn, second) = (twin(model, batch, sizes, gamma) for gamma in (0.0, 0.7))
    expected = {
        "infonce": infonce,
        "hn": hn,
        "infonce_norm": first.norm().item(),
        "hn_norm": second.norm().item(),
        "cosine": F.cosine_similarity(first, second, dim=0).item(),
        "ratio": (second.norm() / first.norm()).item(),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("negatives", "name"), [("micro", "infonce"), ("micro", "hn"), ("batch", "hn")])
def test_the_probe_measures_what_the_next_step_does(data, negatives, name):
    """Dropout included: the step that follows draws what the probe drew, and no gradient of the probe remains."""
    batch, tokenizer = data
    model = small_encoder(tokenizer, dropout=0.3)
    optim = OptimConfig(micro_batch=4, negatives=negatives, clip_grad=0.0, lr=1e-3, weight_decay=0.0)
    objective, optimizer = HNClip(GlobalTerm(GLOBAL_LOSSES[name])), build_optimizer(model, optim)
    torch.manual_seed(5)
    found = probe_gradients(model, batch, optim)
    assert all(parameter.grad is None for parameter in model.parameters())
    step = TrainStep(model, objective, optimizer, optim, total=10)(batch, 0).read()
    assert found[name] == pytest.approx(step["global"], rel=1e-6)
    assert found[f"{name}_norm"] == pytest.approx(step["grad_norm"], rel=1e-6)
    assert probe_gradients(model, batch, optim)[name] != pytest.approx(found[name], rel=1e-4)


@pytest.mark.parametrize(
    ("optim", "loss", "gamma"),
    [({"negatives": "batch"}, "infonce", 0.5), ({"negatives": "memory", "memory": 9}, "hn", 0.8)],
)
def test_probing_changes_no_bit_of_a_run(optim, loss, gamma, model_directory, tmp_path):
    """Weights, optimiser, memory and random states, and every number of every step. γ is that of the run if it has
    one."""
    objective = ObjectiveConfig(global_loss=loss, gamma=0.8, token_weight=0.0)
    config = config_for(model_directory, optim={"epochs": 1, **optim}, objective=objective, limit=19)
    runs = [
        train_scenes(replace(config, probe_gradients=every), options_for(tmp_path / str(every))) for every in (0, 2)
    ]
    assert steps(runs[0]) == steps(runs[1])
    states = [load_checkpoint(run) for run in runs]
    for part in ("model", "optimizer", "random", "memory", "best", "last"):
        torch.testing.assert_close(*(getattr(state, part) for state in states), rtol=0, atol=0)
    entries = read_metrics(runs[1], "gradients")
    assert [(entry["step"], entry["gamma"]) for entry in entries] == [(0, gamma), (2, gamma)]
    assert entries[0][loss] == pytest.approx(steps(runs[0])[0]["global"], rel=1e-6)


# Where floats end ---------------------------------------------------------------------------------------------


class Free(nn.Module):
    """Every vector is a parameter: S = I, and captions have `shared`² in common, so logits lead by the scale."""

    device = torch.device("cpu")

    def __init__(self, count, scale, *, shared=0.0, dtype=torch.float32):
        super().__init__()
        eye = torch.eye(count, count + 1, dtype=dtype)  # [N, N + 1]
        common = shared * torch.eye(count + 1, dtype=dtype)[-1]  # [N + 1]
        self.image, self.caption = nn.Parameter(eye), nn.Parameter(eye + common)
        self.scale = nn.Parameter(torch.tensor(float(scale), dtype=dtype))

    def forward(self, batch, *, tokens=False):
        rows = batch.ids[:, 0]
        image, text = ViewEmbeddings(self.image[rows]), ViewEmbeddings(self.caption[rows])
        return Embeddings({"full": image}, {"caption": text}, self.scale, batch.ids)


def probe(model, micro, *, gamma=0.5):
    count = len(model.image)
    numbers, pixels = torch.arange(count)[:, None], torch.zeros(count, 3, 1, 1, dtype=torch.uint8)
    batch = Batch({"full": pixels}, {"caption": TextBatch(numbers, torch.ones(count))}, numbers)
    return probe_gradients(model, batch, OptimConfig(micro_batch=micro), gamma=gamma)


@pytest.mark.parametrize(("count", "scale"), [(16, 36.0), (4, 70.0)])
def test_a_loss_of_zero_does_not_mean_a_gradient_of_zero(count, scale):
    """In float32 the positives' gradients are 0 and the negatives' are not, even where their squares would be."""
    each = scale * math.exp(-scale) / count  # to each similarity of a negative
    found = probe(Free(count, scale), count)
    assert (found["infonce"], found["infonce_saturated"]) == (0.0, 1.0)
    assert found["infonce_norm"] == pytest.approx(each * math.sqrt(2 * count * (count - 1)), rel=1e-4, abs=0)
    assert (torch.full((count, count), each).norm() == 0) == (scale == 70)


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 120.0), (torch.float64, 800.0)])
def test_a_gradient_of_exactly_zero_has_no_angle(dtype, scale):
    """InfoNCE leads by the scale, L_HN by nothing: its captions have all in common that γ = 1 asks for."""
    model = Free(5, scale, shared=1.0, dtype=dtype)
    found = probe(model, 5, gamma=1.0)
    assert [found[key] for key in ("infonce", "infonce_norm", "cosine", "ratio")] == [0.0, 0.0, None, None]
    assert found["hn"] == pytest.approx(math.log(5))
    assert found["hn_norm"] > 1
    assert (found["infonce_saturated"], found["hn_saturated"]) == (1.0, 0.0)
    assert [probe(model, 5, gamma=0.0)[key] for key in ("hn_norm", "cosine", "ratio")] == [0.0, None, None]
