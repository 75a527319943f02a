"""Blocks, freezing and trained tensors in every family, and interpolation."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from hnclip.data.images import ImageTransform
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load, wrap
from hnclip.models.long_context import stretch
from hnclip.models.parameters import (
    describe_trainable,
    encoder_layers,
    first_difference,
    freeze,
    interpolate,
    linear_names,
    match_base,
    restore_trained_tensors,
    train_mode,
    trained_tensors,
)

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
PICTURE = {"image_size": 32, "patch_size": 16}
INNER = ["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj", "self_attn.out_proj", "mlp.fc1", "mlp.fc2"]


def clip(tokenizer: Any) -> DualEncoder:
    from transformers import CLIPConfig, CLIPModel

    text = {**SMALL, "vocab_size": len(tokenizer), "max_position_embeddings": 40}
    return wrap(
        CLIPModel(CLIPConfig(projection_dim=16, text_config=text, vision_config={**SMALL, **PICTURE})), tokenizer
    )


def siglip(tokenizer: Any) -> DualEncoder:
    from transformers import SiglipConfig, SiglipModel

    text = {**SMALL, "vocab_size": len(tokenizer), "max_position_embeddings": 40}
    return wrap(SiglipModel(SiglipConfig(text_config=text, vision_config={**SMALL, **PICTURE})), tokenizer)


def two_towers(tokenizer: Any, image: Any = None) -> DualEncoder:
    from transformers import BertConfig, BertModel, VisionTextDualEncoderModel, ViTConfig, ViTModel

    text = BertModel(BertConfig(**SMALL, vocab_size=len(tokenizer), max_position_embeddings=40))
    backbone = VisionTextDualEncoderModel(None, image or ViTModel(ViTConfig(**SMALL, **PICTURE)), text)
    return wrap(backbone, tokenizer, ImageTransform(32))


def residual_tower() -> Any:
    from transformers import ResNetConfig, ResNetModel

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 3], layer_type="basic", hidden_size=16)
    return ResNetModel(config)


FAMILIES = [clip, siglip, two_towers]


@pytest.fixture(autouse=True)
def steady() -> None:
    torch.manual_seed(0)


def trained(model: DualEncoder) -> set[str]:
    return {name for name, parameter in model.backbone.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("build", FAMILIES)
def test_the_blocks_of_every_family_are_found(build: Any, tokenizer: Any) -> None:
    backbone = build(tokenizer).backbone
    for tower in (backbone.vision_model, backbone.text_model):
        blocks = encoder_layers(tower)
        assert len(blocks) == 3
        assert {type(block).__name__ for block in blocks} <= {
            "CLIPEncoderLayer",
            "SiglipEncoderLayer",
            "ViTLayer",
            "BertLayer",
        }


def test_a_tower_in_stages_is_the_list_of_its_stages() -> None:
    """The second stage has more blocks than there are stages, but they are inside one."""
    from transformers import ConvNextConfig, ConvNextModel

    tower = ConvNextModel(ConvNextConfig(num_stages=2, hidden_sizes=[4, 8], depths=[1, 5]))
    assert [type(block).__name__ for block in encoder_layers(tower)] == ["ConvNextStage", "ConvNextStage"]


@pytest.mark.parametrize("build", [clip, siglip])
def test_adapted_layers_are_those_of_the_blocks_alone(build: Any, tokenizer: Any) -> None:
    """SigLIP's pooling head has an out_proj and two fc layers of the same names."""
    model = build(tokenizer)
    expected = {
        tower: {f"{tower}.encoder.layers.{block}.{name}" for block in range(3) for name in INNER}
        for tower in ("vision_model", "text_model")
    }
    assert set(linear_names(model, "image")) == expected["vision_model"]
    assert set(linear_names(model, "text")) == expected["text_model"]
    assert sorted(linear_names(model)) == sorted(expected["vision_model"] | expected["text_model"])


