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

Change = Callable[[DualEncoder], object]


def change_weight(model: DualEncoder) -> None:
    with torch.no_grad():
        model.backbone.visual_projection.weight[3, 5].add_(1e-6)


def change_transform(name: str, **changed: Any) -> Change:
    return lambda model: setattr(model, name, replace(getattr(model, name), **changed))


def rename_weight(model: DualEncoder) -> None:
    model.backbone.image_projection = model.backbone.visual_projection
    del model.backbone.visual_projection


def use(model: DualEncoder) -> None:
    model.encode_texts(model.tokenize(["a tree", "a caption of many more words, none of which is of any importance"]))
    model.backbone.set_attn_implementation("eager")
    model.to(torch.float64).to(torch.float32)


CHANGES: dict[str, Change] = {
    "weight": change_weight,
    "image transform": change_transform("image_transform", resample="bilinear"),
    "cleaning": change_transform("text_transform", clean=str),
    "context": change_transform("text_transform", context=100),
    "vocabulary": lambda model: model.tokenizer.add_tokens(["xylophone"]),
    "lower case": lambda model: setattr(model.tokenizer.backend_tokenizer, "normalizer", NFC()),
    "activation": lambda model: setattr(model.backbone.config.vision_config, "hidden_act", "gelu"),
}
SAME: dict[str, Change] = {  # the first three as other versions of transformers do
    "another default": lambda model: setattr(model.backbone.config.text_config, "new_default", 3),
    "renamed weight": rename_weight,
    "stored positions": lambda model: model.backbone.register_buffer("position_ids", torch.arange(5)),
    "use and kernels": use,
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
    assert known == model_fingerprint(load(model_directory))  # another directory
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
    assert model_fingerprint(model, directory) == model_fingerprint(model) != known
    monkeypatch.setenv("HNCLIP_CACHE", str(memory / "not a directory"))
    assert model_fingerprint(load(directory), directory) == known


def test_records_are_identified_by_ids_captions_and_order(tmp_path: Path) -> None:
    def record(name: str, *captions: str) -> Record:
        return Record(name, FileImage(tmp_path / f"{name}.png"), captions, None)

    first, second = record("a", "one", "two"), record("b", "three")
    known = records_fingerprint([first, second])
    assert records_fingerprint([replace(first, split="test"), second]) == known
    for other in ([second, first], [first], [record("a", "one"), record("b", "two", "three")], [first, record("c")]):
        assert records_fingerprint(other) != known


def test_images_are_identified_by_size_and_time_of_their_files(tmp_path: Path) -> None:
    records = [Record(name, FileImage(tmp_path / name), (), None) for name in ("a", "b")]
    found = [images_fingerprint(records)]
    for name, content in (("a", "image"), ("a", "longer image"), ("b", "image"), ("a", None)):
        (tmp_path / name).unlink() if content is None else (tmp_path / name).write_text(content)
        found.append(images_fingerprint(records))
    assert len(set(found)) == 5
    (tmp_path / "b").unlink()
    assert images_fingerprint(records) == found[0]
