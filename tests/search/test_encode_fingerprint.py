"""What makes embeddings other embeddings, and what does not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hnclip.core import Record
from hnclip.data.image_sources import FileImage
from hnclip.data.texts import clean_caption
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load
from hnclip.search.fingerprint import model_fingerprint, pictures_fingerprint, records_fingerprint


def change_weight(model: DualEncoder) -> None:
    with torch.no_grad():
        model.backbone.visual_projection.weight[3, 5].add_(1e-6)


def change_picture(model: DualEncoder) -> None:
    model.image_transform = replace(model.image_transform, resample="bilinear")


def change_text(model: DualEncoder) -> None:
    other = str if model.text_transform.clean is clean_caption else clean_caption
    model.text_transform = replace(model.text_transform, clean=other)


def change_context(model: DualEncoder) -> None:
    model.text_transform = replace(model.text_transform, context=100)


def change_tokenizer(model: DualEncoder) -> None:
    model.tokenizer.add_tokens(["xylophone"])


def change_layer(model: DualEncoder) -> None:
    model.backbone.config.vision_config.hidden_act = "gelu"


CHANGES = [change_weight, change_picture, change_text, change_context, change_tokenizer, change_layer]


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_is_known_by_what_it_does(change: Callable[[DualEncoder], None], model_directory: Path) -> None:
    model = load(model_directory)
    before = model_fingerprint(model)
    change(model)
    assert model_fingerprint(model) != before


def test_a_model_is_not_known_by_its_place(model_directory: Path, tmp_path: Path) -> None:
    model = load(model_directory)
    known = model_fingerprint(model)
    moved = load(shutil.copytree(model_directory, tmp_path / "copy"))
    assert model_fingerprint(moved) == known
    model.encode_texts(model.tokenize(["a tree", "a caption of many more words, none of which is of any importance"]))
    assert model_fingerprint(model) == known
    assert model_fingerprint(model.to(torch.float64).to(torch.float32)) == known


def test_records_are_known_by_ids_captions_and_order(tmp_path: Path) -> None:
    def record(name: str, *captions: str) -> Record:
        return Record(name, FileImage(tmp_path / f"{name}.png"), captions, None)

    first, second = record("a", "one", "two"), record("b", "three")
    known = records_fingerprint([first, second])
    assert records_fingerprint([replace(first, split="test"), second]) == known
    for other in ([second, first], [first], [record("a", "one"), record("b", "two", "three")], [first, record("c")]):
        assert records_fingerprint(other) != known


def test_pictures_are_known_by_their_files(tmp_path: Path) -> None:
    records = [Record(name, FileImage(tmp_path / name), (), None) for name in ("a", "b")]
    found = [pictures_fingerprint(records)]
    for action in (
        lambda: (tmp_path / "a").write_text("picture"),
        lambda: (tmp_path / "a").write_text("longer picture"),
        lambda: (tmp_path / "b").write_text("picture"),
        lambda: (tmp_path / "a").unlink(),
    ):
        action()
        found.append(pictures_fingerprint(records))
    assert len(set(found)) == 5
    (tmp_path / "b").unlink()
    assert pictures_fingerprint(records) == found[0]
