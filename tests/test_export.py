"""ONNX export: graphs against torch, and immich's layout read the way immich reads it."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import string
import sys
from dataclasses import replace
from pathlib import Path

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

import hnclip
from hnclip.data.images import ImageTransform
from hnclip.export import graph as graphs
from hnclip.export import layouts, to_onnx, tokenizer_files
from hnclip.export.to_onnx import ExportCheck, export_onnx
from hnclip.models.load import wrap
from hnclip.models.preprocessing import read_image_transform
from hnclip.util.console import configure_logging
from small_families import PHRASE, bert_tokenizer, gemma_tokenizer, sentencepiece_tokenizer

TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
HALF = (0.5, 0.5, 0.5)
CLOSE = 2e-5  # onnxruntime and torch add up in a different order
SHORT, MIDDLE = "a red dog", "The small cat, near the bench, lies under a large tree; it's green."
LONG = "a blue house stands beside the tree and a large red dog " * 30

GRAPHS = {"image.onnx", "text.onnx"}
PLAIN = GRAPHS | {"tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "hnclip.json"}
VISUAL = {"visual/model.onnx", "visual/preprocess_cfg.json"}
TEXTUAL = {"textual/model.onnx", "textual/tokenizer.json", "textual/tokenizer_config.json"}
IMMICH = {"config.json"} | VISUAL | TEXTUAL


def spread(model: nn.Module) -> nn.Module:
    """Weights large enough that no two captions or pictures look alike to the model."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    return model.eval()


def make_clip(context: int, width: int = 24):
    from transformers import CLIPConfig, CLIPModel

    from hnclip.models.preprocessing import train_tokenizer

    tokenizer = train_tokenizer([PHRASE] * 3, 600)
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    text = {**TOWER, **special, "vocab_size": len(tokenizer), "max_position_embeddings": context}
    vision = {**TOWER, "image_size": 32, "patch_size": 16}
    config = CLIPConfig(projection_dim=width, text_config=text, vision_config=vision)
    assert config.text_config.hidden_act == "quick_gelu"
    return wrap(spread(CLIPModel(config)), tokenizer)


def make_siglip(directory: Path):
    from transformers import SiglipConfig, SiglipModel

    tokenizer = sentencepiece_tokenizer(directory)
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = SiglipConfig(
        text_config={**TOWER, **special, "vocab_size": len(tokenizer), "max_position_embeddings": 16},
        vision_config={**TOWER, "image_size": 32, "patch_size": 16},
    )
    return wrap(spread(SiglipModel(config)), tokenizer, ImageTransform(32, squash=True, mean=HALF, std=HALF))


def make_siglip2(side: str):
    from transformers import Siglip2Config, Siglip2Model

    tokenizer = gemma_tokenizer()
    tokenizer.padding_side = side
    special = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    config = Siglip2Config(
        text_config={**TOWER, **special, "vocab_size": len(tokenizer), "max_position_embeddings": 20},
        vision_config={**TOWER, "num_patches": 4, "patch_size": 8},
    )
    return wrap(spread(Siglip2Model(config)), tokenizer, ImageTransform(16, squash=True, mean=HALF, std=HALF))


def make_two_towers():
    from transformers import (
        BertConfig,
        Dinov2Config,
        VisionTextDualEncoderConfig,
        VisionTextDualEncoderModel,
    )

    tokenizer = bert_tokenizer()
    tokenizer.model_max_length = 40
    vision = Dinov2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=42, patch_size=14)
    text = BertConfig(**TOWER, vocab_size=len(tokenizer), max_position_embeddings=40)
    config = VisionTextDualEncoderConfig.from_vision_text_configs(vision, text, projection_dim=24)
    # Smaller pictures than the tower's own: DINOv2 shrinks its table of positions, 3×3, to theirs.
    return wrap(spread(VisionTextDualEncoderModel(config)), tokenizer, ImageTransform(28))


