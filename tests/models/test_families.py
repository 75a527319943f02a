"""Every family: the vectors of transformers alone, round trips, and two joined towers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    BertModel,
    Dinov2Model,
    DistilBertConfig,
    DistilBertModel,
    EfficientNetConfig,
    EfficientNetModel,
    SwinConfig,
    ViTImageProcessorPil,
)

from hnclip.cli import main
from hnclip.core import Batch, TextBatch
from hnclip.models.families import pool_each_patch
from hnclip.models.load import load, save
from small_families import WRITERS, bert_tokenizer, write_bert, write_dinov2

SHORT, LONG = "a red dog", "a small green cat lies on the grass beside the large blue house and a tree"
CAPTIONS = [SHORT, LONG, "a bench", "under the tree " + " ".join([LONG] * 12)]  # the last is longer than any context
KINDS = ["clip", *WRITERS]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {"clip": model_directory, **{kind: write(root / kind) for kind, write in WRITERS.items()}}


@pytest.fixture(params=KINDS)
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
    expected = F.normalize(plain.get_text_features(**inputs).pooler_output, dim=-1)
    found = model.encode_texts(model.tokenize(CAPTIONS)).vectors
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert (found @ found.T).triu(1).max() < 0.999  # the captions differ
    assert model.width == found.shape[1]

    inputs = AutoImageProcessor.from_pretrained(directory, backend="pil")(images, return_tensors="pt")
    expected = F.normalize(plain.get_image_features(**inputs).pooler_output, dim=-1)
    found = model.encode_images(model.preprocess_images(images)).vectors
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)  # resizing may differ by a grey level
    assert found[0] @ found[1] < 0.99


@torch.no_grad()
def test_neither_the_number_nor_the_id_of_pads_matters(model):
    """Only words are marked as tokens, neither pads nor special tokens."""
    texts, special = model.tokenize(CAPTIONS), set(model.tokenizer.all_special_ids)
    together = model.encode_texts(texts, tokens=True)
    for ids, length, counted in zip(texts.ids, texts.lengths, together.mask):
        assert special.isdisjoint(ids[counted].tolist())
        assert special.issuperset(ids[:length][~counted[:length]].tolist())
        assert counted.any()
        assert not counted[length:].any()
    for row, caption in enumerate(CAPTIONS):
        alone = model.encode_texts(model.tokenize([caption]), tokens=True)
        torch.testing.assert_close(alone.vectors[0], together.vectors[row], rtol=0, atol=1e-5)
        words, expected = alone.tokens[0][alone.mask[0]], together.tokens[row][together.mask[row]]
        torch.testing.assert_close(words, expected, rtol=0, atol=1e-5)
    if not model.family.fixed_length:
        is_token = torch.arange(texts.ids.shape[1]) < texts.lengths[:, None]
        other = TextBatch(texts.ids.where(is_token, 3), texts.lengths)
        torch.testing.assert_close(model.encode_texts(other).vectors, together.vectors, rtol=0, atol=1e-6)


def test_a_batch_is_encoded_with_gradients_in_both_towers(model, images):
    texts = model.tokenize(CAPTIONS[:2])
    batch = Batch({"full": model.preprocess_images(images)}, {"caption": texts}, torch.zeros(2, 2, dtype=torch.long))
    found = model(batch, tokens=True)
    image, text = found.images["full"], found.texts["caption"]
    assert image.vectors.shape == text.vectors.shape
    assert image.tokens.shape == (2, model.family.grid(model.backbone, model.image_size) ** 2, model.width)
    assert text.tokens.shape[:2] == texts.ids.shape
    assert found.scale.shape == ()
    loss = (image.vectors * text.vectors).sum() * found.scale + image.tokens[:, 0].sum() + text.tokens[:, 1].sum()
    loss.backward()
    without = {name for name, weight in model.backbone.named_parameters() if weight.grad is None}
    assert {name for name in without if "mask_token" not in name} <= {"logit_bias"}


def test_a_round_trip_keeps_every_bit(model, tmp_path):
    save(model, tmp_path / "again")
    again = load(tmp_path / "again")
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for value in ("image_transform", "context", "source"):
        assert getattr(again, value) == getattr(model, value)
    assert again.text_transform(CAPTIONS).tokens.tolist() == model.text_transform(CAPTIONS).tokens.tolist()
    save(again, tmp_path / "twice")
    for name in ("model.safetensors", "tokenizer_config.json", "preprocessor_config.json"):
        assert (tmp_path / "twice" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert "local_files_only" not in (tmp_path / "again" / "tokenizer_config.json").read_text()


@torch.no_grad()
def test_siglip_token_vectors_and_left_padding(directories):
    """Patches are what the attention head gives for one patch alone; texts are padded as the tokenizer does it."""
    model = load(directories["siglip"])
    patches = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    head = model.backbone.vision_model.head
    expected = torch.stack([head(patches[:, [i]]) for i in range(5)], dim=1)
    torch.testing.assert_close(pool_each_patch(head, patches), expected, rtol=0, atol=1e-5)
    model.tokenizer.padding_side = "left"
    options = {"padding": "max_length", "max_length": model.context, "return_tensors": "pt"}
    ids = model.tokenizer(CAPTIONS[:3], **options)["input_ids"]
    assert ids[0, 0] == model.tokenizer.pad_token_id
    output = model.backbone.get_text_features(input_ids=ids)
    found = model.encode_texts(model.tokenize(CAPTIONS[:3]), tokens=True)
    torch.testing.assert_close(found.vectors, F.normalize(output.pooler_output, dim=-1), rtol=0, atol=1e-5)
    words = F.normalize(model.backbone.text_model.head(output.last_hidden_state), dim=-1)
    length = int(found.mask[1].sum())
    torch.testing.assert_close(found.tokens[1, :length], words[1, -1 - length : -1], rtol=0, atol=1e-5)


@torch.no_grad()
def test_naflex_patches_are_cut_as_its_processor_cuts_them(directories, images):
    model = load(directories["siglip2"])
    processor = AutoImageProcessor.from_pretrained(directories["siglip2"], backend="pil")
    squares = [image.resize((32, 32)) for image in images]
    inputs = processor(squares, return_tensors="pt")
    found = model.family.image_inputs(model.backbone, model.normalize_pixels(model.preprocess_images(squares)))
    torch.testing.assert_close(found["pixel_values"], inputs["pixel_values"], rtol=0, atol=1e-5)
    assert found["spatial_shapes"].tolist() == inputs["spatial_shapes"].tolist() == [[4, 4], [4, 4]]


@pytest.fixture
def towers(tmp_path):
    return write_dinov2(tmp_path / "dino"), write_bert(tmp_path / "bert")


@torch.no_grad()
def test_two_towers_are_joined_by_random_projections(towers, images, tmp_path):
    """The same at every load, and marked as untrained, also after saving, until the user changes it."""
    model, second = (load("+".join(map(str, towers))) for _ in range(2))
    dino, bert = Dinov2Model.from_pretrained(towers[0]).eval(), BertModel.from_pretrained(towers[1]).eval()
    visual, textual = model.backbone.visual_projection.weight, model.backbone.text_projection.weight
    pixels = model.preprocess_images(images)
    expected = F.normalize(dino(pixel_values=model.normalize_pixels(pixels)).pooler_output @ visual.T, dim=-1)
    found = model.encode_images(pixels, tokens=True)
    torch.testing.assert_close(found.vectors, expected, rtol=0, atol=1e-5)
    assert found.tokens.shape == (2, 16, 512)  # the class token is not a patch
    expected = F.normalize(bert(**model.tokenizer([SHORT], return_tensors="pt")).pooler_output @ textual.T, dim=-1)
    torch.testing.assert_close(model.encode_texts(model.tokenize([SHORT])).vectors, expected, rtol=0, atol=1e-5)
    assert model.image_transform.shortest == 32
    assert model.scale.item() == pytest.approx(1 / 0.07, rel=1e-3)  # CLIP's first value

    for name, value in (("visual_projection", visual), ("text_projection", textual)):
        assert torch.equal(getattr(second.backbone, name).weight, value)
        assert value.std().item() == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(visual, textual)
    for untrained in (True, False):
        model.untrained_projections = untrained
        save(model, tmp_path / "joined")
        again = load(tmp_path / "joined")
        assert again.untrained_projections is untrained
        assert torch.equal(again.backbone.visual_projection.weight, visual)


def test_untrained_projections_are_refused_wherever_vectors_are_used(towers, tmp_path, capsys):
    """By every command, with the command that trains them."""
    joined, data, out = "+".join(map(str, towers)), "scenes/park/small", ["--out", str(tmp_path / "out")]
    with pytest.raises(ValueError, match="hnclip train --model"):
        load(joined).encode([SHORT])
    for command in (["eval", "--data", data], ["encode", data, *out], ["index", data, *out], ["diagnose", data, *out]):
        assert main([*command, "--model", joined]) == 1
        assert "hnclip train --model" in capsys.readouterr().err, command


def test_a_tower_keeps_the_statistics_of_its_batch_norms(tmp_path):
    size = {"width_coefficient": 0.25, "depth_coefficient": 0.1, "hidden_dim": 320, "hidden_size": 320}
    torch.manual_seed(0)
    tower = EfficientNetModel(EfficientNetConfig(**size, image_size=32)).eval()
    for name, buffer in tower.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_()
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 2)
    tower.save_pretrained(tmp_path / "image")
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "image")
    joined = load(f"{tmp_path / 'image'}+{write_bert(tmp_path / 'text')}").eval()
    assert joined.family.grid(joined.backbone, 32) is None
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        found = joined.backbone.vision_model(pixel_values=pixels).pooler_output
        torch.testing.assert_close(found, tower(pixels).pooler_output)
    joined.backbone.config.vision_config = SwinConfig(patch_size=4)  # patches are merged from stage to stage
    assert joined.family.grid(joined.backbone, 32) is None


def test_towers_that_cannot_be_joined_are_refused(towers, tmp_path, directories, model_directory):
    image, text = towers
    tokenizer = bert_tokenizer()
    config = DistilBertConfig(dim=32, hidden_dim=64, n_layers=1, n_heads=2, vocab_size=len(tokenizer))
    DistilBertModel(config).save_pretrained(tmp_path / "distil")
    tokenizer.save_pretrained(tmp_path / "distil")
    for name, word in (
        (f"{text}+{image}", r"IMAGE\+TEXT"),
        (f"{image}+{image}", r"IMAGE\+TEXT"),
        (f"{image}+{tmp_path / 'distil'}", "pooler_output"),
    ):
        with pytest.raises(ValueError, match=word):
            load(name)
    with pytest.raises(ValueError, match="symbols"):  # a tokenizer with more symbols than the model
        load(directories["siglip"], tokenizer=model_directory)


@torch.no_grad()
def test_siglip_is_stretched_and_the_others_are_left_alone(directories):
    model = load(directories["siglip"], context=60).eval()
    assert model.context == 60
    assert "stretched from 24 to 60" in model.source
    table = load(directories["siglip"]).backbone.text_model.embeddings.position_embedding.weight
    assert torch.equal(model.backbone.text_model.embeddings.position_embedding.weight[:20], table[:20])
    assert model.encode_texts(model.tokenize([LONG * 3])).vectors.isfinite().all()
    assert load(directories["siglip"], context=24).context == 24
    two = load(directories["vision-text-dual-encoder"], context=30)
    assert (two.context, "stretched" in two.source) == (64, False)
    with pytest.raises(ValueError, match="bert text tower cannot be stretched"):
        load(directories["vision-text-dual-encoder"], context=100)


def test_without_a_processor_a_family_has_its_default(directory, model, tmp_path):
    bare = shutil.copytree(directory, tmp_path / "bare")
    (bare / "preprocessor_config.json").unlink()
    if model.family.kind == "vision-text-dual-encoder":
        with pytest.raises(ValueError, match="preprocessor_config"):
            load(bare)
    else:
        found = load(bare).image_transform
        assert (found.mean == (0.5,) * 3) == found.squash == (model.family.kind != "clip")
        assert found.size == model.image_size
