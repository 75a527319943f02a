"""Heads that start as the model itself, train as a run does, and choose without the pairs that measure."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hnclip.analysis import head_probe as module
from hnclip.analysis.head_probe import Change, Features, ProbeSettings, head_probe, recall_change
from hnclip.analysis.heads import HeadLoss, batch_loss, deal_epochs, train_heads, turned
from hnclip.config import OptimConfig
from hnclip.data.sampler import choose_captions, cut_batches, epoch_order
from hnclip.evaluate.bootstrap import Estimate
from hnclip.evaluate.ranks import Ranks, retrieval_ranks
from hnclip.losses import clip_loss, fixed_margin_loss, tiled_hard_negative_loss
from hnclip.train.optimizer import learning_rate_factor

LOSSES = [HeadLoss(), HeadLoss(gamma=0.5), HeadLoss(margin=0.3)]
SMALL = ProbeSettings(seeds=(0, 1), gammas=(0.25, 0.5), rates=(0.03, 0.1), epochs=2, micro_batch=8, accumulate=4)


def unit(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1).to(dtype)


def rotated(pictures: int, *, width: int = 16, captions: int = 1, noise: float = 0.3, seed: int = 0) -> Features:
    """Captions are the pictures seen from another side, the same for every seed, with noise."""
    turn = torch.linalg.qr(unit(width, width, seed=99)).Q
    image = unit(pictures, width, seed=seed)
    owner = torch.arange(pictures).repeat_interleave(captions)
    text = F.normalize(image[owner] @ turn + noise * unit(len(owner), width, seed=seed + 1), dim=1)
    return Features(image, text, owner, torch.arange(pictures), torch.arange(len(owner)), torch.arange(pictures) // 2)


def alike(features: Features) -> Features:
    """The same with captions that are close to each other, so that a margin has a mean."""
    return replace(features, text=F.normalize(features.text + 0.5, dim=1))


def test_heads_begin_as_the_model_itself() -> None:
    held_out = rotated(30, captions=3)
    zero = torch.zeros(2, 16, 16)
    before, model = module._ranks(held_out, zero), retrieval_ranks(held_out.image, held_out.text, held_out.owner)
    assert torch.equal(before.text_to_image, model.text_to_image)
    assert torch.equal(before.image_to_text, model.image_to_text)
    still = replace(SMALL, rates=(1e-12,))  # a rate that moves nothing leaves every recall at zero-shot
    found = head_probe(alike(rotated(70, seed=5)), held_out, scale=20.0, settings=still)
    assert found.control is not None
    assert found.zero_shot == {
        "text_to_image": 100 * float((model.text_to_image == 1).double().mean()),
        "image_to_text": 100 * float((model.image_to_text == 1).double().mean()),
    }
    for fit in (found.infonce, *found.fits, found.control):
        assert fit.recall == {name: (value, value) for name, value in found.zero_shot.items()}
    assert found.verdict == "undecided"
    assert found.mean[:3] == (0.0, 0.0, 0.0)


def test_infonce_learns_what_the_model_has_not() -> None:
    train, held_out, settings = rotated(400), rotated(60, seed=50), replace(SMALL, epochs=8)
    part = module._Part(train, rotated(60, seed=70), deal_epochs(train, 0, settings))
    chooser = module._Chooser([part], 20.0, settings)
    chosen = chooser.choose(HeadLoss(), iter(range(2)))
    assert (chosen.rate, len(chosen.heads)) == (0.1, 1)
    assert chosen.epoch > 1
    before, after = (module._ranks(held_out, heads) for heads in (torch.zeros(2, 16, 16), chosen.heads[0]))
    for name in ("text_to_image", "image_to_text"):
        assert (getattr(before, name) == 1).double().mean() < 0.15
        assert (getattr(after, name) == 1).double().mean() > 0.6


def literal_loss(image: Tensor, text: Tensor, loss: HeadLoss, scale: float, chunks: list[list[int]]) -> Tensor:
    """Pair by pair: cross-entropies of each query against its own chunk, in both directions."""
    rows = []
    for chunk in chunks:
        for i in chunk:
            for forward in (True, False):
                logits = []
                for j in chunk:
                    score = image[i] @ text[j] if forward else text[i] @ image[j]
                    extra = 0.0 if i == j else loss.gamma * (text[i] @ text[j]).detach() + loss.margin
                    logits.append(scale * (score + extra))
                rows.append(torch.logsumexp(torch.stack(logits), 0) - logits[chunk.index(i)])
    return torch.stack(rows).mean()


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
@pytest.mark.parametrize(
    ("pairs", "chunks"),
    [
        (12, [range(0, 4), range(4, 8), range(8, 12)]),
        (11, [range(0, 4), range(4, 8), range(8, 11)]),
        (9, [range(0, 4), range(4, 9)]),  # one left over joins the chunk before
        (3, [range(0, 3)]),
    ],
)
def test_a_step_has_the_gradient_of_the_literal_twin(loss: HeadLoss, pairs: int, chunks: list[range]) -> None:
    image, text = unit(2, pairs, 5, seed=1, dtype=torch.float64)
    grads, values = [], []
    for way in (batch_loss, literal_loss):
        heads = (0.3 * unit(2, 5, 5, seed=2, dtype=torch.float64)).requires_grad_()
        new_image = torch.stack([F.normalize(row + row @ heads[0], dim=0) for row in image])
        new_text = torch.stack([F.normalize(row + row @ heads[1], dim=0) for row in text])
        if way is batch_loss:
            new_image, new_text = turned(image, heads[0]), turned(text, heads[1])
            value = batch_loss(new_image, new_text, loss, scale=7.0, size=4)
        else:
            value = literal_loss(new_image, new_text, loss, 7.0, [list(chunk) for chunk in chunks])
        value.backward()
        values.append(value.item())
        grads.append(heads.grad)
    assert values[0] == pytest.approx(values[1], rel=1e-12)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("size", [13, 14, 100])
def test_with_one_chunk_the_losses_are_those_of_training(size: int) -> None:
    image, text = unit(2, 13, 6, seed=3)
    plain, hard, fixed = (float(batch_loss(image, text, loss, scale=20.0, size=size)) for loss in LOSSES)
    assert plain == pytest.approx(float(clip_loss(image, text, 20.0)), rel=1e-6)
    assert hard == pytest.approx(float(tiled_hard_negative_loss(image, text, 20.0, 0.5)), rel=1e-6)
    assert fixed == pytest.approx(float(fixed_margin_loss(image, text, 20.0, margin=0.3)), rel=1e-6)


@pytest.mark.parametrize("negatives", ["micro", "batch"])
def test_training_is_adamw_on_the_batches_of_a_run(negatives: Any) -> None:
    """A loop written out: one parameter per side, the loss of every batch, the schedule by hand."""
    features, settings = rotated(75), replace(SMALL, negatives=negatives)
    deals = deal_epochs(features, 3, settings)
    assert [len(batch.pictures) for batch in deals[0]] == [32, 32, 11]
    after = train_heads(features, deals, HeadLoss(0.5), scale=20.0, rate=0.16, settings=settings)

    sides = [torch.zeros(16, 16, requires_grad=True) for _ in range(2)]
    optim = OptimConfig()
    optimizer = torch.optim.AdamW(sides, betas=(optim.beta1, optim.beta2), weight_decay=optim.weight_decay)
    step = 0
    for epoch, batches in enumerate(deals):
        for rows in batches:
            factor = learning_rate_factor(step, total=6, warmup=0, floor=optim.lr_floor)
            optimizer.param_groups[0]["lr"] = 0.01 * factor
            optimizer.zero_grad()
            image = turned(features.image[rows.pictures], sides[0])
            text = turned(features.text[rows.captions], sides[1])
            whole = len(rows.pictures)
            size = whole if negatives == "batch" else 8
            for start in range(0, whole, size):
                part = tiled_hard_negative_loss(image[start : start + size], text[start : start + size], 20.0, 0.5)
                (part * len(image[start : start + size]) / whole).backward(retain_graph=True)
            torch.nn.utils.clip_grad_norm_(sides, optim.clip_grad)
            optimizer.step()
            step += 1
        torch.testing.assert_close(after[epoch], torch.stack(sides).detach(), rtol=1e-4, atol=1e-6)
    assert not torch.equal(after[0], after[1])


def test_batches_and_captions_are_those_of_a_run() -> None:
    """Two captions of each picture, in any order; some pictures and captions are the same thing."""
    plain = rotated(40, captions=2)
    shuffled = torch.randperm(80, generator=torch.Generator().manual_seed(0))
    features = Features(
        plain.image,
        plain.text[shuffled],
        plain.owner[shuffled],
        torch.arange(40) // 2,
        torch.arange(80) % 30,
    )
    settings = replace(SMALL, epochs=3)
    own = (
        [shuffled.tolist().index(2 * row) for row in range(40)],
        [shuffled.tolist().index(2 * row + 1) for row in range(40)],
    )
    shown = []
    for epoch, batches in enumerate(deal_epochs(features, 7, settings)):
        for pictures, captions in batches:
            assert torch.equal(features.owner[captions], pictures)
        shown.append({row: caption for batch in batches for row, caption in zip(*map(Tensor.tolist, batch))})
        choice = choose_captions(torch.full((40,), 2), 7, epoch)
        which = [sorted((own[0][row], own[1][row]))[int(choice[row])] for row in range(40)]
        expected = cut_batches(epoch_order(40, 7, epoch), [32, 8])
        assert [pictures.tolist() for pictures, _ in batches] == expected
        assert shown[-1] == {row: which[row] for rows in expected for row in rows}
    for row in set(shown[0]) & set(shown[1]):
        assert shown[0][row] != shown[1][row]


def probed(monkeypatch: pytest.MonkeyPatch, train: Features, held_out: Features) -> tuple[Any, list[Any]]:
    """A probe, and all that was chosen on the way."""
    chosen: list[Any] = []
    choose = module._Chooser.choose

    def watched(self: Any, *arguments: Any) -> Any:
        chosen.append(choose(self, *arguments))
        return chosen[-1]

    with monkeypatch.context() as patch:
        patch.setattr(module._Chooser, "choose", watched)
        return head_probe(train, held_out, scale=20.0, settings=SMALL), chosen


def test_held_out_pairs_choose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    train, held_out = alike(rotated(100)), rotated(40, seed=8)
    held_out = replace(held_out, text=held_out.image)  # found at once
    poisoned = replace(held_out, image=held_out.image.flip(0), text=-held_out.text)
    one, chosen = probed(monkeypatch, train, held_out)
    other, others = probed(monkeypatch, train, poisoned)
    assert one.infonce.recall != other.infonce.recall
    assert one.gamma == other.gamma
    assert len(chosen) == len(others) == 1 + len(SMALL.gammas) + 1
    for a, b in zip(chosen, others):
        assert (a.loss, a.rate, a.epoch, a.score) == (b.loss, b.rate, b.epoch, b.score)
        assert len(a.heads) == 2
        assert all(torch.equal(x, y) for x, y in zip(a.heads, b.heads))


def test_the_best_on_choosing_pairs_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that tell their rate, epoch and γ, and scores made up from these: ties go to the lower and earlier."""
    scores = {(0.03, 1): 5.0, (0.03, 2): 6.0, (0.1, 1): 6.0, (0.1, 2): 4.0}

    def told(features: Any, epochs: Any, loss: HeadLoss, *, rate: float, **_: Any) -> list[Tensor]:
        return [torch.full((2, 16, 16), rate * epoch) for epoch in (1, 2)]

    known = {rate * epoch: score for (rate, epoch), score in scores.items()}
    monkeypatch.setattr(module, "train_heads", told)
    monkeypatch.setattr(
        module,
        "_score",
        lambda part, heads: known[min(known, key=lambda product: abs(product - float(heads[0, 0, 0])))],
    )
    settings = replace(SMALL, rates=(0.1, 0.03))
    found = head_probe(alike(rotated(70)), rotated(20, seed=3), scale=20.0, settings=settings)
    assert found.control is not None
    for fit in (found.infonce, *found.fits, found.control):
        assert (fit.rate, fit.epoch, fit.choosing) == (0.03, 2, 6.0)
    assert found.gamma == SMALL.gammas[0]


