"""StructXLIP's terms against literal twins, whole and in shards; its schedule, its switches; and a run on scenes."""

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
from hnclip.models.readouts.pool import PoolChunks
from hnclip.objectives.choice import Choice
from hnclip.objectives.embeddings import Embeddings, ViewEmbeddings
from hnclip.objectives.global_term import GlobalTerm
from hnclip.objectives.objective import Moment, Objective
from hnclip.objectives.structxlip import StructXlip, objective, readouts, weight_factors
from hnclip.train.grad_cache import cached_backward, micro_backward

EDGE, FILTERED = [1, 1, 0, 1, 0, 1, 1], [1, 0, 1, 1, 1, 1, 1]
FIRST, SECOND = [1, 1, 0, 1, 1, 0, 1], [0, 1, 0, 1, 1, 0, 1]
CHUNKS = [3, 1, 2, 0, 2, 3, 1]
WEIGHTS = {"structure": 0.25, "consistency": 0.001, "chunks": 0.001}
INFONCE = GlobalTerm(clip_loss)
SWITCHES = ("structxlip_double_norm", "structxlip_misaligned_spans", "structxlip_local_scale")


def make(missing=True, view="filtered", **options):
    """Embeddings as the encoder makes them for StructXLIP, and their leaves."""
    m = Material(**options)

    def there(flags):
        return bools(flags) if missing else None

    mask = torch.arange(3) < (torch.tensor(CHUNKS)[:, None] if missing else 3)
    chunks = m.vectors("chunks", 3), mask.expand(N, 3)
    texts = {
        name: ViewEmbeddings(m.vectors(name), *(chunks if name == view else ())) for name in ("caption", "filtered")
    }
    texts["filtered"] = replace(texts["filtered"], present=there(FILTERED))
    images = {
        "full": ViewEmbeddings(m.vectors("full")),
        "edge": ViewEmbeddings(m.vectors("edge"), present=there(EDGE)),
        "edge_crop_1": ViewEmbeddings(m.vectors("crop_1"), present=there(FIRST)),
        "edge_crop_2": ViewEmbeddings(m.vectors("crop_2"), present=there(SECOND)),
    }
    return Embeddings(images, texts, m.leaves["scale"], IDS), m.leaves


def twin_chunks(leaves, counts, crops, scale):
    """Every span against every valid crop, in loops; crops of pairs that are the same thing do not count."""
    samples = []
    for b in range(N):
        spans = []
        for k in range(counts[b]):
            own, every = [], []
            for j, number in product(range(N), (0, 1)):
                if crops[number][j] and (j == b or not bool((IDS[j] == IDS[b]).any())):
                    logit = scale * (leaves["chunks"][b, k] * leaves[f"crop_{number + 1}"][j]).sum()
                    every.append(logit.exp())
                    own += [logit.exp()] if j == b else []
            if own:
                spans.append(-(torch.log(sum(own)) - torch.log(sum(every))))
        if spans:
            samples.append(sum(spans) / len(spans))
    return sum(samples) / len(samples)


def twin(leaves, edge, filtered, crops, counts, *, official_scale=False):
    """The terms as they are written down, without weights."""
    both = [i for i in range(N) if edge[i] and filtered[i]]
    mapped = [i for i in range(N) if edge[i]]
    rows = {name: [leaves[name][i] for i in range(N)] for name in ("full", "caption", "edge", "filtered")}
    scale = leaves["scale"]
    local = torch.minimum(scale / 0.07, torch.tensor(100.0, dtype=scale.dtype)) if official_scale else scale.detach()
    return {
        "global": twin_sym_ce(rows["full"], rows["caption"], scale, IDS),
        "structure": twin_sym_ce(
            [rows["edge"][i] for i in both], [rows["filtered"][i] for i in both], scale.detach(), IDS[both]
        ),
        "consistency": sum(1 - (rows["full"][i] * rows["edge"][i]).sum() for i in mapped) / len(mapped),
        "chunks": twin_chunks(leaves, counts, crops, local),
    }


def assert_same(got, expected, leaves):
    assert list(got) == list(expected)
    for name, term in got.items():
        torch.testing.assert_close(term, expected[name], rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
        for leaf, a, b in zip(leaves, *(gradients(terms[name], list(leaves.values())) for terms in (got, expected))):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, msg=lambda m, n=name, f=leaf: f"{n} by {f}: {m}")