class Exported:
    """A model, what became of it on disk, and everything that was said meanwhile."""

    def __init__(self, model, directory: Path, layout: layouts.Layout) -> None:
        self.model, self.directory, self.lines = model, directory, []
        self.records: list[logging.LogRecord] = []
        listener = logging.Handler(logging.INFO)  # torch hands its own traces around at the level below
        listener.emit = lambda record: (
            self.lines.append(record.getMessage()) if record.name.startswith("hnclip") else self.records.append(record)
        )
        configure_logging(quiet=True)
        logging.getLogger("hnclip").setLevel(logging.INFO)
        loggers = [logging.getLogger(name) for name in (None, "torch", "onnxscript", "onnx_ir", "transformers")]
        for logger in loggers:
            logger.addHandler(listener)
        levels = [logging.getLogger(name).level for name in ("torch.onnx", "onnxscript")]
        random = torch.get_rng_state()
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            self.check = export_onnx(model, directory, layout=layout)
        self.printed = out.getvalue()
        for logger in loggers:
            logger.removeHandler(listener)
        assert [logging.getLogger(name).level for name in ("torch.onnx", "onnxscript")] == levels
        assert torch.equal(torch.get_rng_state(), random)


def assert_clean(exported: Exported, files: set[str]) -> None:
    """The right files, no trace of the machine in any of them, silence, and a small error."""
    found = {path.relative_to(exported.directory).as_posix() for path in exported.directory.rglob("*.*")}
    assert found == files
    package = Path(hnclip.__file__).parent
    traces = [b"site-packages", b"Traceback", *(str(path).encode() for path in (package, exported.directory.parent))]
    for name in found:
        content = (exported.directory / name).read_bytes()
        assert not any(trace in content for trace in traces), name
        if name.endswith(".onnx"):
            graph = onnx.load(exported.directory / name, load_external_data=False)
            onnx.checker.check_model(str(exported.directory / name))
            parts = [graph, graph.graph, *graph.graph.node, *graph.graph.value_info, *graph.graph.initializer]
            assert not any(part.metadata_props or part.doc_string for part in parts)
            assert [opset.version for opset in graph.opset_import] == [graphs.OPSET]
    assert exported.printed == ""
    assert exported.records == []
    assert exported.check.image_error < CLOSE
    assert exported.check.text_error < CLOSE
    for line, error in zip(exported.lines, (exported.check.image_error, exported.check.text_error)):
        assert f"{error:.1e}" in line


def session(file: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])


def signature(file: Path):
    opened = session(file)
    return [(i.name, i.type, i.shape) for i in opened.get_inputs()], [(o.name, o.shape) for o in opened.get_outputs()]


def run(file: Path, **inputs) -> torch.Tensor:
    return torch.from_numpy(session(file).run(None, {name: np.asarray(value) for name, value in inputs.items()})[0])


@torch.no_grad()
def encode_images(model, pixels):
    return model.encode_pixels(pixels).vectors.float()


@torch.no_grad()
def encode_texts(model, *texts):
    return model.encode_texts(model.tokenize(texts)).vectors.float()


def assert_close(found, expected):
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < CLOSE
    assert (found.norm(dim=1) - 1).abs().max() < CLOSE


def write_first(which, tower, feed, file, *, length=None):
    """In place of `_write_graph`: a graph that gives back its first input, whatever the tower."""
    name, first = next(iter(feed.items()))
    kind = onnx.helper.np_dtype_to_tensor_dtype(first.numpy().dtype)
    node = onnx.helper.make_node("Flatten", [name], ["y"])
    ends = [onnx.helper.make_tensor_value_info(end, kind, [None] * n) for end, n in ((name, first.ndim), ("y", 2))]
    graph = onnx.helper.make_graph([node], "first", ends[:1], ends[1:])
    opset = onnx.helper.make_opsetid("", graphs.OPSET)
    file.parent.mkdir(exist_ok=True)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10), file)


def without(tower: str, monkeypatch) -> None:
    """An export that spends no time on one of the towers, and writes a graph of no use for it."""
    write, compare = graphs.write_graph, graphs.compare
    choose = {tower: write_first}
    monkeypatch.setattr(
        graphs, "write_graph", lambda which, *rest, **more: choose.get(which, write)(which, *rest, **more)
    )
    monkeypatch.setattr(graphs, "compare", lambda which, *rest: 0.0 if which == tower else compare(which, *rest))


# --- the plain layout -----------------------------------------------------------------------------------------------