def test_both_sides_have_the_same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[Any]] = {}
    real = module.train_heads

    def watched(features: Features, epochs: Any, loss: HeadLoss, **options: Any) -> list[Tensor]:
        rows = [batch.pictures.tolist() for batches in epochs for batch in batches]
        seen.setdefault(loss.name, []).append((options["rate"], rows))
        return real(features, epochs, loss, **options)

    monkeypatch.setattr(module, "train_heads", watched)
    head_probe(alike(rotated(70)), rotated(20, seed=3), scale=20.0, settings=SMALL)
    first, *others = seen.values()
    assert len(others) == 3
    assert all(other == first for other in others)
    assert first[0][1] != first[1][1]  # of another seed


def test_a_probe_is_the_same_twice_and_draws_from_nobody_else() -> None:
    train, held_out = rotated(90, captions=2), rotated(24, seed=3)
    state = torch.get_rng_state()
    first = head_probe(train, held_out, scale=20.0, settings=SMALL)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    again = head_probe(train, held_out, scale=20.0, settings=SMALL)
    assert replace(again, seconds=0.0) == replace(first, seconds=0.0)
    other = head_probe(train, held_out, scale=20.0, settings=replace(SMALL, seeds=(4, 5)))
    assert other.infonce.choosing != first.infonce.choosing


