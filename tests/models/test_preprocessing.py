"""Image processors against transformers; token ids against OpenAI's tokenizer, as open_clip contains it."""

from __future__ import annotations

import json
from importlib.util import module_from_spec, spec_from_file_location
from unicodedata import is_normalized, normalize

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, CLIPTokenizer

from hnclip.data.images import ImageTransform, preprocess_image
from hnclip.data.texts import TextTransform, clean_caption
from hnclip.models.preprocessing import (
    BPE_FILE,
    find_bpe_file,
    image_processor,
    openai_tokenizer,
    read_image_transform,
    transform_of,
)
from small_families import bert_tokenizer

KINDS = ("clip", "siglip", "vision-text-dual-encoder")
CONFIGS = {kind: AutoConfig.for_model(kind) for kind in ("clip", "siglip", "siglip2")} | {
    "vision-text-dual-encoder": AutoConfig.for_model(
        "vision-text-dual-encoder", vision_config={"model_type": "vit"}, text_config={"model_type": "bert"}
    )
}


@pytest.mark.parametrize("change", [{"do_resize": False}, {"rescale_factor": 1 / 127.5}, {"size": {"height": 9}}])
def test_unsupported_settings_name_the_directory(change, tmp_path):
    image_processor(ImageTransform(224), CONFIGS["clip"]).save_pretrained(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ValueError, match=str(tmp_path)):
        read_image_transform(tmp_path, "clip", 224)


sides = st.integers(1, 500)
channels = st.tuples(*[st.floats(0.01, 1)] * 3)
filters = st.sampled_from(["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"])


@settings(max_examples=60)
@given(sides, st.none() | sides, st.booleans(), filters, channels, channels, st.sampled_from(KINDS))
def test_a_processor_keeps_every_transform(size, margin, squash, resample, mean, std, kind):
    shortest = None if margin is None else size + margin
    transform = ImageTransform(size, shortest=shortest, squash=squash, resample=resample, mean=mean, std=std)
    assert transform_of(image_processor(transform, CONFIGS[kind])) == transform


@pytest.mark.parametrize("options", [{"shortest": 30, "resample": "lanczos"}, {"squash": True}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_saved_processor_gives_the_same_pixels_in_transformers(tmp_path, options, kind):
    transform = ImageTransform(24, std=(0.25, 0.3, 0.35), **options)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 83, 3), dtype=np.uint8))
    image_processor(transform, CONFIGS[kind]).save_pretrained(tmp_path)
    assert read_image_transform(tmp_path, kind, 24) == transform
    (expected,) = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")(image, return_tensors="pt").pixel_values
    mean, std = torch.tensor(transform.mean)[:, None, None], torch.tensor(transform.std)[:, None, None]
    torch.testing.assert_close((preprocess_image(image, transform) / 255 - mean) / std, expected, rtol=0, atol=1e-5)


LONG = " ".join(f"The {n}th house, it's “No. {n}” on Elm & Oak St., has {n % 7} windows." for n in range(40))
CAPTIONS = [
    "It's the dog's bowl; they've seen what I'd said, you're not who we'll meet, I'm sure, DON'T!",
    "Room 101: 3.14159, 1,000,000 & 24/7, 50% off (½ price), Ⅷ, “curly” quotes, it’s… an em—dash",
    "&lt;b&gt;Bold&lt;/b&gt; &amp; &quot;quoted&quot; &amp;amp; caf&eacute; &#x1F600; &amp;eacute; &notanentity;",
    "schÃ¶n, itâ€™s a cafÃ© â€” voilÃ le travail, ﬁsh and ﬂour, oﬃce, ﬅop",
    "🦜 a parrot, 👩‍🚀 an astronaut, 🇩🇪, ❤️, 👍🏽, ΟΔΟΣ Αθηνών, ΣΑΣ, Σ, 天地玄黃 ไทย, हिन्दी, العربية",
    "İSTANBUL, ıspanak, STRASSE, straße, ẞ, ŉ, ǅ, K, Å, ｆｕｌｌ　ｗｉｄｔｈ, e\u0301, J\u030c, ȷ\u030c",
    "zero\u200bwidth, soft\u00adhyphen, no\u00a0break, line\u2028break, \ufeffmark, tab\there",
    "<br>line</br> </w> a dog <|endoftext|> a cat, dog<|endoftext|>cat, <|startoftext|> a dog",
    "a" * 300 + "!!!??...---",
    LONG,
]


