from __future__ import annotations

import copy
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from hnclip.core import Batch, TextBatch
from hnclip.data.images import OPENAI_MEAN, OPENAI_STD
from hnclip.models.load import load, wrap


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
    assert patches.mask.shape == (4, (model.image_size // backbone.config.vision_config.patch_size) ** 2)
    assert patches.mask.all()
    hidden = backbone.text_model(input_ids=texts.ids).last_hidden_state
    expected = F.normalize(backbone.text_projection(hidden), dim=-1)
    torch.testing.assert_close(words.tokens[words.mask], expected[words.mask], rtol=0, atol=1e-5)


@pytest.mark.parametrize("tokens", [False, True])
@torch.no_grad()
def test_views_in_one_call_equal_separate_calls(model, pixels, texts, tokens):
    images, captions = {"full": pixels, "crop": pixels.flip(0)[:3]}, {"short": texts[:2], "caption": texts}
    batch = Batch(images, captions, ids=torch.zeros(4, 2, dtype=torch.long), margin_text=torch.ones(4, 3))
    found = model(batch, tokens=tokens)
    assert found.ids is batch.ids
    assert found.margin_text is batch.margin_text
    assert torch.equal(found.scale, model.scale)
    pairs = [(found.images[name], model.encode_images(view, tokens=tokens)) for name, view in images.items()]
    pairs += [(found.texts[name], model.encode_texts(view, tokens=tokens)) for name, view in captions.items()]
    for together, alone in pairs:
        torch.testing.assert_close(together.vectors, alone.vectors, rtol=0, atol=1e-5)
        assert (together.tokens is None) == (alone.tokens is None) == (not tokens)
        if tokens:
            width = alone.tokens.shape[1]  # a short view is padded to the width of the longest
            assert torch.equal(together.mask[:, :width], alone.mask)
            assert not together.mask[:, width:].any()
            torch.testing.assert_close(together.tokens[:, :width], alone.tokens, rtol=0, atol=1e-5)


def test_the_wrapper_adds_no_parameters_and_reads_its_width_without_a_forward_pass(model):
    assert set(model.state_dict()) == {f"backbone.{name}" for name in model.backbone.state_dict()}
    random = torch.get_rng_state()
    model.train()
    model.backbone.text_model.register_forward_pre_hook(lambda *_: pytest.fail("forward pass"))
    assert model.width == model.backbone.config.projection_dim
    assert torch.equal(torch.get_rng_state(), random)


@pytest.fixture
def photos(tmp_path):
    """Three different images, and their files."""
    ramp = Image.linear_gradient("L")
    images = [
        Image.merge("RGB", [ramp, ramp.rotate(90), ramp.rotate(turn)]).resize((130, 111)) for turn in (0, 90, 180)
    ]
    files = [tmp_path / f"photo {row}.png" for row in range(3)]
    for image, file in zip(images, files):
        image.save(file)
    return images, files


@torch.no_grad()
@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_encode_gives_unit_vectors_of_texts_in_their_order(model, captions, batch_size):
    texts = [captions[0], "a red house", captions[1], "two dogs"]
    found = model.encode(texts, batch_size=batch_size)
    assert isinstance(found, np.ndarray)
    assert (found.shape, found.dtype) == ((4, model.width), np.float32)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    for row, text in enumerate(texts):
        expected = model.encode_texts(model.tokenize([text])).vectors[0]
        np.testing.assert_allclose(found[row], expected, atol=1e-5)
    tensor = model.encode(texts, batch_size=batch_size, to="torch", progress=True)
    assert torch.equal(tensor, torch.from_numpy(found))
    for vectors in (found, tensor):
        cosines = model.similarity(vectors, 3 * vectors[:2])
        assert type(cosines) is type(vectors)
        np.testing.assert_allclose(cosines, found @ found[:2].T, atol=1e-6)


@torch.no_grad()
def test_encode_takes_images_in_every_form(model, photos):
    images, files = photos
    expected = model.encode_images(model.preprocess_images(images)).vectors
    forms = [images, files, [str(file) for file in files], [np.asarray(image) for image in images]]
    for form in [*forms, [images[0], files[1], str(files[2])]]:
        np.testing.assert_allclose(model.encode(form, batch_size=2), expected, atol=1e-6)


def test_encode_keeps_the_mode_and_takes_no_gradient(model):
    model.train()
    model.backbone.vision_model.eval()  # as a frozen tower
    assert not model.encode(["a red house"], to="torch").requires_grad
    assert model.backbone.text_model.training
    assert not model.backbone.vision_model.training
    assert model.encode([]).shape == (0, model.width)


def test_strings_are_images_only_if_the_file_exists(model, photos, caplog, tmp_path):
    """A path that may be mistyped is a text with a warning as a string, and an error as a `Path`."""
    with caplog.at_level(logging.WARNING):
        found = model.encode(["no_such.png"])
        assert "no_such.png" in caplog.text
        caplog.clear()
        model.encode(["a drawing of cat.png", "x" * 5000 + ".png"])
        assert "drawing" not in caplog.text
    np.testing.assert_allclose(found, model.encode(["no_such.png"]))
    (tmp_path / "note.txt").write_text("a text file is no image")
    assert model.encode([str(tmp_path / "note.txt")]).shape == (1, model.width)
    with pytest.raises(ValueError, match="no_such"):
        model.encode([Path("no_such.png")])


def test_invalid_inputs_are_refused(model, photos, pixels):
    """Arrays of floats would be divided by 255 a second time."""
    images, files = photos
    for single in ("a red house", files[0], images[0]):
        with pytest.raises(ValueError, match="list"):
            model.encode(single)
    for mixed in (["a red house", images[0]], [str(files[0]), "a red house"], [files[0], "no_such.png"]):
        with pytest.raises(ValueError, match="inputs"):
            model.encode(mixed)
    floats = np.random.default_rng(0).random((9, 9, 3))
    for wrong in (floats, floats.astype(np.float32), torch.from_numpy(floats), np.zeros((3, 9, 9), np.uint8)):
        for call in (model.encode, model.preprocess_images):
            with pytest.raises(ValueError, match="uint8"):
                call([wrong])
    for wrong in (pixels / 255, pixels.long()):
        with pytest.raises(ValueError, match="preprocess_images"):
            model.encode_images(wrong)
    with pytest.raises(ValueError, match="78 tokens"):  # more than the context
        model.encode_texts(TextBatch(torch.zeros(1, 78, dtype=torch.long), torch.tensor([78])))


def test_saving_through_the_model_and_loading_on_a_device(model, tmp_path):
    model.save(tmp_path / "model")
    again = load(tmp_path / "model", context=248, device="auto")
    assert again.context == 248
    assert again.device.type == (torch.accelerator.current_accelerator() or torch.device("cpu")).type
    with pytest.raises(ValueError, match="nonsense"):
        load(tmp_path / "model", device="nonsense")


def test_wrapping_encoding_and_saving_change_neither_model_nor_tokenizer(model, tmp_path, captions):
    backbone, tokenizer = model.backbone, model.tokenizer

    def state():
        attention = backbone.config.text_config._attn_implementation
        return backbone.config.to_dict(), attention, copy.deepcopy(tokenizer.init_kwargs), tokenizer.model_max_length

    before, weights = state(), {name: value.clone() for name, value in backbone.state_dict().items()}
    wrapped = wrap(backbone, tokenizer)
    wrapped.encode(["a red house", captions[0]])  # packed
    wrapped.save(tmp_path / "model")
    assert load(tmp_path / "model").tokenizer.model_max_length == model.context
    assert state() == before
    assert all(torch.equal(value, weights[name]) for name, value in backbone.state_dict().items())