def test_poolers_and_projections_of_two_towers_are_left_out(tokenizer: Any) -> None:
    names = linear_names(two_towers(tokenizer))
    assert len(names) == 2 * 3 * 6
    assert all(".layer." in name or ".layers." in name for name in names)


def test_packed_attention_is_left_out(tokenizer: Any) -> None:
    model = clip(tokenizer)
    block = nn.TransformerEncoderLayer(16, 2, 32)
    model.backbone.text_model.encoder.layers = nn.ModuleList([block, nn.TransformerEncoderLayer(16, 2, 32)])
    prefix = "text_model.encoder.layers"
    assert isinstance(block.self_attn.out_proj, nn.Linear)
    assert linear_names(model, "text") == [f"{prefix}.{i}.{name}" for i in (0, 1) for name in ("linear1", "linear2")]


def test_a_tower_of_convolutions_takes_no_adapters(tokenizer: Any) -> None:
    model = two_towers(tokenizer, residual_tower())
    with pytest.raises(ValueError, match="image tower has no linear layers"):
        linear_names(model)
    assert len(linear_names(model, "text")) == 18


def test_freezing_by_depth_leaves_what_is_above(tokenizer: Any) -> None:
    model = clip(tokenizer)
    everything = trained(model)
    freeze(model, image=1, text=3)
    below = (
        "vision_model.embeddings.",
        "vision_model.pre_layrnorm.",
        "vision_model.encoder.layers.0.",
        "text_model.embeddings.",
        "text_model.encoder.",
    )
    assert trained(model) == {name for name in everything if not name.startswith(below)}
    assert "text_model.final_layer_norm.weight" in trained(model)


def test_a_whole_tower_goes_with_its_projection(tokenizer: Any) -> None:
    model = clip(tokenizer)
    everything = trained(model)
    freeze(model, image="all")
    assert trained(model) == {
        name for name in everything if not name.startswith(("vision_model.", "visual_projection."))
    }
    freeze(model, text="all")
    assert trained(model) == {"logit_scale"}


@pytest.mark.parametrize("build", FAMILIES)
def test_what_is_frozen_gets_no_gradient_and_what_trains_gets_one(build: Any, tokenizer: Any) -> None:
    model = build(tokenizer)
    freeze(model, image=2, text=1)
    captions = model.tokenize(["a red house by the sea", "two dogs under a tree"])
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    image, text = model.encode_images(pixels).vectors, model.encode_texts(captions).vectors
    (model.scale * image @ text.T)[0, 0].backward()
    with_gradient = {name for name, parameter in model.backbone.named_parameters() if parameter.grad is not None}
    assert with_gradient == trained(model)


def test_an_impossible_depth_names_the_true_one(tokenizer: Any) -> None:
    for depth in (4, -1):
        with pytest.raises(ValueError, match="text tower has 3 blocks"):
            freeze(clip(tokenizer), text=depth)


def test_the_bias_of_siglip_never_trains(tokenizer: Any) -> None:
    model = siglip(tokenizer)
    assert "logit_bias" in trained(model)
    freeze(model)
    assert "logit_bias" not in trained(model)
    assert "logit_scale" in trained(model)


def test_the_line_for_people_counts_right(tokenizer: Any) -> None:
    model = clip(tokenizer)
    model.backbone.logit_scale.data.fill_(100.0).log_()
    sizes = {name: parameter.numel() for name, parameter in model.backbone.named_parameters()}
    total = sum(sizes.values()) - 1  # without the temperature
    assert describe_trainable(model) == f"all {total:,} parameters train; temperature trains"

    model.backbone.logit_scale.requires_grad_(False)
    assert describe_trainable(model) == f"all {total:,} parameters train; temperature fixed at 100.0"

    freeze(model, image="all", text=2)
    left = sum(
        size for name, size in sizes.items() if name.startswith(("text_model.encoder.layers.2.", "text_model.final"))
    )
    projection = sizes["text_projection.weight"]
    share = (left + projection) / total
    assert describe_trainable(model) == (
        f"{left + projection:,} of {total:,} parameters train ({share:.2%}): text tower {left:,}, projections "
        f"{projection:,}; temperature fixed at 100.0"
    )