def test_plain_clip_with_adapters(tmp_path):
    """In training mode and with adapters, which only the graphs are without."""
    from hnclip.models.adapters import add_adapters

    model = make_clip(77)
    bare = encode_texts(model, SHORT)
    add_adapters(model, method="lora", rank=2, dropout=0.5, train_scale=True)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3)
    model.train()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    exported = Exported(model, tmp_path / "out", "onnx")

    assert model.training
    assert model.backbone.training
    assert model.has_adapters
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    assert any(weight.requires_grad for weight in model.parameters())

    model.eval()
    assert_clean(exported, PLAIN)
    image, text = (tmp_path / "out" / name for name in ("image.onnx", "text.onnx"))
    assert signature(image) == (
        [("pixel_values", "tensor(float)", ["batch", 3, 32, 32])],
        [("image_embeds", ["batch", 24])],
    )
    assert signature(text) == (
        [("input_ids", "tensor(int64)", ["batch", "length"])],
        [("text_embeds", ["batch", 24])],
    )
    for batch in (1, 3, 7):
        pixels = torch.randn(batch, 3, 32, 32)
        assert_close(run(image, pixel_values=pixels), encode_images(model, pixels))
    for texts in ([SHORT], [SHORT, MIDDLE], [LONG, SHORT, MIDDLE]):
        ids = model.tokenize(texts).ids
        assert_close(run(text, input_ids=ids), encode_texts(model, *texts))
    assert (encode_texts(model, SHORT) - bare).abs().max() > 0.01  # the adapters did something

    # Each graph holds its own tower only, without adapters.
    plain = make_clip(77).backbone
    for file, tower in ((image, plain.vision_model), (text, plain.text_model)):
        held = sum(int(np.prod(tensor.dims)) for tensor in onnx.load(file).graph.initializer)
        assert held < sum(weight.numel() for weight in tower.parameters()) + 24 * 16 + 100  # the projection, and small

    about = json.loads((tmp_path / "out/hnclip.json").read_text())
    assert about["scale"] == pytest.approx(model.scale.item())
    assert (about["dimension"], about["image_size"], about["context"]) == (24, 32, 77)
    assert (about["pad"], about["padding_side"]) == (model.tokenizer.eos_token_id, "right")
    assert tuple(about["mean"]) == model.image_transform.mean
    assert tuple(about["std"]) == model.image_transform.std
    assert about["source"] == model.source
    assert "bias" not in about
    assert read_image_transform(tmp_path / "out", "clip", 32) == model.image_transform
    assert "attention_mask" not in about


@pytest.mark.slow
def test_plain_siglip2_of_large_weights(tmp_path, monkeypatch):
    """Texts are fixed at the context, here padded on the left; weights too large for protobuf lie beside."""
    model = make_siglip2("left")
    monkeypatch.setattr(graphs, "LARGEST_FILE", 1000)
    exported = Exported(model, tmp_path / "first", "onnx")
    assert_clean(exported, PLAIN | {f"{name}.data" for name in GRAPHS})

    directory = tmp_path / "moved"
    (tmp_path / "first").rename(directory)
    for name in ("image.onnx", "text.onnx"):
        tensors = onnx.load(directory / name, load_external_data=False).graph.initializer
        places = {entry.value for t in tensors for entry in t.external_data if entry.key == "location"}
        assert places == {f"{name}.data"}
    assert signature(directory / "text.onnx")[0] == [("input_ids", "tensor(int64)", ["batch", 20])]

    for batch in (1, 4):
        pixels = torch.randn(batch, 3, 16, 16)
        assert_close(run(directory / "image.onnx", pixel_values=pixels), encode_images(model, pixels))
    about = json.loads((directory / "hnclip.json").read_text())
    settings = json.loads((directory / "preprocessor_config.json").read_text())
    assert (settings["patch_size"], settings["max_num_patches"]) == (8, 4)
    assert about["padding_side"] == "left"
    assert about["bias"] == pytest.approx(model.backbone.logit_bias.item())
    texts = ["a dog", "the red cat", "a large house under a tree"]
    rows = [list(row) for row in model.text_transform(texts)]
    padded = [[about["pad"]] * (about["context"] - len(row)) + row for row in rows]
    assert_close(run(directory / "text.onnx", input_ids=np.array(padded)), encode_texts(model, *texts))


