"""Blocks, freezing and trained tensors in every family, and interpolation."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from hnclip.data.images import ImageTransform
from hnclip.models.dual_encoder import DualEncoder
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

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
IMAGES = {"image_size": 32, "patch_size": 16}


def clip(tokenizer: Any, kind: str = "CLIP") -> DualEncoder:
    import transformers

    text = {**SMALL, "vocab_size": len(tokenizer), "max_position_embeddings": 40}
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config={**SMALL, **IMAGES})
    torch.manual_seed(0)
    return wrap(getattr(transformers, f"{kind}Model")(config), tokenizer)


def siglip(tokenizer: Any) -> DualEncoder:
    return clip(tokenizer, "Siglip")


def two_towers(tokenizer: Any, image: Any = None) -> DualEncoder:
    from transformers import BertConfig, BertModel, VisionTextDualEncoderModel, ViTConfig, ViTModel

    text = BertModel(BertConfig(**SMALL, vocab_size=len(tokenizer), max_position_embeddings=40))
    backbone = VisionTextDualEncoderModel(None, image or ViTModel(ViTConfig(**SMALL, **IMAGES)), text)
    return wrap(backbone, tokenizer, ImageTransform(32))


def residual_tower() -> Any:
    from transformers import ResNetConfig, ResNetModel

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 3], layer_type="basic", hidden_size=16)
    return ResNetModel(config)


def trained(model: DualEncoder) -> set[str]:
    return {name for name, parameter in model.backbone.named_parameters() if parameter.requires_grad}


FAMILIES = pytest.mark.parametrize("build", [clip, siglip, two_towers])


@FAMILIES
def test_blocks_and_their_linear_layers_are_found_in_every_family(build: Any, tokenizer: Any) -> None:
    """Neither poolers nor projections: SigLIP's pooling head has an out_proj and two fc layers of the same names."""
    model = build(tokenizer)
    for which, tower in (("image", model.backbone.vision_model), ("text", model.backbone.text_model)):
        blocks = encoder_layers(tower)
        assert len(blocks) == 3
        inside = {id(part) for part in blocks.modules()}
        names = linear_names(model, which)
        assert len(set(names)) == 3 * 6
        assert all(id(model.backbone.get_submodule(name)) in inside for name in names)
    assert linear_names(model) == linear_names(model, "image") + linear_names(model, "text")


def test_the_blocks_of_a_tower_in_stages_are_its_stages(tokenizer: Any) -> None:
    """The second stage has more blocks than there are stages."""
    tower = residual_tower()
    assert [type(block).__name__ for block in encoder_layers(tower)] == ["ResNetStage", "ResNetStage"]
    with pytest.raises(ValueError, match="no linear layers"):
        linear_names(two_towers(tokenizer, tower))


def test_freezing_by_depth_and_of_whole_towers(tokenizer: Any) -> None:
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
    freeze(model, image="all")
    assert trained(model) == {
        "logit_scale",
        "text_projection.weight",
        "text_model.final_layer_norm.weight",
        "text_model.final_layer_norm.bias",
    }
    for depth in (4, -1):
        with pytest.raises(ValueError, match="3 blocks"):
            freeze(model, text=depth)


@FAMILIES
def test_exactly_what_is_not_frozen_gets_a_gradient(build: Any, tokenizer: Any) -> None:
    """SigLIP's bias, which no loss reads, never trains."""
    model = build(tokenizer)
    freeze(model, image=2, text=1)
    texts = model.tokenize(["a red house by the sea", "two dogs under a tree"])
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    image, text = model.encode_images(pixels).vectors, model.encode_texts(texts).vectors
    (model.scale * image @ text.T)[0, 0].backward()
    assert {name for name, weight in model.backbone.named_parameters() if weight.grad is not None} == trained(model)


def test_the_description_counts_what_trains(tokenizer: Any) -> None:
    model = clip(tokenizer)
    sizes = {name: parameter.numel() for name, parameter in model.backbone.named_parameters()}
    total = sum(sizes.values()) - 1  # without the temperature
    assert describe_trainable(model) == f"all {total:,} parameters train; temperature trains"
    model.backbone.logit_scale.requires_grad_(False)
    freeze(model, image="all", text=2)
    above = ("text_model.encoder.layers.2.", "text_model.final")
    tower = sum(size for name, size in sizes.items() if name.startswith(above))
    found = describe_trainable(model)
    for part in (f"of {total:,}", f"text tower {tower:,}", f"projections {sizes['text_projection.weight']:,}", "fixed"):
        assert part in found


def test_statistics_of_a_frozen_batch_norm_stay(tokenizer: Any) -> None:
    """In a tower that trains they must be gathered and saved."""
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


def test_trained_tensors_are_restored_and_those_of_another_model_refused(tokenizer: Any) -> None:
    model = clip(tokenizer)
    freeze(model, image="all", text=1)
    kept = {name: tensor.clone() for name, tensor in trained_tensors(model).items()}
    assert {name.removeprefix("backbone.") for name in kept} == trained(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    restore_trained_tensors(model, kept)
    assert all(tensor.equal(kept[name]) for name, tensor in trained_tensors(model).items())
    scale, frozen, weight = (
        f"backbone.{name}" for name in ("logit_scale", "visual_projection.weight", "text_projection.weight")
    )
    missing = {name: tensor for name, tensor in kept.items() if name != scale}
    for other, name in (
        (missing, scale),
        ({**kept, frozen: torch.zeros(1)}, frozen),
        ({**kept, weight: torch.zeros(2, 3)}, weight),
    ):
        with pytest.raises(ValueError, match=name):
            restore_trained_tensors(model, other)


@pytest.fixture
def tuned(model: DualEncoder) -> DualEncoder:
    """The base with every weight changed."""
    moved = deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in moved.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
    return moved


def weights(model: DualEncoder) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_interpolated_weights_lie_between(model: DualEncoder, tuned: DualEncoder, alpha: float) -> None:
    base, after = weights(model), weights(tuned)
    mixed = weights(interpolate(deepcopy(tuned), model, tuned, alpha))
    for name in base:
        expected = base[name].double() * (1 - alpha) + after[name].double() * alpha
        torch.testing.assert_close(mixed[name].double(), expected, rtol=1e-6, atol=1e-7)
        if alpha in (0, 1):
            assert torch.equal(mixed[name], after[name] if alpha else base[name])
    assert all(torch.equal(now, base[name]) for name, now in weights(model).items())


def test_a_base_is_stretched_to_its_tuned_model_and_another_architecture_refused(
    model: DualEncoder, tuned: DualEncoder, model_directory: Any
) -> None:
    short = model.backbone.text_model.embeddings.position_embedding.weight.detach().clone()
    stretch(tuned)
    match_base(model, tuned)
    assert model.context == 248
    assert torch.equal(model.backbone.text_model.embeddings.position_embedding.weight[:20], short[:20])
    interpolate(tuned, model, tuned, 0.5)
    with pytest.raises(ValueError, match="architectures"):
        match_base(model, load(model_directory))
