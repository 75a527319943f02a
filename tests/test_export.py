"""ONNX export: the written directory alone gives the vectors of torch, also when it is read as immich reads it."""

from __future__ import annotations

import json
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Tokenizer
from torch import nn

from hnclip import export
from hnclip.cli import main
from hnclip.export import compare, export_onnx, immich_name, write_graph, write_tokenizer
from hnclip.models.adapters import add_adapters
from hnclip.models.load import load
from hnclip.models.preprocessing import read_image_transform
from small_families import WRITERS, sentencepiece_tokenizer, write_bert, write_dinov2

CLOSE = 2e-5  # onnxruntime and torch add in a different order
SHORT, MIDDLE = "a red dog", "The small cat, near the bench, lies under a large tree; it's green."
TEXTS = [SHORT, MIDDLE, "a blue house stands near the tree and a large red dog " * 30]
GRAPHS = {"image.onnx", "text.onnx"}
PLAIN = GRAPHS | {"tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "hnclip.json"}
TEXTUAL = {"textual/model.onnx", "textual/tokenizer.json", "textual/tokenizer_config.json"}
IMMICH = {"config.json", "visual/model.onnx", "visual/preprocess_cfg.json"} | TEXTUAL


@pytest.fixture
def make_model(model_directory, tmp_path):
    def make(kind):
        if kind == "joined":
            model = load(f"{write_dinov2(tmp_path / 'dino')}+{write_bert(tmp_path / 'bert')}")
            model.untrained_projections = False
            return model
        return load(model_directory if kind == "clip" else WRITERS[kind](tmp_path / kind))

    return make


class Program:
    """A program that has only the written files: tokenizer.json, hnclip.json and the graphs."""

    image_file, text_file = "image.onnx", "text.onnx"

    def __init__(self, directory):
        self.directory = directory
        self.image, self.text = (
            onnxruntime.InferenceSession(str(directory / name), providers=["CPUExecutionProvider"])
            for name in (self.image_file, self.text_file)
        )
        self.read_settings()

    def read_settings(self):
        about = self.about = json.loads((self.directory / "hnclip.json").read_text())
        self.tokenizer = Tokenizer.from_file(str(self.directory / "tokenizer.json"))
        self.tokenizer.enable_truncation(max_length=about["context"])
        length = None if "length" in about["input_ids"] else about["context"]
        self.tokenizer.enable_padding(direction=about["padding_side"], pad_id=about["pad"], length=length)

    def encode_pixels(self, pixels):
        return self.image.run(None, {self.image.get_inputs()[0].name: pixels})[0]

    def encode_texts(self, texts):
        tokens = self.tokenizer.encode_batch(texts)
        rows = ([t.ids for t in tokens], [t.attention_mask for t in tokens])
        kinds = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}
        return self.text.run(
            None, {i.name: np.array(row, kinds[i.type]) for i, row in zip(self.text.get_inputs(), rows)}
        )[0]

    def shapes(self):
        return {i.name: i.shape for graph in (self.image, self.text) for i in graph.get_inputs()}


class Immich(Program):
    """What immich's machine-learning service does with a directory, without immich.

    After clip/visual.py, clip/textual.py and transforms.py of immich-ml 3.1: `OpenClipVisualEncoder`,
    `OpenClipTextualEncoder`, and `MClipTextualEncoder` for models with a mask.
    """

    image_file, text_file = "visual/model.onnx", "textual/model.onnx"

    def read_settings(self):
        preprocessing = json.loads((self.directory / "visual/preprocess_cfg.json").read_text())
        self.size = preprocessing["size"][0]
        assert preprocessing["interpolation"].upper() in Image.Resampling.__members__
        self.mean, self.std = (np.array(preprocessing[key], dtype=np.float32) for key in ("mean", "std"))
        context = json.loads((self.directory / "config.json").read_text())["text_cfg"]["context_length"]
        pad = json.loads((self.directory / "textual/tokenizer_config.json").read_text())["pad_token"]
        self.tokenizer = Tokenizer.from_file(str(self.directory / "textual/tokenizer.json"))
        self.tokenizer.enable_padding(length=context, pad_token=pad, pad_id=self.tokenizer.token_to_id(pad))
        self.tokenizer.enable_truncation(max_length=context)

    def encode_image(self, image):
        width, height = image.size
        if width < height:
            shape = (self.size, int((height / width) * self.size))
        else:
            shape = (int((width / height) * self.size), self.size)
        image = image.resize(shape, Image.Resampling.BICUBIC)
        left, upper = (int(side / 2 - self.size / 2) for side in shape)
        image = image.crop((left, upper, left + self.size, upper + self.size))
        pixels = np.asarray(image.convert("RGB"), dtype=np.float32) / 255.0
        pixels = pixels * (1.0 / self.std) - self.mean / self.std
        return self.encode_pixels(pixels.transpose(2, 0, 1)[None])[0]

    def encode_texts(self, texts):
        return super().encode_texts([" ".join(text.split()) for text in texts])