def test_families_stay_whole_and_the_share_is_held_back() -> None:
    features = replace(rotated(101), groups=torch.arange(101) % 9)
    held_back = []
    for turn in range(4):
        fitting, choosing = module._split(features, 0.25, turn)
        assert len(fitting) + len(choosing) == 101
        assert set(fitting.families.tolist()).isdisjoint(choosing.families.tolist())
        assert 0.25 * 101 <= len(choosing) < 0.25 * 101 + 12
        held_back.append(set(choosing.image_ids.tolist()))
    assert set.union(*held_back) == set(range(101))
    two = replace(rotated(10), groups=torch.tensor([0] + [1] * 9))
    for turn in range(5):
        assert {len(part) for part in module._split(two, 0.99, turn)} == {1, 9}  # somebody is left to train
        assert {len(part) for part in module._split(two, 0.01, turn)} == {1, 9}  # and to choose
    single = replace(rotated(50), groups=None)
    parts = [module._split(single, 0.1, turn)[1].image_ids.tolist() for turn in range(10)]
    assert sorted(row for part in parts for row in part) == list(range(50))


def test_more_than_most_pairs_are_drawn_at_random() -> None:
    found = head_probe(rotated(200), rotated(20, seed=3), scale=20.0, settings=replace(SMALL, most=100))
    assert (found.left_out, found.pairs, found.choosing, found.held_out) == (100, 100, 11, 20)
    assert "(100 more left out at random)" in found.to_text()
    kept = module._some(rotated(200), 100)
    assert kept.image_ids.tolist() == sorted(set(kept.image_ids.tolist())) != list(range(100))


