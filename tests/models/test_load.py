from __future__ import annotations

import os
import shutil
from fnmatch import fnmatch

import pytest
import torch
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import load_file, save_file

from hnclip.models.load import is_hub_name, load, load_transforms, save
from hnclip.models.long_context import stretch
from small_families import PHRASE, WRITERS


@pytest.fixture
def saved(model, tmp_path):
    save(model, tmp_path / "model")
    return tmp_path / "model"


def content(directory):
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def same_weights(one, other):
    before, after = one.state_dict(), other.state_dict()
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def replace_weights(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


DAMAGES = {
    "config.json": lambda d: (d / "config.json").unlink(),
    "training run": lambda d: (d / "config.json").write_text('{"optim": {}}'),
    "llama": lambda d: (d / "config.json").write_text('{"model_type": "llama"}'),
    "model.safetensors": lambda d: (d / "model.safetensors").unlink(),
    "incomplete": lambda d: os.truncate(d / "model.safetensors", 1_000_000),
    "text_projection.weight": lambda d: replace_weights(d, lambda t: t.pop("text_projection.weight")),
    "logit_scale": lambda d: replace_weights(d, lambda t: t.update({"logit_scale": torch.zeros(3, 3)})),
    # As in ports of Long-CLIP that keep their second positional table.
    "embedding_res": lambda d: replace_weights(d, lambda t: t.update({"position_embedding_res": torch.zeros(3)})),
    "tokenizer.json": lambda d: (d / "tokenizer.json").unlink(),
    "preprocess": lambda d: (d / "preprocessor_config.json").write_text("not JSON"),
}


@pytest.mark.parametrize("word", DAMAGES)
def test_a_damaged_directory_is_refused(saved, word):
    DAMAGES[word](saved)
    with pytest.raises((ValueError, OSError), match=word):
        load(saved)


def test_a_pickle_with_code_is_refused_and_the_code_not_executed(saved, code, tmp_path):
    (saved / "model.safetensors").unlink()
    torch.save({"logit_scale": code}, saved / "pytorch_model.bin")
    with pytest.raises((ValueError, OSError), match="Weights only"):
        load(saved)
    assert not (tmp_path / "executed").exists()


def test_shards_pickles_of_tensors_and_half_precision_open_too(model, saved):
    """All as fp32; training an opened model does not change its file."""
    tensors = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    model.backbone.save_pretrained(saved, max_shard_size="1MB")
    assert len(list(saved.glob("*.safetensors"))) > 2
    assert same_weights(load(saved), model)
    for file in saved.glob("model*"):
        file.unlink()
    torch.save(tensors, saved / "pytorch_model.bin")
    assert same_weights(load(saved), model)
    (saved / "pytorch_model.bin").unlink()
    model.backbone.half().save_pretrained(saved)
    before, opened = (saved / "model.safetensors").read_bytes(), load(saved)
    assert {weight.dtype for weight in opened.parameters()} == {torch.float32}
    assert same_weights(opened, model.float())
    with torch.no_grad():
        for weight in opened.parameters():
            weight.add_(1)
    assert (saved / "model.safetensors").read_bytes() == before


def test_saving_replaces_a_directory_as_a_whole(model, saved, monkeypatch):
    (saved / "leftover.txt").write_text("of another model")
    stretch(model)
    save(model, saved)
    assert load(saved).context == 248
    assert not (saved / "leftover.txt").exists()

    def fail(directory):
        raise OSError("no space left")

    before = content(saved)
    monkeypatch.setattr(model.tokenizer, "save_pretrained", fail)
    with pytest.raises(OSError, match="no space left"):
        save(model, saved)
    assert content(saved) == before
    assert [path.name for path in saved.parent.iterdir()] == ["model"]


def test_loading_and_saving_print_nothing_and_change_no_settings(model, saved, capfd):
    from transformers.utils import logging

    settings = logging.get_verbosity(), logging.is_progress_bar_enabled()
    assert settings[1]
    save(load(saved), saved)
    replace_weights(saved, lambda tensors: tensors.pop("text_projection.weight"))
    with pytest.raises(ValueError, match="text_projection"):
        load(saved)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == settings


def test_a_hub_model_in_the_cache_opens_offline(tmp_path, monkeypatch, model_directory):
    """The local hub cache holds one model; nothing else can be reached."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    cache = tmp_path / "hub" / "models--someone--small"
    shutil.copytree(model_directory, cache / "snapshots" / commit)
    (cache / "refs").mkdir()
    for name in ("main", "v2"):
        (cache / "refs" / name).write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    for name in ("someone/small", "someone/small@v2"):
        assert same_weights(load(name), load(model_directory))
    with pytest.raises(ValueError, match="someone/other"):
        load("someone/other")
    (cache / "snapshots" / commit / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no weights"):
        load("someone/small")


SHARDS = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"model.safetensors", "open_clip_model.safetensors", "pytorch_model.bin"}, {"model.safetensors"}),
        ({*SHARDS, "model.fp16.safetensors"}, SHARDS),
        ({"adapter_model.safetensors", "adapter_model.bin"}, {"adapter_model.safetensors"}),
    ],
)
def test_only_one_format_of_weights_is_downloaded(files, expected, tmp_path, monkeypatch):
    fetched = set()

    def download(repository, *, revision, allow_patterns, ignore_patterns):
        fetched.update(name for name in files if any(fnmatch(name, pattern) for pattern in allow_patterns))
        for name in fetched:
            (tmp_path / name).touch()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, OSError)):  # the files are empty
        load("owner/model")
    assert fetched == expected


def test_a_mistyped_path_is_not_looked_up_on_the_hub(tmp_path, monkeypatch):
    """The error names both possibilities."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"runs/mien.*no such file or directory.*hub"):
        load("runs/mien")
    with pytest.raises(ValueError, match="runs/mien"):
        load("runs/mien+runs/mine")
    for name in (str(tmp_path / "nowhere"), "./nowhere", "nowhere", "a/b/c"):
        with pytest.raises(ValueError, match="no such file or directory"):
            load(name)
    assert is_hub_name("openai/clip-vit-base-patch32")
    assert is_hub_name("owner/model@refs/pr/3")
    assert not is_hub_name("runs/mien")


@pytest.fixture(scope="module")
def bases(tmp_path_factory, model_directory):
    root = tmp_path_factory.mktemp("bases")
    return {"clip": model_directory, **{kind: write(root / kind) for kind, write in WRITERS.items()}}


@pytest.mark.parametrize("kind", ["clip", *WRITERS, "bundled"])
def test_transforms_are_read_without_the_weights(kind, bases, tmp_path):
    model = load(bases.get(kind, kind))
    text, image = load_transforms(bases.get(kind, kind), context=model.context + 5)
    assert (text.context, text.clean, image) == (model.context + 5, model.text_transform.clean, model.image_transform)
    assert text(["a red dog"]).tokens.tolist() == model.text_transform(["a red dog"]).tokens.tolist()
    if kind in bases:
        copy = shutil.copytree(bases[kind], tmp_path / "copy", ignore=shutil.ignore_patterns("*.safetensors"))
        assert load_transforms(copy)[0].context == model.context
    with pytest.raises(ValueError, match="nowhere"):
        load_transforms("nowhere")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["clip", *WRITERS])
def test_sentence_transformers_gives_the_models_own_vectors(kind, bases, tmp_path):
    """At the full context, for texts and images."""
    from sentence_transformers import SentenceTransformer

    model = load(bases[kind])
    save(model, tmp_path / "model")
    theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu", local_files_only=True)
    assert theirs.max_seq_length == model.context
    texts = ["a red dog", PHRASE, f"{PHRASE} " * 6, f"{PHRASE} " * 20, f"{PHRASE} " * 20 + "bench"]
    ramp = Image.linear_gradient("L").resize((model.image_size, model.image_size))
    square = Image.merge("RGB", [ramp, ramp.rotate(90), ramp.rotate(180)])
    for inputs, tolerance in ((texts, 1e-5), ([square], 1e-4)):
        found = theirs.encode(inputs, convert_to_tensor=True, normalize_embeddings=True)
        torch.testing.assert_close(found, model.encode(inputs, to="torch"), rtol=0, atol=tolerance)
