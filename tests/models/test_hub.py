from __future__ import annotations

import shutil

import pytest

from hnclip.models.hub import fetch_model, looks_like_hub_name
from hnclip.models.load import load


@pytest.fixture
def cache(tmp_path, monkeypatch, model_directory):
    """A local hub cache that holds one model, as a download leaves it; nothing else can be reached."""
    from huggingface_hub import constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    model = tmp_path / "hub" / "models--someone--small"
    shutil.copytree(model_directory, model / "snapshots" / commit)
    (model / "refs").mkdir()
    for name in ("main", "v2"):
        (model / "refs" / name).write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return model / "snapshots" / commit


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("openai/clip-vit-large-patch14", True),
        ("google/siglip-base-patch16-224@main", True),
        ("owner/model@refs/pr/3", True),
        ("bundled", False),
        ("./owner/model", False),
        ("/owner/model", False),
        ("../model", False),
        ("a/b/c", False),
        ("owner/model with space", False),
    ],
)
def test_names_of_the_hub(name, is_one):
    assert looks_like_hub_name(name) is is_one


def test_a_model_in_the_cache_opens_offline(cache, model_directory):
    assert fetch_model("someone/small").resolve() == cache.resolve()
    assert fetch_model("someone/small@v2").resolve() == cache.resolve()
    found, expected = load("someone/small"), load(model_directory)
    assert found.source == expected.source
    assert found.state_dict().keys() == expected.state_dict().keys()


def test_offline_a_model_that_is_not_there_is_named(cache):
    with pytest.raises(ValueError, match=r"'someone/other' is no file or directory here.*HF_HUB_OFFLINE is set"):
        load("someone/other")


def test_a_model_without_weights_is_named(cache):
    (cache / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"'someone/small' has no weights that can be read: neither .safetensors nor"):
        load("someone/small")


def test_a_typing_error_in_a_path_is_not_sent_to_the_hub(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise AssertionError("asked the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    for name in (str(tmp_path / "nowhere"), "./nowhere", "nowhere"):
        with pytest.raises(ValueError, match="is neither 'bundled' nor a file or directory here"):
            load(name)
