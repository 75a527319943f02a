"""Adapters start as the base model, follow their equations, and are saved alone."""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import CLIPModel

from hnclip.models.adapters import BaseModel, add_adapters, merge_adapters, save_adapter
from hnclip.models.load import load, save
from hnclip.models.long_context import stretch
from hnclip.models.parameters import linear_names
from small_families import write_bert, write_dinov2, write_siglip, write_two_towers

KINDS = ["clip", "siglip", "vision-text-dual-encoder"]
METHODS = ["lora", "dora"]
CAPTIONS = ["a small red house and a tree", "the large dog lies on the grass beside a bench", "a blue cat"]
TOWERS = {"image": "vision_model", "text": "text_model"}


@pytest.fixture(scope="module")
def bases(model_directory, tmp_path_factory):
    directory = tmp_path_factory.mktemp("bases")
    return {
        "clip": model_directory,
        "siglip": write_siglip(directory / "siglip"),
        "vision-text-dual-encoder": write_two_towers(directory / "towers"),
    }


@cache
def _opened(directory):
    return load(directory)


def base_model(directory):
    """A copy of a model that is read from disk only once."""
    return copy.deepcopy(_opened(directory))


def embed(model):
    """Global and token vectors of fixed images and captions."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (3, 3, model.image_size, model.image_size), generator=generator, dtype=torch.uint8)
    image, text = model.encode_images(pixels, tokens=True), model.encode_texts(model.tokenize(CAPTIONS), tokens=True)
    return {"image": image.vectors, "patches": image.tokens, "text": text.vectors, "words": text.tokens}


def assert_same(a, b, tolerance):
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=tolerance)


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


def adapted(directory, method="lora", **options):
    torch.manual_seed(0)
    model = base_model(directory)
    add_adapters(model, **{"method": method, "rank": 4, "alpha": 8.0, "train_scale": False, **options})
    return model


def written(directory, out, **options):
    """A disturbed adapter of a base, saved; returns the model it was saved from."""
    model = adapted(directory, **options)
    disturb(model)
    save_adapter(model, out, BaseModel(str(directory)))
    return model


@pytest.fixture
def adapter(bases, tmp_path):
    """An adapter of the CLIP base that a test may damage."""
    written(bases["clip"], tmp_path / "adapter")
    return tmp_path / "adapter"


def edit(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_begin_as_the_base_model_and_follow_their_equations(kind, method, bases):
    """Bit for bit at first (B = 0, and the magnitudes are the norms); then a twin has the equation's plain weights."""
    model, twin = adapted(bases[kind], method, dropout=0.5), base_model(bases[kind])
    assert model.has_adapters
    with torch.no_grad():  # torch has another kernel for SigLIP's head once it is frozen
        assert_same(embed(model), embed(base_model(bases[kind]).requires_grad_(False)), 0)
    model, twin = model.double(), twin.double()
    disturb(model)
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


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("kind", "towers"), [*((kind, "both") for kind in KINDS), ("clip", "image"), ("clip", "text")])
def test_every_adapter_and_nothing_else_gets_a_gradient(kind, method, towers, bases):
    model = adapted(bases[kind], method, towers=towers)
    disturb(model)  # with B = 0, A has no gradient
    found = embed(model)
    (found["image"] @ found["text"].T)[0, 1].backward()
    tensors = ["lora_A.default.weight", "lora_B.default.weight", "lora_magnitude_vector.default.weight"]
    expected = {
        f"base_model.model.{name}.{tensor}"
        for name in linear_names(base_model(bases[kind]), towers)
        for tensor in tensors[: 2 if method == "lora" else 3]
    }
    parameters = dict(model.backbone.named_parameters())
    assert {name for name, p in parameters.items() if p.grad is not None and p.grad.any()} == expected
    assert {name for name, p in parameters.items() if p.requires_grad} == expected


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_merging_gives_a_plain_model_with_the_same_vectors(kind, method, bases, tmp_path):
    model = adapted(bases[kind], method, projections=kind != "siglip")
    disturb(model)
    before, source = embed(model), base_model(bases[kind])
    assert largest_difference(model, source) > 1e-3
    assert merge_adapters(model) is model
    assert_same(embed(model), before, 1e-5)
    assert model.state_dict().keys() == source.state_dict().keys()
    assert type(model.backbone) is type(source.backbone)
    assert all(parameter.requires_grad for parameter in model.parameters())
    save(model, tmp_path / "merged")
    assert_same(embed(load(tmp_path / "merged")), before, 1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_peft_alone_opens_what_is_saved(method, bases, tmp_path):
    model = written(bases["clip"], tmp_path / "adapter", method=method, projections=True)
    files = {file.name for file in (tmp_path / "adapter").iterdir()}
    assert files == {"adapter_model.safetensors", "adapter_config.json", "hnclip.json", "README.md"}
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(bases["clip"])
    theirs = base_model(bases["clip"])
    backbone = CLIPModel.from_pretrained(settings["base_model_name_or_path"])
    theirs.backbone = PeftModel.from_pretrained(backbone, tmp_path / "adapter").eval()
    assert_same(embed(theirs), embed(model), 0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_opens_as_the_model_it_was_saved_from(kind, method, bases, tmp_path, monkeypatch):
    """Also from another working directory than the base was named in; the trained temperature is included."""
    monkeypatch.chdir(bases[kind].parent)
    model = adapted(bases[kind], method, projections=kind != "siglip", train_scale=True)
    disturb(model)
    save_adapter(model, tmp_path / "adapter", BaseModel(bases[kind].name))
    monkeypatch.chdir(tmp_path)
    again = load("adapter").eval()
    assert_same(embed(again), embed(model), 1e-5)
    assert torch.equal(again.scale, model.scale)
    assert not again.has_adapters
    assert method in again.source.lower()
    assert json.loads(Path("adapter/hnclip.json").read_text())["base"]["model"] == str(bases[kind])


def test_the_base_is_opened_as_it_was(model, bases, tmp_path):
    """Stretched and with another tokenizer; the base may have been an adapter too."""
    save(model, tmp_path / "short")
    base = BaseModel(str(tmp_path / "short"), context=100, keep=5, ratio=3, tokenizer=str(bases["clip"]))
    long = load(**asdict(base))
    add_adapters(long, method="lora", rank=2, train_scale=False)
    disturb(long, 0.02)
    save_adapter(long, tmp_path / "first", base)
    first = load(tmp_path / "first")
    assert first.context == 100
    assert_same(embed(first), embed(long), 1e-4)
    second = written(tmp_path / "first", tmp_path / "second", method="dora")
    assert_same(embed(load(tmp_path / "second")), embed(second), 1e-3)  # merged twice in float32


@pytest.mark.parametrize("method", METHODS)
def test_an_adapter_of_plain_peft_opens(method, bases, tmp_path):
    """With other layers, another rank and a bias."""
    layers = {"target_modules": r"vision_model.*\.(q_proj|fc1)", "use_dora": method == "dora", "bias": "lora_only"}
    model = base_model(bases["clip"])
    model.backbone = get_peft_model(CLIPModel.from_pretrained(bases["clip"]), LoraConfig(r=3, **layers)).eval()
    disturb(model)
    model.backbone.save_pretrained(tmp_path / "plain", save_embedding_layers=False)
    assert_same(embed(load(tmp_path / "plain")), embed(model), 1e-5)
    edit(tmp_path / "plain" / "adapter_config.json", lambda content: content.update(base_model_name_or_path=None))
    with pytest.raises(ValueError, match="base_model_name_or_path"):
        load(tmp_path / "plain")


def test_a_base_that_has_moved_is_named(bases, tmp_path):
    shutil.copytree(bases["clip"], tmp_path / "here")
    model = written(tmp_path / "here", tmp_path / "adapter")
    (tmp_path / "here").rename(tmp_path / "there")
    with pytest.raises(ValueError, match="/here"):
        load(tmp_path / "adapter")
    edit(tmp_path / "adapter" / "hnclip.json", lambda content: content["base"].update(model=str(tmp_path / "there")))
    assert_same(embed(load(tmp_path / "adapter")), embed(model), 1e-5)


def test_a_hub_model_keeps_its_name(bases, tmp_path):
    save_adapter(adapted(bases["clip"]), tmp_path / "adapter", BaseModel("someone/model@main"))
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("someone/model", "main")
    assert json.loads((tmp_path / "adapter" / "hnclip.json").read_text())["base"]["model"] == "someone/model@main"
    assert BaseModel("bundled").located().model == "bundled"


@pytest.mark.parametrize("change", [{"intermediate_size": 96}, {"num_hidden_layers": 3}, {"num_hidden_layers": 1}])
def test_an_adapter_of_another_base_is_refused(change, bases, adapter, tmp_path):
    other = base_model(bases["clip"])
    config = copy.deepcopy(other.backbone.config)
    config.text_config.update(change)
    other.backbone = CLIPModel(config)
    save(other, tmp_path / "other")
    edit(adapter / "hnclip.json", lambda content: content["base"].update(model=str(tmp_path / "other")))
    with pytest.raises(ValueError, match=r"text_model\.encoder\.layers"):
        load(adapter)


def test_an_adapter_of_joined_towers_opens_with_the_same_projections(tmp_path):
    base = f"{write_dinov2(tmp_path / 'dino')}+{write_bert(tmp_path / 'bert')}"
    model = load(base)
    assert model.untrained_projections
    add_adapters(model, method="lora", rank=4, train_scale=False)
    disturb(model)
    save_adapter(model, tmp_path / "adapter", BaseModel(base))
    again = load(tmp_path / "adapter")
    assert not again.untrained_projections
    assert_same(embed(again), embed(model), 1e-5)


DAMAGES = {
    "hnclip.json": lambda d: (d / "hnclip.json").write_text("{}"),
    "no weights": lambda d: (d / "adapter_model.safetensors").unlink(),
    "adapter": lambda d: os.truncate(d / "adapter_model.safetensors", 1000),
    "IA3": lambda d: (d / "adapter_config.json").write_text('{"peft_type": "IA3"}'),
}


@pytest.mark.parametrize("word", DAMAGES)
def test_a_damaged_adapter_is_refused(word, adapter):
    DAMAGES[word](adapter)
    with pytest.raises(ValueError, match=word):
        load(adapter)


def test_impossible_requests_are_refused(bases, tmp_path, monkeypatch):
    plain, model = base_model(bases["clip"]), adapted(bases["clip"])
    for word, request in (
        ("no adapters", lambda: merge_adapters(plain)),
        ("no adapters", lambda: save_adapter(plain, tmp_path / "adapter", BaseModel("bundled"))),
        ("no projections", lambda: adapted(bases["siglip"], projections=True)),
        ("already", lambda: add_adapters(model, method="lora", train_scale=False)),
        ("merge_adapters", lambda: save(model, tmp_path / "whole")),
        ("adapters", lambda: stretch(model, context=500)),
    ):
        with pytest.raises(ValueError, match=word):
            request()
    assert not any(tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"pip install 'hnclip\[adapt\]'"):
        adapted(bases["clip"])