@pytest.mark.parametrize("official_scale", [False, True])
@pytest.mark.parametrize("misaligned", [False, True])
@pytest.mark.parametrize("missing", [False, True])
def test_terms_are_the_twins_in_value_and_every_gradient(missing, misaligned, official_scale):
    embeddings, leaves = make(missing, "caption" if misaligned else "filtered")
    made: Objective = StructXlip(INFONCE, 1, 1, 1, misaligned=misaligned, official_scale=official_scale)
    there = (EDGE, FILTERED, (FIRST, SECOND), CHUNKS) if missing else ([1] * N, [1] * N, ([1] * N,) * 2, [3] * N)
    assert_same(made(embeddings), twin(leaves, *there, official_scale=official_scale), leaves)


def test_default_weights_are_those_of_the_released_script():
    embeddings, _ = make()
    weighted, plain = StructXlip(INFONCE)(embeddings), StructXlip(INFONCE, 1, 1, 1)(embeddings)
    for name, weight in {"global": 1, **WEIGHTS}.items():
        torch.testing.assert_close(weighted[name], weight * plain[name])


def test_the_official_scale_has_a_gradient_below_its_limit_only():
    embeddings, leaves = make(missing=False)
    for s, moves in ((6.0, True), (8.0, False)):  # 7 / 0.07 is 100
        scale = torch.tensor(s, dtype=torch.float64, requires_grad=True)
        term = StructXlip(INFONCE, official_scale=True)(replace(embeddings, scale=scale))["chunks"]
        assert bool(gradients(term, [scale])[0].any()) == moves
    hot = StructXlip(INFONCE, official_scale=True)(replace(embeddings, scale=torch.tensor(33.1).double()))["chunks"]
    same = StructXlip(INFONCE)(replace(embeddings, scale=torch.tensor(100.0).double()))["chunks"]
    torch.testing.assert_close(hot, same)
    assert "scale" in leaves


def test_only_the_global_term_moves_the_scale():
    embeddings, leaves = make()
    terms = StructXlip(INFONCE)(embeddings)
    moved = {name for name, term in terms.items() if gradients(term, [leaves["scale"]])[0].any()}
    assert moved == {"global"}


@pytest.mark.parametrize("sizes", [[3, 4], [1, 2, 4], [5, 1, 1], [2, 1, 1, 2, 1]])
def test_weighted_shards_average_to_the_whole(sizes):
    embeddings, leaves = make()
    made = StructXlip(INFONCE, 1, 1, 1)
    shards, whole = [made(shard) for shard in shards_of(embeddings, sizes)], made(embeddings)
    means = {
        name: torch.stack([len(sizes) * rows / N * shard[name] for rows, shard in zip(sizes, shards)]).mean()
        for name in whole
    }
    assert_same(means, whole, leaves)


@pytest.mark.parametrize("name", sorted(GLOBAL_LOSSES))
def test_the_global_term_changes_no_bit_of_the_others(name):
    embeddings, leaves = make(dtype=torch.float32)
    with_it = StructXlip(GlobalTerm(GLOBAL_LOSSES[name], margins=name == "hn"))(embeddings)
    plain, alone = StructXlip(INFONCE)(embeddings), StructXlip(None)(embeddings)
    assert list(with_it) == list(plain) == ["global", *alone]
    for term in alone:
        for other in (plain, alone):
            assert torch.equal(with_it[term], other[term])
            pairs = zip(*(gradients(terms[term], list(leaves.values())) for terms in (with_it, other)))
            assert all(torch.equal(a, b) for a, b in pairs)
    image, text = embeddings.images["full"].vectors, embeddings.texts["caption"].vectors
    assert torch.equal(with_it["global"], GLOBAL_LOSSES[name](image, text, embeddings.scale, ids=IDS))


