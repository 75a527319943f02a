"""The probe against literal losses and autograd, against the step it precedes, and in closed form where floats end."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from small import PAIRS, Toy, config_for, options_for, scenes, small_batch, small_encoder, toy_batch
from torch import nn

from hnclip.config import ObjectiveConfig, OptimConfig
from hnclip.core import Batch, Embeddings, ViewEmbeddings
from hnclip.losses import GLOBAL_LOSSES
from hnclip.objectives.base import GlobalTerm
from hnclip.objectives.hn_clip import HNClip
from hnclip.training.checkpoint import load_checkpoint
from hnclip.training.gradient_probe import GradientProbe
from hnclip.training.log import read_metrics
from hnclip.training.optimizer import build_optimizer
from hnclip.training.runs import train
from hnclip.training.step import TrainStep


@pytest.fixture(scope="module")
def data():
    return small_batch()


@pytest.fixture
def batch(data):
    return data[0]


def literal(embeddings, ids, gamma):
    """Eq. 2, one query and one negative after the other; γ = 0 is eq. 1."""
    image, text = embeddings.images["full"].vectors, embeddings.texts["caption"].vectors
    likeness, scale, queries = (text @ text.T).detach(), embeddings.scale, []
    for i in range(len(ids)):
        columns = [j for j in range(len(ids)) if j == i or not (ids[i] == ids[j]).any()]
        for a, b in ((image, text), (text, image)):
            margins = torch.tensor(
                [0.0 if j == i else gamma * likeness[i, j].item() for j in columns], dtype=torch.float64
            )
            logits = scale * (b[columns] @ a[i] + margins)  # [columns]
            queries.append(torch.logsumexp(logits, 0) - scale * (a[i] @ b[i]))
    return torch.stack(queries).mean()


def twin(model, batch, sizes, gamma):
    """The loss and its gradient as one long vector, from one graph of all micro-batches."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    parts = torch.split(torch.arange(len(batch)), sizes)
    loss = 0.0
    for rows in parts:
        part = batch[int(rows[0]) : int(rows[-1]) + 1]
        loss = loss + len(part) / len(batch) * literal(model(part), part.ids, gamma)
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    return loss.item(), torch.cat(
        [torch.zeros_like(p).flatten() if g is None else g.flatten() for p, g in zip(parameters, grads)]
    )


@pytest.mark.parametrize(
    ("negatives", "micro", "sizes"), [("micro", 4, [4, 4, 3]), ("micro", 5, [5, 6]), ("batch", 4, [PAIRS])]
)
@pytest.mark.parametrize("frozen", [False, True])
def test_losses_norms_and_cosine_are_those_of_autograd(data, batch, negatives, micro, sizes, frozen):
    """The last micro-batch is uneven, two pairs are no negatives, and a frozen tower counts nowhere."""
    model = small_encoder(data[1])
    if frozen:
        model.backbone.vision_model.requires_grad_(False)
    found = GradientProbe(model, OptimConfig(micro_batch=micro, negatives=negatives), gamma=0.7).probe(batch)
    (infonce, first), (hn, second) = (twin(model, batch, sizes, gamma) for gamma in (0.0, 0.7))
    assert found["infonce"] == pytest.approx(infonce, rel=1e-10)
    assert found["hn"] == pytest.approx(hn, rel=1e-10)
    assert found["infonce_norm"] == pytest.approx(first.norm().item(), rel=1e-9)
    assert found["hn_norm"] == pytest.approx(second.norm().item(), rel=1e-9)
    assert found["cosine"] == pytest.approx(F.cosine_similarity(first, second, dim=0).item(), rel=1e-9)
    assert found["ratio"] == pytest.approx((second.norm() / first.norm()).item(), rel=1e-9)
    assert found["cosine"] < 0.999
    assert abs(found["ratio"] - 1) > 0.01


