from __future__ import annotations

import hashlib
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from openai_twin import KEEP, OpenAITwin, small_b16, small_l14
from safetensors.torch import save_file
from torch import nn

from hnclip.measure import fresh_result, load_file
from hnclip.models.openai_layout import build_clip, is_openai_layout
from hnclip.models.weights import Checkpoint, read_checkpoint

SIZES = {"b16": small_b16, "l14": small_l14}
HALVED = re.compile(r"attn|mlp|conv1|proj")  # what OpenAI keeps in fp16
WORDS = (1, 18, 19, 20, 75, 246, 300)  # with start and end: 3, 20, 21, 22, 77 and 248 tokens; the last must be cut


def checkpoint(tensors, **options):
    """Tensors as if they had been read from a file."""
    return Checkpoint(
        **{"file": Path("some/weights.pt"), "tensors": dict(tensors), "kind": "pickle", "about": {}, **options}
    )


def build(twin, **options):
    return build_clip(checkpoint(twin.state_dict(), **options))[0]


def captions(twin, *, pad=0, seed=1):
    """Captions of every length that matters, in OpenAI's ids: [B, context]."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(1, twin.vocabulary - 2, (words,), generator=generator).tolist() for words in WORDS]
    return torch.stack([twin.tokens(row, pad=pad) for row in rows])


def pictures(twin):
    size = twin.visual.conv1.kernel_size[0] * (len(twin.visual.positional_embedding) - 1) ** 0.5
    return torch.randn(3, 3, int(size), int(size), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def text_vectors(model, ids):
    return model.encode_text(ids) if isinstance(model, OpenAITwin) else model.get_text_features(ids).pooler_output


@torch.no_grad()
def image_vectors(model, pixels):
    if isinstance(model, OpenAITwin):
        return model.encode_image(pixels)
    return model.get_image_features(pixels).pooler_output


def close(a, b, tolerance=1e-5):
    """Equal as they are, and after normalisation."""
    scale = b.abs().max()
    return (a - b).abs().max() <= tolerance * scale and (
        F.normalize(a, dim=-1) - F.normalize(b, dim=-1)
    ).abs().max() <= tolerance


@pytest.fixture(scope="module", params=SIZES)
def pair(request):
    """A Long-CLIP in OpenAI's layout, and what became of it."""
    twin = SIZES[request.param]()
    return twin, build(twin)


