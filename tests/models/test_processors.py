from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from hnclip.data.images import OPENAI_MEAN, OPENAI_STD, ImageTransform, preprocess_image
from hnclip.models.processors import _HABITS, build_processor, read_processor

HALF = (0.5, 0.5, 0.5)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

# In the form of the files beside these weights, apart from keys that say nothing of pixels.
PUBLISHED = {
    "openai/clip-vit-base-patch32": (
        {
            "crop_size": 224,
            "do_center_crop": True,
            "do_normalize": True,
            "do_resize": True,
            "feature_extractor_type": "CLIPFeatureExtractor",
            "image_mean": list(OPENAI_MEAN),
            "image_std": list(OPENAI_STD),
            "resample": 3,
            "size": 224,
        },
        ImageTransform(224),
    ),
    "google/siglip2-base-patch16-224": (
        {
            "do_convert_rgb": None,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_processor_type": "SiglipImageProcessor",
            "image_std": [0.5, 0.5, 0.5],
            "processor_class": "SiglipProcessor",
            "resample": 2,
            "rescale_factor": 0.00392156862745098,
            "size": {"height": 224, "width": 224},
        },
        ImageTransform(224, squash=True, resample="bilinear", mean=HALF, std=HALF),
    ),
    "google/siglip2-base-patch16-naflex": (
        {
            "do_convert_rgb": None,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_processor_type": "Siglip2ImageProcessorFast",
            "image_std": [0.5, 0.5, 0.5],
            "max_num_patches": 256,
            "patch_size": 16,
            "resample": 2,
            "rescale_factor": 0.00392156862745098,
        },
        ImageTransform(256, squash=True, resample="bilinear", mean=HALF, std=HALF),
    ),
    "facebook/dinov2-base": (
        {
            "crop_size": {"height": 224, "width": 224},
            "do_center_crop": True,
            "do_convert_rgb": True,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": list(IMAGENET_MEAN),
            "image_processor_type": "BitImageProcessor",
            "image_std": list(IMAGENET_STD),
            "resample": 3,
            "rescale_factor": 0.00392156862745098,
            "size": {"shortest_edge": 256},
        },
        ImageTransform(224, shortest=256, mean=IMAGENET_MEAN, std=IMAGENET_STD),
    ),
    "facebook/deit-base-patch16-224": (
        {
            "crop_size": 224,
            "do_center_crop": True,
            "do_normalize": True,
            "do_resize": True,
            "feature_extractor_type": "DeiTFeatureExtractor",
            "image_mean": list(IMAGENET_MEAN),
            "image_std": list(IMAGENET_STD),
            "resample": 3,
            "size": 256,
        },
        ImageTransform(224, shortest=256, squash=True, mean=IMAGENET_MEAN, std=IMAGENET_STD),
    ),
    "google/vit-base-patch16-224, before processors had names": (
        {"do_normalize": True, "do_resize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": 224},
        ImageTransform(224, squash=True, resample="bilinear", mean=HALF, std=HALF),
    ),
    "facebook/dinov3-vitb16-pretrain-lvd1689m": (
        {
            "crop_size": None,
            "do_center_crop": None,
            "do_convert_rgb": None,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": list(IMAGENET_MEAN),
            "image_processor_type": "DINOv3ViTImageProcessorFast",
            "image_std": list(IMAGENET_STD),
            "resample": 2,
            "rescale_factor": 0.00392156862745098,
            "size": {"height": 224, "width": 224},
        },
        ImageTransform(224, squash=True, resample="bilinear", mean=IMAGENET_MEAN, std=IMAGENET_STD),
    ),
}


def stored(processor, directory):
    """What `save_pretrained` leaves in a file."""
    processor.save_pretrained(directory)
    return json.loads((directory / "preprocessor_config.json").read_text())


def settings_of(**changes):
    return {**PUBLISHED["openai/clip-vit-base-patch32"][0], **changes}


@pytest.fixture(scope="module")
def picture():
    values = np.random.default_rng(0).integers(0, 256, (50, 83, 3), dtype=np.uint8)
    values[:25] = np.linspace(0, 255, 83, dtype=np.uint8)[None, :, None]
    return Image.fromarray(values)


@pytest.mark.parametrize("name", PUBLISHED)
def test_reads_what_is_published(name):
    settings, expected = PUBLISHED[name]
    assert read_processor(settings, model_image_size=expected.size) == expected