def test_statistics_of_a_frozen_batch_norm_stay(tokenizer: Any) -> None:
    """In a frozen tower they are weights like any other; in one that trains they must be gathered and saved."""
    model = two_towers(tokenizer, residual_tower())
    pixels = torch.randint(0, 256, (2, 3, 224, 224), dtype=torch.uint8)
    for frozen in (True, False):
        model.requires_grad_(True)
        freeze(model, image="all" if frozen else 0)
        train_mode(model)
        before = {name: tensor.clone() for name, tensor in model.backbone.vision_model.named_buffers()}
        model.encode_images(pixels)
        moved = [name for name, tensor in model.backbone.vision_model.named_buffers() if not tensor.equal(before[name])]
        assert bool(moved) != frozen
        assert model.backbone.text_model.encoder.training
    assert {f"backbone.vision_model.{name}" for name in before} <= trained_tensors(model).keys()


def test_what_trains_is_taken_out_and_put_back(tokenizer: Any) -> None:
    model = clip(tokenizer)
    freeze(model, image="all", text=1)
    kept = {name: tensor.clone() for name, tensor in trained_tensors(model).items()}
    assert {name.removeprefix("backbone.") for name in kept} == trained(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    restore_trained_tensors(model, kept)
    assert not first_difference(trained_tensors(model), kept)
    assert all(tensor.equal(kept[name]) for name, tensor in trained_tensors(model).items())


def test_tensors_of_another_model_are_refused_by_name(tokenizer: Any) -> None:
    model = clip(tokenizer)
    freeze(model, image="all")
    kept = trained_tensors(model)
    scale, weight = "backbone.logit_scale", "backbone.text_projection.weight"
    others = [
        {name: tensor for name, tensor in kept.items() if name != scale},
        {**kept, "backbone.visual_projection.weight": torch.zeros(1)},
        {**kept, weight: torch.zeros(2, 3)},
    ]
    for other, name in zip(others, (scale, "backbone.visual_projection.weight", weight)):
        with pytest.raises(ValueError, match=name):
            restore_trained_tensors(model, other)


@pytest.fixture
def tuned(model):
    """The base with every weight moved."""
    moved = deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in moved.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
    return moved


def weights(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_every_weight_is_between(model, tuned, alpha):
    base, after = weights(model), weights(tuned)
    mixed = weights(interpolate(deepcopy(tuned), model, tuned, alpha))
    for name in base:
        expected = base[name].double() * (1 - alpha) + after[name].double() * alpha
        torch.testing.assert_close(mixed[name].double(), expected, rtol=1e-6, atol=1e-7)
    assert weights(model).keys() == base.keys()
    assert all(torch.equal(now, base[name]) for name, now in weights(model).items())  # the sources stay


@pytest.mark.parametrize(("alpha", "end"), [(0.0, "base"), (1.0, "tuned")])
def test_the_ends_are_the_models_themselves(model, tuned, alpha, end):
    expected = weights({"base": model, "tuned": tuned}[end])
    mixed = weights(interpolate(deepcopy(tuned), model, tuned, alpha))
    assert all(torch.equal(mixed[name], expected[name]) for name in expected)


def test_a_short_base_is_stretched_to_its_tuned_model(model, tuned):
    short = model.backbone.text_model.embeddings.position_embedding.weight.detach().clone()
    stretch(tuned)
    match_base(model, tuned)
    assert model.context == 248
    assert torch.equal(model.backbone.text_model.embeddings.position_embedding.weight[:20], short[:20])
    interpolate(tuned, model, tuned, 0.5)


def test_models_of_different_make_are_told_apart(model, model_directory):
    with pytest.raises(ValueError, match="different architectures"):
        match_base(model, load(model_directory))
    shallow = deepcopy(model)
    del shallow.backbone.vision_model.encoder.layers[-1]
    with pytest.raises(ValueError, match=r"vision_model\.encoder\.layers\.3"):
        match_base(model, shallow)
