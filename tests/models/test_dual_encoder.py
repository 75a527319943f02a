from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from hnclip.core import Batch, TextBatch
from hnclip.data.images import OPENAI_MEAN, OPENAI_STD
from hnclip.models.load import load, wrap
from hnclip.models.parameters import trained_tensors
from hnclip.models.readout import Readout


@pytest.fixture
def pixels(model):
    shape = (4, 3, model.image_size, model.image_size)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def texts(model, captions):
    """Captions of several lengths, the last filling the context."""
    return model.tokenize([captions[0][:n] for n in (5, 20, 120)] + [" ".join(captions[:2])])


@torch.no_grad()
def test_token_vectors_pass_the_final_norm_and_the_projection(model, pixels, texts):
    backbone = model.backbone
    patches, words = model.encode_images(pixels, tokens=True), model.encode_texts(texts, tokens=True)
    mean, std = (torch.tensor(values)[:, None, None] for values in (OPENAI_MEAN, OPENAI_STD))
    hidden = backbone.vision_model(pixel_values=(pixels.float() / 255 - mean) / std).last_hidden_state[:, 1:]
    expected = backbone.visual_projection(backbone.vision_model.post_layernorm(hidden))
    torch.testing.assert_close(patches.tokens, F.normalize(expected, dim=-1), rtol=0, atol=1e-5)
    assert patches.mask.all()
    hidden = backbone.text_model(input_ids=texts.ids).last_hidden_state
    expected = F.normalize(backbone.text_projection(hidden), dim=-1)
    torch.testing.assert_close(words.tokens[words.mask], expected[words.mask], rtol=0, atol=1e-5)


@torch.no_grad()
def test_views_in_one_call_equal_separate_calls(model, pixels, texts):
    images, captions = {"full": pixels, "crop": pixels.flip(0)[:3]}, {"short": texts[:2], "caption": texts}
    batch = Batch(images, captions, ids=torch.zeros(4, 2, dtype=torch.long), margin_text=torch.ones(4, 3))
    found = model(batch, tokens=True)
    assert found.ids is batch.ids
    assert found.margin_text is batch.margin_text
    assert model(batch).images["crop"].tokens is None
    pairs = [(found.images[name], model.encode_images(view, tokens=True)) for name, view in images.items()]
    pairs += [(found.texts[name], model.encode_texts(view, tokens=True)) for name, view in captions.items()]
    for together, alone in pairs:
        torch.testing.assert_close(together.vectors, alone.vectors, rtol=0, atol=1e-5)
        width = alone.tokens.shape[1]  # a short view is padded to the width of the longest
        assert torch.equal(together.mask[:, :width], alone.mask)
        assert not together.mask[:, width:].any()
        torch.testing.assert_close(together.tokens[:, :width], alone.tokens, rtol=0, atol=1e-5)


class AllTokens(Readout):
    """Gives the tokens that the encoder gives by itself."""

    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(()))

    def forward(self, seen):
        return self.factor * F.normalize(seen.project(seen.hidden), dim=-1), seen.inside


def test_readouts_get_the_last_hidden_states_of_their_view(model, pixels, texts, tmp_path):
    """Of views that are encoded together. Readouts train and are not saved."""
    captions = {"short": texts[:2], "caption": texts}
    batch = Batch({"full": pixels, "crop": pixels[:3]}, captions, torch.zeros(4, 2, dtype=torch.long))
    expected = model(batch, tokens=True)
    model.readouts.update({name: AllTokens() for name in ("full", "short")})
    found = model(batch, tokens=True)
    assert found.images["crop"].tokens is found.texts["caption"].tokens is model(batch).images["full"].tokens is None
    views = [(found.images["full"], expected.images["full"]), (found.texts["short"], expected.texts["short"])]
    for view, other in views:
        width = min(view.tokens.shape[1], other.tokens.shape[1])
        mask = other.mask[:, :width]
        assert view.mask[:, :width][mask].all()
        torch.testing.assert_close(view.tokens[:, :width][mask], other.tokens[:, :width][mask], rtol=0, atol=1e-5)
    found.images["full"].tokens.sum().backward()
    assert model.readouts["full"].factor.grad is not None
    assert "readouts.full.factor" in trained_tensors(model)
    model.save(tmp_path / "saved")
    assert not len(load(tmp_path / "saved").readouts)


