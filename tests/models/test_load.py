from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import load_file, save_file

from hnclip.models.load import load, save
from hnclip.models.openai_checkpoint import load_openai_checkpoint
from small_families import PHRASE, WRITERS


def content(directory):
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def same_weights(one, other):
    before, after = one.state_dict(), other.state_dict()
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def replace_weights(directory, **changes):
    """None leaves a tensor out."""
    tensors = load_file(directory / "model.safetensors") | {k.replace("__", "."): v for k, v in changes.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


DAMAGES = {
    "config.json": lambda d: (d / "config.json").unlink(),
    "incomplete": lambda d: os.truncate(d / "model.safetensors", 1_000_000),
    "text_projection.weight": lambda d: replace_weights(d, text_projection__weight=None),
    "logit_scale": lambda d: replace_weights(d, logit_scale=torch.zeros(3, 3)),
    # As in ports of Long-CLIP that keep their second positional table.
    "embedding_res": lambda d: replace_weights(d, position_embedding_res=torch.zeros(3)),
    "tokenizer.json": lambda d: (d / "tokenizer.json").unlink(),
    "preprocess": lambda d: (d / "preprocessor_config.json").write_text("not JSON"),
}


@pytest.mark.parametrize("word", DAMAGES)
def test_a_damaged_directory_is_refused(saved, word):
    DAMAGES[word](saved)
    with pytest.raises((ValueError, OSError), match=word):
        load(saved)


def test_code_in_a_pickle_is_not_executed(saved, tmp_path, monkeypatch):
    class Code:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "executed",))

    (saved / "model.safetensors").unlink()
    torch.save({"logit_scale": Code()}, saved / "pytorch_model.bin")
    with pytest.raises((ValueError, OSError), match="Weights only"):
        load(saved)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin"):
        load_openai_checkpoint(saved / "pytorch_model.bin")
    assert not (tmp_path / "executed").exists()


def test_shards_of_half_precision_open_as_fp32(model, saved):
    (saved / "model.safetensors").unlink()
    model.backbone.half().save_pretrained(saved, max_shard_size="1MB")
    assert len(list(saved.glob("*.safetensors"))) > 2
    assert same_weights(load(saved), model.float())


def test_saving_replaces_a_directory_as_a_whole(model, saved, monkeypatch):
    (saved / "leftover.txt").write_text("of another model")
    save(model, saved)
    assert not (saved / "leftover.txt").exists()

    def fail(directory):
        raise OSError("no space left")

    before = content(saved)
    monkeypatch.setattr(model.tokenizer, "save_pretrained", fail)
    with pytest.raises(OSError, match="no space left"):
        save(model, saved)
    assert content(saved) == before
    assert [path.name for path in saved.parent.iterdir()] == ["model"]


def test_a_hub_model_in_the_cache_opens_offline(tmp_path, monkeypatch, model_directory):
    """The local hub cache holds one model; nothing else can be reached."""
    cache, commit = tmp_path / "models--someone--small", "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(model_directory, cache / "snapshots" / commit)
    (cache / "refs").mkdir()
    (cache / "refs" / "v2").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert same_weights(load("someone/small@v2"), load(model_directory))
    with pytest.raises(ValueError, match="someone/other"):
        load("someone/other")


def test_a_mistyped_path_is_not_looked_up_on_the_hub(tmp_path, monkeypatch):
    """The error names both possibilities."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    for name in ("runs/mien", str(tmp_path / "nowhere"), "./nowhere", "nowhere", "a/b/c"):
        with pytest.raises(ValueError, match="no such file or directory"):
            load(name)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["clip", *WRITERS])
def test_sentence_transformers_gives_the_models_own_vectors(kind, directories, tmp_path):
    """At the full context, for texts and images."""
    from sentence_transformers import SentenceTransformer

    model = load(directories[kind])
    save(model, tmp_path / "model")
    theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu", local_files_only=True)
    assert theirs.max_seq_length == model.context
    ramp = Image.linear_gradient("L").resize((model.image_size, model.image_size))
    square = Image.merge("RGB", [ramp, ramp.rotate(90), ramp.rotate(180)])
    for inputs, tolerance in ((["a red dog", PHRASE, f"{PHRASE} " * 20], 1e-5), ([square], 1e-4)):
        found = theirs.encode(inputs, convert_to_tensor=True, normalize_embeddings=True)
        torch.testing.assert_close(found, model.encode(inputs, to="torch"), rtol=0, atol=tolerance)
