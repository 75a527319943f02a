"""The model in the package, and the properties of `scenes` that it shows."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path

import pytest

from hnclip.analysis.captions import caption_similarity
from hnclip.data.scenes import scene_records
from hnclip.evaluation.retrieval import evaluate, prepare_gallery
from hnclip.models.load import load


def test_it_is_small_and_takes_long_captions() -> None:
    with as_file(files("hnclip.models") / "bundled") as directory:
        assert sum(file.stat().st_size for file in Path(directory).iterdir()) <= 8e6
    assert load("bundled").context == 248


@pytest.mark.parametrize("domain", ["park", "shelf"])
def test_it_finds_most_families_and_has_much_to_learn(domain: str) -> None:
    """On the validation split; the test split is for results."""
    model = load("bundled")
    gallery = prepare_gallery(scene_records(domain, "validation"), model)
    found = evaluate(model, gallery)
    for direction in ("text_to_image", "image_to_text"):
        assert found.metrics[direction]["R@10"] > 60
        assert 10 < found.metrics[direction]["R@1"] < 65
    assert model.scale.item() == pytest.approx(100, abs=0.01)
    similarity = caption_similarity(found.text, gallery.owner)
    assert similarity["hardest"] >= 0.9  # captions are near-duplicates
    assert similarity["pairwise"] < similarity["hardest"]
    assert gallery.truncated == 0
