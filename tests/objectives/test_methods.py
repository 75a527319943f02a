"""Properties of every method: terms against twins, shards, exchange of the global loss, schedules, runs on scenes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from method_twins import TWINS, gradients, make_embeddings, twin_terms

from hnclip.config import ObjectiveConfig, OptimConfig
from hnclip.data.batching import prepare
from hnclip.data.parts import PARTS
from hnclip.data.scenes import scene_records
from hnclip.losses import GLOBAL_LOSSES, hard_negative_loss
from hnclip.models.load import load
from hnclip.objectives.base import TrainProgress
from hnclip.objectives.registry import METHODS, build_objective, build_readouts
from hnclip.objectives.structxlip import weight_factors
from hnclip.training.step import backward

FIDELITIES = ("official", "corrected")


def config_of(method, fidelity="corrected", global_loss="infonce", weights=None, **options):
    weights = dict.fromkeys(TWINS[method], 1.0) if weights is None else weights
    if method == "hn_clip":
        return ObjectiveConfig(global_loss=global_loss, token_weight=weights["token"], **options)
    named = {"method": method, "fidelity": fidelity, "global_loss": global_loss, "weights": weights}
    return ObjectiveConfig(**named, token_weight=0.0, **options)


def assert_same(got, expected, leaves, tolerance=1e-9):
    assert list(got) == list(expected)
    for name in got:
        torch.testing.assert_close(got[name], expected[name], rtol=tolerance, atol=tolerance)
        mine, theirs = gradients(got[name], leaves), gradients(expected[name], leaves)
        for leaf in leaves:
            torch.testing.assert_close(mine[leaf], theirs[leaf], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("fidelity", FIDELITIES)
@pytest.mark.parametrize("method", METHODS)
def test_terms_equal_their_twins_in_value_and_every_gradient(method, fidelity, missing):
    embeddings, leaves = make_embeddings(method, missing=missing)
    terms = build_objective(config_of(method, fidelity))(embeddings)
    assert_same(terms, twin_terms(method, embeddings, fidelity == "official"), leaves)


@pytest.mark.parametrize("name", GLOBAL_LOSSES)
@pytest.mark.parametrize("method", METHODS)
def test_the_global_loss_changes_no_bit_of_the_other_terms(method, name):
    embeddings, leaves = make_embeddings(method, dtype=torch.float32)
    got, plain = (build_objective(config_of(method, global_loss=loss))(embeddings) for loss in (name, "infonce"))
    assert list(got) == list(plain) == ["global", *TWINS[method]]
    for term in TWINS[method]:
        assert torch.equal(got[term], plain[term])
        mine, theirs = gradients(got[term], leaves), gradients(plain[term], leaves)
        assert all(torch.equal(mine[leaf], theirs[leaf]) for leaf in leaves)
    if method != "smartclip":
        image, text = embeddings.images["full"].vectors, embeddings.texts["caption"].vectors
        assert torch.equal(got["global"], GLOBAL_LOSSES[name](image, text, embeddings.scale, ids=embeddings.ids))


@pytest.mark.parametrize(("method", "left_out"), [(method, term) for method in METHODS for term in TWINS[method]])
def test_a_term_with_weight_zero_needs_no_views_of_its_own(method, left_out):
    weights = {term: 0.0 if term == left_out else 0.3 for term in TWINS[method]}
    objective, whole = (build_objective(config_of(method, weights=w)) for w in (weights, None))
    assert set(objective.image_views) <= set(whole.image_views)
    assert set(objective.text_views) <= set(whole.text_views)
    assert set(objective.parts) <= set(whole.parts)
    embeddings, _ = make_embeddings(method)
    seen = replace(
        embeddings,
        images={name: embeddings.images[name] for name in objective.image_views},
        texts={name: embeddings.texts[name] for name in objective.text_views},
    )
    terms, expected = objective(seen), whole(embeddings)
    assert set(terms) == {"global", *TWINS[method]} - {left_out}
    for name, term in terms.items():
        torch.testing.assert_close(term, expected[name] * weights.get(name, 1.0))


@pytest.mark.parametrize("method", [method for method in METHODS if method not in ("hn_clip", "smartclip")])
def test_without_a_global_loss_the_other_terms_stay(method):
    objective = build_objective(config_of(method, global_loss="none"))
    assert list(objective(make_embeddings(method)[0])) == list(TWINS[method])


def test_frozen_margins_come_from_the_batch():
    e, _ = make_embeddings("hn_clip")
    frozen = make_embeddings("hn_clip", seed=5)[1]["caption"].detach()
    objective = build_objective(config_of("hn_clip", global_loss="hn", margin_source="frozen"))
    image, text = e.images["full"].vectors, e.texts["caption"].vectors
    expected = hard_negative_loss(image, text, e.scale, margin_text=frozen, ids=e.ids)
    assert objective(replace(e, margin_text=frozen))["global"] == expected
    with pytest.raises(ValueError, match="margin_text"):
        objective(e)


def test_finelips_term_rises_through_the_first_epoch():
    e, _ = make_embeddings("finelip")
    objective = build_objective(config_of("finelip"))
    whole = objective(e)
    for step, share in ((0, 0.125), (1, 0.375), (3, 0.875), (4, 1.0), (11, 1.0)):
        terms = objective.at(TrainProgress(step, epoch_steps=4, epochs=3))(e)
        torch.testing.assert_close(terms["fine"], share * whole["fine"])
        assert terms["global"] == whole["global"]


def test_structxlips_weights_fall_as_measured_in_ten_epochs():
    factors = [weight_factors(TrainProgress(epoch * 37 + 5, 37, 10)) for epoch in range(10)]
    measured = [1, 1, 0.985, 0.944, 0.883, 0.817, 0.756, 0.715, 0.7, 0.7]  # of the released code
    assert [factor["structure"] for factor in factors] == pytest.approx(measured, abs=5e-4)
    for name, floor in (("consistency", 0.5), ("chunks", 0.4)):
        course = [(factor["structure"] - 0.7) / 0.3 for factor in factors]
        assert [(factor[name] - floor) / (1 - floor) for factor in factors] == pytest.approx(course)
    e, _ = make_embeddings("structxlip")
    objective = build_objective(config_of("structxlip"))
    late = objective.at(TrainProgress(9, 1, 10))(e)
    torch.testing.assert_close(late["chunks"], 0.4 * objective(e)["chunks"])


# Through data, encoder and gradient caching


@pytest.fixture
def small(model_directory):
    return load(model_directory).eval()


def make_batch(model, config):
    """Scenes with filtered captions; some lack something. The readouts are put into the model."""
    objective = build_objective(config)
    model.readouts.clear()
    model.readouts.update(build_readouts(objective, model))
    records = [
        replace(record, filtered=tuple(caption.replace("red ", "") for caption in record.captions))
        for record in scene_records("park", "train", families=2, members=4)
    ]
    records[3] = replace(records[3], regions=())
    records[4] = replace(records[4], filtered=())
    data = prepare(
        records,
        model.text_transform,
        model.image_transform,
        image_views=objective.image_views,
        text_views=objective.text_views,
        parts=objective.parts,
        grid=model.family.grid(model.backbone, model.image_size),
    )
    return objective, data.batch(range(len(records)))


@pytest.mark.parametrize("method", METHODS)
def test_scenes_reach_all_terms_and_all_weights_with_and_without_gradient_caching(small, method):
    objective, batch = make_batch(small, config_of(method, global_loss="hn"))
    assert {PARTS[part].view for part in objective.parts} <= set(objective.readouts(small))
    found = []
    for negatives, chunk in (("micro", 8), ("batch", 3)):
        small.zero_grad()
        terms = backward(small, batch, objective, OptimConfig(micro_batch=chunk, negatives=negatives)).terms
        assert list(terms) == ["global", *TWINS[method]]
        assert all(term > 0 for term in terms.values())
        found.append((terms, {name: weight.grad.clone() for name, weight in small.named_parameters()}))
    (terms, whole), (cached_terms, cached) = found
    torch.testing.assert_close(cached_terms, terms, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(cached, whole, rtol=1e-3, atol=2e-5)
