"""Adapters start as the base model, follow their equations, and are saved alone."""

from __future__ import annotations

import copy
import os
import sys
from dataclasses import asdict
from functools import cache

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import CLIPModel

from hnclip.models.adapters import BaseModel, add_adapters, merge_adapters, save_adapter
from hnclip.models.load import load
from hnclip.models.parameters import linear_names

METHODS = pytest.mark.parametrize("method", ["lora", "dora"])
KINDS = pytest.mark.parametrize("kind", ["clip", "siglip", "vision-text-dual-encoder"])
CAPTIONS = ["a small red house and a tree", "the large dog lies on the grass beside a bench", "a blue cat"]

opened = cache(load)


def base_model(directory):
    """A copy of a model that is read from disk only once."""
    return copy.deepcopy(opened(directory))


def embed(model):
    """Global and token vectors of fixed images and captions."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (3, 3, model.image_size, model.image_size), generator=generator, dtype=torch.uint8)
    image, text = model.encode_images(pixels, tokens=True), model.encode_texts(model.tokenize(CAPTIONS), tokens=True)
    return {"image": image.vectors, "patches": image.tokens, "text": text.vectors, "words": text.tokens}


def assert_same(a, b, tolerance):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def largest_difference(a, b):
    """Of the vectors of two models, in the tower that differs less."""
    first, second = embed(a), embed(b)
    return min((first[name] - second[name]).abs().max() for name in ("image", "text"))


def disturb(model, size=0.2):
    """Change everything that trains, as steps would."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * size)
    return model


def adapted(directory, method="lora", **options):
    torch.manual_seed(0)
    model = base_model(directory)
    add_adapters(model, **{"method": method, "rank": 4, "alpha": 8.0, "train_scale": False, **options})
    return model


@pytest.fixture
def clip(directories):
    return directories["clip"]


@METHODS
@KINDS
def test_adapters_begin_as_the_base_model_and_follow_their_equations(kind, method, directories):
    """Bit for bit at first (B = 0, and the magnitudes are the norms); then a twin has the equation's plain weights."""
    directory = directories[kind]
    model, twin = adapted(directory, method, dropout=0.5), base_model(directory)
    assert model.has_adapters
    with torch.no_grad():  # torch has another kernel for SigLIP's head once it is frozen
        assert_same(embed(model), embed(base_model(directory).requires_grad_(False)), 0)
    model, twin = disturb(model.double()), twin.double()
    layers, plain = model.backbone.get_base_model(), twin.backbone
    assert largest_difference(model, twin) > 1e-3
    with torch.no_grad():
        for name in linear_names(twin):
            layer = layers.get_submodule(name)
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            whole = layer.base_layer.weight + 8.0 / 4 * b @ a  # [out, in]
            if method == "dora":
                magnitude = layer.lora_magnitude_vector["default"].weight  # [out]
                whole = magnitude[:, None] * whole / (whole**2).sum(dim=1, keepdim=True).sqrt()
            plain.get_submodule(name).weight.copy_(whole)
    assert_same(embed(model), embed(twin), 1e-12)
    assert largest_difference(model.train(), twin) > 1e-3  # dropout acts in training only
    trained = {name for name, parameter in model.backbone.named_parameters() if parameter.requires_grad}
    assert trained == {name for name in model.backbone.state_dict() if "lora_" in name}


@METHODS
@KINDS
def test_an_adapter_opens_as_the_model_it_was_saved_from(kind, method, directories, tmp_path, monkeypatch):
    """Also from another working directory than the base was named in; the trained temperature is included. Merging
    gives a plain model with the same vectors."""
    base = directories[kind]
    monkeypatch.chdir(base.parent)
    model = disturb(adapted(base, method, projections=kind != "siglip", train_scale=True))
    before, source = embed(model), base_model(base)
    assert largest_difference(model, source) > 1e-3
    save_adapter(model, tmp_path / "adapter", BaseModel(base.name))
    monkeypatch.chdir(tmp_path)
    again = load("adapter").eval()
    assert_same(embed(again), before, 1e-5)
    assert torch.equal(again.scale, model.scale)
    assert not again.has_adapters
    assert method in again.source.lower()
    assert merge_adapters(model) is model
    assert_same(embed(model), before, 1e-5)
    assert model.state_dict().keys() == source.state_dict().keys()
    assert type(model.backbone) is type(source.backbone)
    assert all(parameter.requires_grad for parameter in model.parameters())


@METHODS
def test_peft_opens_what_is_saved_and_the_other_way_round(method, clip, tmp_path):
    """An adapter of plain peft may have other layers, another rank and a bias."""
    model = disturb(adapted(clip, method, projections=True))
    save_adapter(model, tmp_path / "adapter", BaseModel(str(clip)))
    files = {file.name for file in (tmp_path / "adapter").iterdir()}
    assert files == {"adapter_model.safetensors", "adapter_config.json", "hnclip.json", "README.md"}
    theirs = base_model(clip)
    theirs.backbone = PeftModel.from_pretrained(CLIPModel.from_pretrained(clip), tmp_path / "adapter").eval()
    assert_same(embed(theirs), embed(model), 0)
    layers = {"target_modules": r"vision_model.*\.(q_proj|fc1)", "use_dora": method == "dora", "bias": "lora_only"}
    plain = base_model(clip)
    plain.backbone = get_peft_model(CLIPModel.from_pretrained(clip), LoraConfig(r=3, **layers)).eval()
    disturb(plain).backbone.save_pretrained(tmp_path / "plain", save_embedding_layers=False)
    assert_same(embed(load(tmp_path / "plain")), embed(plain), 1e-5)


def test_the_base_is_opened_as_it_was(saved, clip, tmp_path):
    """Stretched and with another tokenizer."""
    base = BaseModel(str(saved), context=100, keep=5, ratio=3, tokenizer=str(clip))
    long = load(**asdict(base))
    add_adapters(long, method="lora", rank=2, train_scale=False)
    save_adapter(disturb(long, 0.02), tmp_path / "first", base)
    first = load(tmp_path / "first")
    assert first.context == 100
    assert_same(embed(first), embed(long), 1e-4)


DAMAGES = {
    "hnclip.json": lambda d: (d / "hnclip.json").write_text("{}"),
    "adapter": lambda d: os.truncate(d / "adapter_model.safetensors", 1000),
    "IA3": lambda d: (d / "adapter_config.json").write_text('{"peft_type": "IA3"}'),
}


@pytest.mark.parametrize("word", DAMAGES)
def test_a_damaged_adapter_is_refused(word, clip, tmp_path):
    save_adapter(adapted(clip), tmp_path, BaseModel(str(clip)))
    DAMAGES[word](tmp_path)
    with pytest.raises(ValueError, match=word):
        load(tmp_path)


def test_impossible_requests_are_refused(clip, monkeypatch):
    with pytest.raises(ValueError, match="no adapters"):
        merge_adapters(base_model(clip))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"pip install 'hnclip\[adapt\]'"):
        adapted(clip)