@pytest.fixture(scope="module")
def reference():
    """SimpleTokenizer of open_clip, with OpenAI's names for the special tokens, which open_clip has renamed."""
    import regex

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENIZERS_PARALLELISM", "false")  # the module sets it; this takes it back
        spec = spec_from_file_location("open_clip_tokenizer", find_bpe_file().with_name("tokenizer.py"))
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    tokenizer = module._tokenizer
    pattern = tokenizer.pat.pattern
    for theirs, openai in (("<start_of_text>", "<|startoftext|>"), ("<end_of_text>", "<|endoftext|>")):
        tokenizer.encoder[openai] = tokenizer.encoder.pop(theirs)
        tokenizer.cache[openai] = openai
        pattern = pattern.replace(theirs, regex.escape(openai))
    tokenizer.pat = regex.compile(pattern, tokenizer.pat.flags)
    return tokenizer


@pytest.fixture(scope="module")
def openai():
    return openai_tokenizer()


def ids_of(tokenizer, text, context=10**6):
    return list(TextTransform(tokenizer, context, clean_caption)([text])[0])


def reference_ids(reference, text):
    return [49406, *reference.encode(text), 49407]


@pytest.mark.parametrize("context", [3, 77, 10**6])
def test_captions_have_openais_ids_and_end_where_openais_end(openai, reference, context):
    assert openai.get_vocab() == reference.encoder
    for text in CAPTIONS + [LONG[:length] for length in range(200, 1200, 30)]:
        expected = reference_ids(reference, text)
        expected = expected if len(expected) <= context else [*expected[: context - 1], 49407]
        assert ids_of(openai, text, context) == expected


def is_documented_difference(text):
    cleaned = clean_caption(text)
    return "'ſ" in cleaned or "\u0345" in cleaned or not is_normalized("NFC", cleaned)


PIECES = [piece for caption in CAPTIONS[:-3] for piece in (*caption.split(), " ") if "<|" not in piece]
PIECES += ["'", "'S", "&", "&#769;", "<", "Σ"]
unicode_text = st.text(st.characters(exclude_categories=["Cn"]), min_size=1, max_size=20)  # Cn: letters to be
mixed_text = st.lists(st.one_of(st.sampled_from(PIECES), unicode_text), min_size=1, max_size=8).map("".join)


@given(st.one_of(unicode_text, mixed_text))
@example("'S 'T 'Re 'vE 'M 'Ll 'D ’s ''s")
@example("ab1cd2ef-gh_ij.kl")
def test_any_text_has_openais_ids(openai, reference, text):
    if clean_caption(text) and not is_documented_difference(text):
        assert ids_of(openai, text) == reference_ids(reference, text)


def test_a_written_tokenizer_gives_the_same_ids_in_transformers(tmp_path, openai, tokenizer):
    for written in (openai, tokenizer):
        written.save_pretrained(tmp_path)
        reopened = CLIPTokenizer.from_pretrained(tmp_path)
        assert all(ids_of(reopened, caption) == ids_of(written, caption) for caption in CAPTIONS)
        assert openai_tokenizer(tmp_path, len(written)).get_vocab() == written.get_vocab()


def test_the_vocabulary_of_the_model_is_used_and_not_another(tmp_path, openai):
    """A BPE file next to the model comes before that of packages; a tokenizer of another model is ignored."""
    bert_tokenizer().save_pretrained(tmp_path)
    assert openai_tokenizer(tmp_path).get_vocab() == openai.get_vocab()
    (tmp_path / "tokenizer.json").write_text("{")
    assert openai_tokenizer(tmp_path).get_vocab() == openai.get_vocab()
    (tmp_path / BPE_FILE).touch()
    assert find_bpe_file(tmp_path).samefile(tmp_path / BPE_FILE)


@given(st.text(st.characters(exclude_categories=["Cs", "Cc", "Cn", "Co"]), min_size=1))
@example("Zwölf Boxkämpfer jagen Viktor, it's 5 o'clock — 天地玄黃 🦜 ﬁ")
def test_a_trained_tokenizer_keeps_any_text(tokenizer, text):
    """Except for case and white space, which CLIP's rules drop."""
    ids = tokenizer(text)["input_ids"]
    assert ids.count(tokenizer.unk_token_id) == 1  # the end token, which CLIP also uses for the unknown
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(decoded.split()) == "".join(normalize("NFC", text).lower().split())