def assert_close(found, expected):
    expected = torch.as_tensor(expected).float().numpy()
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < CLOSE
    assert np.abs(np.linalg.norm(found, axis=-1) - 1).max() < CLOSE


@torch.no_grad()
def assert_equals_torch(program, model):
    """Batches of several sizes, and texts of several lengths together and alone."""
    for batch in (1, 3):
        pixels = torch.randn(batch, 3, model.image_size, model.image_size)
        assert_close(program.encode_pixels(pixels.numpy()), model.encode_pixels(pixels.to(model.dtype)).vectors)
    vectors = model.encode(TEXTS)
    assert np.abs(vectors @ vectors.T - np.eye(3)).max() < 0.9999  # the texts differ
    assert_close(program.encode_texts(TEXTS), vectors)
    for row, text in enumerate(TEXTS):
        assert_close(program.encode_texts([text]), vectors[row : row + 1])


def assert_files(directory, names):
    """These files, without the paths of this machine."""
    assert {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()} == names
    for name in names:
        assert not any(path in (directory / name).read_bytes() for path in (b"site-packages", str(directory).encode()))
        if name.endswith(".onnx"):
            onnx.checker.check_model(str(directory / name))


def test_a_model_with_adapters_is_exported_and_stays_as_it_is(make_model, tmp_path):
    model = make_model("clip")
    bare = model.encode([SHORT])
    add_adapters(model, method="lora", rank=2, dropout=0.5, train_scale=True)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3)
    model.train()
    before, random = {name: weight.clone() for name, weight in model.state_dict().items()}, torch.get_rng_state()
    check = export_onnx(model, tmp_path / "out")
    assert torch.equal(torch.get_rng_state(), random)
    assert model.backbone.training
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert max(check.image_error, check.text_error) < CLOSE

    model.eval()
    assert np.abs(model.encode([SHORT]) - bare).max() > 0.01  # the adapters have an effect
    assert_files(tmp_path / "out", PLAIN)
    program = Program(tmp_path / "out")
    assert_equals_torch(program, model)
    assert program.shapes() == {"pixel_values": ["batch", 3, 48, 48], "input_ids": ["batch", "length"]}
    assert program.about["scale"] == pytest.approx(model.scale.item())
    assert read_image_transform(tmp_path / "out", "clip", 48) == model.image_transform


@pytest.mark.slow
def test_two_towers_in_double_precision_are_exported_in_fp32(make_model, tmp_path):
    """With a mask, so that the length of texts may vary; images are smaller than the position table of the DINOv2."""
    model = make_model("joined").double()
    export_onnx(model, tmp_path / "out")
    assert all(weight.dtype == torch.float64 for weight in model.parameters())
    program = Program(tmp_path / "out")
    assert_equals_torch(program, model)
    assert program.shapes()["attention_mask"] == ["batch", "length"]


@pytest.mark.slow
def test_texts_padded_on_the_left_and_weights_in_a_second_file(make_model, tmp_path, monkeypatch):
    model = make_model("siglip2")
    model.tokenizer.padding_side = "left"
    monkeypatch.setattr(export, "LARGEST_GRAPH", 1000)
    export_onnx(model, tmp_path / "first")
    (tmp_path / "first").rename(tmp_path / "moved")
    assert_files(tmp_path / "moved", PLAIN | {f"{name}.data" for name in GRAPHS})
    program = Program(tmp_path / "moved")
    assert_equals_torch(program, model)
    assert program.shapes()["input_ids"] == ["batch", model.context]


@pytest.fixture
def immich_names(monkeypatch):
    """As if immich knew models as narrow as those of the tests."""
    monkeypatch.setitem(export.IMMICH_NAMES, 32, "Tiny__clip")
    monkeypatch.setitem(export.IMMICH_TWO_TOWERS, 24, "Tiny__two-towers")


