from __future__ import annotations

import json
import shutil

import pytest
import torch
from PIL import Image

from hnclip.data.batches import pad_texts
from hnclip.data.images import preprocess_image
from hnclip.data.texts import tokenize
from hnclip.models.load import load, save, stretch


@pytest.fixture
def saved(model, tmp_path):
    save(model, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def picture():
    ramp = Image.linear_gradient("L")
    return Image.merge("RGB", [ramp, ramp.rotate(90), ramp.rotate(180)]).resize((130, 111))


def encode_text(model, caption):
    ids = tokenize(model.tokenizer, [caption], model.context).ids
    return model.encode_texts(pad_texts(ids, model.tokenizer.pad_token_id)).vectors


def encode_image(model, picture):
    return model.encode_images(preprocess_image(picture, model.image_size)[None]).vectors


def content(directory):
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def test_a_round_trip_keeps_every_bit(model, saved):
    reopened = load(saved)
    before, after = model.state_dict(), reopened.state_dict()
    assert before.keys() == after.keys()
    for name in before:
        assert torch.equal(before[name], after[name]), name
    assert torch.equal(reopened.image_mean, model.image_mean)
    assert torch.equal(reopened.image_std, model.image_std)
    assert reopened.tokenizer.get_vocab() == model.tokenizer.get_vocab()


def test_saving_again_writes_the_same_weights_vocabulary_and_statistics(saved, tmp_path):
    save(load(saved), tmp_path / "again")
    for name in ("model.safetensors", "tokenizer.json", "preprocessor_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (saved / name).read_bytes()


@torch.no_grad()
def test_transformers_alone_opens_it_and_agrees(model, saved, picture, captions):
    from transformers import CLIPModel, CLIPProcessor

    caption = " ".join(captions[0].split()[:20])
    clip, processor = CLIPModel.from_pretrained(saved).eval(), CLIPProcessor.from_pretrained(saved)
    inputs = processor(text=[caption], images=[picture], return_tensors="pt")
    expected = clip(**inputs)
    torch.testing.assert_close(encode_text(model, caption), expected.text_embeds, rtol=0, atol=1e-5)
    torch.testing.assert_close(encode_image(model, picture), expected.image_embeds, rtol=0, atol=1e-5)


def test_picture_statistics_are_saved(model, tmp_path):
    model.image_mean.fill_(0.25)
    model.image_std.fill_(0.125)
    save(model, tmp_path / "model")
    reopened = load(tmp_path / "model")
    assert reopened.image_mean.flatten().tolist() == [0.25] * 3
    assert reopened.image_std.flatten().tolist() == [0.125] * 3


def test_picture_statistics_are_found_where_a_processor_saves_them(model, saved):
    (saved / "preprocessor_config.json").unlink()
    assert torch.equal(load(saved).image_mean, model.image_mean)  # OpenAI's, for want of others
    nested = {"image_processor": {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25]}}
    (saved / "processor_config.json").write_text(json.dumps(nested))
    assert load(saved).image_mean.flatten().tolist() == [0.5] * 3


@torch.no_grad()
def test_a_stretched_model_takes_long_captions_after_a_round_trip(model, tmp_path, captions):
    before = encode_text(model, "a red house")
    assert stretch(model) is model
    assert model.context == 248
    torch.testing.assert_close(encode_text(model, "a red house"), before)
    save(model, tmp_path / "long")
    reopened = load(tmp_path / "long")
    assert reopened.context == 248
    assert reopened.tokenizer.model_max_length == 248
    caption = " ".join(captions[:3])
    assert len(tokenize(reopened.tokenizer, [caption], 248).ids[0]) > 200
    torch.testing.assert_close(encode_text(reopened, caption), encode_text(model, caption), rtol=0, atol=1e-6)
    ending = captions[0].split(". ")
    swapped = ". ".join([*ending[:-2], ending[-1], ending[-2]])
    assert not torch.allclose(encode_text(reopened, swapped), encode_text(reopened, captions[0]), atol=1e-3)


def test_stretching_twice_is_refused_and_changes_nothing(model):
    stretch(model)
    table = model.clip.text_model.embeddings.position_embedding.weight.clone()
    with pytest.raises(ValueError, match="table has 248 positions"):
        stretch(model)
    assert torch.equal(model.clip.text_model.embeddings.position_embedding.weight, table)


def test_a_stretched_model_learns_its_positions(model, captions):
    stretch(model)
    encode_text(model, " ".join(captions[:3])).sum().backward()
    gradient = model.clip.text_model.embeddings.position_embedding.weight.grad
    assert (gradient[:200].abs().sum(dim=1) > 0).all()


def break_config(directory):
    (directory / "config.json").write_text('{"model_type": ')


def list_config(directory):
    (directory / "config.json").write_text("[]")


def wrong_type(directory):
    settings = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**settings, "model_type": "siglip"}))


