"""Every family: the vectors of transformers alone, round trips, and two joined towers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    BertModel,
    Dinov2Model,
)

from hnclip.cli import main
from hnclip.core import Batch, TextBatch
from hnclip.models.families import pool_each_patch
from hnclip.models.load import load, save
from small_families import WRITERS, write_bert, write_dinov2

SHORT, LONG = "a red dog", "a small green cat lies on the grass beside the large blue house and a tree"
CAPTIONS = [SHORT, LONG, "a bench", "under the tree " + " ".join([LONG] * 12)]  # the last is longer than any context


@pytest.fixture(params=["clip", *WRITERS])
def directory(request, directories):
    return directories[request.param]


@pytest.fixture
def model(directory):
    return load(directory)


@pytest.fixture
def images():
    ramp = Image.linear_gradient("L")
    colours = Image.merge("RGB", [ramp, ramp.rotate(90), ramp.rotate(180)])
    return [colours.resize((64, 64)), colours.rotate(70).resize((64, 64))]


def assert_close(found, expected, tolerance=1e-5):
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@torch.no_grad()
def test_vectors_equal_transformers_alone(directory, model, images):
    plain = model.family.backbone_class().from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    # As each family's documentation asks: SigLIP padded to its context without a mask, the others masked.
    options = {"return_tensors": "pt", "truncation": True, "max_length": model.context}
    if model.family.fixed_length:
        inputs = {"input_ids": tokenizer(CAPTIONS, padding="max_length", **options)["input_ids"]}
    else:
        inputs = dict(tokenizer(CAPTIONS, padding=True, **options))
    found = model.encode_texts(model.tokenize(CAPTIONS)).vectors
    assert_close(found, F.normalize(plain.get_text_features(**inputs).pooler_output, dim=-1))
    assert (found @ found.T).triu(1).max() < 0.999  # the captions differ
    assert model.width == found.shape[1]
    inputs = AutoImageProcessor.from_pretrained(directory, backend="pil")(images, return_tensors="pt")
    found = model.encode_images(model.preprocess_images(images)).vectors
    # Resizing may differ by a grey level.
    assert_close(found, F.normalize(plain.get_image_features(**inputs).pooler_output, dim=-1), 2e-3)
    assert found[0] @ found[1] < 0.99


@torch.no_grad()
def test_neither_the_number_nor_the_id_of_pads_matters(model):
    """Only words are marked as tokens, neither pads nor special tokens."""
    texts, special = model.tokenize(CAPTIONS), set(model.tokenizer.all_special_ids)
    together = model.encode_texts(texts, tokens=True)
    for row, (ids, length, counted) in enumerate(zip(texts.ids, texts.lengths, together.mask)):
        assert special.isdisjoint(ids[counted].tolist())
        assert special.issuperset(ids[:length][~counted[:length]].tolist())
        assert counted.any()
        assert not counted[length:].any()
        alone = model.encode_texts(model.tokenize([CAPTIONS[row]]), tokens=True)
        assert_close(alone.vectors[0], together.vectors[row])
        assert_close(alone.tokens[0][alone.mask[0]], together.tokens[row][counted])
    if not model.family.fixed_length:
        is_token = torch.arange(texts.ids.shape[1]) < texts.lengths[:, None]
        other = TextBatch(texts.ids.where(is_token, 3), texts.lengths)
        assert_close(model.encode_texts(other).vectors, together.vectors, 1e-6)


def test_a_batch_is_encoded_with_gradients_in_both_towers(model, images):
    texts = model.tokenize(CAPTIONS[:2])
    batch = Batch({"full": model.preprocess_images(images)}, {"caption": texts}, torch.zeros(2, 2, dtype=torch.long))
    found = model(batch, tokens=True)
    image, text = found.images["full"], found.texts["caption"]
    assert image.tokens.shape == (2, model.family.grid(model.backbone, model.image_size) ** 2, model.width)
    assert text.tokens.shape[:2] == texts.ids.shape
    loss = (image.vectors * text.vectors).sum() * found.scale + image.tokens[:, 0].sum() + text.tokens[:, 1].sum()
    loss.backward()
    without = {name for name, weight in model.backbone.named_parameters() if weight.grad is None}
    assert {name for name in without if "mask_token" not in name} <= {"logit_bias"}


def test_a_round_trip_keeps_every_bit(model, tmp_path):
    save(model, tmp_path / "again")
    again = load(tmp_path / "again")
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    for value in ("image_transform", "context", "source"):
        assert getattr(again, value) == getattr(model, value)
    assert again.text_transform(CAPTIONS).tokens.tolist() == model.text_transform(CAPTIONS).tokens.tolist()
    save(again, tmp_path / "twice")
    for name in ("model.safetensors", "tokenizer_config.json", "preprocessor_config.json"):
        assert (tmp_path / "twice" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


@torch.no_grad()
def test_siglip_patches_are_what_the_attention_head_gives_for_one_patch_alone(directories):
    model = load(directories["siglip"])
    patches = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    head = model.backbone.vision_model.head
    assert_close(pool_each_patch(head, patches), torch.stack([head(patches[:, [i]]) for i in range(5)], dim=1))


@pytest.fixture
def towers(tmp_path):
    return write_dinov2(tmp_path / "dino"), write_bert(tmp_path / "bert")


@torch.no_grad()
def test_two_towers_are_joined_by_random_projections(towers, images, tmp_path, capsys):
    """The same at every load, and marked as untrained, also after saving, until the user changes it."""
    model, second = (load("+".join(map(str, towers))) for _ in range(2))
    dino, bert = Dinov2Model.from_pretrained(towers[0]).eval(), BertModel.from_pretrained(towers[1]).eval()
    visual, textual = model.backbone.visual_projection.weight, model.backbone.text_projection.weight
    pixels = model.preprocess_images(images)
    expected = dino(pixel_values=model.normalize_pixels(pixels)).pooler_output @ visual.T
    found = model.encode_images(pixels, tokens=True)
    assert_close(found.vectors, F.normalize(expected, dim=-1))
    assert found.tokens.shape == (2, 16, 512)  # the class token is not a patch
    expected = bert(**model.tokenizer([SHORT], return_tensors="pt")).pooler_output @ textual.T
    assert_close(model.encode_texts(model.tokenize([SHORT])).vectors, F.normalize(expected, dim=-1))
    assert model.scale.item() == pytest.approx(1 / 0.07, rel=1e-3)  # CLIP's first value
    assert torch.equal(second.backbone.visual_projection.weight, visual)
    assert torch.equal(second.backbone.text_projection.weight, textual)
    assert not torch.equal(visual, textual)
    for untrained in (True, False):
        model.untrained_projections = untrained
        save(model, tmp_path / "joined")
        assert load(tmp_path / "joined").untrained_projections is untrained
    with pytest.raises(ValueError, match="hnclip train --model"):
        second.encode([SHORT])
    assert main(["eval", "--data", "scenes/park/small", "--model", second.name]) == 1
    assert "hnclip train --model" in capsys.readouterr().err


def test_towers_and_tokenizers_that_do_not_fit_are_refused(towers, directories):
    image, text = towers
    for name, options, word in (
        (f"{text}+{image}", {}, r"IMAGE\+TEXT"),
        (directories["siglip"], {"tokenizer": directories["clip"]}, "symbols"),
        (directories["vision-text-dual-encoder"], {"context": 100}, "bert text tower cannot be stretched"),
    ):
        with pytest.raises(ValueError, match=word):
            load(name, **options)