@pytest.mark.slow
def test_plain_two_towers_in_double_precision(tmp_path):
    """Texts have a mask, so their length is free; the graph is fp32 whatever the model is."""
    model = make_two_towers().double()
    exported = Exported(model, tmp_path / "out", "onnx")
    assert_clean(exported, PLAIN)
    assert all(weight.dtype == torch.float64 for weight in model.parameters())

    file = tmp_path / "out/text.onnx"
    assert signature(file)[0] == [
        (name, "tensor(int64)", ["batch", "length"]) for name in ("input_ids", "attention_mask")
    ]
    texts = [SHORT, LONG, MIDDLE]
    batch = model.tokenize(texts)
    mask = (torch.arange(batch.ids.shape[1])[None] < batch.lengths[:, None]).long()
    assert_close(run(file, input_ids=batch.ids, attention_mask=mask), encode_texts(model, *texts))
    alone = model.tokenize([SHORT]).ids
    assert_close(run(file, input_ids=alone, attention_mask=torch.ones_like(alone)), encode_texts(model, SHORT))
    pixels = torch.randn(3, 3, 28, 28)
    assert_close(run(tmp_path / "out/image.onnx", pixel_values=pixels), encode_images(model, pixels.double()))
    assert "attention_mask" in json.loads((tmp_path / "out/hnclip.json").read_text())


# --- immich's layout ------------------------------------------------------------------------------------------------


class Immich:
    """What immich's machine-learning service does with a directory, step by step, without immich.

    After clip/visual.py, clip/textual.py and transforms.py of immich-ml 3.1: `OpenClipVisualEncoder`,
    `OpenClipTextualEncoder`, and `MClipTextualEncoder` for models with a mask.
    """

    def __init__(self, directory: Path, *, masked: bool) -> None:
        self.masked = masked
        self.visual, self.textual = (session(directory / name / "model.onnx") for name in ("visual", "textual"))
        preprocessing = json.loads((directory / "visual/preprocess_cfg.json").read_text())
        size = preprocessing["size"]
        self.size = size[0] if isinstance(size, list) else size
        assert preprocessing["interpolation"].upper() in Image.Resampling.__members__
        self.mean, self.std = (np.array(preprocessing[key], dtype=np.float32) for key in ("mean", "std"))

        text = json.loads((directory / "config.json").read_text())["text_cfg"]
        context = text.get("context_length", 77)
        self.canonicalise = (text.get("tokenizer_kwargs") or {}).get("clean") == "canonicalize"
        pad = json.loads((directory / "textual/tokenizer_config.json").read_text())["pad_token"]
        self.tokenizer = Tokenizer.from_file(str(directory / "textual/tokenizer.json"))
        assert self.tokenizer.token_to_id(pad) is not None
        self.tokenizer.enable_padding(length=context, pad_token=pad, pad_id=self.tokenizer.token_to_id(pad))
        self.tokenizer.enable_truncation(max_length=context)

    def image(self, picture: Image.Image) -> torch.Tensor:
        width, height = picture.size
        if width < height:
            shape = (self.size, int((height / width) * self.size))
        else:
            shape = (int((width / height) * self.size), self.size)
        picture = picture.resize(shape, Image.Resampling.BICUBIC)
        left, upper = (int(side / 2 - self.size / 2) for side in shape)
        picture = picture.crop((left, upper, left + self.size, upper + self.size))
        pixels = np.asarray(picture.convert("RGB"), dtype=np.float32) / 255.0
        pixels = pixels * (1.0 / self.std) - self.mean / self.std
        return torch.from_numpy(self.visual.run(None, {"image": pixels.transpose(2, 0, 1)[None]})[0])

    def tokens(self, text: str):
        text = " ".join(text.split())
        if self.canonicalise:
            text = text.translate(str.maketrans("", "", string.punctuation)).lower()
        return self.tokenizer.encode(text)

    def text(self, text: str) -> torch.Tensor:
        tokens = self.tokens(text)
        ids, mask = (np.array([row], dtype=np.int32) for row in (tokens.ids, tokens.attention_mask))
        feed = {"input_ids": ids, "attention_mask": mask} if self.masked else {"text": ids}
        return torch.from_numpy(self.textual.run(None, feed)[0])


def picture(width: int, height: int) -> Image.Image:
    noise = np.random.default_rng(width).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def assert_same_pictures(immich: Immich, model) -> None:
    # SigLIP squashes, which immich does not: there square pictures only. All but the last are for Pillow here as there.
    squares, others = [(20, 20), (40, 40), (200, 200)], [(20, 30), (60, 40), (40, 60), (200, 150)]
    *small, large = squares if model.image_transform.squash else others
    seen = []
    for shape in (*small, large):
        image = picture(*shape)
        seen.append(immich.image(image))
        expected = encode_images(model, model.normalize_pixels(model.preprocess_images([image])))
        if shape == large:  # resized by torch, which rounds some grey levels the other way
            assert (seen[-1] - expected).abs().max() < 5e-3
        else:
            assert_close(seen[-1], expected)
    assert torch.pdist(torch.cat(seen)).min() > 0.02


