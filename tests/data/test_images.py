from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from hnclip.data.images import preprocess_image

SIZES = [(37, 64), (64, 37), (33, 32), (97, 31), (5, 3), (1, 9), (32, 32), (200, 200)]


@pytest.fixture(scope="module")
def hugging_face():
    from transformers import CLIPImageProcessorPil

    def process(image, size):
        processor = CLIPImageProcessorPil(
            size={"shortest_edge": size},
            crop_size={"height": size, "width": size},
            do_rescale=False,
            do_normalize=False,
        )
        return torch.as_tensor(processor(image, return_tensors="pt")["pixel_values"][0])

    return process


def noise(width, height, channels, seed=0):
    """A picture with soft and hard edges: a ramp plus noise."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    values[: height // 2] = np.linspace(0, 255, width, dtype=np.uint8)[None, :, None]
    return values


def picture(mode, width, height):
    rgb = Image.fromarray(noise(width, height, 3), "RGB")
    if mode in ("RGBA", "LA"):
        made = rgb.convert(mode)
        made.putalpha(Image.fromarray(noise(width, height, 1, seed=1)[..., 0], "L"))
        return made
    return rgb.convert(mode)


def assert_within_one_grey_level(found, expected):
    assert found.shape == expected.shape
    assert (found.int() - expected.int()).abs().max() <= 1


@pytest.mark.parametrize("mode", ["RGB", "L", "LA", "P", "RGBA", "CMYK", "1"])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_equals_the_hugging_face_processor(hugging_face, size, mode):
    image = picture(mode, *size)
    assert_within_one_grey_level(preprocess_image(image, 32), hugging_face(image, 32))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 700), st.integers(1, 700), st.sampled_from([32, 96, 224]))
@example(55, 11, 96)  # 55 · (96 / 11) is a hair below 480
def test_resizes_to_the_shape_hugging_face_asks_for(width, height, size):
    from transformers.image_transforms import get_resize_output_image_size

    rows, columns = get_resize_output_image_size(
        np.zeros((height, width, 3)), size, default_to_square=False, input_data_format="channels_last"
    )
    asked = []
    resize = Image.Image.resize
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Image.Image, "resize", lambda self, shape, *how: asked.append(shape) or resize(self, shape, *how))
        preprocess_image(Image.new("RGB", (width, height)), size)
    assert asked == ([] if (columns, rows) == (width, height) else [(columns, rows)])


@pytest.mark.parametrize("mode", ["RGB", "L", "LA", "P", "RGBA", "CMYK", "1", "I;16", "I", "F"])
def test_gives_bytes_of_the_asked_size(mode):
    image = Image.new(mode, (41, 23))
    made = preprocess_image(image, 16)
    assert made.dtype == torch.uint8
    assert made.shape == (3, 16, 16)
    assert made.is_contiguous()


def test_sixteen_bits_become_eight(tmp_path):
    # Hugging Face's processor turns everything above 255 white here.
    ramp = np.linspace(0, 65535, 32 * 32).reshape(32, 32)
    Image.fromarray(ramp.astype(np.uint16)).save(tmp_path / "deep.png")
    with Image.open(tmp_path / "deep.png") as deep:
        made = preprocess_image(deep, 32)  # [3, 32, 32]
    assert_within_one_grey_level(made, torch.from_numpy(ramp / 257).round().expand(3, 32, 32))


def test_a_picture_of_the_right_size_passes_unchanged():
    values = noise(32, 32, 3)
    made = preprocess_image(Image.fromarray(values), 32)
    assert torch.equal(made, torch.from_numpy(values).permute(2, 0, 1))


def test_transparency_lies_on_white():
    half_red = Image.new("RGBA", (8, 8), (255, 0, 0, 128))
    made = preprocess_image(half_red, 8)
    assert made[:, 0, 0].tolist() == [255, 127, 127]
    palette = Image.new("P", (8, 8), 0)
    palette.putpalette([0, 0, 0, 9, 9, 9])
    palette.info["transparency"] = 0
    assert preprocess_image(palette, 8).min() == 255


@pytest.mark.parametrize(("orientation", "degrees"), [(3, 180), (6, 270), (8, 90)])
def test_rotation_stored_in_the_file_is_applied(tmp_path, orientation, degrees):
    upright = Image.fromarray(noise(24, 12, 3))
    exif = Image.Exif()
    exif[0x0112] = orientation
    lying = upright.rotate(-degrees, expand=True)
    lying.save(tmp_path / "lying.png", exif=exif)
    with Image.open(tmp_path / "lying.png") as reopened:
        assert torch.equal(preprocess_image(reopened, 12), preprocess_image(upright, 12))
    assert not torch.equal(preprocess_image(lying, 12), preprocess_image(upright, 12))


def test_leaves_the_picture_it_was_given_alone():
    image = picture("RGBA", 20, 30)
    before = image.copy()
    preprocess_image(image, 16)
    assert (image.mode, image.size, image.tobytes()) == (before.mode, before.size, before.tobytes())
