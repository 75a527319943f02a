"""Adapters start as the base model, follow their equations, and are saved alone."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hnclip.models.adapters import BaseModel, add_adapters, merge_adapters, save_adapter
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load, save
from hnclip.models.long_context import stretch
from hnclip.models.parameters import linear_names
from small_families import write_bert, write_dinov2, write_siglip, write_two_towers

KINDS = ["clip", "siglip", "vision-text-dual-encoder"]
METHODS = ["lora", "dora"]
CAPTIONS = ["a small red house and a tree", "the large dog lies on the grass beside a bench", "a blue cat"]
TOWERS = {"image": "vision_model", "text": "text_model"}


@pytest.fixture(scope="module")
def bases(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("bases")
    return {
        "clip": model_directory,
        "siglip": write_siglip(directory / "siglip"),
        "vision-text-dual-encoder": write_two_towers(directory / "towers"),
    }


@cache
def _opened(directory: Path) -> DualEncoder:
    return load(directory)


def base_model(directory: Path) -> DualEncoder:
    """A copy of a model that is read from disk only once."""
    return copy.deepcopy(_opened(directory))


def embed(model: DualEncoder) -> dict[str, Tensor]:
    """Global and token vectors of fixed images and captions."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (3, 3, model.image_size, model.image_size), generator=generator, dtype=torch.uint8)
    image, text = model.encode_images(pixels, tokens=True), model.encode_texts(model.tokenize(CAPTIONS), tokens=True)
    return {"image": image.vectors, "patches": image.tokens, "text": text.vectors, "words": text.tokens}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float) -> None:
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=tolerance)


def assert_differ(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """The adapters change the vectors."""
    for name in ("image", "text"):
        assert (a[name] - b[name]).abs().max() > 1e-3


def disturb(model: DualEncoder, size: float = 0.2) -> None:
    """Change everything that trains, as steps would."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * size)


def adapted(directory: Path, method: str = "lora", **options: Any) -> DualEncoder:
    torch.manual_seed(0)
    model = base_model(directory)
    add_adapters(model, **{"method": method, "rank": 4, "alpha": 8.0, "train_scale": False, **options})
    return model


def written(directory: Path, out: Path, **options: Any) -> DualEncoder:
    """A disturbed adapter of a base, saved; returns the model it was saved from."""
    model = adapted(directory, **options)
    disturb(model)
    save_adapter(model, out, BaseModel(str(directory)))
    return model


@pytest.fixture(scope="module")
def saved(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved") / "adapter"
    written(bases["clip"], directory)
    return directory


@pytest.fixture
def adapter(saved: Path, tmp_path: Path) -> Path:
    """An adapter of the CLIP base that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "adapter"))