MAKERS = {
    "clip-77": lambda directory: make_clip(77, width=512),
    "clip-248": lambda directory: make_clip(248),
    "siglip": make_siglip,
    "two-towers": lambda directory: make_two_towers(),
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow) if kind in ("clip-248", "two-towers") else kind for kind in MAKERS],
)
def test_immich_reads_its_layout(tmp_path, monkeypatch, kind):
    if kind in ("clip-248", "two-towers"):  # their pictures are as those of clip-77
        without("image", monkeypatch)
    (tmp_path / "tokenizer").mkdir()
    model = MAKERS[kind](tmp_path / "tokenizer")
    exported = Exported(model, tmp_path / "out", "immich")
    assert_clean(exported, IMMICH | ({"textual/spiece.model"} if kind == "siglip" else set()))
    immich = Immich(tmp_path / "out", masked=kind == "two-towers")

    if kind in ("clip-77", "siglip"):
        assert_same_pictures(immich, model)
    longest = model.text_transform([LONG])
    assert longest.truncated == 1
    vectors = []
    for text in (SHORT, MIDDLE, LONG):
        ids = model.text_transform([text])[0]
        assert immich.tokens(text).ids == [*ids, *[model.text_transform.pad] * (model.context - len(ids))]
        vectors.append(encode_texts(model, text))
        assert_close(immich.text(text), vectors[-1])
    assert immich.tokens(LONG).ids[-1] == (model.tokenizer.eos_token_id or model.tokenizer.sep_token_id)
    assert torch.pdist(torch.cat(vectors)).min() > 0.02

    advice = exported.lines[2:]
    assert len(advice) == (2 if kind == "siglip" else 1)
    assert ("clip/ViT-B-16__openai" if kind == "clip-77" else "immich has no name for vectors of") in advice[0]
    if kind == "siglip":
        assert "cuts out the centre" in advice[1]


def test_names_that_immich_knows():
    model = make_two_towers()
    (line,) = layouts.immich_advice(model, 768)
    assert "clip/XLM-Roberta-Large-Vit-L-14" in line  # one of M-CLIP, whose text tower has a mask
    (line,) = layouts.immich_advice(model, 1024)
    assert "1024" in line
    assert "512, 640, 768" in line


@pytest.fixture(scope="module")
def encode_both_ways(tmp_path_factory):
    """Ids by SigLIP's tokenizer, and by the tokenizer.json that is made of it."""
    directory = tmp_path_factory.mktemp("siglip")
    slow = sentencepiece_tokenizer(directory)
    slow.save_pretrained(directory / "out")
    fast = tokenizer_files.fast_siglip_tokenizer(directory / "out")
    return lambda text: (slow(text, verbose=False)["input_ids"], fast.encode(text).ids)


PIECES = [*"abcdeghorstuADRÉéﬁ½²…日!?,.;:'-_()[]{}&#/\\~^`|@$%*+=\" \t\n\u00a0", "dog", "The ", " small"]


@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_siglips_tokenizer_as_a_file(encode_both_ways, text):
    slow, fast = encode_both_ways(text)
    assert fast == slow


def test_tokenizer_files(tmp_path):
    """Whatever the tokenizer was told before, its file neither pads nor cuts; that is for its settings to say."""
    transform = replace(clip().text_transform, context=50)
    backend = transform.tokenizer.backend_tokenizer
    backend.enable_padding(length=9)
    backend.enable_truncation(max_length=9)
    tokenizer_files.write_tokenizer(transform, tmp_path)
    reader = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert reader.padding is None
    assert reader.truncation is None
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == 50
    assert settings["pad_token"] == "<|endoftext|>"


# --- what goes wrong --------------------------------------------------------------------------------------------------


@functools.cache
def clip():
    return make_clip(77)


def test_unknown_layout(tmp_path):
    with pytest.raises(ValueError, match="layout must be one of onnx, immich, got 'coreml'"):
        export_onnx(clip(), tmp_path / "out", layout="coreml")


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_missing_packages_are_named(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"needs the package {package}: pip install 'hnclip\[onnx\]'"):
        export_onnx(clip(), tmp_path / "out")


