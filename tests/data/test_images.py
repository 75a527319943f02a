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
    "DeiT": (
        ImageTransform(32, 37, squash=True),
        "DeiTImageProcessorPil",
        {"size": {"height": 37, "width": 37}, "crop_size": SQUARE},
    ),
}
SIZES = [
    *[(200, 150), (149, 203), (117, 64), (640, 97), (1500, 1000)],  # shrink a lot
    *[(37, 64), (33, 32), (97, 31), (32, 32), (40, 200)],  # shrink little, or are tall
    *[(5, 3), (1, 9), (1, 1), (1000, 3), (3, 1000)],  # grow
]


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
def test_equals_transformers_in_every_mode(mode):
    for size in ((150, 110), (40, 35), (9, 20)):
        image = make(mode, *size)
        assert torch.equal(preprocess_image(image, CLIP), hugging_face(image).to(torch.uint8))
        squashed = ImageTransform(32, squash=True)
        assert torch.equal(preprocess_image(image, squashed), preprocess_image(to_rgb(image), squashed))


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
    assert transform.resized(width, height) == (columns, rows)
    resized = image.resize((columns, rows), Image.Resampling[resample.upper()])
    left, top = (columns - size) // 2, (rows - size) // 2
    expected = np.asarray(resized)[top : top + size, left : left + size]
    found = preprocess_image(image, transform)
    assert found.is_contiguous()
    assert torch.equal(found, torch.tensor(expected).permute(2, 0, 1))


# What transformers rejects, ignores or clips


def test_premultiplied_transparency_and_alpha_of_a_palette_are_on_white():
    for premultiplied, straight in (("La", "LA"), ("RGBa", "RGBA")):
        image = make(premultiplied, 50, 40)
        assert torch.equal(preprocess_image(image, CLIP), preprocess_image(image.convert(straight), CLIP))
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 255, 9, 9, 9, 0], "RGBA")
    assert preprocess_image(palette, CLIP).min() == 255


def test_sixteen_bits_are_scaled_to_eight(tmp_path):
    ramp = np.linspace(0, 65535, 96)[None].repeat(64, axis=0).astype(np.uint16)
    expected = preprocess_image(Image.fromarray((ramp >> 8).astype(np.uint8)), CLIP)
    for kind in ("<u2", ">u2"):
        assert torch.equal(preprocess_image(Image.fromarray(ramp.astype(kind)), CLIP), expected)
    Image.fromarray(np.full((8, 8), 1000, np.uint16)).save(tmp_path / "clear.png", transparency=1000)
    with Image.open(tmp_path / "clear.png") as clear:
        assert preprocess_image(clear, CLIP).min() == 255


@pytest.mark.parametrize(("mode", "value"), [("I", 256), ("I", -1), ("F", 255.5), ("F", float("nan"))])
def test_values_without_a_known_range_are_rejected(mode, value):
    with pytest.raises(ValueError, match="8 bits"):
        preprocess_image(Image.new(mode, (8, 8), value), CLIP)


_TURNS = "FLIP_LEFT_RIGHT ROTATE_180 FLIP_TOP_BOTTOM TRANSPOSE ROTATE_90 TRANSVERSE ROTATE_270"
TURNS = dict(enumerate(_TURNS.split(), 2))


@pytest.mark.parametrize("orientation", TURNS)
@pytest.mark.parametrize("kind", ["png", "tiff", "webp"])
def test_exif_orientation_is_applied(orientation, kind):
    upright, exif, file = make("RGB", 90, 61), Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    turned = upright.transpose(Image.Transpose[TURNS[orientation]])  # which the orientation undoes
    turned.save(file, kind, exif=exif, **({"lossless": True} if kind == "webp" else {}))
    with Image.open(file) as reopened:
        assert torch.equal(preprocess_image(reopened, CLIP), preprocess_image(upright, CLIP))


@pytest.mark.parametrize("exif", [b"Exif\x00\x00rubbish", b"Exif\x00\x00II*\x00\x08" + bytes(9), b"", None])
def test_invalid_exif_is_ignored(exif):
    image, file = make("RGB", 60, 41), io.BytesIO()
    image.save(file, "png", exif=exif or b"")
    with Image.open(file) as reopened:
        if exif is None:
            reopened.info["Raw profile type exif"] = "\nexif\n 4\nnothex"
        assert torch.equal(preprocess_image(reopened, CLIP), preprocess_image(image, CLIP))


def test_empty_huge_and_truncated_images_are_errors():
    for size in ((0, 5), (5, 0)):
        with pytest.raises(ValueError, match="no pixels"):
            preprocess_image(Image.new("RGB", size), CLIP)
    thin = Image.new("L", (1, 200_000))
    with pytest.raises(ValueError, match="too thin"):
        preprocess_image(thin, CLIP)
    assert preprocess_image(thin, ImageTransform(32, squash=True)).shape == (3, 32, 32)
    file = io.BytesIO()
    make("RGB", 64, 64).save(file, "jpeg")
    file.truncate(len(file.getvalue()) * 2 // 3)
    with Image.open(file) as cut, pytest.raises(OSError, match="truncated"):
        preprocess_image(cut, CLIP)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P transparent"])
def test_images_are_not_modified_and_to_rgb_is_upright_and_on_white(mode):
    image = make(mode, 32, 32)
    before = image.copy()
    preprocess_image(image, CLIP).zero_()
    to_rgb(image).paste((1, 2, 3), (0, 0, 9, 9))
    assert (image.mode, image.info, image.tobytes()) == (before.mode, before.info, before.tobytes())
    clear = Image.new("RGBA", (4, 2), (255, 0, 0, 0))
    clear.getexif()[0x0112] = 6
    flat = to_rgb(clear)
    assert (flat.mode, flat.size, flat.getpixel((0, 0))) == ("RGB", (2, 4), (255, 255, 255))


def test_invalid_transforms_are_rejected():
    assert ImageTransform(32, shortest=32) == CLIP != ImageTransform(32, shortest=33)
    nan = float("nan")
    for wrong in ({"size": 0}, {"shortest": 31}, {"resample": "cubic"}, {"mean": (0.5,)}, {"std": (0.5, 0.5, nan)}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ImageTransform(**{"size": 32, **wrong})
    with pytest.raises(ValueError, match="std"):
        ImageTransform(32, std=(0.5, 0.0, 0.5))
