from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from hnclip.config import ObjectiveConfig
from hnclip.losses import GLOBAL_LOSSES, clip_loss, hard_negative_loss
from hnclip.models.readouts.mask import CaptionMask
from hnclip.objectives.build import build_objective, build_readouts
from hnclip.objectives.choice import Choice
from hnclip.objectives.embeddings import Embeddings, ViewEmbeddings
from hnclip.objectives.global_term import GlobalTerm
from hnclip.objectives.objective import Moment, Objective
from hnclip.objectives.smartclip import SmartClip, objective

IDS = torch.tensor([[0, 0], [0, 1], [2, 1], [3, 3], [4, 4], [5, 5]])
HN = GlobalTerm(partial(hard_negative_loss, gamma=0.4), margins=True)


def make_leaves(n=6, d=8, seed=0, dtype=torch.float64):
    """Vectors of images and captions, masks of zeros and ones, and the scale; all with gradient."""
    generator = torch.Generator().manual_seed(seed)
    topic = torch.randn(n, d, generator=generator, dtype=torch.float64)
    image, text = (F.normalize(topic + torch.randn(n, d, generator=generator), dim=1) for _ in range(2))
    mask = (torch.rand(n, d, generator=generator, dtype=torch.float64) < 0.6).double()
    scale = torch.tensor(10.0, dtype=torch.float64)
    return [leaf.to(dtype).requires_grad_() for leaf in (image, text, mask, scale)]


def embed(image, text, mask, scale, **others):
    counts = torch.ones(len(mask), 1, dtype=torch.bool)
    views = {"full": ViewEmbeddings(image)}, {"caption": ViewEmbeddings(text, mask[:, None], counts)}
    return Embeddings(*views, scale, **others)


def negatives(i, ids):
    n = 6 if ids is None else len(ids)
    return [j for j in range(n) if j != i and (ids is None or not any(a == b for a, b in zip(ids[i].tolist(), ids[j])))]


def twin_global(image, text, mask, scale, gamma=0.0, ids=None, source=None):
    """Pair by pair, direction by direction, dimension by dimension."""
    source = (text if source is None else source).detach()

    def score(i, j):
        return sum(image[i, d] * mask[j, d] * text[j, d] for d in range(image.shape[1]))

    def margin(i, j):
        return 0.0 if i == j else gamma * (source[i] * source[j]).sum()

    total = image.new_zeros(())
    for i in range(len(image)):
        captions = [torch.exp(scale * (score(i, j) + margin(i, j))) for j in (i, *negatives(i, ids))]
        images = [torch.exp(scale * (score(j, i) + margin(j, i))) for j in (i, *negatives(i, ids))]
        total = total - torch.log(captions[0] / sum(captions)) / 2 - torch.log(images[0] / sum(images)) / 2
    return total / len(image)


def twin_sparsity(mask, weight):
    return weight * sum(value for row in mask for value in row) / mask.shape[1] / mask.shape[0]


def check(found, expected, leaves):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    pairs = zip(
        torch.autograd.grad(found, leaves, allow_unused=True), torch.autograd.grad(expected, leaves, allow_unused=True)
    )
    for ours, theirs in pairs:
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("ids", [None, IDS], ids=["no ids", "ids"])
@pytest.mark.parametrize("gamma", [0.0, 0.4])
def test_terms_are_those_of_a_literal_twin_in_value_and_gradient(gamma, ids):
    leaves = make_leaves()
    term = GlobalTerm(partial(hard_negative_loss, gamma=gamma), margins=True) if gamma else GlobalTerm(clip_loss)
    terms = SmartClip(term, 0.3)(embed(*leaves, ids=ids))
    assert list(terms) == ["global", "sparsity"]
    check(terms["global"], twin_global(*leaves, gamma=gamma, ids=ids), leaves)
    check(terms["sparsity"], twin_sparsity(leaves[2], 0.3), leaves)


def test_margins_are_those_of_whole_captions():
    image, text, mask, scale = leaves = make_leaves()
    found = SmartClip(HN, 0.0)(embed(*leaves))["global"]
    # Without margin_text the loss would build them from what it compares.
    assert found != hard_negative_loss(image, mask * text, scale, 0.4)
    frozen = make_leaves(seed=5)[1].detach()
    terms = SmartClip(replace(HN, frozen=True), 0.0)(embed(*leaves, margin_text=frozen))
    check(terms["global"], twin_global(*leaves, gamma=0.4, source=frozen), leaves)


