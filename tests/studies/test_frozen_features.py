"""What towers say before their projections, encoded once."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from hnclip.core import ImageSource, InvalidImage, Record
from hnclip.data.batching import pad_texts
from hnclip.models.load import load
from hnclip.studies import frozen_features as module
from hnclip.studies.frozen_features import Encoding, frozen_features
from small_families import WORDS, write_bert, write_dinov2, write_siglip


class Noise(ImageSource):
    """A picture made of its number; `bad` ones cannot be read."""

    def __init__(self, number: int, *, bad: bool = False) -> None:
        self.number, self.bad = number, bad

    @property
    def key(self) -> str:
        return str(self.number)

    def stamp(self) -> str:
        if self.bad:
            raise InvalidImage("missing image", "not there")
        return self.key

    def read(self) -> bytes:
        if self.bad:
            raise InvalidImage("missing image", "not there")
        pixels = torch.randint(256, (20, 20, 3), generator=torch.Generator().manual_seed(self.number))
        content = io.BytesIO()
        Image.fromarray(pixels.to(torch.uint8).numpy()).save(content, "PNG")
        return content.getvalue()

    def decode(self, content: bytes) -> Image.Image:
        return Image.open(io.BytesIO(content))


def records(count: int) -> list[Record]:
    """Captions in no order of length; every third picture has two."""

    def caption(i: int, j: int) -> str:
        return " ".join(WORDS[i % 9 : i % 9 + 2 + (5 * i) % 7 + j])

    return [
        Record(f"r{i}", Noise(i), tuple(caption(i, j) for j in range(1 + (i % 3 == 0))), None) for i in range(count)
    ]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("towers")
    joined = f"{write_dinov2(home / 'image')}+{write_bert(home / 'text')}"
    return {"joined": joined, "siglip": str(write_siglip(home / "siglip"))}


def opened(name: str):
    torch.manual_seed(0)
    return load(name).eval()


@pytest.mark.parametrize("kind", ["clip", "joined", "siglip"])
@torch.no_grad()
def test_projected_they_are_the_models_own_vectors(kind, directories, model_directory, tmp_path) -> None:
    model = opened(str(model_directory) if kind == "clip" else directories[kind])
    shown = records(7)
    found = frozen_features(model, shown, tmp_path, encoding=Encoding(batch=3))
    projections = [
        getattr(model.backbone, name, torch.nn.Identity()) for name in ("visual_projection", "text_projection")
    ]
    pixels = model.preprocess_images([record.image.load() for record in shown])
    captions = [caption for record in shown for caption in record.captions]
    image, text = model.encode_images(pixels).vectors, model.encode_texts(model.tokenize(captions)).vectors
    torch.testing.assert_close(F.normalize(projections[0](found.image), dim=1), image, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(F.normalize(projections[1](found.text), dim=1), text, rtol=1e-4, atol=1e-5)
    assert found.owner.tolist() == [0, 0, 1, 2, 3, 3, 4, 5, 6, 6]
    assert (found.image.dtype, found.text.dtype) == (torch.float32, torch.float32)


@torch.no_grad()
def test_the_mean_is_over_the_tokens_of_each_caption(directories, tmp_path) -> None:
    model = opened(directories["joined"])
    shown = records(6)
    found = frozen_features(model, shown, tmp_path, encoding=Encoding("mean", batch=4))
    captions = [caption for record in shown for caption in record.captions]
    for caption, vector in zip(captions, found.text):
        ids = pad_texts(model.text_transform([caption]), model.text_transform.pad).ids
        hidden = model.backbone.text_model(input_ids=ids).last_hidden_state[0]  # [T, W], no pads in a batch of one
        torch.testing.assert_close(vector, hidden.mean(0), rtol=1e-4, atol=1e-5)


def test_equal_pictures_and_captions_have_equal_numbers(directories, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "PART", 2)  # doubles in different parts are doubles all the same
    shown = records(5)
    shown[4] = replace(shown[4], image=Noise(1), captions=shown[2].captions)
    found = frozen_features(opened(directories["joined"]), shown, tmp_path)
    assert found.image_ids.tolist() == [0, 1, 2, 3, 1]
    assert found.caption_ids.tolist() == [0, 1, 2, 3, 4, 5, 3]


def counting(monkeypatch) -> list[int]:
    encode, made = module.encode_part, list[int]()

    def counted(part, *args):
        made.append(len(part))
        return encode(part, *args)

    monkeypatch.setattr(module, "encode_part", counted)
    return made


def test_what_was_encoded_is_not_encoded_again(directories, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(module, "PART", 4)
    made = counting(monkeypatch)
    monkeypatch.setattr("hnclip.util.console.INTERVAL", 0.0)
    caplog.set_level("INFO", logger="hnclip")
    name, shown = directories["joined"], records(10)
    first = frozen_features(opened(name), shown, tmp_path)
    assert made == [4, 4, 2]
    assert ["4 of 10" in caplog.messages[0], "8 of 10" in caplog.messages[1]] == [True, True]
    again = frozen_features(opened(name), shown, tmp_path)
    assert made == [4, 4, 2]
    assert torch.equal(first.image, again.image)
    assert torch.equal(first.text, again.text)
    changed = [*shown[:5], replace(shown[5], captions=("a red dog",)), *shown[6:]]
    frozen_features(opened(name), changed, tmp_path)
    assert made == [4, 4, 2, 4]
    frozen_features(opened(name), shown[:4], tmp_path, encoding=Encoding("mean"))
    assert made == [4, 4, 2, 4, 4]
    other = opened(name)
    with torch.no_grad():
        next(other.backbone.vision_model.parameters()).add_(0.1)
    frozen_features(other, shown[:4], tmp_path)
    assert made == [4, 4, 2, 4, 4, 4]


def test_a_kill_costs_one_part(directories, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "PART", 4)
    made = counting(monkeypatch)
    name, save = directories["joined"], module.save_file

    def dies_at_the_second(tensors, path) -> None:
        save(tensors, path)
        if len(made) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "save_file", dies_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        frozen_features(opened(name), records(10), tmp_path)
    found = frozen_features(opened(name), records(10), tmp_path)
    assert made == [4, 4, 4, 2]
    assert len(found) == 10
    assert not list(Path(tmp_path).rglob(".*"))


def test_bad_records_are_left_out_or_refused(directories, tmp_path) -> None:
    model, shown = opened(directories["joined"]), records(8)
    shown[2] = replace(shown[2], image=Noise(2, bad=True))
    found = frozen_features(model, shown, tmp_path, max_bad=0.2)
    assert len(found) == 7
    whole = frozen_features(model, records(8), tmp_path)
    assert torch.equal(found.image, whole.image[[0, 1, 3, 4, 5, 6, 7]])
    with pytest.raises(ValueError, match="1 of 8 records of photos are invalid"):
        frozen_features(model, shown, tmp_path, name="photos")
    bad = [replace(record, image=Noise(9, bad=True)) for record in shown]
    with pytest.raises(ValueError, match="no record of photos can be used"):
        frozen_features(model, bad, tmp_path, name="photos", max_bad=1.0)
    with pytest.raises(ValueError, match="photos has no records"):
        frozen_features(model, [], tmp_path, name="photos")


def test_options_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="own"):
        Encoding("last")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch"):
        Encoding(batch=0)