def test_encode_gives_unit_vectors_of_texts_in_their_order(model, captions):
    """Without gradients; the mode stays."""
    texts = [captions[0], "a red house", captions[1], "two dogs"]
    expected = torch.cat([model.encode_texts(model.tokenize([text])).vectors.detach() for text in texts])
    model.train()
    model.backbone.vision_model.eval()  # as a frozen tower
    found, tensor = model.encode(texts, batch_size=3), model.encode(texts, batch_size=2, to="torch")
    assert (model.backbone.text_model.training, model.backbone.vision_model.training) == (True, False)
    assert (type(found), found.dtype) == (np.ndarray, np.float32)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    for vectors in (found, tensor):
        np.testing.assert_allclose(vectors, expected, atol=1e-5)
        cosines = model.similarity(vectors, 3 * vectors[:2])
        assert type(cosines) is type(vectors)
        np.testing.assert_allclose(cosines, expected @ expected[:2].T, atol=1e-5)


@pytest.fixture
def photos(tmp_path):
    """Three different images, and their files."""
    ramp = Image.linear_gradient("L").resize((130, 111))
    images = [Image.merge("RGB", [ramp, ramp.rotate(90), ramp.rotate(turn)]) for turn in (0, 90, 180)]
    files = [tmp_path / f"photo {row}.png" for row in range(3)]
    for image, file in zip(images, files):
        image.save(file)
    return images, files


@torch.no_grad()
def test_encode_takes_images_in_every_form(model, photos):
    images, files = photos
    expected = model.encode_images(model.preprocess_images(images)).vectors
    for form in (images, files, [np.asarray(image) for image in images], [images[0], files[1], str(files[2])]):
        np.testing.assert_allclose(model.encode(form, batch_size=2), expected, atol=1e-6)


def test_invalid_inputs_are_refused(model, photos, pixels):
    """Arrays of floats would be divided by 255 a second time."""
    images, _ = photos
    floats = np.random.default_rng(0).random((9, 9, 3))
    for word, call, wrong in (
        ("list", model.encode, "a red house"),
        ("list", model.encode, np.zeros((9, 9, 3), np.uint8)),  # its rows would be read as grey images
        ("inputs", model.encode, ["a red house", images[0]]),
        ("no_such", model.encode, [Path("no_such.png")]),
        ("uint8", model.encode, [floats]),
        ("preprocess_images", model.encode_images, pixels / 255),
        ("78 tokens", model.encode_texts, TextBatch(torch.zeros(1, 78, dtype=torch.long), torch.tensor([78]))),
    ):
        with pytest.raises(ValueError, match=word):
            call(wrong)


def test_wrapping_encoding_and_saving_change_neither_model_nor_tokenizer(model, tmp_path, captions):
    backbone, tokenizer = model.backbone, model.tokenizer

    def state():
        return backbone.config.to_dict(), copy.deepcopy(tokenizer.init_kwargs), tokenizer.model_max_length

    before, weights = state(), copy.deepcopy(backbone.state_dict())
    wrapped = wrap(backbone, tokenizer)
    assert set(wrapped.state_dict()) == {f"backbone.{name}" for name in weights}
    wrapped.encode(["a red house", captions[0]])  # packed
    wrapped.save(tmp_path / "model")
    again = load(tmp_path / "model", device="auto")
    assert again.tokenizer.model_max_length == model.context
    assert again.device.type == (torch.accelerator.current_accelerator() or torch.device("cpu")).type
    assert state() == before
    assert all(torch.equal(value, weights[name]) for name, value in backbone.state_dict().items())
