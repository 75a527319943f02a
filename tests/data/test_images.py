from __future__ import annotations

import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from hnclip.data import images
from hnclip.data.images import ImageTransform, preprocess_image

CLIP = ImageTransform(32)
TRANSFORMS = {
    "CLIP": CLIP,
    "DINOv2": ImageTransform(32, shortest=37),
    "SigLIP": ImageTransform(32, squash=True),
    "ViT": ImageTransform(32, squash=True, resample="bilinear"),
    "DeiT": ImageTransform(32, shortest=37, squash=True),
}
SIZES = [
    *[(200, 150), (150, 200), (201, 151), (149, 203), (117, 64), (640, 97)],  # shrink a lot
    *[(37, 64), (64, 37), (33, 32), (97, 31), (32, 32), (40, 200), (60, 130)],  # shrink little, or are tall
    *[(5, 3), (1, 9), (1, 1), (17, 31), (1000, 3), (3, 1000)],  # grow
]


def processor(name):
    """The same from transformers."""
    from transformers import (
        BitImageProcessorPil,
        CLIPImageProcessorPil,
        DeiTImageProcessorPil,
        SiglipImageProcessorPil,
        ViTImageProcessorPil,
    )

    square = {"height": 32, "width": 32}
    return {
        "CLIP": lambda **raw: CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=square, **raw),
        "DINOv2": lambda **raw: BitImageProcessorPil(size={"shortest_edge": 37}, crop_size=square, **raw),
        "SigLIP": lambda **raw: SiglipImageProcessorPil(size=square, **raw),
        "ViT": lambda **raw: ViTImageProcessorPil(size=square, **raw),
        "DeiT": lambda **raw: DeiTImageProcessorPil(size={"height": 37, "width": 37}, crop_size=square, **raw),
    }[name](do_rescale=False, do_normalize=False)


def hugging_face(image, name="CLIP"):
    return torch.as_tensor(processor(name)(image, return_tensors="pt")["pixel_values"][0])


def literally(image, transform):
    """Pillow step by step: convert, resize everything, crop."""
    width, height = transform.resized(*image.size)
    image = image.convert("RGB").resize((width, height), Image.Resampling[transform.resample.upper()])
    left, top = (width - transform.size) // 2, (height - transform.size) // 2
    image = image.crop((left, top, left + transform.size, top + transform.size))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def in_one_piece(image, transform):
    """torch step by step: resize everything in one call, crop."""
    width, height = transform.resized(*image.size)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    resized = F.interpolate(pixels, (height, width), mode=transform.resample, antialias=True)[0]
    left, top = (width - transform.size) // 2, (height - transform.size) // 2
    return resized[:, top : top + transform.size, left : left + transform.size]