@pytest.mark.parametrize("kind", [kind for kind in _HABITS if kind != "DINOv3ViT"])  # which needs torchvision
def test_knows_what_each_processor_does_when_nothing_is_said(kind):
    import transformers

    processor = getattr(transformers, f"{kind}ImageProcessorPil")
    habits = _HABITS[kind]
    assert Image.Resampling[habits.resample.upper()] == processor.resample
    assert (habits.mean, habits.std) == (tuple(processor.image_mean), tuple(processor.image_std))
    assert habits.crop == bool(getattr(processor, "do_center_crop", None))
    assert habits.squash == ("shortest_edge" not in (getattr(processor, "size", None) or {}))
    silent = read_processor({"image_processor_type": f"{kind}ImageProcessor"}, model_image_size=224)
    assert silent == ImageTransform(
        224, squash=habits.squash, resample=habits.resample, mean=habits.mean, std=habits.std
    )


@pytest.mark.parametrize("name", ["CLIPImageProcessor", "CLIPImageProcessorFast", "CLIPImageProcessorPil"])
def test_all_names_of_a_processor_mean_the_same(name):
    settings = settings_of(image_processor_type=name, do_pad=False)
    assert read_processor(settings, model_image_size=224) == ImageTransform(224)


def test_settings_without_a_side_take_the_models():
    settings = {"image_mean": [0.5, 0.5, 0.5], "image_std": 0.25}
    assert read_processor(settings, model_image_size=48) == ImageTransform(48, mean=HALF, std=(0.25,) * 3)


def test_without_normalising_pixels_stay_between_0_and_1():
    transform = read_processor(settings_of(do_normalize=False), model_image_size=224)
    assert (transform.mean, transform.std) == ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


@pytest.mark.parametrize("size", [[224, 224], {"height": 224, "width": 224, "shortest_edge": None}])
def test_a_square_may_be_spelt_as_a_pair(size):
    settings = settings_of(size=size, do_center_crop=False)
    assert read_processor(settings, model_image_size=224) == ImageTransform(224, squash=True)


sides = st.integers(1, 500)
colours = st.tuples(*[st.floats(0.01, 1)] * 3)


