"""The encoder loop on images as they are stored, and on captions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from encode_helpers import save_picture
from hnclip.core import ViewEmbeddings
from hnclip.data.image_sources import FileImage
from hnclip.encode.loop import encode_batches, encode_captions, encode_images, encode_pixels
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load


@pytest.fixture(scope="module")
def model(model_directory: Path) -> DualEncoder:
    return load(model_directory)


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_images_are_encoded_in_order_and_bad_ones_reported(batch: int, model: DualEncoder, tmp_path: Path) -> None:
    for number in range(6):
        save_picture(tmp_path / f"{number}.png", number)
    (tmp_path / "bad.png").write_bytes(b"no image")
    files = [tmp_path / f"{name}.png" for name in ("0", "bad", "1", "0", "2", "missing", "3", "4", "1", "5")]
    done: list[int] = []
    model.train()
    found = encode_images(model, [FileImage(file) for file in files], batch=batch, advance=done.append)
    assert found.kept == (0, 2, 3, 4, 6, 7, 8, 9)
    assert {row: problem.kind for row, problem in found.problems.items()} == {1: "corrupt image", 5: "missing image"}
    assert sum(done) == len(files)
    assert model.training
    expected = model.encode([files[row] for row in found.kept], to="torch")
    torch.testing.assert_close(found.vectors, expected, atol=2e-6, rtol=0)


def test_captions_are_encoded_by_length_and_returned_in_order(model: DualEncoder) -> None:
    texts = [" ".join(["tree"] * length) for length in (30, 2, 100, 1, 7, 7)]
    found = encode_captions(model, model.text_transform(texts), batch=2)
    expected = torch.cat([encode_captions(model, model.text_transform([text])) for text in texts])
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)
    empty = [encode_images(model, []).vectors, encode_captions(model, [])]
    assert [vectors.shape for vectors in [*empty, encode_pixels(model, torch.empty(0, 3, 48, 48))]] == [(0, 32)] * 3


def test_a_batch_is_started_before_the_previous_one_is_fetched(model: DualEncoder) -> None:
    events = []

    def encode(pixels: torch.Tensor) -> ViewEmbeddings:
        assert not torch.is_grad_enabled()
        events.append("start")
        return model.encode_images(pixels)

    for name, _ in encode_batches(model, encode, [(name, torch.zeros(1, 3, 48, 48).byte()) for name in "abc"]):
        assert torch.is_grad_enabled()
        events.append(name)
    assert events == ["start", "start", "a", "start", "b", "c"]