def noise(width, height, channels, seed=0):
    """A picture with soft and hard edges: a ramp plus noise, part of it black and white."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    values[: height // 2] = np.linspace(0, 255, width, dtype=np.uint8)[None, :, None]
    values[:, width // 2 :] = np.where(values[:, width // 2 :] < 128, 0, 255)
    return values


def picture(mode, width, height):
    rgb = Image.fromarray(noise(width, height, 3))
    if mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        made = rgb.convert("P") if mode == "PA" else rgb.convert("LA" if mode == "La" else "RGBA")
        made.putalpha(Image.fromarray(noise(width, height, 1, seed=1)[..., 0]))
        return made.convert(mode)
    if mode == "P transparent":
        made = rgb.convert("P")
        made.info["transparency"] = bytes(range(256))
        return made
    if mode == "L transparent":
        made = rgb.convert("L")
        made.info["transparency"] = 255
        return made
    if mode == "RGB transparent":
        rgb.info["transparency"] = (255, 255, 0)
        return rgb
    return rgb.convert("L").convert(mode) if mode in ("I", "F", "1") else rgb.convert(mode)


def assert_within_one_grey_level(found, expected):
    assert found.shape == expected.shape
    assert (found.int() - expected.int()).abs().max() <= 1


def show_size(size):
    return f"{size[0]}x{size[1]}"


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("size", SIZES, ids=show_size)
def test_equals_the_hugging_face_processor(size, name):
    image = picture("RGB", *size)
    assert_within_one_grey_level(preprocess_image(image, TRANSFORMS[name]), hugging_face(image, name))


@pytest.mark.parametrize(
    "mode",
    [
        *["RGB", "L", "1", "P", "CMYK", "YCbCr", "HSV", "RGBX", "I", "F", "RGBA", "LA", "PA"],
        *["P transparent", "L transparent", "RGB transparent"],
    ],
)
@pytest.mark.parametrize("size", [(150, 110), (110, 150), (40, 35), (9, 20)], ids=show_size)
def test_equals_the_hugging_face_processor_in_every_mode(size, mode):
    image = picture(mode, *size)
    assert_within_one_grey_level(preprocess_image(image, CLIP), hugging_face(image))


@pytest.mark.parametrize("kind", ["png", "gif", "bmp", "tiff", "webp", "jpeg", "pcx"])
@pytest.mark.parametrize("mode", ["P", "RGB", "L"])
def test_reads_files_of_many_formats(kind, mode):
    file = io.BytesIO()
    picture("L" if (kind, mode) == ("jpeg", "P") else mode, 50, 40).save(file, kind)
    with Image.open(file) as image:
        found = preprocess_image(image, CLIP)
        assert_within_one_grey_level(found, hugging_face(image))


@pytest.mark.parametrize("size", [(1500, 1000), (1000, 1500), (500, 375)], ids=show_size)
def test_equals_the_hugging_face_processor_for_photographs(size):
    from transformers import CLIPImageProcessorPil

    image = picture("RGB", *size)
    expected = CLIPImageProcessorPil(do_rescale=False, do_normalize=False)(image, return_tensors="pt")["pixel_values"]
    assert_within_one_grey_level(preprocess_image(image, ImageTransform(224)), expected[0])


@settings(max_examples=150)
@given(
    st.integers(1, 400),
    st.integers(1, 400),
    st.sampled_from([16, 32, 48]),
    st.integers(0, 12),
    st.booleans(),
    st.sampled_from(["bilinear", "bicubic", "lanczos", "hamming", "box", "nearest"]),
)
def test_equals_resizing_and_cropping_to_one_grey_level(width, height, size, margin, squash, resample):
    image = picture("RGB", width, height)
    transform = ImageTransform(size, shortest=size + margin, squash=squash, resample=resample)
    found, expected = preprocess_image(image, transform), literally(image, transform)
    if resample in ("bilinear", "bicubic"):
        assert_within_one_grey_level(found, expected)
    else:
        assert torch.equal(found, expected)


@settings(max_examples=60)
@given(st.integers(1, 150), st.integers(1, 400), st.sampled_from([16, 32]), st.booleans())
@example(48, 97, 32, False)  # the first height at which Pillow 13 begins with the rows
@example(95, 200, 32, True)
@example(40, 40, 32, True)
def test_pictures_that_are_tall_or_shrink_little_equal_pillow_exactly(width, height, size, squash):
    transform = ImageTransform(size, squash=squash)
    columns, rows = transform.resized(width, height)
    if width >= 1.5 * columns and height >= 1.5 * rows and height - rows <= 2 * (width - columns):
        return
    image = picture("RGB", width, height)
    assert torch.equal(preprocess_image(image, transform), literally(image, transform))


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("size", [(200, 150), (130, 200), (230, 120), (149, 203)], ids=show_size)
@pytest.mark.parametrize("strip", [1, 1000, 2**20])
def test_strips_and_unread_rows_change_nothing(monkeypatch, size, transform, strip):
    monkeypatch.setattr(images, "STRIP", strip)
    image = picture("RGB", *size)
    assert torch.equal(preprocess_image(image, transform), in_one_piece(image, transform))


@settings(max_examples=100)
@given(st.integers(1, 700), st.integers(1, 700), st.sampled_from([32, 96, 224]))
@example(55, 11, 96)  # 55 · (96 / 11) is a hair below 480
def test_resizes_to_the_shape_hugging_face_asks_for(width, height, size):
    from transformers.image_transforms import get_resize_output_image_size

    rows, columns = get_resize_output_image_size(
        np.zeros((height, width, 3)), size, default_to_square=False, input_data_format="channels_last"
    )
    assert ImageTransform(16, shortest=size).resized(width, height) == (columns, rows)


@pytest.mark.parametrize("mode", ["RGB", "L", "LA", "La", "P", "PA", "RGBA", "RGBa", "CMYK", "1", "I;16", "I", "F"])
@pytest.mark.parametrize("size", [(41, 23), (90, 60)], ids=show_size)
def test_gives_bytes_of_the_asked_size(mode, size):
    made = preprocess_image(Image.new(mode, size), ImageTransform(16))
    assert made.dtype == torch.uint8
    assert made.shape == (3, 16, 16)
    assert made.is_contiguous()


def test_a_picture_of_the_right_size_passes_unchanged():
    values = noise(32, 32, 3)
    made = preprocess_image(Image.fromarray(values), CLIP)
    assert torch.equal(made, torch.from_numpy(values).permute(2, 0, 1))


def test_the_crop_lies_in_the_centre():
    values = noise(41, 32, 3)
    made = preprocess_image(Image.fromarray(values), CLIP)
    assert torch.equal(made, torch.from_numpy(values[:, 4:36]).permute(2, 0, 1))
    made = preprocess_image(Image.fromarray(values), ImageTransform(20, shortest=32))
    assert torch.equal(made, torch.from_numpy(values[6:26, 10:30]).permute(2, 0, 1))


@pytest.mark.parametrize("size", [(32, 32), (96, 64)], ids=show_size)
def test_sixteen_bits_become_eight(tmp_path, size):
    # Hugging Face's processor turns everything above 255 white here.
    ramp = np.linspace(0, 65535, size[0])[None].repeat(size[1], axis=0)
    for kind in ("<u2", ">u2"):
        image = Image.fromarray(ramp.astype(kind))
        expected = preprocess_image(Image.fromarray((ramp / 257).astype(np.uint8)), CLIP)
        assert_within_one_grey_level(preprocess_image(image, CLIP), expected)
    Image.fromarray(ramp.astype(np.uint16)).save(tmp_path / "deep.png")
    with Image.open(tmp_path / "deep.png") as deep:
        assert_within_one_grey_level(preprocess_image(deep, CLIP), expected)
        assert (hugging_face(deep) == 255).float().mean() > 0.9


def test_sixteen_bits_keep_their_transparent_colour(tmp_path):
    Image.fromarray(np.full((32, 32), 1000, np.uint16)).save(tmp_path / "deep.png", transparency=1000)
    with Image.open(tmp_path / "deep.png") as deep:
        assert preprocess_image(deep, CLIP).min() == 255


@pytest.mark.parametrize(("mode", "value"), [("I", 256), ("I", -1), ("F", 255.5), ("F", float("nan"))])
def test_values_without_a_known_range_are_refused(mode, value):
    with pytest.raises(ValueError, match=f"mode {mode} and values from .*scale it to 8 bits first"):
        preprocess_image(Image.new(mode, (8, 8), value), CLIP)


def test_transparency_lies_on_white():
    half_red = Image.new("RGBA", (8, 8), (255, 0, 0, 128))
    made = preprocess_image(half_red, ImageTransform(8))
    assert made[:, 0, 0].tolist() == [255, 127, 127]
    palette = Image.new("P", (8, 8), 0)
    palette.putpalette([0, 0, 0, 9, 9, 9])
    palette.info["transparency"] = 0
    assert preprocess_image(palette, ImageTransform(8)).min() == 255


@pytest.mark.parametrize(("multiplied", "straight"), [("La", "LA"), ("RGBa", "RGBA")])
def test_premultiplied_transparency_lies_on_white_too(multiplied, straight):
    image = picture(multiplied, 50, 40)
    assert torch.equal(preprocess_image(image, CLIP), preprocess_image(image.convert(straight), CLIP))


def test_the_alpha_of_a_palette_lies_on_white():
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 255, 9, 9, 9, 0], "RGBA")
    assert preprocess_image(palette, ImageTransform(8)).min() == 255
    assert hugging_face(palette).max() == 9  # shows what was meant to be hidden


@settings(max_examples=30)
@given(st.binary(min_size=4 * 64, max_size=4 * 64))
def test_laying_on_white_rounds_as_pillow_composites(content):
    image = Image.frombytes("RGBA", (8, 8), content)
    expected = Image.alpha_composite(Image.new("RGBA", (8, 8), "white"), image).convert("RGB")
    assert torch.equal(
        preprocess_image(image, ImageTransform(8)), torch.from_numpy(np.array(expected)).permute(2, 0, 1)
    )


TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,  # undone by 270
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize("orientation", TURNS)
@pytest.mark.parametrize("kind", ["png", "tiff", "webp"])
def test_rotation_stored_in_the_file_is_applied(tmp_path, orientation, kind):
    upright = Image.fromarray(noise(90, 61, 3))
    exif = Image.Exif()
    exif[0x0112] = orientation
    lying = upright.transpose(TURNS[orientation])
    lying.save(tmp_path / f"lying.{kind}", exif=exif, **({"lossless": True} if kind == "webp" else {}))
    with Image.open(tmp_path / f"lying.{kind}") as reopened:
        assert torch.equal(
            preprocess_image(reopened, ImageTransform(24)), preprocess_image(upright, ImageTransform(24))
        )
        if kind != "tiff":  # which Pillow turns itself
            assert torch.equal(hugging_face(reopened), hugging_face(lying))


@pytest.mark.parametrize("exif", [b"Exif\x00\x00rubbish", b"Exif\x00\x00II*\x00\x08" + bytes(9), b""])
def test_exif_that_is_damaged_or_silent_turns_nothing(tmp_path, exif):
    image = Image.fromarray(noise(60, 41, 3))
    image.save(tmp_path / "picture.png", exif=exif)
    with Image.open(tmp_path / "picture.png") as reopened:
        assert torch.equal(preprocess_image(reopened, CLIP), preprocess_image(image, CLIP))


def test_an_exif_profile_in_broken_hex_turns_nothing():
    image = Image.fromarray(noise(60, 41, 3))
    expected = preprocess_image(image, CLIP)
    broken = image.copy()
    broken.info["Raw profile type exif"] = "\nexif\n 4\nnothex"
    assert torch.equal(preprocess_image(broken, CLIP), expected)


@pytest.mark.parametrize("kind", ["png", "jpeg"])
def test_a_truncated_file_is_an_error(kind):
    file = io.BytesIO()
    Image.fromarray(noise(64, 64, 3)).save(file, kind)
    file.truncate(len(file.getvalue()) * 2 // 3)
    with Image.open(file) as cut, pytest.raises(OSError, match="truncated"):
        preprocess_image(cut, CLIP)


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0)])
def test_a_picture_without_pixels_is_refused(size):
    with pytest.raises(ValueError, match=rf"no pixels: it is {size[0]} wide and {size[1]} high"):
        preprocess_image(Image.new("RGB", size), CLIP)


def test_a_picture_that_would_become_huge_is_refused():
    """Its shortest side of one pixel would become 32, and its length grow as much."""
    thin = Image.new("L", (1, 200_000))
    with pytest.raises(ValueError, match=r"too thin: 1 × 200000 would be resized to 32 × 6400000 pixels"):
        preprocess_image(thin, CLIP)
    assert preprocess_image(thin, ImageTransform(32, squash=True)).shape == (3, 32, 32)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P transparent"])
@pytest.mark.parametrize("size", [(20, 30), (100, 120)], ids=show_size)
def test_leaves_the_picture_it_was_given_alone(mode, size):
    image = picture(mode, *size)
    before = image.copy()
    preprocess_image(image, ImageTransform(16))
    assert (image.mode, image.size, image.info, image.tobytes()) == (
        before.mode,
        before.size,
        before.info,
        before.tobytes(),
    )


def test_the_shortest_side_may_be_spelt_in_two_ways():
    assert ImageTransform(32, shortest=32) == ImageTransform(32) != ImageTransform(32, shortest=33)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"size": 0}, "size must be at least 1 pixel, got 0"),
        ({"shortest": 31}, "shortest must be at least size.* got shortest 31 and size 32"),
        ({"resample": "cubic"}, "resample must be one of nearest, box, .*got 'cubic'"),
        ({"mean": (0.5,)}, "mean must hold 3 finite numbers"),
        ({"std": (0.5, 0.5, float("nan"))}, "std must hold 3 finite numbers"),
        ({"std": (0.5, 0.0, 0.5)}, "std must be greater than 0"),
    ],
)
def test_a_transform_that_makes_no_sense_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        ImageTransform(**{"size": 32, **wrong})


def test_a_flat_picture_is_upright_in_rgb_on_white_and_a_copy():
    clear = Image.new("RGBA", (4, 2), (255, 0, 0, 0))
    clear.getexif()[0x0112] = 6  # to be turned by a quarter
    flat = images.flat_picture(clear)
    assert (flat.mode, flat.size, flat.getpixel((0, 0))) == ("RGB", (2, 4), (255, 255, 255))
    deep = Image.fromarray(np.full((2, 2), 256 * 100, np.uint16))
    assert images.flat_picture(deep).getpixel((0, 0)) == (100, 100, 100)  # scaled, not clipped
    plain = Image.new("RGB", (2, 2), "blue")
    images.flat_picture(plain).putpixel((0, 0), (1, 2, 3))
    assert plain.getpixel((0, 0)) == (0, 0, 255)