def test_taking_pictures_keeps_their_captions() -> None:
    features = rotated(6, captions=2)
    taken = features.take(torch.tensor([4, 1]))
    assert taken.image_ids.tolist() == [4, 1]
    assert torch.equal(taken.image, features.image[[4, 1]])
    assert taken.owner.tolist() == [1, 1, 0, 0]
    assert taken.caption_ids.tolist() == [2, 3, 8, 9]
    assert torch.equal(taken.text, features.text[[2, 3, 8, 9]])
    assert taken.families.tolist() == [2, 0]


def test_the_control_has_the_mean_margin() -> None:
    train, held_out = rotated(80, captions=2), rotated(20, seed=3)
    close = alike(train)
    found = head_probe(close, held_out, scale=20.0, settings=SMALL)
    text = close.text[::2].double()
    similarity = text @ text.T
    mean = (similarity.sum() - similarity.trace()) / (len(text) * (len(text) - 1))
    assert found.control is not None
    assert found.control.loss.gamma == 0
    assert found.control.loss.margin == pytest.approx(found.gamma * float(mean), rel=1e-5)
    assert found.control.change is not None
    apart = replace(train, text=train.text - train.text[::2].mean(0))  # cosines below 0 on average
    assert module._mean_similarity(apart) < 0
    without = head_probe(apart, held_out, scale=20.0, settings=SMALL)
    assert without.control is None
    assert without.to_dict()["control"] is None
    assert len(without.rows()) == len(found.rows()) - 1


