"""Packed captions against padded ones: same embeddings, same gradients, no work for pads."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import CLIPConfig, CLIPModel

from hnclip.core import TextBatch
from hnclip.models.families import Clip
from hnclip.models.packing import use_packed_attention
from small_families import spread

END = 40


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
    assert use_packed_attention(model.text_model)
    found, found_words = Clip().packed_text_features(model, texts, request="tokens")
    torch.testing.assert_close(found, vectors, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found_words[mask], words[mask], rtol=1e-10, atol=1e-10)
    assert not found_words[~mask].any()
    got = gradients(model, found, found_words, mask)
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-9)


def test_layers_compute_tokens_and_no_pads_and_dropout_acts():
    model, texts = small_clip(dropout=0.5), texts_of([20, 3, 3, 5])
    rows = set()
    for module in model.text_model.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.register_forward_hook(lambda module, given, output: rows.add(given[0].flatten(0, -2).shape[0]))
    for training in (True, False):
        model.train(training)
        first, second = (Clip().text_features(model, texts, None, request="tokens")[0] for _ in range(2))
        assert torch.equal(first, second) is not training
    assert rows == {31}


def test_packing_changes_neither_the_configuration_nor_the_attention_that_the_user_chooses():
    """Also if the user chooses another after a packed batch, which is then not packed."""
    model, texts = small_clip(), texts_of([20, 3, 3, 5])
    expected = padded(model, texts)
    before = copy.deepcopy(model.config.to_dict())
    for packs, implementation in ((True, "sdpa"), (False, "eager"), (True, "sdpa")):
        model.set_attn_implementation(implementation)
        assert use_packed_attention(model.text_model) is packs
        found = Clip().text_features(model, texts, None, request="global")[0]
        torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-6)
        assert model.config._attn_implementation == model.text_model.config._attn_implementation == implementation
    assert model.config.to_dict() == before
    assert all(torch.equal(found, right) for found, right in zip(padded(model, texts), expected))
