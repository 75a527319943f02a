"""A part of a gallery is a gallery of its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_galleries import evaluation_of, gallery_of, model_on, tied_vectors

from hnclip.evaluate import summarize
from hnclip.evaluate.held_out import restrict

OWNER = torch.tensor([2, 0, 1, 1, 3, 0, 4, 5, 5])


@given(tied_vectors(), st.data())
def test_equals_an_evaluation_of_the_part_alone(vectors, data):
    image, text, owner = vectors
    kept = sorted(data.draw(st.sets(st.integers(0, len(image) - 1), min_size=1)))
    found = restrict(evaluation_of(*vectors), gallery_of(owner), {f"r{i}" for i in kept}, intervals=False)
    rows = [t for t, own in enumerate(owner.tolist()) if own in kept]
    alone = evaluation_of(image[kept], text[rows], torch.tensor([kept.index(int(owner[t])) for t in rows]))
    assert torch.equal(found.ranks.text_to_image, alone.ranks.text_to_image)
    assert torch.equal(found.ranks.image_to_text, alone.ranks.image_to_text)
    assert torch.equal(found.ranks.owner, alone.ranks.owner)
    assert torch.equal(found.image, alone.image)
    assert torch.equal(found.text, alone.text)
    assert found.metrics == alone.metrics


def test_all_records_are_the_gallery_itself():
    whole = model_on(OWNER, 2.0, 1)
    found = restrict(whole, gallery_of(OWNER), {f"r{i}" for i in range(6)}, intervals=False)
    assert torch.equal(found.ranks.text_to_image, whole.ranks.text_to_image)
    assert found.metrics == whole.metrics


def test_fewer_candidates_make_no_rank_worse():
    owner = torch.arange(200)
    whole = model_on(owner, 4.0, 1)
    found = restrict(whole, gallery_of(owner), {f"r{i}" for i in range(0, 200, 3)})
    before = whole.ranks.text_to_image[::3]
    assert bool((found.ranks.text_to_image <= before).all())
    assert bool((found.ranks.text_to_image < before).any())


def test_intervals_resample_families():
    owner = torch.arange(60)
    gallery, whole = gallery_of(owner, [f"family {i // 6}" for i in range(60)]), model_on(owner, 4.0, 1)
    ids = frozenset(f"r{i}" for i in range(0, 60, 2))
    part = restrict(whole, gallery, ids)
    families = torch.arange(30) // 3
    assert part.metrics == summarize(part.ranks, intervals=True, groups=families)
    assert part.metrics != summarize(part.ranks, intervals=True)
    assert part.metrics.image_to_text.queries == 30


@pytest.mark.parametrize(("ids", "message"), [({"r1", "x", "y"}, "2 are not in it, for example 'x'"), (set(), "0 are")])
def test_unknown_ids_are_named(ids, message):
    with pytest.raises(ValueError, match=rf"^ids must name records of the gallery.*{message}"):
        restrict(model_on(OWNER, 1.0, 1), gallery_of(OWNER), ids)