def edit(file: Path, change: Callable[[dict], None]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_begin_as_the_base_model(kind: str, method: str, bases: dict[str, Path]) -> None:
    """B = 0, and the magnitudes are the norms: not one bit differs."""
    model = adapted(bases[kind], method, projections=kind != "siglip")
    assert model.has_adapters
    base = base_model(bases[kind]).requires_grad_(False)  # torch has another kernel for SigLIP's head once it is frozen
    with torch.no_grad():
        assert_same(embed(model), embed(base), 0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_their_equations(kind: str, method: str, bases: dict[str, Path]) -> None:
    """The twin has the equation's matrices as plain weights."""
    model, twin = adapted(bases[kind], method).double(), base_model(bases[kind]).double()
    disturb(model)
    layers, plain = model.backbone.get_base_model(), twin.backbone
    assert_differ(embed(model), embed(twin))
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


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("kind", "towers"), [*((kind, "both") for kind in KINDS), ("clip", "image"), ("clip", "text")])
def test_gradient_reaches_every_adapter_and_nothing_else(
    kind: str, method: str, towers: str, bases: dict[str, Path]
) -> None:
    model = adapted(bases[kind], method, towers=towers)
    disturb(model)  # at B = 0 no gradient would come through to A
    found = embed(model)
    (found["image"] @ found["text"].T)[0, 1].backward()
    chosen = list(TOWERS.values()) if towers == "both" else [TOWERS[towers]]
    tensors = ["lora_A.default.weight", "lora_B.default.weight", "lora_magnitude_vector.default.weight"]
    expected = {
        f"base_model.model.{name}.{tensor}"
        for name in linear_names(base_model(bases[kind]))
        if name.split(".")[0] in chosen
        for tensor in tensors[: 2 if method == "lora" else 3]
    }
    reached = {name for name, p in model.backbone.named_parameters() if p.grad is not None and bool(p.grad.any())}
    assert reached == expected
    assert {name for name, p in model.backbone.named_parameters() if p.requires_grad} == expected


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_merging_gives_a_plain_model_with_the_same_vectors(
    kind: str, method: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    model = adapted(bases[kind], method, projections=kind != "siglip")
    disturb(model)
    before, source = embed(model), base_model(bases[kind])
    assert merge_adapters(model) is model
    assert_same(embed(model), before, 1e-5)
    assert_differ(before, embed(source))
    assert model.state_dict().keys() == source.state_dict().keys()
    assert type(model.backbone) is type(source.backbone)
    assert all(parameter.requires_grad for parameter in model.parameters())
    save(model, tmp_path / "merged")
    assert_same(embed(load(tmp_path / "merged")), before, 1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_peft_opens_what_is_saved_without_this_package(method: str, bases: dict[str, Path], tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import CLIPModel

    model = written(bases["clip"], tmp_path / "adapter", method=method, projections=True)
    files = {file.name for file in (tmp_path / "adapter").iterdir()}
    assert files == {"adapter_model.safetensors", "adapter_config.json", "hnclip.json", "README.md"}
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(bases["clip"])
    assert settings["target_modules"] == sorted(settings["target_modules"])

    theirs = base_model(bases["clip"])
    backbone = CLIPModel.from_pretrained(settings["base_model_name_or_path"])
    theirs.backbone = PeftModel.from_pretrained(backbone, tmp_path / "adapter").eval()
    assert_same(embed(theirs), embed(model), 0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_opens_as_the_model_it_was_saved_from(
    kind: str, method: str, bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from another working directory than the base was named in; the trained temperature comes along."""
    monkeypatch.chdir(bases[kind].parent)
    model = adapted(bases[kind], method, projections=kind != "siglip", train_scale=True)
    disturb(model)
    save_adapter(model, tmp_path / "adapter", BaseModel(bases[kind].name))
    monkeypatch.chdir(tmp_path)
    again = load("adapter").eval()
    assert_same(embed(again), embed(model), 1e-5)
    assert torch.equal(again.scale, model.scale)
    assert not again.has_adapters
    assert again.source.endswith("with the DoRA of adapter" if method == "dora" else "with the LoRA of adapter")
    assert json.loads(Path("adapter/hnclip.json").read_text())["base"]["model"] == str(bases[kind])


def test_the_base_is_opened_as_it_was(model: DualEncoder, bases: dict[str, Path], tmp_path: Path) -> None:
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
def test_an_adapter_of_plain_peft_opens(method: str, bases: dict[str, Path], tmp_path: Path) -> None:
    """With layers, ranks and a bias of its own choice."""
    from peft import LoraConfig, get_peft_model
    from transformers import CLIPModel

    settings = LoraConfig(
        r=3, target_modules=r"vision_model.*\.(q_proj|fc1)", use_dora=method == "dora", bias="lora_only"
    )
    model = base_model(bases["clip"])
    model.backbone = get_peft_model(CLIPModel.from_pretrained(bases["clip"]), settings).eval()
    disturb(model)
    model.backbone.save_pretrained(tmp_path / "plain", save_embedding_layers=False)
    assert_same(embed(load(tmp_path / "plain")), embed(model), 1e-5)
    edit(tmp_path / "plain" / "adapter_config.json", lambda content: content.update(base_model_name_or_path=None))
    with pytest.raises(ValueError, match="base_model_name_or_path"):
        load(tmp_path / "plain")


def test_a_base_that_has_moved_is_named(bases: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(bases["clip"], tmp_path / "here")
    model = written(tmp_path / "here", tmp_path / "adapter")
    (tmp_path / "here").rename(tmp_path / "there")
    with pytest.raises(ValueError, match="/here"):
        load(tmp_path / "adapter")
    edit(tmp_path / "adapter" / "hnclip.json", lambda content: content["base"].update(model=str(tmp_path / "there")))
    assert_same(embed(load(tmp_path / "adapter")), embed(model), 1e-5)


def test_a_hub_model_keeps_its_name(bases: dict[str, Path], tmp_path: Path) -> None:
    save_adapter(adapted(bases["clip"]), tmp_path / "adapter", BaseModel("someone/model@main"))
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("someone/model", "main")
    assert json.loads((tmp_path / "adapter" / "hnclip.json").read_text())["base"]["model"] == "someone/model@main"
    assert BaseModel("bundled").located().model == "bundled"


@pytest.mark.parametrize("change", [{"intermediate_size": 96}, {"num_hidden_layers": 3}, {"num_hidden_layers": 1}])
def test_an_adapter_of_another_base_is_refused(
    change: dict[str, int], bases: dict[str, Path], adapter: Path, tmp_path: Path
) -> None:
    from transformers import CLIPModel

    other = base_model(bases["clip"])
    config = copy.deepcopy(other.backbone.config)
    for key, value in change.items():
        setattr(config.text_config, key, value)
    other.backbone = CLIPModel(config)
    save(other, tmp_path / "other")
    edit(adapter / "hnclip.json", lambda content: content["base"].update(model=str(tmp_path / "other")))
    with pytest.raises(ValueError, match=r"text_model\.encoder\.layers"):
        load(adapter)


def test_an_adapter_of_joined_towers_opens_with_the_same_projections(tmp_path: Path) -> None:
    base = f"{write_dinov2(tmp_path / 'dino')}+{write_bert(tmp_path / 'bert')}"
    model = load(base)
    assert model.untrained_projections
    add_adapters(model, method="lora", rank=4, train_scale=False)
    disturb(model)
    save_adapter(model, tmp_path / "adapter", BaseModel(base))
    again = load(tmp_path / "adapter")
    assert not again.untrained_projections
    assert_same(embed(again), embed(model), 1e-5)


def truncate(directory: Path) -> None:
    file = directory / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda d: (d / "hnclip.json").write_text("{}"), "hnclip.json"),
        (lambda d: (d / "adapter_model.safetensors").unlink(), "no weights"),
        (truncate, "adapter"),
        (lambda d: (d / "adapter_config.json").write_text('{"peft_type": "IA3"}'), "IA3"),
    ],
)
def test_a_damaged_adapter_is_refused(damage: Callable[[Path], None], word: str, adapter: Path) -> None:
    damage(adapter)
    with pytest.raises(ValueError, match=word):
        load(adapter)


def test_impossible_requests_are_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    plain, model = base_model(bases["clip"]), adapted(bases["clip"])
    requests: list[tuple[str, Callable[[], Any]]] = [
        ("no adapters", lambda: merge_adapters(plain)),
        ("no adapters", lambda: save_adapter(plain, tmp_path / "adapter", BaseModel("bundled"))),
        ("no projections", lambda: adapted(bases["siglip"], projections=True)),
        ("already", lambda: add_adapters(model, method="lora", train_scale=False)),
        ("merge_adapters", lambda: save(model, tmp_path / "whole")),
        ("adapters", lambda: stretch(model, context=500)),
    ]
    for word, request in requests:
        with pytest.raises(ValueError, match=word):
            request()
    assert not any(tmp_path.iterdir())


def test_without_peft_the_package_to_install_is_named(bases: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"pip install 'hnclip\[adapt\]'"):
        adapted(bases["clip"])


def test_dropout_is_for_training(bases: dict[str, Path]) -> None:
    """peft returns its model in training mode, whatever mode it was in."""
    model = adapted(bases["clip"], dropout=0.5)
    disturb(model)
    assert_same(embed(model), embed(model), 0)
    model.train()
    assert_differ(embed(model), embed(model))