class TestParity:
    @pytest.mark.parametrize("pad", ["zero", "end"])
    def test_captions(self, pair, pad):
        twin, clip = pair
        expected = text_vectors(twin, captions(twin))
        ids = captions(twin, pad=0 if pad == "zero" else twin.vocabulary - 1)
        assert close(text_vectors(clip, ids), expected)
        similarity = F.normalize(expected, dim=-1) @ F.normalize(expected, dim=-1).T
        assert similarity.triu(1).max() < 0.95  # they could have been told apart

    def test_captions_without_pads(self, pair):
        twin, clip = pair
        ids = captions(twin)
        for row, expected in zip(ids, text_vectors(twin, ids)):
            assert close(text_vectors(clip, row[None, : row.argmax() + 1]), expected[None])

    def test_the_longest_captions_fill_the_context(self, pair):
        lengths = (captions(pair[0]).argmax(dim=-1) + 1).tolist()
        assert lengths == [3, 20, 21, 22, 77, 248, 248]

    def test_pictures(self, pair):
        twin, clip = pair
        assert close(image_vectors(clip, pictures(twin)), image_vectors(twin, pictures(twin)))

    def test_similarities_with_the_scale(self, pair):
        twin, clip = pair
        image = F.normalize(image_vectors(twin, pictures(twin)), dim=-1)
        text = F.normalize(text_vectors(twin, captions(twin)), dim=-1)
        with torch.no_grad():
            found = clip(input_ids=captions(twin), pixel_values=pictures(twin)).logits_per_image
            assert close(found, twin.logit_scale.exp() * image @ text.T)

    def test_in_double_precision_nothing_is_left_of_the_difference(self):
        twin = small_l14()
        clip = build(twin).double()
        twin.double()
        twin.mask1, twin.mask2 = twin.mask1.double(), twin.mask2.double()
        assert close(text_vectors(clip, captions(twin)), text_vectors(twin, captions(twin)), 1e-12)
        pixels = pictures(twin).double()
        assert close(image_vectors(clip, pixels), image_vectors(twin, pixels), 1e-12)

    @pytest.mark.parametrize("size", SIZES)
    def test_plain_clip_with_one_table(self, size):
        twin = SIZES[size](long=False, context=77)
        clip = build(twin)
        assert close(text_vectors(clip, captions(twin)), text_vectors(twin, captions(twin)))
        assert clip.config.text_config.max_position_embeddings == 77

    def test_gradients(self, pair):
        """Of both towers, also where one tensor became three, was turned, or came from two."""
        twin, clip = pair
        weight = torch.randn(len(WORDS), twin.text_projection.shape[1], generator=torch.Generator().manual_seed(3))
        ids, pixels = captions(twin), pictures(twin)
        twin.zero_grad()
        ((twin.encode_text(ids) * weight).sum() + (twin.encode_image(pixels) * weight[:3]).sum()).backward()
        clip.zero_grad()
        text, image = clip.get_text_features(ids).pooler_output, clip.get_image_features(pixels).pooler_output
        ((text * weight).sum() + (image * weight[:3]).sum()).backward()
        attention = clip.text_model.encoder.layers[1].self_attn
        packed = torch.cat([attention.q_proj.weight.grad, attention.k_proj.weight.grad, attention.v_proj.weight.grad])
        expected = twin.transformer.resblocks[1].attn.in_proj_weight.grad
        positions = clip.text_model.embeddings.position_embedding.weight.grad
        assert (packed - expected).abs().max() <= 1e-4 * expected.abs().max()
        both = twin.positional_embedding.grad[:KEEP], twin.positional_embedding_res.grad[KEEP:]
        assert (positions - torch.cat(both)).abs().max() <= 1e-4 * positions.abs().max()
        for found, other in (
            (clip.visual_projection.weight.grad, twin.visual.proj.grad.T),
            (clip.text_projection.weight.grad, twin.text_projection.grad.T),
            (clip.vision_model.embeddings.patch_embedding.weight.grad, twin.visual.conv1.weight.grad),
        ):
            assert (found - other).abs().max() <= 1e-4 * other.abs().max()


def swap(module, first, second):
    a, b = module.get_parameter(first), module.get_parameter(second)
    a.data, b.data = b.data.clone(), a.data.clone()


def swap_attention(first, second):
    def change(clip):
        for tower in (clip.text_model, clip.vision_model):
            swap(tower.encoder.layers[0].self_attn, f"{first}_proj.weight", f"{second}_proj.weight")

    return change


def other_activation(clip):
    for module in clip.modules():
        if hasattr(module, "activation_fn"):
            module.activation_fn = nn.GELU()


def turn(name):
    def change(clip):
        clip.get_parameter(name).data = clip.get_parameter(name).data.T.clone()

    return change


