"""Blocks, freezing and trained tensors in every family, and interpolation."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from transformers import BertConfig, BertModel, ResNetConfig, ResNetModel, VisionTextDualEncoderModel

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

KINDS = pytest.mark.parametrize("kind", ["clip", "siglip", "vision-text-dual-encoder"])  # of two blocks per tower


def pixels(model):
    return torch.randint(0, 256, (2, 3, model.image_size, model.image_size), dtype=torch.uint8)


def trained(model):
    return {name for name, parameter in model.backbone.named_parameters() if parameter.requires_grad}


@KINDS
def test_blocks_and_their_linear_layers_are_found_in_every_family(kind, directories):
    """Neither poolers nor projections: SigLIP's pooling head has an out_proj and two fc layers of the same names."""
    model = load(directories[kind])
    for which, tower in (("image", model.backbone.vision_model), ("text", model.backbone.text_model)):
        blocks, names = encoder_layers(tower), linear_names(model, which)
        inside = {id(part) for part in blocks.modules()}
        assert (len(blocks), len(set(names))) == (2, 2 * 6)
        assert all(id(model.backbone.get_submodule(name)) in inside for name in names)
    assert linear_names(model) == linear_names(model, "image") + linear_names(model, "text")


@KINDS
def test_exactly_what_is_not_frozen_gets_a_gradient(kind, directories):
    """By depth and of a whole tower. SigLIP's bias, which no loss reads, never trains."""
    model = load(directories[kind])
    everything = trained(model)
    freeze(model, image=1, text=2)
    if kind == "clip":
        image = ("embeddings.", "pre_layrnorm.", "encoder.layers.0.")
        below = (*(f"vision_model.{part}" for part in image), "text_model.embeddings.", "text_model.encoder.")
        assert trained(model) == {name for name in everything if not name.startswith(below)}
    texts = model.tokenize(["a red house by the sea", "two dogs under a tree"])
    (model.scale * model.encode_images(pixels(model)).vectors @ model.encode_texts(texts).vectors.T)[0, 0].backward()
    assert {name for name, weight in model.backbone.named_parameters() if weight.grad is not None} == trained(model)
    total = sum(dict(model.backbone.named_parameters())[name].numel() for name in trained(model)) - 1  # the scale
    assert f"{total:,}" in describe_trainable(model)
    freeze(model, image="all")
    assert not [name for name in trained(model) if name.startswith(("vision", "visual"))]
    assert [name for name in trained(model) if name.startswith("text_model.")]
    with pytest.raises(ValueError, match="2 blocks"):
        freeze(model, text=3)


def test_statistics_of_a_frozen_batch_norm_stay(tokenizer):
    """In a tower that trains they must be gathered and saved, and interpolated as weights are."""
    text = BertConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=len(tokenizer))
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 3], "layer_type": "basic", "hidden_size": 16}
    towers = ResNetModel(ResNetConfig(**sizes)), BertModel(text)
    model = wrap(VisionTextDualEncoderModel(None, *towers), tokenizer, ImageTransform(32))
    assert len(encoder_layers(model.backbone.vision_model)) == 2
    with pytest.raises(ValueError, match="no linear layers"):
        linear_names(model)
    for frozen in (True, False):
        model.requires_grad_(True)
        freeze(model, image="all" if frozen else 0)
        train_mode(model)
        before = {name: tensor.clone() for name, tensor in model.backbone.vision_model.named_buffers()}
        model.encode_images(pixels(model))
        after = dict(model.backbone.vision_model.named_buffers())
        assert all(tensor.equal(before[name]) for name, tensor in after.items()) == frozen
    assert {f"backbone.vision_model.{name}" for name in before} <= trained_tensors(model).keys()
    tuned, batch = deepcopy(model), pixels(model)
    tuned.encode_images(batch)
    for alpha, expected in ((0.0, model), (1.0, tuned)):
        mixed = interpolate(deepcopy(tuned), model, tuned, alpha)
        assert torch.equal(*(deepcopy(one).eval().encode_images(batch).vectors for one in (mixed, expected)))


def test_trained_tensors_are_restored_and_those_of_another_model_refused(model_directory):
    model = load(model_directory)
    freeze(model, image="all", text=1)
    kept = {name: tensor.clone() for name, tensor in trained_tensors(model).items()}
    assert {name.removeprefix("backbone.") for name in kept} == trained(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    restore_trained_tensors(model, kept)
    assert all(tensor.equal(kept[name]) for name, tensor in trained_tensors(model).items())
    weight = "backbone.text_projection.weight"
    for name, other in (
        (weight, {name: tensor for name, tensor in kept.items() if name != weight}),
        (weight, {**kept, weight: torch.zeros(2, 3)}),
        ("backbone.visual_projection.weight", {**kept, "backbone.visual_projection.weight": torch.zeros(1)}),
    ):
        with pytest.raises(ValueError, match=name):
            restore_trained_tensors(model, other)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_interpolated_weights_lie_between(model, model_directory, alpha):
    """A base is stretched to its tuned model; another architecture is refused."""
    tuned = stretch(deepcopy(model))
    match_base(model, tuned)
    assert model.context == 248
    base = deepcopy(model)
    with torch.no_grad():
        for weight in tuned.parameters():
            weight.add_(torch.randn(weight.shape) * 0.1)
    mixed = interpolate(deepcopy(tuned), model, tuned, alpha)
    for before, now, after, found in zip(*(m.parameters() for m in (base, model, tuned, mixed))):
        expected = before.double() * (1 - alpha) + after.double() * alpha
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-7)
        assert torch.equal(now, before)
        assert alpha == 0.3 or torch.equal(found, after if alpha else before)
    with pytest.raises(ValueError, match="architectures"):
        match_base(model, load(model_directory))