def test_immich_does_not_pad_on_the_left(tmp_path):
    with pytest.raises(ValueError, match="pads its texts on the left, immich always on the right"):
        export_onnx(make_siglip2("left"), tmp_path / "out", layout="immich")
    assert not (tmp_path / "out").exists()


def test_immich_needs_a_tokenizer_file(tmp_path, monkeypatch):
    model = clip()
    monkeypatch.setattr(type(model.tokenizer), "save_pretrained", lambda self, directory: Path(directory).mkdir())
    with pytest.raises(ValueError, match=r"immich reads tokenizer.json, and a CLIPTokenizer cannot be written as one"):
        export_onnx(model, tmp_path / "out", layout="immich")
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_works_in_python_is_refused(tmp_path):
    class Shouting(type(clip().tokenizer)):
        def __call__(self, text, **settings):
            text = [text] if isinstance(text, str) else text
            return super().__call__([f"{line} !" for line in text], **settings)

    model = clip()
    loud = Shouting(vocab=model.tokenizer.get_vocab(), merges=[])
    with pytest.raises(ValueError, match=r"tokenizer.json reads 'a dog' otherwise than the Shouting of this model"):
        tokenizer_files.write_tokenizer(replace(model.text_transform, tokenizer=loud), tmp_path)


@pytest.mark.parametrize("tower", ["image", "text"])
def test_a_graph_that_differs_is_not_written(tmp_path, monkeypatch, tower):
    """One tower's graph is wrong; the directory that was there stays as it is."""
    without({"image": "text", "text": "image"}[tower], monkeypatch)
    monkeypatch.setattr(graphs, "write_graph", write_first)
    model = make_clip(77, width=1)  # so that any shape can be compared with its vectors
    (tmp_path / "out").mkdir()
    (tmp_path / "out/old").touch()
    with pytest.raises(ValueError, match=rf"the {tower} tower as ONNX differs from torch by \d.*more than 1e-04"):
        export_onnx(model, tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["old"]


def test_the_largest_difference(tmp_path):
    """Over all batches; what is not a number differs too, wherever it stands."""
    feeds = [{"x": torch.ones(2, 3)}, {"x": torch.zeros(1, 3)}]
    expected = [feed["x"].clone() for feed in feeds]
    write_first("image", None, feeds[0], tmp_path / "a.onnx")
    assert graphs.compare("image", tmp_path / "a.onnx", feeds, expected) == 0
    for batch, column in ((0, 1), (1, 2)):
        expected[batch][0, column] += 3e-5 * (batch + 1)
    assert graphs.compare("image", tmp_path / "a.onnx", feeds, expected) == pytest.approx(6e-5, rel=1e-3)
    for batch in (0, 1):
        for wrong, words in ((1.5e-4, r"1\.[0-9]e-04"), (torch.nan, "nan")):
            changed = [vectors.clone() for vectors in expected]
            changed[batch][0, 0] += wrong
            with pytest.raises(ValueError, match=f"the text tower as ONNX differs from torch by {words}"):
                graphs.compare("text", tmp_path / "a.onnx", feeds, changed)


def test_a_tower_that_cannot_be_traced(tmp_path):
    class Counting(nn.Module):
        def forward(self, x):
            return x * len(x.tolist())

    with pytest.raises(ValueError, match="the image tower cannot be written as ONNX: ") as raised:
        graphs.write_graph("image", Counting(), {"x": torch.ones(2, 3)}, tmp_path / "a.onnx")
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_sample_texts_reach_the_context():
    transform = clip().text_transform
    batches = to_onnx._sample_texts(transform)
    assert [len(batch.lengths) for batch in batches] == [1, 2, 5]
    assert [int(batch.lengths.max()) for batch in batches] == [3, 40, 77]
    start, end = transform.tokenizer.bos_token_id, transform.tokenizer.eos_token_id
    for batch in batches:
        for ids, length in zip(batch.ids.tolist(), batch.lengths.tolist()):
            assert ids[0] == start
            assert ids.index(end) == length - 1


def test_check_is_plain_numbers():
    assert json.loads(json.dumps(vars(ExportCheck(0.5, 0.25)))) == {"image_error": 0.5, "text_error": 0.25}
