"""GOAL's terms against literal twins, whole and in shards; its switches; and a run on scenes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from framework_twins import IDS, Material, N, bools, gradients, make_batch, shards_of, twin_sym_ce, without

from hnclip.config import ObjectiveConfig
from hnclip.data.scenes import scene_records
from hnclip.data.views.parts import PARTS
from hnclip.losses import GLOBAL_LOSSES, clip_loss
from hnclip.models.load import load
from hnclip.objectives.choice import Choice
from hnclip.objectives.embeddings import Embeddings, ViewEmbeddings
from hnclip.objectives.global_term import GlobalTerm
from hnclip.objectives.goal import Goal, objective, readouts
from hnclip.objectives.objective import Moment, Objective
from hnclip.train.grad_cache import cached_backward, micro_backward

CROP, SENTENCE = [1, 1, 0, 1, 0, 1, 1], [1, 1, 0, 0, 1, 1, 1]
REGION, SPAN = [1, 0, 1, 1, 1, 0, 1], [0, 1, 1, 1, 1, 0, 1]
WEIGHTS = {"local": 0.5, "patch": 1.0, "text": 1.0}
INFONCE = GlobalTerm(clip_loss)


def make(missing=True, **options):
    """Embeddings as the encoder makes them for GOAL, and their leaves."""
    m = Material(**options)
    full = ViewEmbeddings(m.vectors("full"), m.vectors("region", 1), bools(REGION)[:, None] | (not missing))
    caption = ViewEmbeddings(m.vectors("caption"), m.vectors("span", 1), bools(SPAN)[:, None] | (not missing))
    crop = ViewEmbeddings(m.vectors("crop"), present=bools(CROP) if missing else None)
    sentence = ViewEmbeddings(m.vectors("sentence"), present=bools(SENTENCE) if missing else None)
    images, texts = {"full": full, "crop": crop}, {"caption": caption, "sentence": sentence}
    return Embeddings(images, texts, m.leaves["scale"], IDS), m.leaves


def twin(leaves, crop, sentence, region, span):
    """The terms as they are written down, pair by pair."""
    both = [i for i in range(N) if crop[i] and sentence[i]]
    patch = [i for i in range(N) if crop[i] and region[i]]
    text = [i for i in range(N) if sentence[i] and span[i]]
    everybody = range(N)
    crops, sentences = ([leaves[name][i] for i in both] for name in ("crop", "sentence"))
    return {
        "global": twin_sym_ce(
            [leaves["full"][i] for i in everybody], [leaves["caption"][i] for i in everybody], leaves["scale"], IDS
        ),
        "local": 0.5 * twin_sym_ce(crops, sentences, leaves["scale"], IDS[both]),
        "patch": sum(((leaves["region"][i, 0] * leaves["crop"][i]).sum() - 1) ** 2 for i in patch) / len(patch),
        "text": sum(((leaves["span"][i, 0] * leaves["sentence"][i]).sum() - 1) ** 2 for i in text) / len(text),
    }


def assert_same(got, expected, leaves):
    assert list(got) == list(expected)
    for name, term in got.items():
        torch.testing.assert_close(term, expected[name], rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
        for leaf, a, b in zip(leaves, *(gradients(terms[name], list(leaves.values())) for terms in (got, expected))):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, msg=lambda m, n=name, f=leaf: f"{n} by {f}: {m}")


@pytest.mark.parametrize("missing", [False, True])
def test_terms_are_the_twins_in_value_and_every_gradient(missing):
    embeddings, leaves = make(missing)
    there = (CROP, SENTENCE, REGION, SPAN) if missing else ([1] * N,) * 4
    goal: Objective = Goal(INFONCE)
    assert_same(goal(embeddings), twin(leaves, *there), leaves)


@pytest.mark.parametrize("sizes", [[3, 4], [1, 2, 4], [5, 1, 1], [2, 1, 1, 2, 1]])
def test_weighted_shards_average_to_the_whole(sizes):
    embeddings, leaves = make()
    shards = [Goal(INFONCE)(shard) for shard in shards_of(embeddings, sizes)]
    whole = Goal(INFONCE)(embeddings)
    means = {
        name: torch.stack([len(sizes) * rows / N * shard[name] for rows, shard in zip(sizes, shards)]).mean()
        for name in whole
    }
    assert_same(means, whole, leaves)


@pytest.mark.parametrize("name", sorted(GLOBAL_LOSSES))
def test_the_global_term_changes_no_bit_of_the_others(name):
    embeddings, leaves = make(dtype=torch.float32)
    with_it, plain = Goal(GlobalTerm(GLOBAL_LOSSES[name], margins=name == "hn"))(embeddings), Goal(INFONCE)(embeddings)
    alone = Goal(None)(embeddings)
    assert list(with_it) == list(plain) == ["global", *alone]
    for term in alone:
        for other in (plain, alone):
            assert torch.equal(with_it[term], other[term])
            pairs = zip(*(gradients(terms[term], list(leaves.values())) for terms in (with_it, other)))
            assert all(torch.equal(a, b) for a, b in pairs)
    image, text = embeddings.images["full"].vectors, embeddings.texts["caption"].vectors
    assert torch.equal(with_it["global"], GLOBAL_LOSSES[name](image, text, embeddings.scale, ids=IDS))


@pytest.mark.parametrize("weights", list(product([0, 0.3], repeat=3)))
def test_a_term_left_out_asks_for_nothing(weights):
    local, patch, text = weights
    goal = Goal(INFONCE, local, patch, text)
    embeddings, _ = make()
    assert goal.image_views == (("full", "crop") if local or patch else ("full",))
    assert goal.text_views == (("caption", "sentence") if local or text else ("caption",))
    assert goal.parts == (("region",) if patch else ()) + (("sentence_span",) if text else ())
    assert goal.tokens == bool(patch or text)
    seen = replace(
        embeddings,
        images={
            "full": replace(embeddings.images["full"], **({} if patch else {"tokens": None, "mask": None})),
            **{name: embeddings.images[name] for name in goal.image_views[1:]},
        },
        texts={
            "caption": replace(embeddings.texts["caption"], **({} if text else {"tokens": None, "mask": None})),
            **{name: embeddings.texts[name] for name in goal.text_views[1:]},
        },
    )
    terms, every = goal(seen), Goal(INFONCE, 1, 1, 1)(embeddings)
    assert set(terms) == {"global"} | {n for n, w in zip(("local", "patch", "text"), weights) if w}
    for name, term in terms.items():
        torch.testing.assert_close(term, every[name] * (1 if name == "global" else 0.3))
    choice = Choice(INFONCE, dict(zip(WEIGHTS, weights)))
    made = readouts(choice, None)
    assert set(made) == ({"full"} if patch else set()) | ({"caption"} if text else set())
    assert {PARTS[part].view for part in goal.parts} == set(made)


@pytest.mark.parametrize("view", ["crop", "sentence"])
def test_without_any_region_its_terms_are_zero(view):
    embeddings, leaves = make()
    terms = Goal(INFONCE)(without(embeddings, view, torch.zeros(N, dtype=torch.bool)))
    for name in ("local", "patch" if view == "crop" else "text"):
        assert terms[name] == 0
        assert all(not grad.any() for grad in gradients(terms[name], list(leaves.values())))
    other = "text" if view == "crop" else "patch"
    assert terms[other] == Goal(INFONCE)(embeddings)[other]


def test_no_gradient_is_stopped():
    embeddings, leaves = make(missing=False)
    terms = Goal(INFONCE)(embeddings)
    for name, reached in {
        "local": {"crop", "sentence", "scale"},
        "patch": {"region", "crop"},
        "text": {"span", "sentence"},
    }.items():
        grads = gradients(terms[name], list(leaves.values()))
        assert {leaf for leaf, grad in zip(leaves, grads) if grad.any()} == reached


@pytest.mark.parametrize("official", list(product([False, True], repeat=3)))
def test_switches_choose_parts_and_nothing_else(official):
    names = ("goal_patch_size", "goal_box_scale", "goal_late_span")
    chosen = frozenset(name for name, there in zip(names, official) if there)
    made = objective(Choice(INFONCE, WEIGHTS, chosen))
    region = {
        (False, False): "region",
        (True, False): "region_official_patch",
        (False, True): "region_official_scale",
        (True, True): "region_official",
    }[official[:2]]
    assert made.parts == (region, "sentence_span_official" if official[2] else "sentence_span")
    assert replace(made, region_part="region", span_part="sentence_span") == Goal(INFONCE)
    assert made.at(Moment(5, 2, 10)) is made


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_wrong_weights_are_an_error(weight):
    for name in WEIGHTS:
        with pytest.raises(ValueError, match=f"GOAL's {name}"):
            Goal(INFONCE, **{f"{name}_weight": weight})
    with pytest.raises(ValueError, match="GOAL needs a term"):
        Goal(None, 0, 0, 0)


def test_missing_readouts_are_an_error():
    embeddings, _ = make()
    plain = replace(embeddings, images={**embeddings.images, "full": ViewEmbeddings(embeddings.images["full"].vectors)})
    with pytest.raises(ValueError, match="readouts"):
        Goal(INFONCE)(plain)


# Through data, encoder and gradient caching -------------------------------------------------------------------------


@pytest.fixture
def small(model_directory):
    return load(model_directory).eval()


def grads_of(model):
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("fidelity", ["official", "corrected"])
def test_scenes_reach_all_terms_and_all_weights(small, fidelity):
    records = scene_records("park", "train", families=2, members=4)
    records[3] = replace(records[3], regions=())
    made, batch = make_batch(
        small, ObjectiveConfig(framework="goal", token_weight=0, global_loss="infonce", fidelity=fidelity), records
    )
    embeddings = small(batch, tokens=made.tokens)
    assert embeddings.images["crop"].present.tolist() == [True] * 3 + [False] + [True] * 4
    assert embeddings.images["full"].mask[:, 0].tolist() == embeddings.texts["caption"].mask[:, 0].tolist()
    assert embeddings.images["full"].mask.sum() == 7
    terms = made(embeddings)
    assert list(terms) == ["global", "local", "patch", "text"]
    assert all(term > 0 for term in terms.values())
    sum(terms.values()).backward()
    assert [name for name, weight in small.named_parameters() if weight.grad is None] == []


def test_gradient_caching_is_the_whole_batch(small):
    records = scene_records("park", "train", families=2, members=4)
    records[3] = replace(records[3], regions=())
    made, batch = make_batch(small, ObjectiveConfig(framework="goal", token_weight=0, global_loss="hn"), records)
    found = []
    for backward, chunk in ((micro_backward, 8), (cached_backward, 3)):
        small.zero_grad()
        result = backward(small, batch, made, chunk=chunk)
        found.append((result.terms, grads_of(small)))
    (terms, whole), (cached_terms, cached) = found
    for name in terms:
        torch.testing.assert_close(cached_terms[name], terms[name])
    for name in whole:
        torch.testing.assert_close(cached[name], whole[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("switch", ["goal_patch_size", "goal_box_scale", "goal_late_span"])
def test_a_switch_changes_its_own_term_alone(small, switch):
    """The small model has patches of 16 pixels, where the patch switch changes nothing at all."""
    records = scene_records("park", "train", families=2, members=4)
    found = []
    for fidelity in ("official", "corrected"):
        config = ObjectiveConfig(framework="goal", token_weight=0, global_loss="infonce", switches={switch: fidelity})
        made, batch = make_batch(small, config, records)
        with torch.no_grad():
            found.append(made(small(batch, tokens=True)))
    changed = {name for name in found[0] if not torch.equal(found[0][name], found[1][name])}
    assert changed == {"goal_patch_size": set(), "goal_box_scale": {"patch"}, "goal_late_span": {"text"}}[switch]