def ranks(hits: Tensor) -> Ranks:
    """One caption per picture, found at once or not, alike in both directions."""
    rank = torch.where(hits, 1, 5)
    return Ranks(rank, rank, torch.arange(len(rank)))


def test_verdicts_of_known_changes() -> None:
    queries = torch.arange(200)
    some, more = ranks(queries % 2 == 0), ranks(queries % 4 != 1)
    raised = recall_change([more, more], [some, some], queries)
    assert raised.verdict == "raises"
    assert raised.mean.mean == raised.text_to_image.mean == raised.image_to_text.mean == pytest.approx(25.0)
    assert 18 < raised.mean.low < 25 < raised.mean.high < 32
    lowered = recall_change([some, some], [more, more], queries)
    assert lowered.verdict == "lowers"
    assert lowered.mean[:3] == pytest.approx((-25.0, -raised.mean.high, -raised.mean.low))
    other = ranks(queries % 2 == 1)
    assert recall_change([other], [some], queries).verdict == "undecided"
    assert recall_change([some], [some], queries).mean[:3] == (0.0, 0.0, 0.0)
    unsure = recall_change([more, some], [some, more], queries)  # one seed says so, the other the opposite
    assert unsure.verdict == "undecided"
    assert unsure.mean.low < -18
    families = recall_change([more], [some], queries // 40)
    assert families.mean.high - families.mean.low < 1e-9  # every family gains alike
    with pytest.raises(ValueError, match="same captions and pictures"):
        recall_change([some], [some, some], queries)


def test_what_a_probe_says() -> None:
    found = head_probe(alike(rotated(70)), rotated(20, seed=3), scale=130.0, settings=SMALL)
    assert found.control is not None
    assert found.scale == 100.0
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert told["settings"]["seeds"] == [0, 1]
    assert [fit["gamma"] for fit in told["hn"]] == [0.25, 0.5]
    assert told["infonce"]["change"] is None
    assert told["change"] == next(fit["change"] for fit in told["hn"] if fit["gamma"] == told["gamma"])
    assert all(len(values) == 2 for values in told["control"]["R@1"].values())
    rows = found.rows()
    assert [row[0] for row in rows] == [
        "heads",
        "none (zero-shot)",
        "InfoNCE",
        "L_HN, γ 0.25",
        "L_HN, γ 0.5",
        found.control.loss.name,
    ]
    assert {len(row) for row in rows} == {6}
    for line in (
        "70 training pictures, of which 8, others for each seed, only chose",
        "20 measured",
        "negatives from the micro-batch",
        "seeds 0, 1",
        found.sentence(),
    ):
        assert line in found.to_text()
    for low, high, words in ((1.0, 3.0, "to raise"), (-3.0, -1.0, "to lower"), (-1.0, 1.0, "not expected to change")):
        change = Change(*[Estimate((low + high) / 2, low, high)] * 3)
        fits = tuple(replace(fit, change=change) for fit in found.fits)
        assert words in replace(found, fits=fits).sentence()


def test_progress_counts_every_training() -> None:
    steps: list[int] = []
    ended: list[int] = []

    def progress(walk: range) -> Any:
        for step in walk:
            steps.append(step)
            yield step
        ended.append(len(walk))

    head_probe(alike(rotated(70)), rotated(20, seed=3), scale=20.0, settings=SMALL, progress=progress)
    assert ended == [3 * 4, 4]
    assert len(steps) == 16


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("1 image features are not finite or have no length, first row 2", {"image": "nan"}),
        ("1 text features are not finite or have no length, first row 2", {"text": "zero"}),
        ("image features are 16 wide and text features 8", {"text": torch.ones(20, 8)}),
        (r"image features must be floating-point \[N, D\]", {"image": torch.ones(20, 16).long()}),
        (r"text features must be floating-point \[N, D\]", {"text": torch.ones(16)}),
        (r"owner must be \[20\]", {"owner": torch.arange(19)}),
        (r"image_ids must be \[20\]", {"image_ids": torch.arange(3)}),
        (r"caption_ids must be \[20\]", {"caption_ids": torch.arange(3)}),
        (r"groups must be \[20\]", {"groups": torch.arange(3)}),
        ("owner must name each of the 20 pictures", {"owner": torch.arange(20).clamp(max=18)}),
        ("owner must name each of the 20 pictures", {"owner": torch.arange(20) - 1}),
        ("owner must name each of the 20 pictures", {"owner": torch.arange(20) + 1}),
    ],
)
def test_features_that_cannot_be_used(message: str, fields: dict[str, Any]) -> None:
    features = rotated(20)
    values = {"nan": torch.nan, "zero": 0.0}
    for name, value in fields.items():
        if isinstance(value, str):
            fields = {name: getattr(features, name).clone().index_fill_(0, torch.tensor(2), values[value])}
    with pytest.raises(ValueError, match=message):
        replace(features, **fields)


