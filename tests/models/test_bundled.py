"""The model in the package, and the properties of `scenes` that it shows."""

from __future__ import annotations

import pytest

from hnclip.analysis.captions import caption_similarity
from hnclip.data.scenes import scene_records
from hnclip.evaluation.retrieval import evaluate, prepare_gallery
from hnclip.models.load import load


@pytest.mark.parametrize("domain", ["park", "shelf"])
def test_the_bundled_model_finds_most_families_and_has_much_to_learn(domain):
    """On the validation split; the test split is for results."""
    model = load("bundled")
    gallery = prepare_gallery(scene_records(domain, "validation"), model)
    found = evaluate(model, gallery)
    for direction in ("text_to_image", "image_to_text"):
        assert found.metrics[direction]["R@10"] > 60
        assert 10 < found.metrics[direction]["R@1"] < 65
    assert (model.context, model.scale.item()) == (248, pytest.approx(100, abs=0.01))
    assert caption_similarity(found.text, gallery.owner)["hardest"] >= 0.9  # captions are near-duplicates
    assert found.truncated == 0
