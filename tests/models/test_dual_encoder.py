from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hnclip.data.batches import Batch, TextBatch, pad_texts
from hnclip.data.images import OPENAI_MEAN, OPENAI_STD
from hnclip.data.texts import TextTransform

LENGTHS = (3, 7, 40, 77)  # tokens with start and end


@pytest.fixture
def pixels(model):
    shape = (4, 3, model.image_size, model.image_size)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def texts(model, captions):
    """Captions of several lengths, the last filling the context."""
    long = " ".join(captions[:2])
    return pad_texts(
        [TextTransform(model.tokenizer, length)([long]).ids[0] for length in LENGTHS], model.tokenizer.pad_token_id
    )


def normalised(pixels):
    """Pixel values as a processor of Hugging Face gives them."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (OPENAI_MEAN, OPENAI_STD))
    return (pixels.float() / 255 - mean) / std


@torch.no_grad()
def test_vectors_equal_the_backbones_own(model, pixels, texts):
    expected = model.backbone(input_ids=texts.ids, pixel_values=normalised(pixels))
    torch.testing.assert_close(model.encode_images(pixels).vectors, expected.image_embeds, rtol=0, atol=1e-6)
    torch.testing.assert_close(model.encode_texts(texts).vectors, expected.text_embeds, rtol=0, atol=1e-6)
    assert (expected.text_embeds @ expected.text_embeds.T).triu(1).max() < 0.99  # they could have been told apart


@torch.no_grad()
def test_an_attention_mask_would_change_nothing(model, texts):
    position = torch.arange(texts.ids.shape[1])
    mask = (position < texts.lengths[:, None]).long()  # [B, T]
    masked = model.backbone.get_text_features(input_ids=texts.ids, attention_mask=mask).pooler_output
    torch.testing.assert_close(model.encode_texts(texts).vectors, F.normalize(masked, dim=-1), rtol=0, atol=1e-5)


@torch.no_grad()
def test_pads_change_neither_vectors_nor_counted_tokens(model, texts):
    together = model.encode_texts(texts, tokens=True)
    for i, length in enumerate(LENGTHS):
        alone = model.encode_texts(texts[i : i + 1], tokens=True)
        assert alone.tokens.shape[1] == length
        torch.testing.assert_close(alone.vectors[0], together.vectors[i], rtol=0, atol=1e-5)
        torch.testing.assert_close(
            alone.tokens[0, 1 : length - 1], together.tokens[i][together.mask[i]], rtol=0, atol=1e-5
        )


@torch.no_grad()
def test_the_pad_id_does_not_matter(model, texts):
    position = torch.arange(texts.ids.shape[1])
    other = torch.where(position < texts.lengths[:, None], texts.ids, 0)
    assert not torch.equal(other, texts.ids)
    same = model.encode_texts(TextBatch(other, texts.lengths))
    torch.testing.assert_close(same.vectors, model.encode_texts(texts).vectors, rtol=0, atol=1e-6)


@torch.no_grad()
def test_patch_vectors_pass_the_final_norm_and_the_projection(model, pixels):
    found = model.encode_images(pixels, tokens=True)
    hidden = model.backbone.vision_model(pixel_values=normalised(pixels)).last_hidden_state[:, 1:]
    expected = model.backbone.visual_projection(model.backbone.vision_model.post_layernorm(hidden))
    patches = (model.image_size // model.backbone.config.vision_config.patch_size) ** 2
    assert found.tokens.shape == (4, patches, model.backbone.config.projection_dim)
    torch.testing.assert_close(found.tokens, F.normalize(expected, dim=-1), rtol=0, atol=1e-5)
    torch.testing.assert_close(found.tokens.norm(dim=-1), torch.ones(4, patches))
    assert found.mask.shape == (4, patches)
    assert found.mask.all()
    torch.testing.assert_close(found.vectors, model.encode_images(pixels).vectors, rtol=0, atol=1e-6)


@torch.no_grad()
def test_word_vectors_pass_the_projection(model, texts):
    found = model.encode_texts(texts, tokens=True)
    hidden = model.backbone.text_model(input_ids=texts.ids).last_hidden_state
    expected = F.normalize(model.backbone.text_projection(hidden), dim=-1)
    assert found.tokens.shape == expected.shape
    torch.testing.assert_close(found.tokens[found.mask], expected[found.mask], rtol=0, atol=1e-5)
    torch.testing.assert_close(found.tokens[found.mask].norm(dim=-1), torch.ones(int(found.mask.sum())))


@torch.no_grad()
def test_the_word_mask_leaves_out_start_end_and_pads(model, texts):
    mask = model.encode_texts(texts, tokens=True).mask
    special = {model.tokenizer.bos_token_id, model.tokenizer.eos_token_id}
    for row, counted, length in zip(texts.ids, mask, LENGTHS):
        assert counted.nonzero().flatten().tolist() == list(range(1, length - 1))
        assert special.isdisjoint(row[counted].tolist())


@pytest.mark.parametrize("tokens", [False, True])
@torch.no_grad()
def test_views_in_one_call_equal_separate_calls(model, pixels, texts, tokens):
    short = texts[:2]
    crops = pixels.flip(0)[:3]
    batch = Batch(
        {"full": pixels, "crop": crops},
        {"short": short, "caption": texts},
        ids=torch.zeros(4, 2, dtype=torch.long),
        margin_text=torch.ones(4, 3),
    )
    found = model(batch, tokens=tokens)
    assert found.ids is batch.ids
    assert found.margin_text is batch.margin_text
    assert torch.equal(found.scale, model.scale)
    expected = {
        "full": (found.images["full"], model.encode_images(pixels, tokens=tokens)),
        "crop": (found.images["crop"], model.encode_images(crops, tokens=tokens)),
        "caption": (found.texts["caption"], model.encode_texts(texts, tokens=tokens)),
        "short": (found.texts["short"], model.encode_texts(short, tokens=tokens)),
    }
    for together, alone in expected.values():
        torch.testing.assert_close(together.vectors, alone.vectors, rtol=0, atol=1e-5)
        assert (together.tokens is None) == (alone.tokens is None) == (not tokens)
        if tokens:
            width = alone.tokens.shape[1]  # a short view is padded to the width of the longest
            assert torch.equal(together.mask[:, :width], alone.mask)
            assert not together.mask[:, width:].any()
            torch.testing.assert_close(together.tokens[:, :width], alone.tokens, rtol=0, atol=1e-5)


def test_one_view_keeps_its_name(model, pixels, texts):
    found = model(Batch({"full": pixels}, {"caption": texts}, ids=torch.zeros(4, 2, dtype=torch.long)))
    assert list(found.images) == ["full"]
    assert list(found.texts) == ["caption"]
    assert torch.equal(found.texts["caption"].vectors, model.encode_texts(texts).vectors)


def test_the_scale_is_exponentiated_and_learns(model):
    scale = model.scale
    torch.testing.assert_close(scale, model.backbone.logit_scale.detach().exp())
    scale.backward()
    torch.testing.assert_close(model.backbone.logit_scale.grad, scale.detach())  # d exp(x) = exp(x)


def test_gradients_reach_both_towers(model, pixels, texts):
    image = model.encode_images(pixels).vectors
    text = model.encode_texts(texts).vectors
    (image * text).sum().mul(model.scale).backward()
    assert [name for name, weight in model.backbone.named_parameters() if weight.grad is None] == []


def test_a_longer_text_than_the_context_is_refused(model):
    texts = TextBatch(torch.zeros(1, 78, dtype=torch.long), torch.tensor([78]))
    with pytest.raises(ValueError, match="texts have 78 tokens, the model takes at most 77"):
        model.encode_texts(texts)


def test_the_wrapper_adds_no_parameters_and_no_saved_buffers(model):
    assert set(model.state_dict()) == {f"backbone.{name}" for name in model.backbone.state_dict()}


def test_the_architecture_is_small_enough_to_ship(model):
    assert model.context == 77
    assert sum(weight.numel() for weight in model.parameters()) < 3_000_000