def test_too_little_or_too_different_data() -> None:
    train, held_out = rotated(70), rotated(20, seed=3)
    for message, arguments in (
        ("at least 64 train pairs", (rotated(63), held_out)),
        ("at least 16 held-out pairs", (train, rotated(15))),
        ("train features are 16 wide and held-out features 8", (train, rotated(20, width=8))),
        ("all train pairs are one family", (replace(train, groups=torch.zeros(70).long()), held_out)),
        ("all held-out pairs are one family", (train, replace(held_out, groups=torch.zeros(20).long()))),
    ):
        with pytest.raises(ValueError, match=message):
            head_probe(*arguments, scale=20.0)
    for scale in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="scale must be finite"):
            head_probe(train, held_out, scale=scale)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seeds", ()),
        ("seeds", (1, 1)),
        ("gammas", ()),
        ("gammas", (0.0, 0.5)),
        ("gammas", (float("inf"),)),
        ("rates", (-0.1,)),
        ("negatives", "all"),
        ("epochs", 0),
        ("micro_batch", 1),
        ("accumulate", 0),
        ("most", 10),
        ("choosing", 0.0),
        ("choosing", 1.0),
    ],
)
def test_settings_that_make_no_sense(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must"):
        ProbeSettings(**{name: value})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_features_of_any_dtype(dtype: torch.dtype) -> None:
    train, held_out = (
        replace(features, image=features.image.to(dtype), text=features.text.to(dtype))
        for features in (rotated(70), rotated(20, seed=3))
    )
    found = head_probe(train, held_out, scale=20.0, settings=SMALL)
    assert found.infonce.choosing > 0