MISTAKES = {
    "query-key": (swap_attention("q", "k"), "both"),
    "query-value": (swap_attention("q", "v"), "both"),
    "key-value": (swap_attention("k", "v"), "both"),
    "text-projection": (turn("text_projection.weight"), "text"),
    "activation": (other_activation, "both"),
    "norms": (lambda clip: swap(clip.vision_model, "pre_layrnorm.weight", "post_layernorm.weight"), "image"),
    "norms-of-a-block": (
        lambda clip: swap(clip.text_model.encoder.layers[1], "layer_norm1.bias", "layer_norm2.bias"),
        "text",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_parity_would_catch(name):
    """Mistakes that leave every shape right."""
    mistake, where = MISTAKES[name]
    twin = small_l14()
    clip = build(twin)
    mistake(clip)
    texts = close(text_vectors(clip, captions(twin)), text_vectors(twin, captions(twin)), 1e-3)
    images = close(image_vectors(clip, pictures(twin)), image_vectors(twin, pictures(twin)), 1e-3)
    assert (texts, images) == (where == "image", where == "text")


def test_the_residual_table_acts_from_the_twenty_first_position():
    """Public converters lose it: captions of up to 20 tokens do not notice, longer ones do."""
    twin = small_b16()
    state = twin.state_dict()
    lost = build_clip(checkpoint({**state, "positional_embedding_res": state["positional_embedding"]}))[0]
    found, expected = text_vectors(lost, captions(twin)), text_vectors(twin, captions(twin))
    for row, words in enumerate(WORDS):
        assert close(found[row : row + 1], expected[row : row + 1], 1e-3) == (words + 2 <= KEEP)


def test_the_effective_table():
    twin = small_b16()
    table = build(twin).text_model.embeddings.position_embedding.weight
    assert torch.equal(table[:20], twin.positional_embedding[:20])
    assert torch.equal(table[20:], twin.positional_embedding_res[20:])


class TestConfig:
    def test_sizes_come_from_the_shapes(self):
        twin = small_l14(vocabulary=700, ratio=3, context=100)
        config = build(twin).config
        text, vision = config.text_config, config.vision_config
        assert (text.hidden_size, text.intermediate_size, text.num_hidden_layers, text.num_attention_heads) == (
            128,
            384,
            2,
            2,
        )
        assert (vision.hidden_size, vision.intermediate_size, vision.num_hidden_layers) == (192, 576, 3)
        assert (vision.num_attention_heads, vision.image_size, vision.patch_size) == (3, 56, 14)
        assert (text.vocab_size, text.max_position_embeddings, config.projection_dim) == (700, 100, 128)
        assert (text.bos_token_id, text.eos_token_id, text.layer_norm_eps) == (698, 699, 1e-5)
        assert (text.hidden_act, vision.hidden_act) == ("quick_gelu", "quick_gelu")
        assert text.projection_dim == vision.projection_dim == 128

    def test_the_end_token_of_openais_vocabulary(self):
        config = build(OpenAITwin(vocabulary=49408, text_width=64, text_layers=1, vision_layers=1, seed=None)).config
        assert (config.text_config.bos_token_id, config.text_config.eos_token_id) == (49406, 49407)

    def test_every_tensor_of_the_true_size_has_its_place(self):
        """447 tensors in Long-CLIP-L; no memory is needed to see it."""
        with torch.device("meta"):
            twin = OpenAITwin(
                vocabulary=49408, image_size=224, patch=14, vision_width=1024, vision_layers=24, text_width=768,
                text_layers=12, joint=768, seed=None,
            )  # fmt: skip
        assert len(twin.state_dict()) == 447
        clip, line = build_clip(checkpoint(twin.state_dict()))
        assert (clip.config.vision_config.num_attention_heads, clip.config.text_config.num_attention_heads) == (16, 12)
        assert (
            sum(weight.numel() for weight in clip.parameters()) == sum(w.numel() for w in twin.parameters()) - 248 * 768
        )
        assert line == (
            "Long-CLIP ViT-L/14 in OpenAI's layout, 248 tokens (20 rows of positional_embedding, 228 of "
            "positional_embedding_res), 224 px, QuickGELU, fp32"
        )


class TestOddities:
    @pytest.mark.parametrize("kind", ["pt", "safetensors"])
    @pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod."])
    def test_through_a_file(self, tmp_path, kind, prefix):
        twin = small_b16()
        file, state = tmp_path / f"longclip.{kind}", {prefix + name: value for name, value in twin.state_dict().items()}
        save_file(state, file) if kind == "safetensors" else torch.save({"state_dict": state}, file)
        clip, _ = build_clip(read_checkpoint(file))
        assert close(text_vectors(clip, captions(twin)), text_vectors(twin, captions(twin)))
        assert close(image_vectors(clip, pictures(twin)), image_vectors(twin, pictures(twin)))

    @pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
    def test_openais_own_archives(self, tmp_path):
        """Traced, matrices in fp16, embeddings and norms in fp32, sizes as scalar tensors."""
        twin = small_b16(long=False, context=77)
        with torch.no_grad():
            for name, weight in twin.named_parameters():
                if HALVED.search(name):
                    weight.copy_(weight.half())
        expected = text_vectors(twin, captions(twin)), image_vectors(twin, pictures(twin))
        for name in ("input_resolution", "context_length", "vocab_size"):
            twin.register_buffer(name, torch.tensor(64))
        archive = torch.jit.trace(twin, (pictures(twin), captions(twin)))
        for name, weight in archive.named_parameters():
            if HALVED.search(name):
                weight.data = weight.data.half()
        torch.jit.save(archive, tmp_path / "ViT-B-16.pt")
        clip, line = build_clip(read_checkpoint(tmp_path / "ViT-B-16.pt"))
        assert close(text_vectors(clip, captions(twin)), expected[0])
        assert close(image_vectors(clip, pictures(twin)), expected[1])
        assert {weight.dtype for weight in clip.parameters()} == {torch.float32}
        assert line == (
            "CLIP ViT-2×128/16 in OpenAI's layout, 77 tokens, 64 px, QuickGELU, fp16 and fp32 widened to fp32"
        )

    def test_a_scripted_model_brings_its_masks_along(self, tmp_path):
        twin = small_b16()
        torch.jit.save(torch.jit.script(twin), tmp_path / "long.pt")
        found = read_checkpoint(tmp_path / "long.pt")
        assert {"mask1", "transformer.resblocks.0.attn_mask"} <= found.tensors.keys()
        assert close(text_vectors(build_clip(found)[0], captions(twin)), text_vectors(twin, captions(twin)))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_other_precisions_become_fp32(self, dtype):
        twin = small_b16()
        clip, line = build_clip(checkpoint({name: value.to(dtype) for name, value in twin.state_dict().items()}))
        assert {weight.dtype for weight in clip.parameters()} == {torch.float32}
        assert "widened to fp32" in line
        twin.load_state_dict({name: value.to(dtype) for name, value in twin.state_dict().items()})
        assert close(text_vectors(clip, captions(twin)), text_vectors(twin, captions(twin)))

    @pytest.mark.parametrize("shape", [(), (1,)])
    def test_the_scale_as_a_scalar_and_as_a_row(self, shape):
        state = small_b16().state_dict()
        clip, _ = build_clip(checkpoint({**state, "logit_scale": torch.full(shape, 4.5)}))
        assert clip.logit_scale.shape == ()
        assert clip.logit_scale.item() == 4.5

    def test_open_clips_names_of_the_text_tower(self):
        """`text.` before them, and the mask that older versions saved."""
        twin = small_l14(long=False, context=77)
        state = {
            name if name.startswith(("visual.", "logit_scale")) else f"text.{name}": value
            for name, value in twin.state_dict().items()
        }
        state["text.attn_mask"] = torch.zeros(77, 77)
        clip, line = build_clip(checkpoint(state), activation="quick_gelu")
        assert close(text_vectors(clip, captions(twin)), text_vectors(twin, captions(twin)))
        assert line == "open_clip ViT-3×192/14 in OpenAI's layout, 77 tokens, 56 px, QuickGELU, fp32"

    def test_a_bias_of_a_sigmoid_loss_is_left_out_and_said(self):
        line = build_clip(checkpoint({**small_b16().state_dict(), "logit_bias": torch.tensor(-10.0)}))[1]
        assert line.endswith(", without its logit_bias")

    def test_a_patch_kernel_in_another_memory_format(self):
        twin = small_b16()
        turned = twin.visual.conv1.weight.detach().contiguous(memory_format=torch.channels_last)
        assert not turned.is_contiguous()
        clip, _ = build_clip(checkpoint({**twin.state_dict(), "visual.conv1.weight": turned}))
        assert clip.vision_model.embeddings.patch_embedding.weight.is_contiguous()
        assert close(image_vectors(clip, pictures(twin)), image_vectors(twin, pictures(twin)))


class TestAsAModel:
    @pytest.fixture(params=["pt", "safetensors"])
    def file(self, request, tmp_path):
        file, state = tmp_path / f"longclip.{request.param}", small_b16().state_dict()
        save_file(state, file) if request.param == "safetensors" else torch.save(state, file)
        return file

    def test_it_is_whole_and_can_be_trained(self, file):
        clip, _ = build_clip(read_checkpoint(file))
        assert not clip.training
        for tensor in [*clip.parameters(), *clip.buffers()]:
            assert tensor.device.type == "cpu"
            assert tensor.is_contiguous()
            assert tensor.is_leaf
        assert all(weight.requires_grad for weight in clip.parameters())
        fresh = type(clip)(clip.config)
        assert {name: value.shape for name, value in clip.state_dict().items()} == {
            name: value.shape for name, value in fresh.state_dict().items()
        }
        for (name, buffer), (other, expected) in zip(clip.named_buffers(), fresh.named_buffers(), strict=True):
            assert name == other
            assert torch.equal(buffer, expected)

    def test_training_changes_every_weight_and_never_the_file(self, file):
        before = hashlib.sha256(file.read_bytes()).digest()
        clip, _ = build_clip(read_checkpoint(file))
        old = {name: weight.detach().clone() for name, weight in clip.named_parameters()}
        twin = small_b16()
        optimizer = torch.optim.AdamW(clip.parameters(), lr=1e-2)
        clip(input_ids=captions(twin)[:3], pixel_values=pictures(twin), return_loss=True).loss.backward()
        optimizer.step()
        assert [name for name, weight in clip.named_parameters() if torch.equal(weight, old[name])] == []
        assert hashlib.sha256(file.read_bytes()).digest() == before
        again, _ = build_clip(read_checkpoint(file))
        assert all(torch.equal(weight, old[name]) for name, weight in again.named_parameters())

    def test_weights_do_not_share_memory(self, file):
        """Query, key and value lie in one packed tensor, side by side."""
        clip, _ = build_clip(read_checkpoint(file))
        spans = sorted((w.data_ptr(), w.data_ptr() + w.nbytes) for w in clip.parameters())
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))

    def test_transformers_saves_and_opens_it(self, file, tmp_path):
        from transformers import CLIPModel

        clip, _ = build_clip(read_checkpoint(file))
        clip.save_pretrained(tmp_path / "saved")
        reopened = CLIPModel.from_pretrained(tmp_path / "saved")
        assert all(torch.equal(a, b) for a, b in zip(reopened.parameters(), clip.parameters(), strict=True))
        ids = captions(small_b16())
        torch.testing.assert_close(text_vectors(reopened, ids), text_vectors(clip, ids))
        assert (tmp_path / "saved" / "model.safetensors").stat().st_size < 1.01 * file.stat().st_size


BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "open_checkpoint.py"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="forgets the peak of memory as Linux allows")
def test_opening_takes_less_memory_than_a_copy(tmp_path):
    """Long-CLIP-L's widths with few layers, beside the usual way, which holds the weights twice; in processes of their
    own, because this one has freed memory that a copy could hide in."""
    file = load_file(BENCHMARK).write(tmp_path, 100)[0]
    assert file.stat().st_size > 90e6
    ours, usual = (
        fresh_result(BENCHMARK, "open_and_use", way=way, file=str(file), megabytes=100) for way in ("hnclip", "usual")
    )
    assert ours["open_memory"] < 0.4
    assert ours["use_memory"] < 1.2
    assert usual["use_memory"] > 1.5


ACTIVATIONS = {
    "long": (True, {}, "QuickGELU"),
    "bare": (False, {}, "QuickGELU assumed"),
    "archive": (False, {"kind": "torchscript"}, "QuickGELU assumed"),
    "run": (
        False,
        {"about": {"epoch": 3, "name": "2025-model_ViT-B-32-quickgelu-lr_1"}},
        "QuickGELU by the name of its run",
    ),
    "from-openai": (False, {"about": {"epoch": 3, "name": "finetune-OpenAI"}}, "QuickGELU by the name of its run"),
    "other-trainer": (False, {"about": {"epoch": 3}}, "QuickGELU assumed"),
}


