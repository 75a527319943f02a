"""Blocks, freezing and trained tensors in every family, and interpolation."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
    ResNetConfig,
    ResNetModel,
    SiglipConfig,
    SiglipModel,
    VisionTextDualEncoderModel,
    ViTConfig,
    ViTModel,
)

from hnclip.data.images import ImageTransform
from hnclip.models.load import load, wrap
from hnclip.models.long_context import stretch
from hnclip.models.parameters import (
    describe_trainable,
    encoder_layers,
    freeze,
    interpolate,
    linear_names,
    match_base,
    restore_trained_tensors,
    train_mode,
    trained_tensors,
)

IMAGES = {"image_size": 32, "patch_size": 16}
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
IMAGES = {"image_size": 32, "patch_size": 16}


def build(kind, tokenizer, image=None):
    """A model of three blocks per tower; `image` replaces the image tower of the third kind."""
    text = {**SMALL, "vocab_size": len(tokenizer), "max_position_embeddings": 40}
    torch.manual_seed(0)
    if kind == "two towers":
        image = image or ViTModel(ViTConfig(**SMALL, **IMAGES))
        backbone = VisionTextDualEncoderModel(None, image, BertModel(BertConfig(**text)))
    elif kind == "CLIP":
        backbone = CLIPModel(CLIPConfig(text_config=text, vision_config={**SMALL, **IMAGES}))
    else:
        backbone = SiglipModel(SiglipConfig(text_config=text, vision_config={**SMALL, **IMAGES}))
    return wrap(backbone, tokenizer, ImageTransform(32))


def residual_tower():
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 3], layer_type="basic", hidden_size=16)
    return ResNetModel(config)


def trained(model):
    return {name for name, parameter in model.backbone.named_parameters() if parameter.requires_grad}


KINDS = pytest.mark.parametrize("kind", ["CLIP", "SigLIP", "two towers"])


@KINDS
def test_blocks_and_their_linear_layers_are_found_in_every_family(kind, tokenizer):
    """Neither poolers nor projections: SigLIP's pooling head has an out_proj and two fc layers of the same names."""
    model = build(kind, tokenizer)
    for which, tower in (("image", model.backbone.vision_model), ("text", model.backbone.text_model)):
        blocks = encoder_layers(tower)
        inside = {id(part) for part in blocks.modules()}
        names = linear_names(model, which)
        assert (len(blocks), len(set(names))) == (3, 3 * 6)
        assert all(id(model.backbone.get_submodule(name)) in inside for name in names)
    assert linear_names(model) == linear_names(model, "image") + linear_names(model, "text")
    tower = residual_tower()  # its second stage has more blocks than there are stages
    assert [type(block).__name__ for block in encoder_layers(tower)] == ["ResNetStage", "ResNetStage"]
    with pytest.raises(ValueError, match="no linear layers"):
        linear_names(build("two towers", tokenizer, tower))


@KINDS
def test_exactly_what_is_not_frozen_gets_a_gradient(kind, tokenizer):
    """By depth and of a whole tower. SigLIP's bias, which no loss reads, never trains."""
    model = build(kind, tokenizer)
    everything = trained(model)
    freeze(model, image=1, text=3)
    if kind == "CLIP":
        below = (
            "vision_model.embeddings.",
            "vision_model.pre_layrnorm.",
            "vision_model.encoder.layers.0.",
            "text_model.embeddings.",
            "text_model.encoder.",
        )
        assert trained(model) == {name for name in everything if not name.startswith(below)}
    texts = model.tokenize(["a red house by the sea", "two dogs under a tree"])
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    (model.scale * model.encode_images(pixels).vectors @ model.encode_texts(texts).vectors.T)[0, 0].backward()
    assert {name for name, weight in model.backbone.named_parameters() if weight.grad is not None} == trained(model)
    freeze(model, image="all")
    assert not [name for name in trained(model) if name.startswith(("vision", "visual"))]
    assert [name for name in trained(model) if name.startswith("text_model.")]
    for depth in (4, -1):
        with pytest.raises(ValueError, match="3 blocks"):
            freeze(model, text=depth)


def test_the_description_counts_what_trains(tokenizer):
    model = build("CLIP", tokenizer)
    sizes = {name: parameter.numel() for name, parameter in model.backbone.named_parameters()}
    total = sum(sizes.values()) - 1  # without the temperature
    assert f"{total:,}" in describe_trainable(model)
    model.backbone.logit_scale.requires_grad_(False)
    freeze(model, image="all", text=2)
    above = ("text_model.encoder.layers.2.", "text_model.final")
    tower = sum(size for name, size in sizes.items() if name.startswith(above))
    found = describe_trainable(model)
    for part in (f"of {total:,}", f"text tower {tower:,}", f"projections {sizes['text_projection.weight']:,}", "fixed"):
        assert part in found


def test_statistics_of_a_frozen_batch_norm_stay(tokenizer):
    """In a tower that trains they must be gathered and saved."""
    model = build("two towers", tokenizer, residual_tower())
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    for frozen in (True, False):
        model.requires_grad_(True)
        freeze(model, image="all" if frozen else 0)
        train_mode(model)
        before = {name: tensor.clone() for name, tensor in model.backbone.vision_model.named_buffers()}
        model.encode_images(pixels)
        after = dict(model.backbone.vision_model.named_buffers())
        assert all(tensor.equal(before[name]) for name, tensor in after.items()) == frozen
        assert model.backbone.text_model.encoder.training
    assert {f"backbone.vision_model.{name}" for name in before} <= trained_tensors(model).keys()


def test_trained_tensors_are_restored_and_those_of_another_model_refused(tokenizer):
    model = build("CLIP", tokenizer)
    freeze(model, image="all", text=1)
    kept = {name: tensor.clone() for name, tensor in trained_tensors(model).items()}
    assert {name.removeprefix("backbone.") for name in kept} == trained(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    restore_trained_tensors(model, kept)
    assert all(tensor.equal(kept[name]) for name, tensor in trained_tensors(model).items())
    names = ("logit_scale", "visual_projection.weight", "text_projection.weight")
    scale, frozen, weight = (f"backbone.{name}" for name in names)
    for name, other in (
        (scale, {name: tensor for name, tensor in kept.items() if name != scale}),
        (frozen, {**kept, frozen: torch.zeros(1)}),
        (weight, {**kept, weight: torch.zeros(2, 3)}),
    ):
        with pytest.raises(ValueError, match=name):
            restore_trained_tensors(model, other)


@pytest.fixture
def tuned(model):
    """The base with every weight changed."""
    moved = deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in moved.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
    return moved


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_interpolated_weights_lie_between(model, tuned, alpha):
    base, mixed = deepcopy(model), interpolate(deepcopy(tuned), model, tuned, alpha)
    for before, now, after, found in zip(*(m.parameters() for m in (base, model, tuned, mixed))):
        expected = before.double() * (1 - alpha) + after.double() * alpha
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-7)
        if alpha in (0, 1):
            assert torch.equal(found, after if alpha else before)
        assert torch.equal(now, before)


def test_a_base_is_stretched_to_its_tuned_model_and_another_architecture_refused(model, tuned, model_directory):
    short = model.backbone.text_model.embeddings.position_embedding.weight.detach().clone()
    stretch(tuned)
    match_base(model, tuned)
    assert model.context == 248
    assert torch.equal(model.backbone.text_model.embeddings.position_embedding.weight[:20], short[:20])
    interpolate(tuned, model, tuned, 0.5)
    with pytest.raises(ValueError, match="architectures"):
        match_base(model, load(model_directory))