@pytest.mark.parametrize("kind", ["clip", "siglip", pytest.param("vision-text-dual-encoder", marks=pytest.mark.slow)])
def test_immich_reads_its_layout(make_model, tmp_path, capsys, immich_names, kind):
    model = make_model(kind)
    assert main(["convert", model.name, str(tmp_path / "out"), "--to", "immich", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["immich_name"] == immich_name(model)
    assert_files(tmp_path / "out", IMMICH | ({"textual/spiece.model"} if kind == "siglip" else set()))
    immich = Immich(tmp_path / "out")
    assert_equals_torch(immich, model)
    image = model.image_transform
    if image.resample == "bicubic":  # immich never squashes, so that only square images are equal for SigLIP
        sizes = [(20, 20), (40, 40)] if image.squash else [(20, 20), (20, 30), (60, 40), (40, 60)]
        noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 6, 3), dtype=np.uint8))
        images = [noise.resize(size, Image.Resampling.BICUBIC) for size in sizes]
        found = np.stack([immich.encode_image(image) for image in images])
        assert_close(found, model.encode(images))


@pytest.fixture(scope="module")
def encode_both_ways(tmp_path_factory):
    """Ids of SigLIP's tokenizer, and of the tokenizer.json that is made of it."""
    directory = tmp_path_factory.mktemp("siglip")
    slow = sentencepiece_tokenizer(directory)
    slow.save_pretrained(directory / "out")
    fast = export.fast_siglip_tokenizer(directory / "out")
    return lambda text: (slow(text, verbose=False)["input_ids"], fast.encode(text).ids)


PIECES = [*"abcdeghorstuADRÉéﬁ½²…日!?,.;:'-_()[]{}&#/\\~^`|@$%*+=\" \t\n\u00a0", "dog", "The ", " small"]


@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_siglips_tokenizer_as_a_file_gives_the_same_ids(encode_both_ways, text):
    slow, fast = encode_both_ways(text)
    assert fast == slow


def test_a_written_tokenizer_neither_pads_nor_truncates(make_model, tmp_path):
    transform = make_model("clip").text_transform
    transform.tokenizer.backend_tokenizer.enable_padding(length=9)
    transform.tokenizer.backend_tokenizer.enable_truncation(max_length=9)
    write_tokenizer(transform, tmp_path, require_json=True)
    reader = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert (reader.padding, reader.truncation) == (None, None)


def test_unsupported_requests_are_refused(make_model, tmp_path, monkeypatch, immich_names):
    left, model = make_model("siglip2"), make_model("clip")
    left.tokenizer.padding_side = "left"
    for word, refused, layout in (("left", left, "immich"), ("onnx, immich", model, "coreml")):
        with pytest.raises(ValueError, match=word):
            export_onnx(refused, tmp_path / "out", layout=layout)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ValueError, match=r"onnxscript: pip install 'hnclip\[onnx\]'"):
        export_onnx(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Wrong(nn.Linear):
    """Gives other vectors in an exported graph than in torch."""

    def forward(self, x):
        wrong = torch.compiler.is_exporting()
        return super().forward(x) + torch.arange(x.shape[1]) if wrong else super().forward(x)


def test_a_graph_that_differs_from_torch_is_refused(make_model, tmp_path):
    """A directory that existed before stays as it was."""
    model = make_model("clip")
    model.backbone.visual_projection = Wrong(32, 32)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/old").touch()
    with pytest.raises(ValueError, match=r"image tower.*differs"):
        export_onnx(model, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["old"]


def test_the_largest_difference_of_all_batches_counts(tmp_path):
    file = tmp_path / "a.onnx"
    write_graph("image", nn.Identity(), {"x": torch.ones(2, 3)}, file)
    feeds = [{"x": torch.ones(2, 3)}, {"x": torch.zeros(1, 3)}]
    expected = [feed["x"].clone() for feed in feeds]
    expected[0][0, 1] += 3e-5
    expected[1][0, 2] += 6e-5
    assert compare("image", file, feeds, expected) == pytest.approx(6e-5, rel=1e-3)
    expected[1][0, 0] = torch.nan
    with pytest.raises(ValueError, match="text tower"):
        compare("text", file, feeds, expected)