@pytest.mark.parametrize("case", ACTIVATIONS)
def test_the_activation_where_the_file_says_it(case):
    long, options, expected = ACTIVATIONS[case]
    clip, line = build_clip(checkpoint(small_b16(long=long).state_dict(), **options))
    assert f", {expected}, fp32" in line
    assert clip.config.text_config.hidden_act == clip.config.vision_config.hidden_act == "quick_gelu"


@pytest.mark.parametrize(
    "options",
    [
        {"about": {"epoch": 3, "name": "2025-model_ViT-B-32-lr_1"}},
        {"file": Path("some/open_clip_pytorch_model.bin")},
        {"file": Path("some/open_clip_model.safetensors"), "kind": "safetensors"},
    ],
    ids=["trainer", "bin", "safetensors"],
)
def test_an_activation_that_nothing_says_must_be_given(options):
    twin = small_b16(long=False, activation=nn.GELU)
    found = checkpoint(twin.state_dict(), **options)
    with pytest.raises(ValueError, match=r"pass activation gelu .* or quick_gelu"):
        build_clip(found)
    clip, line = build_clip(found, activation="gelu")
    assert ", GELU," in line
    assert close(text_vectors(clip, captions(twin)), text_vectors(twin, captions(twin)))
    assert close(image_vectors(clip, pictures(twin)), image_vectors(twin, pictures(twin)))
    quick = build_clip(found, activation="quick_gelu")[0]
    assert not close(text_vectors(quick, captions(twin)), text_vectors(twin, captions(twin)), 1e-3)


