"""Checkpoints in OpenAI's layout against a twin in plain torch: vectors, gradients, and errors by name."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from openai_twin import KEEP, OpenAITwin, small_b16, small_l14
from safetensors.torch import save_file
from torch import nn

from hnclip.models.load import load
from hnclip.models.openai_checkpoint import load_openai_checkpoint, read_state_dict

SIZES = {"b16": small_b16, "l14": small_l14}
WORDS = (1, 18, 19, 20, 75, 246, 300)  # with start and end: 3, 20, 21, 22, 77 and 248 tokens; the last is truncated


def convert(content, directory, name="weights.pt", **options):
    """Model and description of a file with this content."""
    file = directory / name
    save_file(content, file) if file.suffix == ".safetensors" else torch.save(content, file)
    return load_openai_checkpoint(file, **options)


def build(twin, directory):
    return convert(twin.state_dict(), directory)[0]


def captions(twin, *, pad=0, seed=1):
    """Captions of every length that matters, in OpenAI's ids: [B, context]."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(1, twin.vocabulary - 2, (words,), generator=generator).tolist() for words in WORDS]
    return torch.stack([twin.tokens(row, pad=pad) for row in rows])


def images(twin):
    size = int(twin.visual.conv1.kernel_size[0] * (len(twin.visual.positional_embedding) - 1) ** 0.5)
    return torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(2)).to(twin.logit_scale.dtype)


@torch.no_grad()
def vectors(model, twin, ids=None):
    """Image and text vectors of a twin or a converted model."""
    ids, pixels = captions(twin) if ids is None else ids, images(twin)
    if isinstance(model, OpenAITwin):
        return model(pixels, ids)
    return model.get_image_features(pixels).pooler_output, model.get_text_features(ids).pooler_output


