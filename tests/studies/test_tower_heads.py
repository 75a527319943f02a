"""Heads into a space of their own: every loss against a literal twin, and the identities between them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hnclip.analysis.heads import TowerFeatures, deal_epochs
from hnclip.config import OptimConfig
from hnclip.losses import clip_loss
from hnclip.studies.tower_heads import (
    SCALE,
    HeadSettings,
    MarginLoss,
    initial_heads,
    project,
    scaled,
    train_tower_heads,
)
from hnclip.train.optimizer import learning_rate_factor

LOSSES = [MarginLoss(), MarginLoss(0.3), MarginLoss(gamma=0.5), MarginLoss(0.2, 0.5, centred=True)]
SMALL = HeadSettings(epochs=2, micro_batch=4, accumulate=3, width=5)


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def towers(pictures: int, *, captions: int = 1, seed: int = 0) -> TowerFeatures:
    """Two views, 7 and 6 wide, of the same four hidden numbers."""
    hidden = noise(pictures, 4, seed=seed)
    owner = torch.arange(pictures).repeat_interleave(captions)
    text = hidden[owner] @ noise(4, 6, seed=91) + 0.3 * noise(len(owner), 6, seed=seed + 1) + 1.0
    image = hidden @ noise(4, 7, seed=90) + 0.3 * noise(pictures, 7, seed=seed + 2)
    return TowerFeatures(image, text, owner, torch.arange(pictures), torch.arange(len(owner)))


def literal(image: Tensor, text: Tensor, loss: MarginLoss, scale: Tensor, chunks: list[list[int]]) -> Tensor:
    """Pair by pair: cross-entropies of each query against its own chunk, in both directions."""
    rows, fixed = [], text.detach()
    for chunk in chunks:
        negatives = [float(fixed[i] @ fixed[j]) for i in chunk for j in chunk if i != j]
        mean = sum(negatives) / len(negatives) if loss.centred else 0.0
        for i in chunk:
            for forward in (True, False):
                logits = []
                for j in chunk:
                    score = image[i] @ text[j] if forward else text[i] @ image[j]
                    if i != j:
                        score = score + loss.margin + loss.gamma * (float(fixed[i] @ fixed[j]) - mean)
                    logits.append(scale * score)
                rows.append(torch.logsumexp(torch.stack(logits), 0) - logits[chunk.index(i)])
    return torch.stack(rows).mean()


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
@pytest.mark.parametrize(
    ("pairs", "chunks"),
    [
        (8, [range(0, 4), range(4, 8)]),
        (11, [range(0, 4), range(4, 8), range(8, 11)]),
        (9, [range(0, 4), range(4, 9)]),  # one left over joins the chunk before
        (3, [range(0, 3)]),
    ],
)
def test_value_and_gradients_are_the_literal_twins(loss: MarginLoss, pairs: int, chunks: list[range]) -> None:
    image, text = noise(pairs, 7, seed=1, dtype=torch.float64), noise(pairs, 6, seed=2, dtype=torch.float64) + 0.5
    found = []
    for way in ("ours", "twin"):
        trained = [noise(7, 5, seed=3), noise(6, 5, seed=4), torch.tensor(2.0)]
        image_head, text_head, log_scale = (tensor.double().requires_grad_() for tensor in trained)
        if way == "ours":
            pair = project(image, image_head), project(text, text_head)
            value = loss.value(*pair, scale=log_scale.exp(), size=4)
        else:
            images = torch.stack([(row @ image_head) / (row @ image_head).norm() for row in image])
            texts = torch.stack([(row @ text_head) / (row @ text_head).norm() for row in text])
            value = literal(images, texts, loss, log_scale.exp(), [list(chunk) for chunk in chunks])
        found.append((value, *torch.autograd.grad(value, [image_head, text_head, log_scale])))
    for ours, twin in zip(*found):
        torch.testing.assert_close(ours, twin, rtol=1e-9, atol=1e-11)


def test_without_margin_and_gamma_it_is_infonce() -> None:
    image, text = F.normalize(noise(9, 5, seed=1), dim=1), F.normalize(noise(9, 5, seed=2), dim=1)
    expected = clip_loss(image, text, 12.0)
    for loss in (MarginLoss(), MarginLoss(0.0, 0.0, centred=True)):
        torch.testing.assert_close(loss.value(image, text, scale=12.0, size=9), expected)


def trained(loss: MarginLoss, *, negatives="micro", settings=SMALL, seed=0, rate=0.01, features=None):
    features = towers(29, captions=2) if features is None else features
    epochs = deal_epochs(features, seed, settings)
    return list(train_tower_heads(features, epochs, loss, negatives=negatives, rate=rate, seed=seed, settings=settings))


def same(left, right) -> bool:
    return all(
        torch.equal(a.image, b.image) and torch.equal(a.text, b.text) and a.scale == b.scale
        for a, b in zip(left, right)
    )


def test_an_affine_margin_without_gamma_is_the_fixed_one_bit_for_bit() -> None:
    assert same(trained(MarginLoss(0.2, 0.0, centred=True)), trained(MarginLoss(0.2)))
    assert not same(trained(MarginLoss(0.2, 0.3, centred=True)), trained(MarginLoss(0.2)))


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_a_micro_batch_that_covers_the_batch_is_the_batch(loss: MarginLoss) -> None:
    whole = replace(SMALL, micro_batch=12, accumulate=1)
    assert same(trained(loss, settings=whole), trained(loss, settings=whole, negatives="batch"))
    assert same(trained(loss, settings=whole), trained(loss, negatives="batch"))
    assert not same(trained(loss), trained(loss, negatives="batch"))


def test_the_seed_alone_decides() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = trained(LOSSES[2])
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert same(first, trained(LOSSES[2]))
    assert not same(first, trained(LOSSES[2], seed=1))


def test_who_stops_reading_has_what_was_there() -> None:
    features = towers(29, captions=2)
    epochs = deal_epochs(features, 0, SMALL)
    training = train_tower_heads(features, epochs, LOSSES[1], negatives="micro", rate=0.01, seed=0, settings=SMALL)
    assert same([next(training)], trained(LOSSES[1])[:1])


def test_training_is_the_literal_loop() -> None:
    """AdamW by its formulas, with warm-up, cosine, clipping, decay of the heads alone and the scale's clamp."""
    features, loss, rate, optim = towers(29, captions=2), LOSSES[3], 0.02, OptimConfig()
    epochs = deal_epochs(features, 0, SMALL)
    heads = [head.double() for head in initial_heads(7, 6, 5, 0)]
    values = [*heads, torch.tensor(math.log(SCALE)).double()]
    first, second = [torch.zeros_like(v) for v in values], [torch.zeros_like(v) for v in values]
    total, seen = sum(map(len, epochs)), []
    for step, rows in enumerate((rows for batches in epochs for rows in batches), start=1):
        leaves = [value.clone().requires_grad_() for value in values]
        images = F.normalize(features.image[rows.pictures].double() @ leaves[0], dim=1)
        texts = F.normalize(features.text[rows.captions].double() @ leaves[1], dim=1)
        cosines = (texts @ texts.T).detach()
        seen.append(float((cosines.sum() - cosines.trace()) / (len(texts) * (len(texts) - 1))))
        sizes = [4] * (len(texts) // 4)
        if len(texts) % 4 == 1:
            sizes[-1] += 1
        elif len(texts) % 4:
            sizes.append(len(texts) % 4)
        chunks = [part.tolist() for part in torch.arange(len(texts)).split(sizes)]
        grads = torch.autograd.grad(literal(images, texts, loss, leaves[2].exp(), chunks), leaves)
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        grads = [grad * min(1.0, float(optim.clip_grad / (norm + 1e-6))) for grad in grads]
        lr = rate * learning_rate_factor(step - 1, total=total, warmup=round(0.05 * total), floor=optim.lr_floor)
        for place, grad in enumerate(grads):
            first[place] = optim.beta1 * first[place] + (1 - optim.beta1) * grad
            second[place] = optim.beta2 * second[place] + (1 - optim.beta2) * grad**2
            move = (first[place] / (1 - optim.beta1**step)) / ((second[place] / (1 - optim.beta2**step)).sqrt() + 1e-8)
            decay = 1 - lr * optim.weight_decay if place < 2 else 1.0
            values[place] = values[place] * decay - lr * move
        values[2] = values[2].clamp(0, math.log(100))
    found = trained(loss, rate=rate, features=features)[-1]
    torch.testing.assert_close(found.image.double(), values[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.text.double(), values[1], rtol=1e-3, atol=1e-4)
    assert found.scale == pytest.approx(float(values[2].exp()), rel=1e-4)
    assert found.similarity == pytest.approx(sum(seen) / len(seen), rel=1e-3)


def test_the_temperature_trains_and_stays_within_the_clamp() -> None:
    assert trained(MarginLoss())[0].scale != pytest.approx(SCALE, rel=1e-3)
    hopeless = trained(MarginLoss(5.0), settings=replace(SMALL, epochs=8), rate=0.3)  # only a flat softmax helps
    assert hopeless[-1].scale == 1.0


def test_heads_learn() -> None:
    features = scaled(towers(200)), scaled(towers(40, seed=50))
    settings = replace(SMALL, epochs=10, accumulate=5)
    ranks = [
        (found.ranks(features[1]).text_to_image == 1).float().mean()
        for found in trained(MarginLoss(), settings=settings, features=features[0], rate=0.03)
    ]
    assert ranks[-1] > 0.3 > 0.2 > ranks[0]


def test_scaled_features_keep_their_directions() -> None:
    features = towers(30, captions=2)
    found = scaled(replace(features, text=1000 * features.text))
    torch.testing.assert_close(found.image.norm(dim=1), torch.full((30,), math.sqrt(7)))
    torch.testing.assert_close(found.text.norm(dim=1), torch.full((60,), math.sqrt(6)))
    torch.testing.assert_close(F.normalize(found.text, dim=1), F.normalize(features.text, dim=1))
    assert torch.equal(found.owner, features.owner)


@pytest.mark.parametrize("name", ["epochs", "micro_batch", "accumulate", "width"])
def test_settings_refuse_nothing(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        HeadSettings(**{name: 0})


def test_names() -> None:
    names = [loss.name for loss in [*LOSSES, MarginLoss(0.1, 0.2)]]
    assert names == ["InfoNCE", "fixed margin 0.3", "L_HN, γ 0.5", "affine, m 0.2, γ 0.5", "margin 0.1 and γ 0.2"]