@pytest.mark.parametrize("misaligned", [False, True])
@pytest.mark.parametrize("weights", list(product([0, 0.3], repeat=3)))
def test_a_term_left_out_asks_for_nothing(weights, misaligned):
    structure, consistency, chunks = weights
    made = StructXlip(INFONCE, *weights, misaligned=misaligned)
    view = "caption" if misaligned else "filtered"
    assert set(made.image_views) == (
        {"full"}
        | ({"edge"} if structure or consistency else set())
        | ({"edge_crop_1", "edge_crop_2"} if chunks else set())
    )
    assert set(made.text_views) == {"caption"} | ({"filtered"} if structure or (chunks and not misaligned) else set())
    assert made.parts == ((("chunk_spans_official" if misaligned else "chunk_spans"),) if chunks else ())
    assert made.tokens == bool(chunks)
    embeddings, _ = make(view=view)
    seen = replace(
        embeddings,
        images={name: embeddings.images[name] for name in made.image_views},
        texts={name: embeddings.texts[name] for name in made.text_views},
    )
    terms, every = made(seen), StructXlip(INFONCE, 1, 1, 1, misaligned=misaligned)(embeddings)
    assert set(terms) == {"global"} | {name for name, weight in zip(WEIGHTS, weights) if weight}
    for name, term in terms.items():
        torch.testing.assert_close(term, every[name] * (1 if name == "global" else 0.3))
    official = frozenset({"structxlip_misaligned_spans"} if misaligned else ())
    readers = readouts(Choice(INFONCE, dict(zip(WEIGHTS, weights)), official), None)
    assert set(readers) == ({view} if chunks else set())
    assert {PARTS[part].view for part in made.parts} == set(readers)


def test_more_crops_are_more_views():
    assert StructXlip(INFONCE, crops=3).image_views[-3:] == ("edge_crop_1", "edge_crop_2", "edge_crop_3")
    with pytest.raises(ValueError, match="crops"):
        StructXlip(INFONCE, crops=0)


def test_without_any_edge_map_its_terms_are_zero():
    embeddings, leaves = make()
    nobody = torch.zeros(N, dtype=torch.bool)
    for view in ("edge", "edge_crop_1", "edge_crop_2"):
        embeddings = without(embeddings, view, nobody)
    terms = StructXlip(INFONCE)(embeddings)
    for name in WEIGHTS:
        assert terms[name] == 0
        assert all(not grad.any() for grad in gradients(terms[name], list(leaves.values())))
    assert terms["global"] > 0


# Schedule --------------------------------------------------------------------------------------------------------


def test_weights_fall_as_measured_in_ten_epochs():
    """The multipliers of the released code, epoch by epoch, in three digits."""
    found = [weight_factors(Moment(epoch * 37 + 5, 37, 10)) for epoch in range(10)]
    measured = [1, 1, 0.985, 0.944, 0.883, 0.817, 0.756, 0.715, 0.7, 0.7]
    assert [factors["structure"] for factors in found] == pytest.approx(measured, abs=5e-4)
    for name, floor in (("consistency", 0.5), ("chunks", 0.4)):
        # The same course between 1 and another floor.
        course = [(factors["structure"] - 0.7) / 0.3 for factors in found]
        assert [(factors[name] - floor) / (1 - floor) for factors in found] == pytest.approx(course)


@pytest.mark.parametrize("epochs", [1, 2, 3, 5, 20, 100])
def test_weights_fall_in_runs_of_any_length(epochs):
    found = [weight_factors(Moment(epoch * 3, 3, epochs))["chunks"] for epoch in range(epochs + 1)]
    assert found[0] == 1
    assert found == sorted(found, reverse=True)
    assert all(value == pytest.approx(0.4) for epoch, value in enumerate(found) if epoch >= 0.8 * epochs)
    assert all(value == pytest.approx(1) for epoch, value in enumerate(found) if epoch <= 0.1 * epochs)


def test_the_objective_of_a_moment_has_its_weights():
    embeddings, _ = make()
    made = StructXlip(INFONCE)
    late = Moment(90, 10, 10)
    terms, first = made.at(late)(embeddings), made(embeddings)
    assert terms["global"] == first["global"]
    for name, floor in (("structure", 0.7), ("consistency", 0.5), ("chunks", 0.4)):
        torch.testing.assert_close(terms[name], floor * first[name])
    assert made.at(late).at(Moment(0, 10, 10)) == made.at(Moment(19, 10, 10)) == made
    assert made.at(late).image_views == made.image_views


