"""Packed captions against padded ones: same embeddings, same gradients, no work for pads."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import CLIPConfig, CLIPModel

from hnclip.core import Batch, TextBatch
from hnclip.data.batching import pad_texts
from hnclip.models.families import Clip
from hnclip.models.load import load
from hnclip.models.packing import NAME, is_worth_packing, use_packed_attention
from live_memory import LiveMemory
from small_families import spread

END = 40


def packed(model, texts, request="tokens"):
    """Vectors and tokens of a packed batch."""
    assert use_packed_attention(model.text_model)
    return Clip().packed_text_features(model, texts, request=request)


def padded(model, texts):
    """What transformers computes for the padded batch."""
    output = model.get_text_features(input_ids=texts.ids)
    return output.pooler_output, model.text_projection(output.last_hidden_state)


def small_clip(eos=END, dropout=0.0):
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**tower, "vocab_size": END + 1, "max_position_embeddings": 30, "eos_token_id": eos}
    config = CLIPConfig(
        projection_dim=24,
        text_config={**text, "bos_token_id": 0, "pad_token_id": 1, "attention_dropout": dropout},
        vision_config={**tower, "image_size": 16, "patch_size": 8},
    )
    torch.manual_seed(0)
    return spread(CLIPModel(config)).double()


def texts_of(lengths):
    ids = torch.randint(2, END, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(0))
    for row, length in enumerate(lengths):
        ids[row, length - 1] = END
        ids[row, length:] = 1
    return TextBatch(ids, torch.tensor(lengths))


def gradients(model, vectors, words, mask):
    """Of a loss that weights every number that counts differently."""
    model.zero_grad()
    parts = torch.cat([F.normalize(vectors, dim=-1).flatten(), F.normalize(words, dim=-1)[mask].flatten()])
    (parts * torch.randn(parts.shape, generator=torch.Generator().manual_seed(9)).double()).sum().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@settings(max_examples=12)
@given(lengths=st.lists(st.integers(2, 30), min_size=1, max_size=6), eos=st.sampled_from([END, 2]), early=st.booleans())
def test_embeddings_and_every_gradient_are_those_of_the_padded_batch(lengths, eos, early):
    model, texts = small_clip(eos), texts_of(lengths)
    if early:  # an end token in the middle of a caption is where transformers pools
        texts.ids[0, lengths[0] // 2] = END
    vectors, words = padded(model, texts)
    mask = torch.arange(max(lengths))[None] < texts.lengths[:, None]  # [B, T]
    expected = gradients(model, vectors, words, mask)
    found, found_words = packed(model, texts)
    torch.testing.assert_close(found, vectors, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found_words[mask], words[mask], rtol=1e-10, atol=1e-10)
    assert not found_words[~mask].any()
    got = gradients(model, found, found_words, mask)
    assert got.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-8, atol=1e-9, msg=name)


def test_layers_compute_tokens_and_no_pads_and_dropout_acts():
    assert not is_worth_packing(texts_of([20, 20, 20, 19]))
    model, texts = small_clip(dropout=0.5), texts_of([20, 3, 3, 5])
    rows = []
    for module in model.text_model.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.register_forward_hook(lambda module, given, output: rows.append(given[0].flatten(0, -2).shape[0]))
    Clip().text_features(model, texts, None, request="tokens")
    assert set(rows) == {31}
    assert len(rows) == 2 * 8 + 1  # six linear layers and two norms of every block, and the last norm
    for training in (True, False):
        model.train(training)
        first, second = (packed(model, texts, "global")[0] for _ in range(2))
        assert torch.equal(first, second) is not training


def test_a_tower_with_another_attention_is_not_packed():
    """Also if the user chooses it after a packed batch."""
    model, texts = small_clip(), texts_of([20, 3, 3, 5])
    expected = padded(model, texts)[0]
    for packs, implementation in ((False, "eager"), (True, "sdpa"), (False, "eager")):
        model.set_attn_implementation(implementation)
        assert use_packed_attention(model.text_model) is packs
        torch.testing.assert_close(Clip().text_features(model, texts, None, request="global")[0], expected)
        assert model.text_model.encoder.layers[0].self_attn.config._attn_implementation == (NAME if packs else "eager")


def test_packing_changes_neither_configuration_nor_results_of_the_model(tmp_path):
    model, texts = small_clip(), texts_of([20, 3, 3, 5])
    expected, before = padded(model, texts), copy.deepcopy((model.config, model.text_model.config))
    Clip().text_features(model, texts, None, request="tokens")
    for config, old in zip((model.config, model.text_model.config), before):
        assert config.to_dict() == old.to_dict()
        assert config._attn_implementation == old._attn_implementation == "sdpa"
    assert model.text_model.config is model.config.text_config
    assert all(torch.equal(found, right) for found, right in zip(padded(model, texts), expected))
    model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()


def batch_of(model, lengths):
    """Black images, and token ids of the given lengths by view."""
    end, pad = model.tokenizer.eos_token_id, model.text_transform.pad
    texts = {name: pad_texts([[*range(5, 5 + n), end] for n in view], pad) for name, view in lengths.items()}
    pixels = torch.zeros(3, 3, model.image_size, model.image_size, dtype=torch.uint8)
    return Batch({"full": pixels}, texts, torch.arange(6).view(3, 2))


@pytest.mark.parametrize("lengths", [{"caption": [40, 3, 5]}, {"caption": [40, 3, 5], "short": [9, 2, 4]}])
def test_encoding_a_moved_batch_does_not_wait_for_the_device(model_directory, lengths):
    """No operation reads a number back, as nonzero() and item() do."""
    model = load(model_directory)
    batch = batch_of(model, lengths).to(model.device)
    with LiveMemory() as memory:
        found = model(batch, tokens=True)
    assert memory.calls.total() > 50
    assert not [name for name in memory.calls if "nonzero" in name or "_local_scalar_dense" in name]
    for name in lengths:
        alone = model.encode_texts(batch.texts[name], tokens=True)
        mask = alone.mask
        torch.testing.assert_close(found.texts[name].vectors, alone.vectors)
        torch.testing.assert_close(found.texts[name].tokens[:, : mask.shape[1]][mask], alone.tokens[mask])


@torch.no_grad()
def test_vectors_are_normalised_in_float32_under_autocast(model_directory):
    model = load(model_directory)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(batch_of(model, {"caption": [40, 40, 40]}), tokens=True)
    for view in (found.images["full"], found.texts["caption"]):
        for part in (view.vectors, view.tokens):
            assert part.dtype == torch.float32
            torch.testing.assert_close(part.norm(dim=-1), torch.ones(part.shape[:-1]), rtol=0, atol=1e-6)
