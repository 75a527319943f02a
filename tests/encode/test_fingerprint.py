"""What changes a fingerprint, and what does not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hnclip.core import Record
from hnclip.data.image_sources import FileImage
from hnclip.encode import fingerprint
from hnclip.encode.fingerprint import MEMORY, images_fingerprint, model_fingerprint, records_fingerprint
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load

Change = Callable[[DualEncoder], object]


def change_weight(model: DualEncoder) -> None:
    with torch.no_grad():
        model.backbone.visual_projection.weight[3, 5].add_(1e-6)


def change_transform(name: str, **changed: Any) -> Change:
    return lambda model: setattr(model, name, replace(getattr(model, name), **changed))


CHANGES: dict[str, Change] = {
    "weight": change_weight,
    "image transform": change_transform("image_transform", resample="bilinear"),
    "context": change_transform("text_transform", context=100),
    "vocabulary": lambda model: model.tokenizer.add_tokens(["xylophone"]),
    "activation": lambda model: setattr(model.backbone.config.vision_config, "hidden_act", "gelu"),
}
SAME: dict[str, Change] = {  # the first as another version of transformers does
    "another default": lambda model: setattr(model.backbone.config.text_config, "new_default", 3),
    "kernels": lambda model: model.backbone.set_attn_implementation("eager"),
}


@pytest.mark.parametrize("change", [*CHANGES, *SAME])
def test_changes_of_the_output_change_the_fingerprint_of_a_model(change: str, model_directory: Path) -> None:
    model = load(model_directory)
    before = model_fingerprint(model)
    {**CHANGES, **SAME}[change](model)
    assert (model_fingerprint(model) != before) == (change in CHANGES)


def test_weights_are_hashed_once(model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HNCLIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprint, "SMALL", 32)  # so that this model has larger tensors
    directory, memory = shutil.copytree(model_directory, tmp_path / "model"), tmp_path / "cache" / MEMORY
    model = load(directory)
    known = model_fingerprint(model)
    assert model_fingerprint(model, directory) == known
    stretched = load(directory)
    stretched.backbone.text_model.embeddings.position_embedding.weight.detach()[-1].mul_(2)  # as another `keep` does
    assert model_fingerprint(stretched, directory) != known
    # Only the memory can explain that a large weight that is changed in this process makes no difference.
    change_weight(model)
    assert model_fingerprint(model, directory) == known
    assert model_fingerprint(model) != known
    for damaged in ("[]", memory.read_text()[:-20]):  # a damaged memory, or another file: hashed again
        memory.write_text(damaged)
        assert model_fingerprint(load(directory), directory) == known
    for file in directory.glob("*.safetensors"):
        file.touch()
    assert model_fingerprint(model, directory) == model_fingerprint(model) != known


def test_records_are_identified_by_ids_captions_and_order_and_images_by_their_files(tmp_path: Path) -> None:
    def record(name: str, *captions: str) -> Record:
        return Record(name, FileImage(tmp_path / f"{name}.png"), captions, None)

    first, second = record("a", "one", "two"), record("b", "three")
    known = records_fingerprint([first, second])
    assert records_fingerprint([replace(first, split="test"), second]) == known
    for other in ([second, first], [first], [record("a", "one"), record("b", "two", "three")], [first, record("c")]):
        assert records_fingerprint(other) != known
    found = [images_fingerprint([first, second])]
    for content in ("image", "longer image"):
        (tmp_path / "a.png").write_text(content)
        found.append(images_fingerprint([first, second]))
    assert len(set(found)) == 3