@settings(max_examples=100)
@given(
    sides,
    st.none() | sides,
    st.booleans(),
    st.sampled_from(["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]),
    colours,
    colours,
    st.sampled_from(["clip", "siglip", "vision-text-dual-encoder"]),
)
def test_a_round_trip_through_json_keeps_every_transform(size, margin, squash, resample, mean, std, kind):
    shortest = None if margin is None else size + margin
    transform = ImageTransform(size, shortest=shortest, squash=squash, resample=resample, mean=mean, std=std)
    text = build_processor(transform, kind).to_json_string()
    assert read_processor(json.loads(text), model_image_size=size) == transform


@given(st.integers(1, 30), st.sampled_from([8, 14, 16]), st.sampled_from(["bilinear", "bicubic"]), colours, colours)
def test_a_round_trip_of_naflex_keeps_every_square(patches, patch_size, resample, mean, std):
    transform = ImageTransform(patches * patch_size, squash=True, resample=resample, mean=mean, std=std)
    text = build_processor(transform, "siglip2", patch_size=patch_size).to_json_string()
    assert json.loads(text)["max_num_patches"] == patches**2
    assert read_processor(json.loads(text), model_image_size=transform.size) == transform


SHAPES = [
    ImageTransform(24, mean=HALF, std=(0.25, 0.3, 0.35)),
    ImageTransform(24, shortest=30, resample="lanczos"),
    ImageTransform(24, squash=True, resample="bilinear"),
    ImageTransform(24, squash=True, shortest=30),
    ImageTransform(24, squash=True, resample="nearest", mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)),
]


@pytest.mark.parametrize("transform", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["clip", "siglip", "vision-text-dual-encoder"])
def test_the_saved_processor_gives_the_same_pictures_without_hnclip(tmp_path, picture, transform, kind):
    from transformers import AutoImageProcessor

    assert read_processor(stored(build_processor(transform, kind), tmp_path), model_image_size=24) == transform
    processor = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    for mode in ("RGB", "L", "RGBA"):
        expected = processor(picture.convert(mode), return_tensors="pt")["pixel_values"][0]
        mean, std = torch.tensor(transform.mean)[:, None, None], torch.tensor(transform.std)[:, None, None]
        found = (preprocess_image(picture.convert(mode), transform) / 255 - mean) / std
        level = (1.01 / 255 / std).expand_as(found)
        assert ((found - expected).abs() <= level).all()


def test_a_saved_naflex_processor_gives_the_same_squares(tmp_path, picture):
    from transformers import AutoImageProcessor

    transform = ImageTransform(24, squash=True, resample="bilinear", mean=HALF, std=HALF)
    stored(build_processor(transform, "siglip2", patch_size=8), tmp_path)
    square = picture.crop((0, 0, 50, 50))
    output = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")(square, return_tensors="pt")
    assert output["spatial_shapes"].tolist() == [[3, 3]]
    patches = output["pixel_values"][0].reshape(3, 3, 8, 8, 3)  # rows, columns, height, width, colour
    expected = patches.permute(4, 0, 2, 1, 3).reshape(3, 24, 24)
    found = (preprocess_image(square, transform) / 255 - 0.5) / 0.5
    assert (found - expected).abs().max() <= 1.01 / 255 / 0.5


def test_a_whole_processor_keeps_the_settings_in_its_inner_part(tmp_path, model_directory):
    from transformers import CLIPProcessor, CLIPTokenizer

    transform = ImageTransform(48, shortest=56, resample="bilinear", mean=HALF, std=HALF)
    tokenizer = CLIPTokenizer.from_pretrained(model_directory)
    CLIPProcessor(build_processor(transform, "clip"), tokenizer).save_pretrained(tmp_path)
    inner = json.loads((tmp_path / "processor_config.json").read_text())["image_processor"]
    assert read_processor(inner, model_image_size=48) == transform


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_processor_type": "ConvNextImageProcessor"}, "image_processor_type 'ConvNextImageProcessor' is not"),
        ({"do_resize": False}, "do_resize must be true: .* 224 pixels"),
        ({"do_rescale": False}, "do_rescale must be true"),
        ({"rescale_factor": 1 / 127.5}, "rescale_factor 1/255"),
        ({"do_pad": True}, "do_pad is not supported"),
        ({"do_center_crop": False}, "do_center_crop is false and size 224 keeps"),
        ({"size": {"height": 224, "width": 200}}, "size must be .*equal height and width; got"),
        ({"size": {"shortest_edge": 224, "longest_edge": 400}}, "size must be a number, shortest_edge"),
        ({"size": {}}, "size must be a number"),
        ({"size": [224, 224, 3]}, "size must be a whole number of pixels, got"),
        ({"size": "large"}, "size must be a whole number of pixels, got 'large'"),
        ({"size": 0}, "size must be a whole number of pixels, got 0"),
        ({"crop_size": {"height": 224, "width": 200}}, "crop_size must be .*equal height and width"),
        ({"crop_size": {"shortest_edge": 224}}, "crop_size must be one number, or equal height and width"),
        ({"crop_size": 240}, "crop_size 240 is larger than size 224"),
        ({"crop_size": 200}, "crop_size makes pictures of 200 pixels, the model takes 224"),
        ({"size": [240, 240], "do_center_crop": False}, "size makes pictures of 240 pixels, the model takes 224"),
        ({"resample": 17}, r"resample must be one of Pillow's filters 0 \(nearest\), .* got 17"),
        ({"image_mean": [0.5]}, "image_mean must hold a number for each of the 3 colours"),
        ({"image_std": ["a", "b", "c"]}, "image_std must hold a number"),
        ({"image_std": [0, 0, 0]}, "std must be greater than 0"),
    ],
    ids=lambda value: " ".join(f"{key}={inner}" for key, inner in value.items()) if isinstance(value, dict) else "",
)
def test_settings_that_cannot_be_followed_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        read_processor(settings_of(**changes), model_image_size=224)


def test_a_processor_that_cannot_be_built_is_named():
    with pytest.raises(ValueError, match=r"kind must be one of clip, siglip, .*got 'flava'"):
        build_processor(ImageTransform(224), "flava")
    for transform in (ImageTransform(224), ImageTransform(30, squash=True), ImageTransform(32, 48, squash=True)):
        with pytest.raises(ValueError, match="siglip2 takes squashed, uncropped pictures of whole 16-pixel patches"):
            build_processor(transform, "siglip2")