def test_an_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="activation must be quick_gelu or gelu, got 'relu'"):
        build_clip(checkpoint(small_b16().state_dict()), activation="relu")


class TestOpenClipConfig:
    """An open_clip_config.json beside the weights."""

    SETTINGS = {  # noqa: RUF012
        "embed_dim": 64,
        "vision_cfg": {"image_size": 64, "layers": 2, "width": 128, "patch_size": 16, "head_width": 32},
        "text_cfg": {"context_length": 77, "vocab_size": 600, "width": 128, "heads": 2, "layers": 2},
    }

    @pytest.fixture
    def twin(self):
        return small_b16(long=False, context=77, activation=nn.GELU, vision_heads=4)

    def beside(self, directory, twin, **changes):
        """Weights and settings in one directory; changes by a dotted name."""
        settings = json.loads(json.dumps(self.SETTINGS))
        for name, value in changes.items():
            part, _, key = name.rpartition("__")
            (settings[part] if part else settings)[key] = value
        (directory / "open_clip_config.json").write_text(json.dumps({"model_cfg": settings, "preprocess_cfg": {}}))
        save_file(twin.state_dict(), directory / "open_clip_model.safetensors")
        return read_checkpoint(directory / "open_clip_model.safetensors")

    def test_it_decides_heads_and_activation(self, tmp_path, twin):
        clip, line = build_clip(self.beside(tmp_path, twin))
        assert clip.config.vision_config.num_attention_heads == 4
        assert close(text_vectors(clip, captions(twin)), text_vectors(twin, captions(twin)))
        assert close(image_vectors(clip, pictures(twin)), image_vectors(twin, pictures(twin)))
        assert line == "open_clip ViT-2×128/16 in OpenAI's layout, 77 tokens, 64 px, GELU, fp32"

    def test_open_clips_own_default_for_heads(self, tmp_path, twin):
        settings = {**self.SETTINGS, "text_cfg": {"width": 128}}
        clip, _ = build_clip(self.beside(tmp_path, twin, **settings))
        assert clip.config.text_config.num_attention_heads == 8

    def test_its_flag_for_quick_gelu(self, tmp_path):
        twin = small_b16(long=False, context=77)
        clip, line = build_clip(self.beside(tmp_path, twin, quick_gelu=True, vision_cfg__head_width=64))
        assert close(image_vectors(clip, pictures(twin)), image_vectors(twin, pictures(twin)))
        assert "QuickGELU," in line

    def test_the_epsilon_of_norms(self, tmp_path, twin):
        clip, _ = build_clip(self.beside(tmp_path, twin, text_cfg__norm_kwargs={"eps": 1e-3}))
        assert clip.text_model.final_layer_norm.eps == 1e-3
        assert clip.vision_model.post_layernorm.eps == 1e-5
        twin.ln_final.eps = 1e-3
        for block in twin.transformer.resblocks:
            block.ln_1.eps = block.ln_2.eps = 1e-3
        assert close(text_vectors(clip, captions(twin)), text_vectors(twin, captions(twin)))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"text_cfg__layers": 12}, r"says text_cfg\.layers 12, but .*open_clip_model\.safetensors has 2"),
            ({"vision_cfg__image_size": [224, 224]}, r"says vision_cfg\.image_size \[224, 224\]"),
            ({"embed_dim": 512}, "says embed_dim 512"),
            ({"text_cfg__pool_type": "last"}, r"says text_cfg\.pool_type 'last', unlike OpenAI's CLIP"),
            ({"text_cfg__no_causal_mask": True}, r"says text_cfg\.no_causal_mask True"),
            ({"vision_cfg__pool_type": "avg"}, r"says vision_cfg\.pool_type 'avg'"),
            ({"text_cfg__act_kwargs": {"approximate": "tanh"}}, r"says text_cfg\.act_kwargs"),
            ({"text_cfg__heads": 3}, "is 128 wide, which 3 heads cannot share"),
            ({"vision_cfg__head_width": 80}, r"visual\.conv1\.weight is 128 wide, no multiple of heads 80 wide"),
            ({"text_cfg": None}, "has no model_cfg with a vision_cfg and a text_cfg"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, tmp_path, twin, changes, message):
        with pytest.raises(ValueError, match=message):
            build_clip(self.beside(tmp_path, twin, **changes))

    def test_image_sizes_may_be_a_pair(self, tmp_path, twin):
        assert build_clip(self.beside(tmp_path, twin, vision_cfg__image_size=[64, 64]))

    @pytest.mark.parametrize("text", ["{", "[]", "{}"])
    def test_a_broken_one_is_refused(self, tmp_path, twin, text):
        found = self.beside(tmp_path, twin)
        (tmp_path / "open_clip_config.json").write_text(text)
        with pytest.raises(ValueError, match=r"open_clip_config\.json"):
            build_clip(found)