# Switches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("official", list(product([False, True], repeat=3)))
def test_each_switch_changes_what_it_says(official):
    double_norm, misaligned, local_scale = official
    choice = Choice(INFONCE, WEIGHTS, frozenset(name for name, there in zip(SWITCHES, official) if there))
    made, readers = objective(choice), readouts(choice, None)
    assert made == StructXlip(INFONCE, misaligned=misaligned, official_scale=local_scale)
    ((view, reader),) = readers.items()
    assert view == ("caption" if misaligned else "filtered")
    assert isinstance(reader, PoolChunks)
    assert reader.double_norm == double_norm


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_wrong_weights_are_an_error(weight):
    for name in WEIGHTS:
        with pytest.raises(ValueError, match=f"StructXLIP's {name}"):
            StructXlip(INFONCE, **{f"{name}_weight": weight})
    with pytest.raises(ValueError, match="StructXLIP needs a term"):
        StructXlip(None, 0, 0, 0)


def test_missing_readouts_are_an_error():
    embeddings, _ = make(view="caption")
    with pytest.raises(ValueError, match="readout"):
        StructXlip(INFONCE)(embeddings)


# Through data, encoder and gradient caching ----------------------------------------------------------------------


@pytest.fixture
def small(model_directory):
    return load(model_directory).eval()


def make_records():
    """Scenes with filtered captions, and with pictures of other scenes as edge maps; some lack something."""
    records = scene_records("park", "train", families=2, members=4)
    others = scene_records("shelf", "train", families=2, members=4)
    colours = {"red ", "black ", "purple ", "brown ", "white ", "blue ", "green "}

    def filtered(caption):
        for colour in colours:
            caption = caption.replace(colour, "")
        return caption

    made = [
        replace(one, edges=other.image, filtered=tuple(map(filtered, one.captions)))
        for one, other in zip(records, others)
    ]
    made[2] = replace(made[2], edges=None)
    made[4] = replace(made[4], filtered=())
    made[5] = replace(made[5], regions=made[5].regions[:1])
    return made


def configured(**options):
    return ObjectiveConfig(framework="structxlip", token_weight=0, **{"global_loss": "infonce", **options})


@pytest.mark.parametrize("fidelity", ["official", "corrected"])
def test_scenes_reach_all_terms_and_all_weights(small, fidelity):
    made, batch = make_batch(small, configured(fidelity=fidelity), make_records())
    embeddings = small(batch, tokens=made.tokens)
    present = {name: view.present for name, view in (embeddings.images | embeddings.texts).items()}
    assert present["full"] is None
    assert present["edge"].nonzero().flatten().tolist() == [0, 1, 3, 4, 5, 6, 7]
    assert present["edge_crop_2"].nonzero().flatten().tolist() == [0, 1, 3, 4, 6, 7]
    assert present["filtered"].nonzero().flatten().tolist() == [0, 1, 2, 3, 5, 6, 7]
    chunks = embeddings.texts["caption" if fidelity == "official" else "filtered"]
    assert chunks.mask.any(1).nonzero().flatten().tolist() == [0, 1, 2, 3, 5, 6, 7]
    terms = made(embeddings)
    assert list(terms) == ["global", *WEIGHTS]
    assert all(term > 0 for term in terms.values())
    sum(terms.values()).backward()
    assert [name for name, weight in small.named_parameters() if weight.grad is None] == []


def test_gradient_caching_is_the_whole_batch(small):
    weights = {"structure": 1.0, "consistency": 1.0, "chunks": 1.0}
    made, batch = make_batch(small, configured(global_loss="hn", weights=weights), make_records())
    found = []
    for backward, chunk in ((micro_backward, 8), (cached_backward, 3)):
        small.zero_grad()
        result = backward(small, batch, made, chunk=chunk)
        found.append((result.terms, {name: weight.grad.clone() for name, weight in small.named_parameters()}))
    (terms, whole), (cached_terms, cached) = found
    for name in terms:
        torch.testing.assert_close(cached_terms[name], terms[name])
    for name in whole:
        torch.testing.assert_close(cached[name], whole[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_changes_the_chunks_alone(small, switch):
    found = []
    for fidelity in ("official", "corrected"):
        made, batch = make_batch(small, configured(switches={switch: fidelity}), make_records())
        with torch.no_grad():
            found.append(made(small(batch, tokens=True)))
    assert {name for name in found[0] if not torch.equal(found[0][name], found[1][name])} == {"chunks"}