def close(a, b, tolerance=1e-5):
    return (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.fixture(scope="module", params=SIZES)
def pair(request, tmp_path_factory):
    """A Long-CLIP in OpenAI's layout and its conversion, both in double precision."""
    twin = SIZES[request.param]()
    return twin.double(), build(twin, tmp_path_factory.mktemp("pair")).double()


def same(clip, twin, tolerance=1e-5):
    return all(close(a, b, tolerance) for a, b in zip(vectors(clip, twin), vectors(twin, twin)))


def test_vectors_equal_the_twins(pair):
    """The id of the pads does not matter."""
    twin, clip = pair
    image, text = vectors(twin, twin)
    for pad in (0, twin.vocabulary - 1):
        found = vectors(clip, twin, captions(twin, pad=pad))
        assert close(found[0], image, 1e-12)
        assert close(found[1], text, 1e-12)
    similarity = F.normalize(text, dim=-1) @ F.normalize(text, dim=-1).T
    assert similarity.triu(1).max() < 0.95  # the captions differ


@pytest.mark.parametrize("size", SIZES)
def test_plain_clip_with_one_table(size, tmp_path):
    twin = SIZES[size](long=False, context=77)
    clip = build(twin, tmp_path)
    assert same(clip, twin)
    assert clip.config.text_config.max_position_embeddings == 77


def test_gradients_equal_the_twins(pair):
    """In both towers, also of tensors that were split, transposed or merged."""
    twin, clip = pair
    weight = torch.randn(len(WORDS), twin.text_projection.shape[1], generator=torch.Generator().manual_seed(3)).double()
    ids, pixels = captions(twin), images(twin)
    twin.zero_grad()
    ((twin.encode_text(ids) * weight).sum() + (twin.encode_image(pixels) * weight[:3]).sum()).backward()
    clip.zero_grad()
    text, image = clip.get_text_features(ids).pooler_output, clip.get_image_features(pixels).pooler_output
    ((text * weight).sum() + (image * weight[:3]).sum()).backward()
    attention = clip.text_model.encoder.layers[1].self_attn
    packed = [part.weight.grad for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
    tables = twin.positional_embedding.grad[:KEEP], twin.positional_embedding_res.grad[KEEP:]
    for found, other in (
        (torch.cat(packed), twin.transformer.resblocks[1].attn.in_proj_weight.grad),
        (clip.text_model.embeddings.position_embedding.weight.grad, torch.cat(tables)),
        (clip.visual_projection.weight.grad, twin.visual.proj.grad.T),
        (clip.text_projection.weight.grad, twin.text_projection.grad.T),
        (clip.vision_model.embeddings.patch_embedding.weight.grad, twin.visual.conv1.weight.grad),
    ):
        assert (found - other).abs().max() <= 1e-10 * other.abs().max()


LAYER = "model.encoder.layers.0.self_attn"
MISTAKES = [  # tensors that are exchanged, or one that is transposed: every shape stays right
    (f"text_{LAYER}.q_proj.weight", f"text_{LAYER}.k_proj.weight"),
    (f"vision_{LAYER}.k_proj.weight", f"vision_{LAYER}.v_proj.weight"),
    ("vision_model.pre_layrnorm.weight", "vision_model.post_layernorm.weight"),
    ("text_projection.weight", None),
]


@pytest.mark.parametrize(("first", "second"), MISTAKES)
def test_the_comparison_would_find_exchanged_tensors(first, second, tmp_path):
    twin = small_l14()
    clip = build(twin, tmp_path)
    state = {name: value.clone() for name, value in clip.state_dict().items()}
    wrong = {first: state[first].T} if second is None else {first: state[second], second: state[first]}
    clip.load_state_dict({**state, **wrong})
    assert not same(clip, twin, 1e-3)


def test_the_residual_table_acts_from_the_twenty_first_position(tmp_path):
    """Public converters lose it, which changes captions of more than 20 tokens."""
    twin = small_b16()
    table = build(twin, tmp_path).text_model.embeddings.position_embedding.weight
    assert torch.equal(table[:20], twin.positional_embedding[:20])
    assert torch.equal(table[20:], twin.positional_embedding_res[20:])
    state = twin.state_dict()
    lost = convert({**state, "positional_embedding_res": state["positional_embedding"]}, tmp_path)[0]
    for words, found, expected in zip(WORDS, vectors(lost, twin)[1], vectors(twin, twin)[1]):
        assert close(found, expected, 1e-3) == (words + 2 <= KEEP)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod."])
def test_wrappers_and_containers(tmp_path, suffix, prefix):
    twin = small_b16()
    state = {prefix + name: value for name, value in twin.state_dict().items()}
    content = state if suffix == "safetensors" else {"epoch": 3, "state_dict": state, "optimizer": {"step": 1}}
    assert same(convert(content, tmp_path, f"longclip.{suffix}")[0], twin)


def test_names_of_open_clip(tmp_path):
    """`text.` before the text tower, the mask of older versions, the bias of a sigmoid loss."""
    twin = small_l14(long=False, context=77)
    state = {
        name if name.startswith(("visual.", "logit_scale")) else f"text.{name}": value
        for name, value in twin.state_dict().items()
    }
    state |= {"text.attn_mask": torch.zeros(77, 77), "logit_bias": torch.tensor(-10.0)}
    clip, line = convert(state, tmp_path, activation="quick_gelu")
    assert same(clip, twin)
    assert "open_clip" in line


def test_half_precision_becomes_fp32(tmp_path):
    twin = small_b16()
    state = {name: value.half() for name, value in twin.state_dict().items()}
    clip = convert({**state, "logit_scale": state["logit_scale"].reshape(1)}, tmp_path)[0]
    assert {weight.dtype for weight in clip.parameters()} == {torch.float32}
    assert clip.logit_scale.shape == ()
    twin.load_state_dict(state)
    assert same(clip, twin)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_training_changes_every_weight_and_never_the_file(tmp_path, suffix):
    twin = small_b16()
    clip, _ = convert(twin.state_dict(), tmp_path, f"longclip.{suffix}")
    file = tmp_path / f"longclip.{suffix}"
    before = file.read_bytes()
    assert not clip.training
    fresh = type(clip)(clip.config)
    for (name, buffer), (other, expected) in zip(clip.named_buffers(), fresh.named_buffers(), strict=True):
        assert name == other
        assert torch.equal(buffer, expected)
    old = {name: weight.detach().clone() for name, weight in clip.named_parameters()}
    clip(input_ids=captions(twin)[:3], pixel_values=images(twin), return_loss=True).loss.backward()
    torch.optim.AdamW(clip.parameters(), lr=1e-2).step()
    assert not [name for name, weight in clip.named_parameters() if torch.equal(weight, old[name])]
    assert file.read_bytes() == before


WIDE = {"image_size": 224, "patch": 14, "vision_width": 1024, "text_width": 768, "vocabulary": 3000, "joint": 768}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="forgets the peak of memory as Linux allows")
def test_opening_takes_less_memory_than_a_copy(tmp_path, monkeypatch):
    """Long-CLIP-L's widths with one layer, compared with the usual way, which holds the weights twice. In new
    processes, because this one has freed memory that a copy could use."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    peak_memory = import_module("measure").peak_memory
    file, sizes = tmp_path / "longclip.pt", {**WIDE, "vision_layers": 1, "text_layers": 1}
    torch.save(OpenAITwin(**sizes).state_dict(), file)
    assert file.stat().st_size > 80e6

    def memory(way, *, read):
        """Rise of the peak, divided by the size of the file."""
        given = {"way": way, "file": str(file), "sizes": sizes, "read": read}
        return peak_memory(Path(__file__).with_name("openai_twin.py"), "opening", **given) / file.stat().st_size

    assert memory("hnclip", read=False) < 0.4
    assert memory("hnclip", read=True) < 1.2
    assert memory("usual", read=True) > 1.5


@pytest.mark.parametrize("name", ["open_clip_pytorch_model.bin", "open_clip_model.safetensors", "epoch_3.pt"])
def test_an_unknown_activation_must_be_given(tmp_path, name):
    twin = small_b16(long=False, activation=nn.GELU)
    content = twin.state_dict()
    if name == "epoch_3.pt":  # the dictionary of open_clip's trainer
        content = {"epoch": 3, "name": "2025-model_ViT-B-32", "state_dict": content}
    with pytest.raises(ValueError, match="activation"):
        convert(content, tmp_path, name)
    assert same(convert(content, tmp_path, name, activation="gelu")[0], twin)
    assert not same(convert(content, tmp_path, name, activation="quick_gelu")[0], twin)


OPEN_CLIP = {
    "embed_dim": 64,
    "vision_cfg": {"image_size": 64, "layers": 2, "width": 128, "patch_size": 16, "head_width": 32},
    "text_cfg": {"context_length": 77, "vocab_size": 600, "width": 128, "heads": 2, "layers": 2},
}


def with_config(twin, directory, *, images=None, **changes):
    """The model of a checkpoint with an open_clip_config.json; `text_cfg__x` changes x in text_cfg."""
    settings = json.loads(json.dumps(OPEN_CLIP))
    for name, value in changes.items():
        part, _, key = name.rpartition("__")
        (settings[part] if part else settings)[key] = value
    content = {"model_cfg": settings, "preprocess_cfg": images or {}}
    (directory / "open_clip_config.json").write_text(json.dumps(content))
    return convert(twin.state_dict(), directory, "open_clip_model.safetensors")[0]


def test_a_configuration_of_open_clip_decides_heads_activation_and_the_epsilon_of_norms(tmp_path):
    twin = small_b16(long=False, context=77, activation=nn.GELU, vision_heads=4)
    twin.ln_final.eps = 1e-3
    for block in twin.transformer.resblocks:
        block.ln_1.eps = block.ln_2.eps = 1e-3
    assert same(with_config(twin, tmp_path, text_cfg__norm_kwargs={"eps": 1e-3}), twin)
    quick = small_b16(long=False, context=77)
    assert same(with_config(quick, tmp_path, quick_gelu=True, vision_cfg__head_width=64), quick)
    default = with_config(twin, tmp_path, text_cfg={"width": 128})
    assert default.config.text_config.num_attention_heads == 8


@pytest.mark.parametrize(
    ("key", "value"), [("pool_type", "last"), ("no_causal_mask", True), ("act_kwargs", {"approximate": "tanh"})]
)
def test_settings_of_open_clip_that_change_the_model_are_refused(tmp_path, key, value):
    with pytest.raises(ValueError, match=key):
        with_config(small_b16(long=False, context=77), tmp_path, **{f"text_cfg__{key}": value})


def test_a_configuration_of_open_clip_decides_the_image_preprocessing(tmp_path, tokenizer):
    twin = small_b16(long=False, context=77, vocabulary=len(tokenizer), activation=nn.GELU, vision_heads=4)
    images = {"mean": [0.5] * 3, "std": [0.25] * 3, "interpolation": "bilinear", "resize_mode": "squash"}
    with_config(twin, tmp_path, images=images)
    tokenizer.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "open_clip_model.safetensors"):
        found = load(path).image_transform
        assert (found.mean, found.std, found.resample, found.squash) == ((0.5,) * 3, (0.25,) * 3, "bilinear", True)


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("ln_final.bias", None, "final_layer_norm.bias"),
        ("visual.transformer.resblocks.1.ln_1.bias", None, "layers.1"),
        ("transformer.resblocks.0.attn.in_proj_weight", torch.zeros(384, 64), "layers.0.self_attn.q_proj"),
        ("positional_embedding_res", torch.zeros(77, 128), "position_embedding"),
        ("visual.positional_embedding", torch.zeros(16, 192), "position_embedding"),
        ("transformer.resblocks.0.ls_1.gamma", torch.zeros(128), "ls_1.gamma"),
        ("text_decoder.resblocks.0.ln_1.weight", torch.zeros(1), "text_decoder"),  # CoCa
        ("visual.proj", torch.zeros(192, 128, dtype=torch.int8), "int8"),
    ],
)
def test_tensors_that_do_not_fit_are_named(name, value, word, tmp_path):
    state = {**small_l14().state_dict(), name: value}
    state = {name: value for name, value in state.items() if value is not None}
    with pytest.raises(ValueError, match=rf"(?s)weights\.pt.*{word}"):
        convert(state, tmp_path)


@pytest.mark.parametrize("content", ["{}", '{"model_cfg": {"vision_cfg": {}}}', "[]", "{"])
def test_a_malformed_configuration_of_open_clip_is_named(content, tmp_path):
    (tmp_path / "open_clip_config.json").write_text(content)
    with pytest.raises(ValueError, match=r"open_clip_config\.json"):
        convert(small_l14().state_dict(), tmp_path)


def test_head_widths_of_towers_wider_than_openais_are_not_guessed(tmp_path):
    """ViT-H has 16 heads of 80, not 20 of 64, and no shape shows it."""
    twin = small_b16(long=False, vision_width=1280, vision_layers=1, vision_heads=16, seed=None)
    with pytest.raises(ValueError, match=r"open_clip_config\.json"):
        build(twin, tmp_path)


@pytest.mark.parametrize("forced", [False, True])
def test_no_code_is_executed(tmp_path, monkeypatch, code, forced):
    torch.save({"state_dict": {"visual.proj": code}}, tmp_path / "evil.pt")
    if forced:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(ValueError, match=r"evil\.pt"):
        read_state_dict(tmp_path / "evil.pt")
    assert not (tmp_path / "executed").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "hub"), [("ViT-B-16.pt", "clip-vit-base-patch16"), ("other.pt", "openai/clip-vit-large-patch14")]
)
def test_torchscript_is_refused_with_the_hub_model_of_the_same_weights(tmp_path, name, hub):
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / name)
    with pytest.raises(ValueError, match=f"TorchScript.*{hub}"):
        load(tmp_path / name)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_files_that_are_no_checkpoint_are_named(tmp_path, suffix, model_directory):
    convert(small_b16().state_dict(), tmp_path, f"whole.{suffix}")
    whole = (tmp_path / f"whole.{suffix}").read_bytes()
    file = tmp_path / f"weights.{suffix}"
    for content in (b"", b"no weights", whole[:-1000], (model_directory / "model.safetensors").read_bytes()):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=rf"weights\.{suffix}"):
            load(file)


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 20, 21, 248, 400])
def test_texts_of_every_length_equal_long_clip(tmp_path, tokenizer, request, length):
    """`length` tokens between start and end; longer texts are truncated, the end token is kept."""
    tokenizer.save_pretrained(tmp_path)
    twin = small_l14(vocabulary=len(tokenizer))
    torch.save(twin.state_dict(), tmp_path / "longclip.pt")
    model = load(tmp_path / "longclip.pt", context=248)
    assert "Long-CLIP" in model.source
    whole = tokenizer(" ".join(request.getfixturevalue("captions")[:4]))["input_ids"][1:-1]
    text = tokenizer.decode(whole[:length])
    words = tokenizer(text)["input_ids"][1:-1]
    expected = F.normalize(twin.encode_text(twin.tokens(words)[None]), dim=-1)
    torch.testing.assert_close(model.encode([text], to="torch"), expected, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="unstretched"):
        load(tmp_path / "longclip.pt", context=500)
