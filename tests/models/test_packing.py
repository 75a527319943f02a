"""Packed captions against padded ones: same embeddings, same gradients, no work for pads."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CLIPConfig, CLIPModel

from hnclip.core import Batch, TextBatch
from hnclip.data.batching import pad_texts
from hnclip.models.families import Clip
from hnclip.models.load import load
from hnclip.models.packing import NAME, is_worth_packing, use_packed_attention

END = 40


def packed_features(model, texts, request):
    assert use_packed_attention(model.text_model)
    return Clip().packed_text_features(model, texts, request=request)


def small_clip(eos: int = END, dropout: float = 0.0) -> CLIPModel:
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**tower, "vocab_size": END + 1, "max_position_embeddings": 30, "eos_token_id": eos}
    config = CLIPConfig(
        projection_dim=24,
        text_config={**text, "bos_token_id": 0, "pad_token_id": 1, "attention_dropout": dropout},
        vision_config={**tower, "image_size": 16, "patch_size": 8},
    )
    torch.manual_seed(0)
    model = CLIPModel(config)
    for weight in model.parameters():  # large enough that captions differ
        if weight.ndim > 1:
            nn.init.normal_(weight, std=0.3)
    return model.double()


def texts_of(lengths: list[int], pad: int = 1) -> TextBatch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, END, (len(lengths), max(lengths)), generator=generator)
    for row, length in enumerate(lengths):
        ids[row, length - 1] = END
        ids[row, length:] = pad
    return TextBatch(ids, torch.tensor(lengths))


def padded_features(model: CLIPModel, texts: TextBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """What transformers computes for the padded batch."""
    output = model.get_text_features(input_ids=texts.ids)
    return output.pooler_output, model.text_projection(output.last_hidden_state)


def is_token(texts: TextBatch) -> torch.Tensor:
    return torch.arange(texts.ids.shape[1])[None] < texts.lengths[:, None]  # [B, T]


def gradients(model: nn.Module, vectors: torch.Tensor, words: torch.Tensor, mask: torch.Tensor) -> dict:
    """Of a loss that weighs every number that counts differently."""
    model.zero_grad()
    parts = [F.normalize(vectors, dim=-1).flatten(), F.normalize(words, dim=-1)[mask].flatten()]
    generator = torch.Generator().manual_seed(9)
    sum((part * torch.randn(part.shape, generator=generator).to(part)).sum() for part in parts).backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@settings(max_examples=12)
@given(lengths=st.lists(st.integers(2, 30), min_size=1, max_size=6), eos=st.sampled_from([END, 2]))
def test_embeddings_and_every_gradient_are_those_of_the_padded_batch(lengths, eos):
    model, texts = small_clip(eos), texts_of(lengths)
    vectors, words = padded_features(model, texts)
    mask = is_token(texts)
    expected = gradients(model, vectors, words, mask)
    packed, packed_words = packed_features(model, texts, "tokens")
    torch.testing.assert_close(packed, vectors, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(packed_words[mask], words[mask], rtol=1e-10, atol=1e-10)
    assert not packed_words[~mask].any()
    found = gradients(model, packed, packed_words, mask)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-8, atol=1e-9, msg=name)


def test_an_end_token_in_the_middle_of_a_caption_is_where_transformers_pools():
    model, texts = small_clip(), texts_of([12, 5, 8])
    texts.ids[0, 3] = END
    expected = padded_features(model, texts)[0]
    torch.testing.assert_close(packed_features(model, texts, "global")[0], expected)


def test_layers_compute_tokens_and_no_pads():
    assert not is_worth_packing(texts_of([20, 20, 20, 19]))
    model, texts = small_clip(), texts_of([20, 3, 3, 5])
    rows = []
    for module in model.text_model.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.register_forward_hook(lambda module, given, output: rows.append(given[0].flatten(0, -2).shape[0]))
    Clip().text_features(model, texts, None, request="tokens")
    assert set(rows) == {31}
    assert len(rows) == 2 * 8 + 1  # six linear layers and two norms of every block, and the last norm


def test_a_tower_with_another_attention_is_not_packed():
    """Also if the user chooses it after a packed batch."""
    model, texts = small_clip(), texts_of([20, 3, 3, 5])
    expected = padded_features(model, texts)[0]
    for packs, implementation in ((False, "eager"), (True, "sdpa"), (False, "eager")):
        model.set_attn_implementation(implementation)
        assert use_packed_attention(model.text_model) is packs
        torch.testing.assert_close(Clip().text_features(model, texts, None, request="global")[0], expected)
        assert model.text_model.encoder.layers[0].self_attn.config._attn_implementation == (NAME if packs else "eager")


def test_packing_changes_neither_configuration_nor_results_of_the_model(tmp_path):
    model, texts = small_clip(), texts_of([20, 3, 3, 5])
    mask = is_token(texts).long()
    expected = padded_features(model, texts)
    masked = model.get_text_features(input_ids=texts.ids, attention_mask=mask).pooler_output
    before = copy.deepcopy((model.config, model.text_model.config))
    Clip().text_features(model, texts, None, request="tokens")
    for config, old in zip((model.config, model.text_model.config), before):
        assert config.to_dict() == old.to_dict()
        assert config._attn_implementation == old._attn_implementation == "sdpa"
    assert model.text_model.config is model.config.text_config
    for found, right in zip(padded_features(model, texts), expected):
        assert torch.equal(found, right)
    assert torch.equal(model.get_text_features(input_ids=texts.ids, attention_mask=mask).pooler_output, masked)
    model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()
    torch.testing.assert_close(padded_features(CLIPModel.from_pretrained(tmp_path).double(), texts)[0], expected[0])


def test_dropout_of_attention_acts():
    model, texts = small_clip(dropout=0.5), texts_of([20, 3, 3, 5])
    for training in (True, False):
        model.train(training)
        first, second = (packed_features(model, texts, "global")[0] for _ in range(2))
        assert torch.equal(first, second) is not training


class Operations(TorchDispatchMode):
    """The names of everything that is computed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.append(str(function))
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("views", [("caption",), ("caption", "short")])
def test_encoding_a_moved_batch_asks_the_device_for_no_number(model_directory, views):
    model = load(str(model_directory))
    end = model.tokenizer.eos_token_id
    texts = {
        name: pad_texts([[*range(5, 5 + length), end] for length in lengths], model.text_transform.pad)
        for name, lengths in zip(views, ([40, 3, 5], [9, 2, 4]))
    }
    pixels = torch.zeros(3, 3, model.image_size, model.image_size, dtype=torch.uint8)
    batch = Batch({"full": pixels}, texts, torch.arange(6).view(3, 2)).to(model.device)
    with Operations() as seen:
        found = model(batch, tokens=True)
    assert len(seen.names) > 50
    assert not [name for name in seen.names if "nonzero" in name or "_local_scalar_dense" in name]
    for name in views:
        alone = model.encode_texts(texts[name], tokens=True)
        mask = alone.mask
        torch.testing.assert_close(found.texts[name].vectors, alone.vectors)
        torch.testing.assert_close(found.texts[name].tokens[:, : mask.shape[1]][mask], alone.tokens[mask])


def test_vectors_have_length_one_under_autocast(model_directory):
    model = load(str(model_directory))
    texts = pad_texts([[*range(5, 45), model.tokenizer.eos_token_id]] * 3, model.text_transform.pad)
    pixels = torch.zeros(3, 3, model.image_size, model.image_size, dtype=torch.uint8)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for view in (model.encode_texts(texts, tokens=True), model.encode_images(pixels, tokens=True)):
            for part in (view.vectors, view.tokens):
                assert part.dtype == torch.float32
                torch.testing.assert_close(part.norm(dim=-1), torch.ones(part.shape[:-1]), rtol=0, atol=1e-6)
