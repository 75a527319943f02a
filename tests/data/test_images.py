"""Images from files, tars and cells, crops and edge maps of them; preprocessing equals transformers' to the bit."""

from __future__ import annotations

import io
import os
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageOps

from hnclip.core import ImageSource, InvalidImage
from hnclip.data.image_sources import CellImage, CropImage, EdgeImage, FileImage, TarImage, decode_image
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


BOX = (5, 3, 25, 17)
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8))
# Large areas of one colour, so that there are lines.
PAINTING = NOISE.crop((0, 0, 5, 4)).resize((40, 30), Image.Resampling.NEAREST)


def encoded(kind: str = "PNG") -> bytes:
    NOISE.save(file := io.BytesIO(), kind)
    return file.getvalue()


def save(path: Path, image: Image.Image, turn: int = 1) -> FileImage:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = turn
    image.save(path, exif=exif)
    return FileImage(path)


def array(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB"))


def bomb(width: int, height: int) -> bytes:
    """A small PNG that claims to be huge."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100))


def family(file: ImageSource) -> list[ImageSource]:
    """An image and different ones that are derived from it."""
    crop, edges = CropImage(file, BOX), EdgeImage(file)
    others = [CropImage(file, (0, 0, 20, 14)), EdgeImage(file, 400, 900)]
    return [file, crop, edges, *others, CropImage(edges, BOX), EdgeImage(crop), CropImage(crop, BOX)]


def test_images_without_a_defined_result_are_errors():
    for case in (("I", (8, 8), 256), ("I", (8, 8), -1), ("F", (8, 8), 255.5), ("RGB", (0, 5)), ("L", (1, 200_000))):
        with pytest.raises(ValueError, match=r"8 bits|no pixels|too thin"):
            preprocess_image(Image.new(*case), CLIP)


def test_all_sources_give_the_same_bytes_and_pixels(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded())
    with tarfile.open(tmp_path / "all.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        tar.add(tmp_path / "a.png")
    tarred = TarImage(tmp_path / "all.tar", "a.png", tarfile.BLOCKSIZE, len(encoded()))
    sources = [FileImage(tmp_path / "a.png"), tarred, CellImage("table.parquet", 2, "v1", lambda row: encoded())]
    for source in sources:
        assert source.read() == encoded()
        assert np.array_equal(array(source.load()), array(NOISE))
    assert len({source.key for source in sources}) == 3
    for source, name in zip(sources, ("a.png", "all.tar")):
        before = source.stamp()
        os.utime(tmp_path / name, (1, 1))
        assert source.stamp() != before


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (encoded("EPS"), "corrupt image"),  # Pillow would start Ghostscript
        (encoded("JPEG")[:-400], "truncated image"),
        (bomb(13_378, 13_378), "oversized image"),  # more than 178,956,970 pixels
        (bomb(12_000, 12_000)[:33], "corrupt image"),  # large, allowed, and nothing after the header
    ],
)
def test_damage_is_reported_with_its_place(content: bytes, kind: str) -> None:
    with pytest.raises(InvalidImage, match="image 7") as caught:
        decode_image(content, "image 7")
    assert caught.value.kind == kind


def test_missing_files_directories_and_pipes_are_missing_images(tmp_path: Path) -> None:
    """A pipe is not opened: that would wait until something is written to it."""
    os.mkfifo(tmp_path / "pipe.png")
    sources = [source for name in ("no.png", "pipe.png", "a\0.png") for source in family(FileImage(tmp_path / name))]
    for source in [*sources, TarImage(tmp_path / "no.tar", "a", 0, 1)]:
        for action in (source.stamp, source.read):
            with pytest.raises(InvalidImage) as caught:
                action()
            assert caught.value.kind == "missing image"


# Derived images


@pytest.mark.parametrize(("turn", "suffix"), [(1, "png"), (2, "png"), (3, "tiff"), (5, "png"), (6, "jpg"), (7, "png")])
def test_boxes_and_maps_are_of_the_upright_image_and_clipped_to_it(tmp_path: Path, turn: int, suffix: str) -> None:
    file = save(tmp_path / f"a.{suffix}", PAINTING, turn)
    upright = ImageOps.exif_transpose(file.load())
    edges = EdgeImage(file).load()
    assert torch.equal(preprocess_image(file.load(), CLIP), preprocess_image(upright, CLIP))
    for box, inside in {BOX: BOX, (-5, -6, 10, 12): (0, 0, 10, 12), (20, 20, 99, 99): (20, 20, *upright.size)}.items():
        assert np.array_equal(array(CropImage(file, box).load()), array(upright.crop(inside)))
    for box in ((5, 5, 5, 9), (9, 5, 5, 9), (40, 0, 50, 10), (0, -9, 10, 0)):
        with pytest.raises(InvalidImage, match=file.path.name):
            CropImage(file, box).load()
    assert (edges.size, edges.mode) == (upright.size, "L")
    assert np.array_equal(array(edges), array(EdgeImage(save(tmp_path / "b.png", upright.convert("RGB"))).load()))