def without(*names):
    return lambda state: {name: value for name, value in state.items() if name not in names}


def with_shape(name, *shape):
    return lambda state: {**state, name: torch.zeros(shape)}


DAMAGED = {
    "missing-norm": (
        without("ln_final.bias"),
        r"lacks the tensor ln_final\.bias of shape \[width\] = \[128\], where width is 128 by token_embedding\.weight",
    ),
    "missing-projection": (
        without("text_projection"),
        r"lacks the tensor text_projection of shape \[width, joint width\]",
    ),
    "missing-scale": (without("logit_scale"), r"lacks the tensor logit_scale of shape \[\]$"),
    "missing-words": (without("token_embedding.weight"), r"lacks the tensor token_embedding\.weight"),
    "missing-layer": (
        lambda state: {name: value for name, value in state.items() if "visual.transformer.resblocks.1." not in name},
        r"lacks the tensor visual\.transformer\.resblocks\.1\.ln_1\.weight",
    ),
    "packed": (
        with_shape("transformer.resblocks.0.attn.in_proj_weight", 384, 64),
        r"weights\.pt: transformer\.resblocks\.0\.attn\.in_proj_weight has shape \[384, 64\], expected "
        r"\[3·width, width\] = \[384, 128\], because 3·width is 384 by token_embedding\.weight; width is 128 by "
        r"token_embedding\.weight",
    ),
    "proj": (
        with_shape("visual.proj", 192, 99),
        r"visual\.proj has shape \[192, 99\], expected \[width, joint width\] = \[192, 128\], because width is 192 by "
        r"visual\.conv1\.weight; joint width is 128 by text_projection",
    ),
    "hidden": (
        with_shape("visual.transformer.resblocks.2.mlp.c_fc.bias", 100),
        r"has shape \[100\], expected \[hidden\] = \[768\], because hidden is 768 by visual\.transformer\.resblocks\.0",
    ),
    "residual": (with_shape("positional_embedding_res", 77, 128), r"positional_embedding_res has shape \[77, 128\]"),
    "short-residual": (with_shape("positional_embedding", 20, 128), "has 20 rows, too few for Long-CLIP's 20"),
    "grid": (with_shape("visual.positional_embedding", 16, 192), "has 16 rows, not a square number and 1"),
    "patches": (with_shape("visual.conv1.weight", 192, 3, 14, 16), "3 colours in patches of 14×16"),
    "colours": (with_shape("visual.conv1.weight", 192, 4, 14, 14), "4 colours"),
    "flat": (with_shape("token_embedding.weight", 600), r"has shape \[600\], expected \[vocabulary, width\]"),
    "scale": (with_shape("logit_scale", 2), r"logit_scale has shape \[2\]"),
    "integers": (
        lambda state: {**state, "visual.proj": torch.zeros(192, 128, dtype=torch.int8)},
        r"visual\.proj holds torch\.int8, expected one of fp64, fp32, fp16, bf16",
    ),
    "unknown": (
        lambda state: {**state, "transformer.resblocks.0.ls_1.gamma": torch.zeros(128), "zeta": torch.zeros(1)},
        r"has 2 tensors that no CLIP of OpenAI's design has, first transformer\.resblocks\.0\.ls_1\.gamma of shape",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_tensors_that_do_not_fit_are_named_as_in_the_file(case):
    damage, message = DAMAGED[case]
    with pytest.raises(ValueError, match=message) as caught:
        build_clip(checkpoint(damage(small_l14().state_dict())))
    assert "some/weights.pt" in str(caught.value)


@pytest.mark.parametrize("width", [100, 160, 200])
def test_a_tower_that_is_no_multiple_of_a_head(width):
    with pytest.raises(ValueError, match=rf"token_embedding\.weight is {width} wide, no multiple of heads 64 wide"):
        build_clip(checkpoint({**small_l14().state_dict(), "token_embedding.weight": torch.zeros(600, width)}))


def test_heads_of_an_image_tower_wider_than_openais_are_not_guessed():
    """ViT-H has 16 heads of 80, not 20 of 64, and no shape tells."""
    twin = small_b16(long=False, vision_width=1280, vision_layers=1, vision_heads=16, seed=None)
    with pytest.raises(ValueError, match=r"image tower 1280 wide; its heads cannot be told .* open_clip_config\.json"):
        build_clip(checkpoint(twin.state_dict()))


OTHERS = {
    "resnet": ("visual.layer1.0.conv1.weight", "a CLIP with a ResNet image tower"),
    "timm": ("visual.trunk.blocks.0.norm1.weight", "an image tower of timm"),
    "eva": ("visual.blocks.0.norm1.weight", "an EVA-CLIP model"),
    "huggingface-text": ("text.transformer.embeddings.word_embeddings.weight", "a text tower of transformers"),
    "coca": ("text_decoder.resblocks.0.ln_1.weight", "a CoCa model"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_models_are_called_by_their_name(case):
    name, message = OTHERS[case]
    tensors = {"visual.proj": torch.zeros(1), name: torch.zeros(1)}
    assert is_openai_layout(tensors)
    with pytest.raises(ValueError, match=rf"{message} \(it has {re.escape(name)}\); supported are CLIP and Long-CLIP"):
        build_clip(checkpoint(tensors))


def test_the_layout_is_recognised():
    assert is_openai_layout(small_b16().state_dict())
    hugging_face = build(small_b16()).state_dict()
    assert not is_openai_layout(hugging_face)
    with pytest.raises(
        ValueError, match=r"not in OpenAI's layout: nothing is named visual\.…, the first is logit_scale"
    ):
        build_clip(checkpoint(hugging_face))