@pytest.mark.parametrize("name", GLOBAL_LOSSES)
def test_with_all_dimensions_open_it_is_the_injected_loss(name):
    image, text, mask, scale = make_leaves()
    term = GlobalTerm(GLOBAL_LOSSES[name], margins=name == "hn")
    opened = embed(image, text, torch.ones_like(mask), scale, ids=IDS)
    assert torch.equal(SmartClip(term, 0.5)(opened)["global"], term(opened))
    assert SmartClip(term, 0.5)(opened)["sparsity"] == 0.5
    closed = embed(image, text, mask, scale, ids=IDS)
    assert SmartClip(term, 0.5)(closed)["global"] != term(closed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", GLOBAL_LOSSES)
def test_sparsity_does_not_know_the_global_loss(name, dtype):
    embeddings = embed(*make_leaves(dtype=dtype), ids=IDS)
    term = GlobalTerm(GLOBAL_LOSSES[name], margins=name == "hn")
    found, usual = (SmartClip(t, 0.3)(embeddings)["sparsity"] for t in (term, GlobalTerm(clip_loss)))
    assert torch.equal(found, usual)
    leaf = embeddings.texts["caption"].tokens
    assert torch.equal(*(torch.autograd.grad(value, leaf)[0] for value in (found, usual)))


def test_sparsity_pushes_closed_dimensions_too():
    leaves = make_leaves()
    mask = leaves[2]
    (gradient,) = torch.autograd.grad(SmartClip(HN, 0.3)(embed(*leaves))["sparsity"], mask)
    torch.testing.assert_close(gradient, torch.full_like(mask, 0.3 / mask.numel()))


@pytest.mark.parametrize("name", GLOBAL_LOSSES)
def test_uneven_shards_add_up_to_the_whole(name):
    leaves = make_leaves()
    smart = SmartClip(GlobalTerm(GLOBAL_LOSSES[name], margins=name == "hn"), 0.3)
    whole, counts = embed(*leaves, ids=IDS), (1, 3, 2)
    shards = [smart(replace(whole, offset=sum(counts[:r]), rows=count)) for r, count in enumerate(counts)]
    for term, expected in smart(whole).items():
        weighted = [len(counts) * count / 6 * shard[term] for count, shard in zip(counts, shards)]
        check(sum(weighted) / len(counts), expected, leaves)
        assert shards[0][term] != expected


def test_narrow_vectors_are_compared_in_float32():
    image, text, mask, scale = make_leaves(dtype=torch.bfloat16)
    terms = SmartClip(HN, 0.3)(embed(image, text, mask, scale))
    wide = SmartClip(HN, 0.3)(embed(image.float(), text.float(), mask.float(), scale.float()))
    for name, term in terms.items():
        assert term.dtype == torch.float32
        torch.testing.assert_close(term, wide[name], rtol=1e-6, atol=0)


def test_weight_zero_leaves_sparsity_out():
    assert list(SmartClip(HN, 0.0)(embed(*make_leaves()))) == ["global"]


def test_it_says_what_it_reads():
    smart: Objective = SmartClip(HN, 0.3)
    assert (smart.image_views, smart.text_views, smart.parts, smart.tokens) == (("full",), ("caption",), (), True)
    assert smart.at(Moment(3, 2, 4)) is smart


@pytest.mark.parametrize("weight", [-0.1, float("nan"), float("inf")])
def test_wrong_weights_are_an_error(weight):
    with pytest.raises(ValueError, match="sparsity"):
        SmartClip(HN, weight)


def test_without_masks_is_an_error():
    image, text, mask, scale = make_leaves()
    words = torch.cat([mask[:, None]] * 2, dim=1)
    for view in (ViewEmbeddings(text), ViewEmbeddings(text, words, words[..., 0] > -1)):
        with pytest.raises(ValueError, match="CaptionMask"):
            SmartClip(HN, 0.3)(Embeddings({"full": ViewEmbeddings(image)}, {"caption": view}, scale))


def test_without_a_global_term_nothing_would_be_learnt():
    with pytest.raises(ValueError, match="learn nothing"):
        objective(Choice(None, {"sparsity": 0.3}))
    with pytest.raises(ValueError, match="learn nothing"):
        build_objective(ObjectiveConfig(framework="smartclip", global_loss="none", token_weight=0.0))


def test_a_configuration_builds_it(model_directory):
    from hnclip.models.load import load

    config = ObjectiveConfig(framework="smartclip", token_weight=0.0, gamma=0.3, weights={"sparsity": 0.7})
    built = build_objective(config)
    assert isinstance(built, SmartClip)
    assert (built.sparsity_weight, built.global_term.margins, built.global_term.frozen) == (0.7, True, False)
    assert built.global_term.loss.keywords == {"gamma": 0.3, "margin": 0.0, "center": 0.0}  # type: ignore[attr-defined]
    made = build_readouts(config, load(str(model_directory)))
    assert list(made) == ["caption"]
    assert isinstance(made["caption"], CaptionMask)
    assert made["caption"].query.shape == (32,)