def test_what_it_says(data, batch):
    found = GradientProbe(small_encoder(data[1]), OptimConfig(negatives="batch", micro_batch=4), gamma=0.3).probe(batch)
    assert [found[key] for key in ("gamma", "negatives", "dtype", "towers")] == [0.3, "batch", "float64", "fp32"]
    half = OptimConfig(precision="bf16", micro_batch=4)
    found = GradientProbe(small_encoder(data[1], dtype=torch.float32), half).probe(batch)
    assert [found[key] for key in ("gamma", "negatives", "dtype", "towers")] == [0.5, "micro", "float32", "bf16"]
    whole = GradientProbe(small_encoder(data[1], dtype=torch.float32), replace(half, precision="fp32")).probe(batch)
    assert found["hn"] != whole["hn"]
    assert found["hn"] == pytest.approx(whole["hn"], rel=0.1)


@pytest.mark.parametrize("negatives", ["micro", "batch"])
@pytest.mark.parametrize("name", ["infonce", "hn"])
def test_it_measures_what_the_step_to_come_does(data, batch, negatives, name):
    """Dropout included: the step that follows draws what the probe drew."""
    model = small_encoder(data[1], dropout=0.3)
    optim = OptimConfig(micro_batch=4, negatives=negatives, clip_grad=0.0, lr=1e-3, weight_decay=0.0)
    objective = HNClip(GlobalTerm(GLOBAL_LOSSES[name]))
    optimizer = build_optimizer(model, optim)
    torch.manual_seed(5)
    found = GradientProbe(model, optim).probe(batch)
    step = TrainStep(model, objective, optimizer, optim, total=10)(batch, 0).read()
    assert found[name] == pytest.approx(step["global"], rel=1e-6)
    assert found[f"{name}_norm"] == pytest.approx(step["grad_norm"], rel=1e-6)
    assert GradientProbe(model, optim).probe(batch)[name] != pytest.approx(found[name], rel=1e-4)