def truncate_weights(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def cut_into_the_header(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])


def drop_a_tensor(directory):
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    del tensors["text_projection.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def reshape_a_tensor(directory):
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    tensors["text_projection.weight"] = torch.zeros(3, 3)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def only_pickle(directory):
    from safetensors.torch import load_file

    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()


def break_statistics(directory):
    (directory / "preprocessor_config.json").write_text("not JSON")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "model' is neither 'bundled' nor a directory"),
        (lambda d: (d / "config.json").unlink(), "model has no config.json"),
        (break_config, "config.json is not valid JSON"),
        (list_config, "config.json holds list, not an object"),
        (wrong_type, "config.json says model_type 'siglip'"),
        (lambda d: (d / "model.safetensors").unlink(), "model has no model.safetensors"),
        (only_pickle, "model has no model.safetensors; weights in other formats are not read"),
        (truncate_weights, "model.safetensors cannot be read"),
        (cut_into_the_header, "model.safetensors cannot be read"),
        (drop_a_tensor, "model.safetensors lacks or misfits 1 tensors, first: text_projection.weight"),
        (reshape_a_tensor, "model.safetensors lacks or misfits 1 tensors, first: text_projection.weight"),
        (lambda d: (d / "tokenizer.json").unlink(), "model has no tokenizer.json"),
        (break_statistics, "preprocessor_config.json is not valid JSON"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_a_damaged_directory_is_refused_by_name(saved, damage, message):
    damage(saved)
    with pytest.raises(ValueError, match=message):
        load(saved)


def test_saving_replaces_a_directory_whole(model, saved):
    (saved / "leftover.txt").write_text("of another model")
    stretch(model)
    save(model, saved)
    assert load(saved).context == 248
    assert not (saved / "leftover.txt").exists()
    assert [path.name for path in saved.parent.iterdir()] == ["model"]


def test_a_failure_while_saving_leaves_the_old_directory(model, saved, monkeypatch):
    before = content(saved)
    stretch(model)

    def fail(directory):
        raise OSError("no space left")

    monkeypatch.setattr(model.tokenizer, "save_pretrained", fail)
    with pytest.raises(OSError, match="no space left"):
        save(model, saved)
    assert content(saved) == before
    assert [path.name for path in saved.parent.iterdir()] == ["model"]


def test_saved_files_have_the_permissions_of_any_new_file(saved):
    (saved.parent / "plain").touch()
    expected = (saved.parent / "plain").stat().st_mode
    assert {file.name: file.stat().st_mode for file in saved.iterdir()} == dict.fromkeys(content(saved), expected)


def test_loading_and_saving_print_nothing_and_change_no_settings(model, saved, capfd):
    from transformers.utils import logging

    settings = logging.get_verbosity(), logging.is_progress_bar_enabled()
    assert settings[1]
    save(load(saved), saved)
    drop_a_tensor(saved)
    with pytest.raises(ValueError, match="lacks"):
        load(saved)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == settings
