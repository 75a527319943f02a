"""Checkpoints in OpenAI's layout against a twin in plain torch: vectors, gradients, and errors by name."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from openai_twin import B16, KEEP, L14, OpenAITwin
from safetensors.torch import save_file
from torch import nn

from hnclip.models.load import load
from hnclip.models.openai_checkpoint import load_openai_checkpoint

WORDS = (1, 18, 19, 20, 75, 246, 300)  # with start and end: 3, 20, 21, 22, 77 and 248 tokens; the last is truncated
SHORT = {"long": False, "context": 77}  # plain CLIP


def convert(content, directory, name="weights.pt", **options):
    """Model and description of a file with this content."""
    file = directory / name
    save_file(content, file) if file.suffix == ".safetensors" else torch.save(content, file)
    return load_openai_checkpoint(file, **options)


def captions(twin, *, pad=0):
    """Captions of every length that matters, in OpenAI's ids: [B, context]."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, twin.vocabulary - 2, (words,), generator=generator).tolist() for words in WORDS]
    return torch.stack([twin.tokens(row, pad=pad) for row in rows])


def images(twin):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(3, 3, twin.size, twin.size, generator=generator).to(twin.logit_scale.dtype)


def vectors(model, twin, ids=None):
    """Image and text vectors of a twin or a converted model."""
    ids, pixels = captions(twin) if ids is None else ids, images(twin)
    if isinstance(model, OpenAITwin):
        return model(pixels, ids)
    return model.get_image_features(pixels).pooler_output, model.get_text_features(ids).pooler_output


def close(a, b, tolerance):
    return (a - b).abs().max() <= tolerance * b.abs().max()


@torch.no_grad()
def same(clip, twin):
    return all(close(a, b, 1e-5) for a, b in zip(vectors(clip, twin), vectors(twin, twin)))


