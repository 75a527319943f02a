from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps
from small_records import blobs, components

from hnclip.data.check import fingerprint as code
from hnclip.data.check.fingerprint import THUMBNAIL, fingerprint, similar_fingerprints
from hnclip.data.images import preprocess_image


def print_of(image):
    return fingerprint(preprocess_image(image, THUMBNAIL).numpy())


def as_jpeg(image, quality):
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file)


def alike(one, other, bits=4):
    return similar_fingerprints([print_of(one), print_of(other)], bits).groups == [[0, 1]]


def random_waves(count, flips, seed=0):
    """Fingerprints around a few centres, 0 to `flips` signs away."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(5, 64)) * 20
    waves = centres[rng.integers(0, 5, count)]
    for row in waves:
        weak = rng.choice(64, rng.integers(0, flips + 1), replace=False)
        row[weak] *= -1
    return waves.astype(np.float16)


@pytest.mark.parametrize("bits", [0, 1, 4, 15])
@pytest.mark.parametrize("correlation", [-1.0, 0.9])
def test_bands_find_what_comparing_all_pairs_finds(monkeypatch, bits, correlation):
    monkeypatch.setattr(code, "_CORRELATION", correlation)
    waves = random_waves(80, flips=9)
    weights = np.array([sum(wave) for wave in code._SLOWEST.tolist()])

    def slowly(one, other):
        one, other = waves[one].astype(float), waves[other].astype(float)
        if sum((a > 0) != (b > 0) for a, b in zip(one, other)) > bits:
            return False
        strength = [sum(weights * vector * vector) for vector in (one, other)]
        return sum(weights * one * other) / (strength[0] * strength[1]) ** 0.5 >= correlation

    found = similar_fingerprints([row.tobytes() for row in waves], bits)
    assert found.complete
    assert found.groups == components(80, slowly)


def test_waves_are_the_cosine_transform():
    """A picture made of one wave has that wave alone, in its strength."""
    rows, columns = np.mgrid[:32, :32]
    for number, (row, column) in enumerate(code._SLOWEST.tolist()):
        picture = np.cos(np.pi * row * (rows + 0.5) / 32) * np.cos(np.pi * column * (columns + 0.5) / 32)
        waves = (code._WAVES @ (20 * picture) @ code._WAVES.T)[tuple(code._SLOWEST.T)]
        expected = np.zeros(64)
        expected[number] = 20 * (0.5 if row and column else 2**0.5 / 2 * 2**0.5)
        assert np.allclose(waves, expected)


def test_the_slowest_waves_leave_out_the_mean():
    assert [0, 0] not in code._SLOWEST.tolist()
    assert len({tuple(wave) for wave in code._SLOWEST.tolist()}) == 64
    assert print_of(blobs(1)) == print_of(blobs(1).copy())


@pytest.mark.parametrize(
    "change",
    [
        lambda image: as_jpeg(image, 30),
        lambda image: image.resize((200, 110), Image.Resampling.BICUBIC),
        lambda image: image.convert("L"),
        lambda image: ImageEnhance.Contrast(image).enhance(0.8),
        lambda image: ImageOps.expand(image, 1, "white").crop((1, 1, 81, 61)),
    ],
    ids=["compressed", "resized", "grey", "contrast", "border"],
)
def test_small_changes_leave_a_picture_alike(change):
    for seed in range(20):
        assert alike(blobs(seed), change(blobs(seed)))


def test_other_pictures_are_not_alike():
    assert similar_fingerprints([print_of(blobs(seed)) for seed in range(60)], 4).groups == []
    assert not alike(blobs(0), ImageOps.mirror(blobs(0)))
    assert not alike(blobs(0), ImageOps.invert(blobs(0)))


def test_drawings_on_one_background_are_told_apart_by_strength():
    """Signs hang on the background, which is strong; what is drawn on it changes strengths."""
    waves = np.full(64, 3.0)
    other = np.where(np.arange(64) % 2, 1.0, 9.0)
    prints = [vector.astype(np.float16).tobytes() for vector in (waves, other, waves * 1.3)]
    assert similar_fingerprints(prints, 0).groups == [[0, 2]]


@pytest.mark.parametrize(
    "pixels",
    [
        np.full((40, 40), 0),
        np.full((40, 40), 255),
        np.full((40, 40), 90),
        np.random.default_rng(0).integers(126, 130, (40, 40)),
        np.tile(np.arange(40) * 6, (40, 1)),
        np.add.outer(np.arange(40), np.arange(40)) * 3,
    ],
    ids=["black", "white", "grey", "noise", "gradient", "slope"],
)
def test_plain_pictures_have_no_fingerprint(pixels):
    assert print_of(Image.fromarray(pixels.astype(np.uint8))) is None


def test_no_fingerprints_and_one():
    assert similar_fingerprints([], 4).groups == []
    assert similar_fingerprints([print_of(blobs(0))], 4).groups == []


@pytest.mark.parametrize("bits", [-1, 16])
def test_bits_outside_the_range_are_refused(bits):
    with pytest.raises(ValueError, match="bits must be between 0 and 15"):
        similar_fingerprints([], bits)
