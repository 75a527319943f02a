"""Files in OpenAI's layout through the front door: `load`, captions as text, pictures as pictures, and out again."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from openai_twin import OpenAITwin, small_b16, small_l14
from PIL import Image
from safetensors.torch import save_file

from hnclip.data.images import OPENAI_MEAN, OPENAI_STD
from hnclip.models.load import load, save


@pytest.fixture
def beside(tokenizer, tmp_path):
    """A directory with the files of a tokenizer, for checkpoints to stand beside."""
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture(params=[small_b16, small_l14], ids=["B/16", "L/14"])
def twin(request, tokenizer) -> OpenAITwin:
    return request.param(vocabulary=len(tokenizer))


@pytest.fixture
def picture():
    ramp = Image.linear_gradient("L")
    return Image.merge("RGB", [ramp, ramp.rotate(90), ramp.rotate(180)])


def normalised(pixels):
    mean, std = (torch.tensor(values)[:, None, None] for values in (OPENAI_MEAN, OPENAI_STD))
    return (pixels.float() / 255 - mean) / std


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 20, 21, 77, 248, 400])
def test_captions_of_every_length_equal_long_clips_own(twin, beside, tokenizer, captions, length):
    """`length` tokens between start and end; more than the context holds are cut, the end token kept."""
    torch.save(twin.state_dict(), beside / "longclip.pt")
    model = load(beside / "longclip.pt").eval()
    assert "Long-CLIP" in model.source
    assert "20 rows of positional_embedding, 228 of positional_embedding_res" in model.source
    whole = tokenizer(" ".join(captions[:4]))["input_ids"][1:-1]
    text = tokenizer.decode(whole[:length])
    words = tokenizer(text)["input_ids"][1:-1]
    assert abs(len(words) - length) <= 1  # a word cut in two may be read as another pair of tokens
    for pad in (0, tokenizer.eos_token_id):
        expected = F.normalize(twin.encode_text(twin.tokens(words, pad=pad)[None]), dim=-1)
        torch.testing.assert_close(model.encode_texts(model.tokenize([text])).vectors, expected, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_what_comes_out_is_the_same_model_to_transformers(twin, beside, captions, picture, name):
    from transformers import CLIPModel, CLIPProcessor

    if name.endswith("pt"):
        torch.save(twin.state_dict(), beside / name)
    else:
        save_file(twin.state_dict(), beside / name)
    model = load(beside / name).eval()
    save(model, beside / "out")
    clip, processor = CLIPModel.from_pretrained(beside / "out").eval(), CLIPProcessor.from_pretrained(beside / "out")
    inputs = processor(text=captions[:1], images=[picture], return_tensors="pt", truncation=True)
    output = clip(**inputs)
    pixels = model.preprocess_images([picture])
    image = F.normalize(twin.encode_image(normalised(pixels)), dim=-1)
    text = F.normalize(twin.encode_text(twin.tokens(inputs["input_ids"][0, 1:-1].tolist())[None]), dim=-1)
    torch.testing.assert_close(model.encode_images(pixels).vectors, image, rtol=0, atol=1e-5)
    torch.testing.assert_close(output.text_embeds, text, rtol=0, atol=1e-5)
    torch.testing.assert_close(output.image_embeds, image, rtol=0, atol=5e-3)  # resizing may differ by a grey level
    assert model.scale.item() == pytest.approx(twin.logit_scale.exp().item())


@torch.no_grad()
def test_a_short_clip_is_stretched_and_then_equals_a_stretched_twin(tokenizer, beside, captions):
    from hnclip.models.long_context import stretch_positions

    short = small_b16(long=False, context=77, vocabulary=len(tokenizer))
    torch.save(short.state_dict(), beside / "clip.pt")
    model = load(beside / "clip.pt", context=248).eval()
    assert model.source.endswith("stretched from 77 to 248 tokens (keep 20, ratio 4)")
    long = small_b16(long=False, context=248, vocabulary=len(tokenizer))
    long.load_state_dict({**short.state_dict(), "positional_embedding": stretch_positions(short.positional_embedding)})
    words = tokenizer(captions[0])["input_ids"][1:-1]
    assert len(words) > 77
    expected = F.normalize(long.encode_text(long.tokens(words)[None]), dim=-1)
    torch.testing.assert_close(model.encode_texts(model.tokenize(captions[:1])).vectors, expected, rtol=0, atol=1e-5)


def test_long_clip_is_never_stretched(twin, beside):
    torch.save(twin.state_dict(), beside / "longclip.pt")
    assert load(beside / "longclip.pt", context=248).context == 248
    with pytest.raises(ValueError, match="more than the 77 of an unstretched model"):
        load(beside / "longclip.pt", context=500)


def test_open_clips_settings_decide_activation_and_pictures(tokenizer, beside):
    twin = small_b16(long=False, context=77, vocabulary=len(tokenizer), activation=torch.nn.GELU)
    directory = beside / "laion"
    directory.mkdir()
    tokenizer.save_pretrained(directory)
    save_file(twin.state_dict(), directory / "open_clip_model.safetensors")
    settings = {
        "model_cfg": {
            "embed_dim": 64,
            "vision_cfg": {"image_size": 64, "layers": 2, "width": 128, "patch_size": 16},
            "text_cfg": {"context_length": 77, "vocab_size": len(tokenizer), "width": 128, "heads": 2, "layers": 2},
        },
        "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.25] * 3, "interpolation": "bilinear", "resize_mode": "squash"},
    }
    (directory / "open_clip_config.json").write_text(json.dumps(settings))
    for path in (directory, directory / "open_clip_model.safetensors"):
        model = load(path)
        assert "open_clip" in model.source
        assert model.backbone.config.text_config.hidden_act == "gelu"
        found = model.image_transform
        assert (found.mean, found.std, found.resample, found.squash) == ((0.5,) * 3, (0.25,) * 3, "bilinear", True)
    settings["preprocess_cfg"]["resize_mode"] = "longest"
    (directory / "open_clip_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="resize_mode 'longest'; supported are shortest, squash"):
        load(directory)


def test_a_file_of_another_layout_is_refused(model_directory):
    with pytest.raises(ValueError, match=r"not in OpenAI's layout .*opened by its directory"):
        load(model_directory / "model.safetensors")


def test_weights_without_a_vocabulary_of_their_size_are_refused(twin, tmp_path):
    """OpenAI's tokenizer is found in an installed package, but these weights embed fewer symbols."""
    torch.save(twin.state_dict(), tmp_path / "model.pt")
    with pytest.raises(ValueError, match="the tokenizer has 49408 symbols, the model embeds only"):
        load(tmp_path / "model.pt")
