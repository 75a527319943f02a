"""`SentenceTransformer(path)` with the real library: the model's own vectors, at full context."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from hnclip.models.load import load, save
from small_families import PHRASE, WRITERS

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
LONG = " ".join([PHRASE] * 20)
ALMOST = f"{PHRASE} " * 6


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    return {"clip": model_directory, **{kind: write(root / kind) for kind, write in WRITERS.items()}}


@pytest.mark.parametrize("kind", ["clip", *WRITERS])
def test_it_gives_the_models_own_vectors(kind, bases, tmp_path):
    from sentence_transformers import SentenceTransformer

    model = load(bases[kind])
    save(model, tmp_path / "model")
    theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu", local_files_only=True)
    assert theirs.max_seq_length == model.context
    texts = ["a red dog", PHRASE, ALMOST, LONG, f"{LONG} bench"]
    assert [len(row) == model.context for row in model.text_transform(texts).ids][-2:] == [True, True]
    with torch.no_grad():
        text = model.encode_texts(model.tokenize(texts)).vectors
    found = F.normalize(theirs.encode(texts, convert_to_tensor=True), dim=-1)
    torch.testing.assert_close(found, text, rtol=0, atol=1e-5)
    alone = F.normalize(theirs.encode(texts[:1], convert_to_tensor=True), dim=-1)
    torch.testing.assert_close(alone, text[:1], rtol=0, atol=1e-5)

    ramp = Image.linear_gradient("L")
    square = Image.merge("RGB", [ramp, ramp.rotate(90), ramp.rotate(180)]).resize((model.image_size, model.image_size))
    with torch.no_grad():
        image = model.encode_images(model.preprocess_images([square])).vectors
    found = F.normalize(theirs.encode([square], convert_to_tensor=True), dim=-1)
    torch.testing.assert_close(found, image, rtol=0, atol=1e-4)


def test_a_long_caption_is_not_cut_at_77_tokens(bases, tmp_path):
    from sentence_transformers import SentenceTransformer

    save(load(bases["clip"]), tmp_path / "model")
    theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu", local_files_only=True)
    start = "a dog stands near the tree and " * 10
    one, other = theirs.encode([f"{start} a red house", f"{start} a blue bench"], convert_to_tensor=True)
    assert len(load(tmp_path / "model").text_transform([start]).ids[0]) > 77
    assert not torch.allclose(one, other, atol=1e-3)


def test_how_a_tokenizer_was_opened_is_not_saved(bases, tmp_path):
    save(load(bases["clip"]), tmp_path / "model")
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    assert not {"is_local", "local_files_only"} & settings.keys()
    assert settings["model_max_length"] == 248