class Counting(Toy):
    """With dropout and a batch norm, which counts its batches."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6).double()

    def text(self, texts, tokens):
        view = super().text(texts, tokens)
        return replace(view, vectors=F.normalize(self.norm(view.vectors), dim=1))


def test_it_leaves_no_trace():
    torch.manual_seed(0)
    model, batch = Counting().train(), toy_batch()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    grads = [(parameter, parameter.grad, parameter.grad.clone()) for parameter in model.parameters()]
    state = torch.get_rng_state()
    GradientProbe(model, OptimConfig(micro_batch=4)).probe(batch)
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, kept[name]), name
    for parameter, grad, value in grads:
        assert parameter.grad is grad
        assert torch.equal(grad, value)
    model(batch)  # the control: here is something to leave
    assert not torch.equal(torch.get_rng_state(), state)
    assert model.norm.num_batches_tracked == 2  # a caption and a short text


@pytest.mark.parametrize(
    "optim", [{}, {"negatives": "batch"}, {"negatives": "memory", "memory": 9}], ids=["micro", "batch", "memory"]
)
def test_measuring_changes_no_bit_of_a_run(optim, model_directory, tmp_path):
    """Weights, optimiser, memory and random states, and every number of every step."""
    config = config_for(model_directory, optim={"epochs": 1, **optim})
    states, steps = [], []
    for every in (0, 2):
        out = train(replace(config, probe_gradients=every), options_for(tmp_path / str(every)), data=scenes()).out
        states.append(load_checkpoint(out))
        steps.append([{**entry, "pairs_per_second": 0, "waited": 0} for entry in read_metrics(out, "step")])
    assert steps[0] == steps[1]
    for part in ("model", "optimizer", "random", "memory", "best", "last"):
        torch.testing.assert_close(*(getattr(state, part) for state in states), rtol=0, atol=0)
    entries = read_metrics(tmp_path / "2", "gradients")
    assert [entry["step"] for entry in entries] == [0, 2]
    assert entries[0]["hn"] == pytest.approx(steps[0][0]["global"], rel=1e-6)


@pytest.mark.parametrize(
    ("objective", "gamma"),
    [(ObjectiveConfig(gamma=0.8), 0.8), (ObjectiveConfig(global_loss="infonce", gamma=0.8, token_weight=0.0), 0.5)],
)
def test_gamma_is_that_of_the_run_if_it_has_one(objective, gamma, model_directory, tmp_path):
    config = config_for(model_directory, objective=objective, probe_gradients=3, limit=8, optim={"epochs": 1})
    (entry,) = read_metrics(train(config, options_for(tmp_path / "run"), data=scenes()).out, "gradients")
    assert (entry["gamma"], entry["step"]) == (gamma, 0)


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


def rows(count):
    return Batch({"full": torch.zeros(count, 3, 1, 1, dtype=torch.uint8)}, {}, torch.arange(count)[:, None])


def test_a_loss_of_zero_is_no_gradient_of_zero():
    """16 pairs, a lead of 36. In float32 the positives' gradients are 0 and the negatives' are not; in float64 neither,
    and the loss is not 0."""
    count, scale = 16, 36.0
    optim = OptimConfig(micro_batch=count)
    each = scale * math.exp(-scale) / count  # to each similarity of a negative
    single, double = (
        GradientProbe(Free(count, scale, dtype=dtype), optim).probe(rows(count))
        for dtype in (torch.float32, torch.float64)
    )
    assert single["infonce"] == 0.0
    assert single["infonce_saturated"] == 1.0
    assert single["infonce_norm"] == pytest.approx(each * math.sqrt(2 * count * (count - 1)), rel=1e-5, abs=0)
    assert single["cosine"] == pytest.approx(1)
    assert double["infonce"] == pytest.approx((count - 1) * math.exp(-scale), rel=0.05, abs=0)
    positives = 2 * count * (count - 1) ** 2 + (count * (count - 1) / scale) ** 2  # the scale's with them
    assert double["infonce_norm"] == pytest.approx(
        each * math.sqrt(2 * count * (count - 1) + positives), rel=0.05, abs=0
    )


def test_the_norm_adds_no_zeros():
    """A lead of 70: entries of 1e-30, whose squares are 0 in float32."""
    count, scale = 4, 70.0
    model = Free(count, scale)
    found = GradientProbe(model, OptimConfig(micro_batch=count)).probe(rows(count))
    each = scale * math.exp(-scale) / count
    assert found["infonce_norm"] == pytest.approx(each * math.sqrt(2 * count * (count - 1)), rel=1e-4, abs=0)
    assert torch.full((count, count), each).norm() == 0


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 120.0), (torch.float64, 800.0)])
def test_a_gradient_of_exactly_zero_has_no_angle(dtype, scale):
    """InfoNCE leads by the scale, L_HN by nothing: its captions have all in common that γ = 1 asks for."""
    count = 5
    probe = GradientProbe(Free(count, scale, shared=1.0, dtype=dtype), OptimConfig(micro_batch=count), gamma=1.0)
    found = probe.probe(rows(count))
    assert [found[key] for key in ("infonce", "infonce_norm", "cosine", "ratio")] == [0.0, 0.0, None, None]
    assert found["hn"] == pytest.approx(math.log(count))
    assert found["hn_norm"] > 1
    assert (found["infonce_saturated"], found["hn_saturated"]) == (1.0, 0.0)
    other = GradientProbe(probe.model, OptimConfig(micro_batch=count), gamma=0.0).probe(rows(count))
    assert [other[key] for key in ("hn_norm", "cosine", "ratio")] == [0.0, None, None]


def test_saturation_is_counted_by_evaluation():
    """Micro-batches of 4, 4 and 3: in the first all captions are equal, so one of three is not saturated."""
    model = Free(11, 40.0, dtype=torch.float64)
    with torch.no_grad():
        model.caption[:4] = 0.0
    shares = {
        negatives: GradientProbe(model, OptimConfig(micro_batch=4, negatives=negatives)).probe(rows(11))
        for negatives in ("micro", "batch")
    }
    assert shares["micro"]["infonce_saturated"] == pytest.approx(2 / 3)
    assert shares["micro"]["infonce"] == pytest.approx(4 / 11 * math.log(4), rel=1e-9)
    assert shares["batch"]["infonce_saturated"] == 0.0