@pytest.mark.parametrize("sizes", [B16, L14], ids=["B/16", "L/14"])
def test_vectors_and_gradients_equal_the_twins(sizes, tmp_path):
    """The id of the pads does not matter; gradients also of tensors that were split, transposed or merged."""
    twin = OpenAITwin(**sizes)
    clip = convert(twin.state_dict(), tmp_path)[0].double()
    twin = twin.double()
    expected = vectors(twin, twin)
    weights = [torch.randn(v.shape, generator=torch.Generator().manual_seed(3)).double() for v in expected]
    sum((vector * weight).sum() for vector, weight in zip(expected, weights)).backward()
    similarity = F.normalize(expected[1], dim=-1) @ F.normalize(expected[1], dim=-1).T
    assert similarity.triu(1).max() < 0.95  # the captions differ
    for pad in (0, twin.vocabulary - 1):
        found = vectors(clip, twin, captions(twin, pad=pad))
        assert all(close(a, b, 1e-12) for a, b in zip(found, expected))
    sum((vector * weight).sum() for vector, weight in zip(found, weights)).backward()
    attention = clip.text_model.encoder.layers[1].self_attn
    packed = [part.weight.grad for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
    tables = twin.positional_embedding.grad[:KEEP], twin.positional_embedding_res.grad[KEEP:]
    for own, theirs in (
        (torch.cat(packed), twin.transformer.resblocks[1].attn.in_proj_weight.grad),
        (clip.text_model.embeddings.position_embedding.weight.grad, torch.cat(tables)),
        (clip.visual_projection.weight.grad, twin.visual.proj.grad.T),
        (clip.text_projection.weight.grad, twin.text_projection.grad.T),
        (clip.vision_model.embeddings.patch_embedding.weight.grad, twin.visual.conv1.weight.grad),
    ):
        assert close(own, theirs, 1e-10)


@pytest.mark.parametrize(("suffix", "prefix"), [("pt", "module."), ("safetensors", "module._orig_mod.")])
def test_wrappers_containers_and_half_precision_open_as_fp32(tmp_path, suffix, prefix):
    twin = OpenAITwin()
    state = {name: value.half() for name, value in twin.state_dict().items()}
    twin.load_state_dict(state)
    state = {prefix + name: value for name, value in state.items()}
    content = state if suffix == "safetensors" else {"epoch": 3, "state_dict": state, "optimizer": {"step": 1}}
    clip = convert(content, tmp_path, f"longclip.{suffix}")[0]
    assert {weight.dtype for weight in clip.parameters()} == {torch.float32}
    assert same(clip, twin)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_training_changes_every_weight_and_never_the_file(tmp_path, suffix):
    twin, file = OpenAITwin(), tmp_path / f"longclip.{suffix}"
    clip, _ = convert(twin.state_dict(), tmp_path, file.name)
    before, old = file.read_bytes(), {name: weight.detach().clone() for name, weight in clip.named_parameters()}
    clip(input_ids=captions(twin)[:3], pixel_values=images(twin), return_loss=True).loss.backward()
    torch.optim.AdamW(clip.parameters(), lr=1e-2).step()
    assert not [name for name, weight in clip.named_parameters() if torch.equal(weight, old[name])]
    assert file.read_bytes() == before


def test_names_of_open_clip_whose_activation_must_be_given(tmp_path):
    """`text.` before the text tower, the mask of older versions, the bias of a sigmoid loss; a single table."""
    twin = OpenAITwin(**L14, **SHORT, activation=nn.GELU)
    state = {
        name if name.startswith(("visual.", "logit_scale")) else f"text.{name}": value
        for name, value in twin.state_dict().items()
    }
    state |= {"text.attn_mask": torch.zeros(77, 77), "logit_bias": torch.tensor(-10.0)}
    content = {"epoch": 3, "name": "2025-model_ViT-B-32", "state_dict": state}  # of open_clip's trainer
    with pytest.raises(ValueError, match="activation"):
        convert(content, tmp_path)
    clip, line = convert(content, tmp_path, activation="gelu")
    assert same(clip, twin)
    assert clip.config.text_config.max_position_embeddings == 77
    assert "open_clip" in line
    assert not same(convert(content, tmp_path, activation="quick_gelu")[0], twin)


def with_config(twin, directory, *, preprocess=None, text=None, vision=None, **changes):
    """The model of a checkpoint with an open_clip_config.json."""
    settings = {
        "embed_dim": 64,
        "vision_cfg": {"image_size": 64, "layers": 2, "width": 128, "patch_size": 16, **(vision or {})},
        "text_cfg": {"context_length": 77, "vocab_size": twin.vocabulary, "width": 128, "layers": 2, **(text or {})},
    }
    content = {"model_cfg": settings | changes, "preprocess_cfg": preprocess or {}}
    (directory / "open_clip_config.json").write_text(json.dumps(content))
    return convert(twin.state_dict(), directory, "open_clip_model.safetensors")[0]


def test_a_configuration_of_open_clip_decides_what_no_shape_shows(tmp_path, tokenizer):
    """Heads, activation, the epsilon of norms, and the preprocessing of images."""
    twin = OpenAITwin(**SHORT, vocabulary=len(tokenizer), activation=nn.GELU, vision_heads=4)
    twin.ln_final.eps = 1e-3
    for block in twin.transformer.resblocks:
        block.ln_1.eps = block.ln_2.eps = 1e-3
    preprocess = {"mean": [0.5] * 3, "std": [0.25] * 3, "interpolation": "bilinear", "resize_mode": "squash"}
    text, vision = {"heads": 2, "norm_kwargs": {"eps": 1e-3}}, {"head_width": 32}
    assert same(with_config(twin, tmp_path, text=text, vision=vision, preprocess=preprocess), twin)
    tokenizer.save_pretrained(tmp_path)
    found = load(tmp_path / "open_clip_model.safetensors").image_transform
    assert (found.mean, found.std, found.resample, found.squash) == ((0.5,) * 3, (0.25,) * 3, "bilinear", True)
    quick = OpenAITwin(**SHORT)
    assert same(with_config(quick, tmp_path, text={"heads": 2}, quick_gelu=True), quick)
    assert with_config(quick, tmp_path).config.text_config.num_attention_heads == 8


def test_a_configuration_of_open_clip_that_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ValueError, match="pool_type"):
        with_config(OpenAITwin(**SHORT), tmp_path, text={"pool_type": "last"})
    (tmp_path / "open_clip_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"open_clip_config\.json"):
        convert(OpenAITwin().state_dict(), tmp_path)
    (tmp_path / "open_clip_config.json").unlink()
    huge = OpenAITwin(long=False, vision_width=1280, vision_layers=1, vision_heads=16, seed=None)
    with pytest.raises(ValueError, match=r"open_clip_config\.json"):  # ViT-H has 16 heads of 80, not 20 of 64
        convert(huge.state_dict(), tmp_path)


def test_tensors_that_do_not_fit_are_named(tmp_path):
    for name, value, word in (
        ("visual.ln_pre.bias", None, "pre_layrnorm.bias"),
        ("transformer.resblocks.0.attn.in_proj_weight", torch.zeros(384, 64), "layers.0.self_attn.q_proj"),
        ("text_decoder.resblocks.0.ln_1.weight", torch.zeros(1), "text_decoder"),  # CoCa
    ):
        state = {**OpenAITwin().state_dict(), name: value}
        with pytest.raises(ValueError, match=rf"(?s)weights\.pt.*{word}"):
            convert({name: value for name, value in state.items() if value is not None}, tmp_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_refused_with_the_hub_model_of_the_same_weights(tmp_path):
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "ViT-B-16.pt")
    with pytest.raises(ValueError, match=r"TorchScript.*clip-vit-base-patch16"):
        load(tmp_path / "ViT-B-16.pt")


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_files_that_are_no_checkpoint_are_named(tmp_path, suffix, model_directory):
    convert(OpenAITwin().state_dict(), tmp_path, f"whole.{suffix}")
    whole = (tmp_path / f"whole.{suffix}").read_bytes()
    file = tmp_path / f"weights.{suffix}"
    for content in (b"", b"no weights", whole[:-1000], (model_directory / "model.safetensors").read_bytes()):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=rf"weights\.{suffix}"):
            load(file)
