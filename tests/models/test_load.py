from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from hnclip.models.load import load, save, stretch, wrap
from hnclip.models.long_context import stretch_positions


@pytest.fixture
def saved(model, tmp_path):
    save(model, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def picture():
    ramp = Image.linear_gradient("L")
    return Image.merge("RGB", [ramp, ramp.rotate(90), ramp.rotate(180)]).resize((130, 111))


def encode_text(model, caption):
    return model.encode_texts(model.tokenize([caption])).vectors


def encode_image(model, picture):
    return model.encode_images(model.preprocess_images([picture])).vectors


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
    transform = replace(model.image_transform, mean=(0.25,) * 3, std=(0.125,) * 3)
    save(wrap(model.backbone, model.tokenizer, transform), tmp_path / "model")
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
    assert len(reopened.text_transform([caption]).ids[0]) > 200
    torch.testing.assert_close(encode_text(reopened, caption), encode_text(model, caption), rtol=0, atol=1e-6)
    ending = captions[0].split(". ")
    swapped = ". ".join([*ending[:-2], ending[-1], ending[-2]])
    assert not torch.allclose(encode_text(reopened, swapped), encode_text(reopened, captions[0]), atol=1e-3)


def test_stretching_twice_is_refused_and_changes_nothing(model):
    stretch(model)
    table = model.backbone.text_model.embeddings.position_embedding.weight.clone()
    with pytest.raises(ValueError, match="takes 248 tokens already"):
        stretch(model)
    assert torch.equal(model.backbone.text_model.embeddings.position_embedding.weight, table)


@pytest.mark.parametrize(
    ("context", "options", "ratio"), [(100, {}, 2), (248, {}, 4), (300, {}, 5), (200, {"keep": 10}, 3)]
)
def test_any_context_can_be_asked_for(model, saved, context, options, ratio):
    keep = options.get("keep", 20)
    table = model.backbone.text_model.embeddings.position_embedding.weight.detach()
    opened = load(saved, context=context, **options)
    expected = stretch_positions(table, keep=keep, ratio=ratio)[:context]
    assert opened.context == context
    assert torch.equal(opened.backbone.text_model.embeddings.position_embedding.weight, expected)
    assert f"stretched from 77 to {context} tokens (keep {keep}, ratio {ratio})" in opened.source
    assert len(opened.text_transform(["word " * 400]).ids[0]) == context


def test_a_long_model_is_left_alone(model, tmp_path):
    save(stretch(model), tmp_path / "long")
    for context in (None, 77, 248):
        opened = load(tmp_path / "long", context=context)
        assert (opened.context, "stretched" in opened.source) == (248, False)
    with pytest.raises(ValueError, match="248 positions, more than the 77 of an unstretched model"):
        load(tmp_path / "long", context=300)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 248, "ratio": 2}, "keep 20 and ratio 2 stretch 77 positions to 134, not to 248"),
        ({"context": 248, "keep": 76}, "keep must be between 0 and 75"),
        ({"context": 248, "keep": -1}, "keep must be between 0 and 75"),
    ],
)
def test_a_stretch_that_cannot_be_is_explained(saved, options, message):
    with pytest.raises(ValueError, match=message):
        load(saved, **options)


def test_a_stretched_model_learns_its_positions(model, captions):
    stretch(model)
    encode_text(model, " ".join(captions[:3])).sum().backward()
    gradient = model.backbone.text_model.embeddings.position_embedding.weight.grad
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


class Evil:
    """A pickle of this runs what it likes when it is opened."""

    def __reduce__(self):
        return (Path.touch, (Path("executed"),))


def evil_pickle(directory):
    (directory / "model.safetensors").unlink()
    torch.save({"logit_scale": Evil()}, directory / "pytorch_model.bin")


def missing_shard(directory):
    (directory / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"logit_scale": "model-00001-of-00001.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def break_statistics(directory):
    (directory / "preprocessor_config.json").write_text("not JSON")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "model' is neither 'bundled' nor a file or directory here"),
        (lambda d: (d / "config.json").unlink(), "model has no config.json"),
        (break_config, "config.json is not valid JSON"),
        (list_config, "config.json holds list, not an object"),
        (wrong_type, r"tensor logit_scale has shape \[\], the configuration needs \[1\]"),
        (lambda d: (d / "model.safetensors").unlink(), "model has no weights: looked for model.safetensors"),
        (evil_pickle, "pytorch_model.bin .*code"),
        (missing_shard, "model-00001-of-00001.safetensors is missing, though model.safetensors.index.json names it"),
        (truncate_weights, "model.safetensors is cut short: .* bytes expected, .*'visual_projection.weight'"),
        (cut_into_the_header, "model.safetensors is cut short: .* bytes of header expected"),
        (drop_a_tensor, r"model.safetensors lacks tensor text_projection.weight, expected with shape \[128, 128\]$"),
        (reshape_a_tensor, r"tensor text_projection.weight has shape \[3, 3\], the configuration needs \[128, 128\]"),
        (lambda d: (d / "tokenizer.json").unlink(), "model has no tokenizer.json"),
        (break_statistics, "preprocessor_config.json is not valid JSON"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_a_damaged_directory_is_refused_by_name(saved, damage, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    damage(saved)
    with pytest.raises(ValueError, match=message):
        load(saved)
    assert not (tmp_path / "executed").exists()


def same_weights(one, other):
    before, after = one.state_dict(), other.state_dict()
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_shards_and_plain_pickles_of_tensors_open_too(model, saved):
    from safetensors.torch import load_file

    tensors = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    model.backbone.save_pretrained(saved, max_shard_size="1MB")
    assert len(list(saved.glob("*.safetensors"))) > 2
    assert same_weights(load(saved), model)
    for file in saved.glob("model*"):
        file.unlink()
    torch.save(tensors, saved / "pytorch_model.bin")
    assert same_weights(load(saved), model)


def test_half_precision_becomes_full(model, saved):
    model.backbone.half().save_pretrained(saved)
    reopened = load(saved)
    assert {weight.dtype for weight in reopened.parameters()} == {torch.float32}
    assert same_weights(reopened, model.float())


def test_training_an_opened_model_leaves_its_file_alone(saved):
    before = (saved / "model.safetensors").read_bytes()
    reopened = load(saved)
    with torch.no_grad():
        for weight in reopened.parameters():
            weight.add_(1)
    assert (saved / "model.safetensors").read_bytes() == before


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
