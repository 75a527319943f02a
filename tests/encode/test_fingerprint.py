"""What changes a fingerprint, and what does not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.normalizers import NFC

from hnclip.core import Record
from hnclip.data.image_sources import FileImage
from hnclip.encode import fingerprint
from hnclip.encode.fingerprint import MEMORY, images_fingerprint, model_fingerprint, records_fingerprint
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load


def change_weight(model: DualEncoder) -> None:
    with torch.no_grad():
        model.backbone.visual_projection.weight[3, 5].add_(1e-6)


def change_text(**changed: Any) -> Callable[[DualEncoder], None]:
    return lambda model: setattr(model, "text_transform", replace(model.text_transform, **changed))


def change_image(model: DualEncoder) -> None:
    model.image_transform = replace(model.image_transform, resample="bilinear")


CHANGES: dict[str, Callable[[DualEncoder], object]] = {
    "weight": change_weight,
    "image transform": change_image,
    "cleaning": change_text(clean=str),
    "context": change_text(context=100),
    "vocabulary": lambda model: model.tokenizer.add_tokens(["xylophone"]),
    "lower case": lambda model: setattr(model.tokenizer.backend_tokenizer, "normalizer", NFC()),
    "activation": lambda model: setattr(model.backbone.config.vision_config, "hidden_act", "gelu"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_fingerprint_of_a_model(change: str, model_directory: Path) -> None:
    model = load(model_directory)
    before = model_fingerprint(model)
    CHANGES[change](model)
    assert model_fingerprint(model) != before


def add_default(model: DualEncoder) -> None:
    """As a later version of transformers may do."""
    model.backbone.config.text_config.new_default = 3
    model.backbone.config.transformers_version = "99.0"


def rename_weight(model: DualEncoder) -> None:
    model.backbone.image_projection = model.backbone.visual_projection
    del model.backbone.visual_projection


def add_positions(model: DualEncoder) -> None:
    """Some versions of transformers store the numbers of positions."""
    model.backbone.register_buffer("position_ids", torch.arange(5))


@pytest.mark.parametrize("change", [add_default, rename_weight, add_positions])
def test_an_upgrade_of_transformers_does_not_change_it(
    change: Callable[[DualEncoder], None], model_directory: Path
) -> None:
    model = load(model_directory)
    before = model_fingerprint(model)
    change(model)
    assert model_fingerprint(model) == before


def test_place_use_and_kernels_do_not_change_it(model_directory: Path, tmp_path: Path) -> None:
    model = load(model_directory)
    known = model_fingerprint(model)
    assert model_fingerprint(load(shutil.copytree(model_directory, tmp_path / "copy"))) == known
    model.encode_texts(model.tokenize(["a tree", "a caption of many more words, none of which is of any importance"]))
    model.backbone.set_attn_implementation("eager")
    assert model_fingerprint(model) == known
    assert model_fingerprint(model.to(torch.float64).to(torch.float32)) == known


def test_weights_are_hashed_once(model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HNCLIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprint, "SMALL", 32)  # so that this model has larger tensors
    directory, memory = shutil.copytree(model_directory, tmp_path / "model"), tmp_path / "cache" / MEMORY
    model = load(directory)
    known = model_fingerprint(model)
    assert not memory.exists()
    assert model_fingerprint(model, directory) == known
    first = memory.read_text()
    # Only the memory can explain that a large weight that is changed in this process makes no difference.
    change_weight(model)
    assert model_fingerprint(model, directory) == known
    assert model_fingerprint(model) != known
    # A changed small weight, as of stretched positions, another file, or a damaged memory: hashed again.
    other = load(directory)
    with torch.no_grad():
        other.backbone.vision_model.post_layernorm.bias.add_(1)
    assert model_fingerprint(other, directory) == model_fingerprint(other) != known
    for damaged in ("{", "[]", first.replace(first.split('"')[3], "0" * 40), first[:-20]):
        memory.write_text(damaged)
        assert model_fingerprint(load(directory), directory) == known
    for file in directory.glob("*.safetensors"):
        file.touch()
    change_weight(model)
    assert model_fingerprint(model, directory) == model_fingerprint(model) != known
    monkeypatch.setenv("HNCLIP_CACHE", str(memory / "not a directory"))
    assert model_fingerprint(load(directory), directory) == known


def test_records_are_known_by_ids_captions_and_order(tmp_path: Path) -> None:
    def record(name: str, *captions: str) -> Record:
        return Record(name, FileImage(tmp_path / f"{name}.png"), captions, None)

    first, second = record("a", "one", "two"), record("b", "three")
    known = records_fingerprint([first, second])
    assert records_fingerprint([replace(first, split="test"), second]) == known
    for other in ([second, first], [first], [record("a", "one"), record("b", "two", "three")], [first, record("c")]):
        assert records_fingerprint(other) != known


def test_images_are_known_by_their_files(tmp_path: Path) -> None:
    records = [Record(name, FileImage(tmp_path / name), (), None) for name in ("a", "b")]
    found = [images_fingerprint(records)]
    for action in (
        lambda: (tmp_path / "a").write_text("image"),
        lambda: (tmp_path / "a").write_text("longer image"),
        lambda: (tmp_path / "b").write_text("image"),
        lambda: (tmp_path / "a").unlink(),
    ):
        action()
        found.append(images_fingerprint(records))
    assert len(set(found)) == 5
    (tmp_path / "b").unlink()
    assert images_fingerprint(records) == found[0]
