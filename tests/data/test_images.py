"""Preprocessing equals transformers' to the bit; what transformers rejects or ignores has a defined meaning."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from hnclip.data.images import ImageTransform, preprocess_image, to_rgb

SQUARE = {"height": 32, "width": 32}
CLIP = ImageTransform(32)
# Our transform, and transformers' processor with its settings.
MODELS = {
    "CLIP": (CLIP, "CLIPImageProcessorPil", {"size": {"shortest_edge": 32}, "crop_size": SQUARE}),
    "DINOv2": (ImageTransform(32, 37), "BitImageProcessorPil", {"size": {"shortest_edge": 37}, "crop_size": SQUARE}),
    "SigLIP": (ImageTransform(32, squash=True), "SiglipImageProcessorPil", {"size": SQUARE}),
    "ViT": (ImageTransform(32, squash=True, resample="bilinear"), "ViTImageProcessorPil", {"size": SQUARE}),
}
# That shrink a lot, shrink little or are tall, and grow.
SIZES = [(200, 150), (149, 203), (640, 97), (1500, 1000), (33, 32), (97, 31), (32, 32), (5, 3), (1, 9), (1, 1)]


def hugging_face(image: Image.Image, name: str = "CLIP") -> torch.Tensor:
    import transformers

    _, processor, settings = MODELS[name]
    raw = getattr(transformers, processor)(do_rescale=False, do_normalize=False, **settings)
    return torch.as_tensor(raw(image, return_tensors="pt")["pixel_values"][0])


def noise(width: int, height: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    """Soft and hard edges: a ramp and noise, part of it black and white."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    values[: height // 2] = np.linspace(0, 255, width, dtype=np.uint8)[None, :, None]
    values[:, width // 2 :] = np.where(values[:, width // 2 :] < 128, 0, 255)
    return values


def make(mode: str, width: int, height: int) -> Image.Image:
    mode, _, transparent = mode.partition(" ")
    image = Image.fromarray(noise(width, height))
    if mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        image = image.convert("P") if mode == "PA" else image.convert("LA" if mode == "La" else "RGBA")
        image.putalpha(Image.fromarray(noise(width, height, 1, seed=1)[..., 0]))
    image = image.convert("L").convert(mode) if mode in ("I", "F", "1") else image.convert(mode)
    if transparent:
        image.info["transparency"] = {"P": bytes(range(256)), "L": 255, "RGB": (255, 255, 0)}[mode]
    return image


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_equals_transformers(size, name):
    image = make("RGB", *size)
    assert torch.equal(preprocess_image(image, MODELS[name][0]).float(), hugging_face(image, name).float())


MODES = ["RGB", "L", "1", "P", "CMYK", "YCbCr", "HSV", "RGBX", "I", "F", "RGBA", "LA", "PA"]


@pytest.mark.parametrize("mode", [*MODES, "P transparent", "L transparent", "RGB transparent"])
def test_equals_transformers_in_every_mode_and_the_image_is_not_modified(mode):
    for size in ((150, 110), (9, 20)):
        image, before = make(mode, *size), make(mode, *size)
        assert torch.equal(preprocess_image(image, CLIP), hugging_face(image).to(torch.uint8))
        to_rgb(image).paste((1, 2, 3), (0, 0, 9, 9))
        assert (image.mode, image.info, image.tobytes()) == (before.mode, before.info, before.tobytes())


@settings(max_examples=100)
@given(
    st.integers(1, 300),
    st.integers(1, 300),
    st.sampled_from([16, 48]),
    st.integers(0, 12),
    st.booleans(),
    st.sampled_from(["bilinear", "bicubic", "lanczos", "hamming", "box", "nearest"]),
)
@example(55, 11, 96, 0, False, "bicubic")  # 55 · (96 / 11) is slightly less than 480
def test_equals_pillow_step_by_step(width, height, size, margin, squash, resample):
    transform, image = ImageTransform(size, size + margin, squash, resample), make("RGB", width, height)
    short = min(width, height)
    columns, rows = (size + margin if squash else (size + margin) * side // short for side in (width, height))
    resized = image.resize((columns, rows), Image.Resampling[resample.upper()])
    left, top = (columns - size) // 2, (rows - size) // 2
    expected = np.asarray(resized)[top : top + size, left : left + size]
    found = preprocess_image(image, transform)
    assert found.is_contiguous()
    assert torch.equal(found, torch.tensor(expected).permute(2, 0, 1))


# What transformers rejects, ignores or clips


def test_exif_orientation_is_applied():
    for orientation, turn in ((3, "ROTATE_180"), (5, "TRANSPOSE"), (6, "ROTATE_90")):
        upright, exif, file = make("RGB", 90, 61), Image.Exif(), io.BytesIO()
        exif[0x0112] = orientation
        upright.transpose(Image.Transpose[turn]).save(file, "png", exif=exif)  # which the orientation undoes
        with Image.open(file) as reopened:
            assert torch.equal(preprocess_image(reopened, CLIP), preprocess_image(upright, CLIP))


def test_images_and_transforms_without_a_defined_result_are_errors():
    cases = [(Image.new("RGB", (0, 5)), "no pixels"), (Image.new("L", (1, 200_000)), "too thin")]
    cases += [(Image.new(*case), "8 bits") for case in (("I", (8, 8), 256), ("I", (8, 8), -1), ("F", (8, 8), 255.5))]
    for image, keyword in cases:
        with pytest.raises(ValueError, match=keyword):
            preprocess_image(image, CLIP)
    for wrong in ({"size": 0}, {"shortest": 31}, {"resample": "cubic"}, {"mean": (0.5,)}, {"std": (0.5, 0.0, 0.5)}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ImageTransform(**{"size": 32, **wrong})
