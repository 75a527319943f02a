"""Image processors against transformers; token ids against OpenAI's tokenizer, as open_clip contains it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from unicodedata import is_normalized, normalize

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, CLIPProcessor, CLIPTokenizer

from hnclip.data.images import OPENAI_MEAN, OPENAI_STD, ImageTransform, preprocess_image
from hnclip.data.texts import TextTransform, clean_caption
from hnclip.models.preprocessing import (
    BPE_FILE,
    BPE_PACKAGES,
    find_bpe_file,
    image_processor,
    openai_tokenizer,
    read_image_transform,
    transform_of,
)
from small_families import bert_tokenizer

HALF = (0.5, 0.5, 0.5)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
OPENAI = {"image_mean": list(OPENAI_MEAN), "image_std": list(OPENAI_STD)}
IMAGENET = {"image_mean": list(IMAGENET_MEAN), "image_std": list(IMAGENET_STD)}
STEPS = {"do_normalize": True, "do_resize": True}
KINDS = ("clip", "siglip", "vision-text-dual-encoder")
CONFIGS = {kind: AutoConfig.for_model(kind) for kind in ("clip", "siglip", "siglip2")} | {
    "vision-text-dual-encoder": AutoConfig.for_model(
        "vision-text-dual-encoder", vision_config={"model_type": "vit"}, text_config={"model_type": "bert"}
    )
}

# The settings of published models, and the size that the model takes.
PUBLISHED = {
    "openai/clip-vit-base-patch32": (
        {**STEPS, **OPENAI, "crop_size": 224, "do_center_crop": True, "feature_extractor_type": "CLIPFeatureExtractor",
         "resample": 3, "size": 224},
        224, ImageTransform(224),
    ),
    "google/siglip2-base-patch16-224": (
        {**STEPS, "do_convert_rgb": None, "do_rescale": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
         "image_processor_type": "SiglipImageProcessor", "resample": 2, "size": {"height": 224, "width": 224}},
        224, ImageTransform(224, squash=True, resample="bilinear", mean=HALF, std=HALF),
    ),
    "google/siglip2-base-patch16-naflex": (
        {**STEPS, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_processor_type": "Siglip2ImageProcessorFast",
         "max_num_patches": 256, "patch_size": 16, "resample": 2},
        256, ImageTransform(256, squash=True, resample="bilinear", mean=HALF, std=HALF),
    ),
    "facebook/dinov2-base": (
        {**STEPS, **IMAGENET, "crop_size": {"height": 224, "width": 224}, "do_center_crop": True, "resample": 3,
         "image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 256}},
        None, ImageTransform(224, shortest=256, mean=IMAGENET_MEAN, std=IMAGENET_STD),
    ),
    "facebook/dinov3-vitb16-pretrain-lvd1689m": (
        {**STEPS, **IMAGENET, "crop_size": None, "do_center_crop": None, "image_processor_type":
         "DINOv3ViTImageProcessorFast", "resample": 2, "size": {"height": 224, "width": 224}},
        None, ImageTransform(224, squash=True, resample="bilinear", mean=IMAGENET_MEAN, std=IMAGENET_STD),
    ),
    "without normalisation": (
        {"image_processor_type": "CLIPImageProcessor", "do_normalize": False},
        224, ImageTransform(224, mean=(0.0,) * 3, std=(1.0,) * 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_reads_the_settings_of_published_models(name, tmp_path):
    settings, size, expected = PUBLISHED[name]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    assert read_image_transform(tmp_path, "vision-text-dual-encoder", size) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"image_processor_type": "NoSuchImageProcessor"},
        {"do_resize": False},
        {"rescale_factor": 1 / 127.5},
        {"do_pad": True},
        {"do_center_crop": False},
        {"size": {"height": 224, "width": 200}},
        {"crop_size": 240},
        {"image_std": [0, 0, 0]},
    ],
    ids=str,
)
def test_unsupported_settings_name_the_directory(change, tmp_path):
    settings = {**PUBLISHED["openai/clip-vit-base-patch32"][0], "image_processor_type": "CLIPImageProcessor", **change}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=str(tmp_path)):
        read_image_transform(tmp_path, "clip", 224)


def test_a_whole_processor_is_read_too(tmp_path, model_directory):
    transform = ImageTransform(48, shortest=56, resample="bilinear", mean=HALF, std=HALF)
    tokenizer = CLIPTokenizer.from_pretrained(model_directory)
    CLIPProcessor(image_processor(transform, CONFIGS["clip"]), tokenizer).save_pretrained(tmp_path)
    assert read_image_transform(tmp_path, "clip", 48) == transform


sides = st.integers(1, 500)
channels = st.tuples(*[st.floats(0.01, 1)] * 3)
filters = st.sampled_from(["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"])


@settings(max_examples=60)
@given(sides, st.none() | sides, st.booleans(), filters, channels, channels, st.sampled_from(KINDS))
def test_a_processor_keeps_every_transform(size, margin, squash, resample, mean, std, kind):
    shortest = None if margin is None else size + margin
    transform = ImageTransform(size, shortest=shortest, squash=squash, resample=resample, mean=mean, std=std)
    assert transform_of(image_processor(transform, CONFIGS[kind])) == transform


def test_a_naflex_processor_keeps_every_square_and_refuses_other_transforms():
    for patches in (1, 16, 30):
        transform = ImageTransform(16 * patches, squash=True, resample="bilinear", mean=HALF)
        processor = image_processor(transform, CONFIGS["siglip2"])
        assert processor.max_num_patches == patches**2
        assert transform_of(processor, transform.size) == transform
    for other in (ImageTransform(32), ImageTransform(33, squash=True)):
        with pytest.raises(ValueError, match="SigLIP 2"):
            image_processor(other, CONFIGS["siglip2"])


@pytest.mark.parametrize(
    "transform",
    [ImageTransform(24, shortest=30, resample="lanczos", std=(0.25, 0.3, 0.35)), ImageTransform(24, squash=True)],
    ids=["crop", "squash"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_saved_processor_gives_the_same_pixels_in_transformers(tmp_path, transform, kind):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 83, 3), dtype=np.uint8))
    image_processor(transform, CONFIGS[kind]).save_pretrained(tmp_path)
    assert read_image_transform(tmp_path, kind, 24) == transform
    expected = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")(image, return_tensors="pt")["pixel_values"][
        0
    ]
    mean, std = torch.tensor(transform.mean)[:, None, None], torch.tensor(transform.std)[:, None, None]
    torch.testing.assert_close((preprocess_image(image, transform) / 255 - mean) / std, expected, rtol=0, atol=1e-5)


LONG = " ".join(f"The {n}th house, it's “No. {n}” on Elm & Oak St., has {n % 7} windows." for n in range(40))
CAPTIONS = [
    "A photo of a cat",
    "It's the dog's bowl; they've seen what I'd said, you're not who we'll meet, I'm sure, DON'T!",
    "Room 101: 3.14159, 1,000,000 & 24/7, 50% off (½ price), Ⅷ",
    "“Curly” quotes, ‘single’ ones, it’s… an em—dash and an en–dash",
    "&lt;b&gt;Bold&lt;/b&gt; &amp; &quot;quoted&quot; &amp;amp; caf&eacute; &#x1F600; &amp;eacute; &notanentity;",
    "schÃ¶n, itâ€™s a cafÃ© â€” voilÃ le travail, ﬁsh and ﬂour, oﬃce, ﬅop",
    "🦜 a parrot, 👩‍🚀 an astronaut, 🇩🇪, ❤️, 👍🏽, ΟΔΟΣ Αθηνών, ΣΑΣ, Σ",
    "İSTANBUL, ıspanak, STRASSE, straße, ẞ, ŉ, ǅ, K, Å, ｆｕｌｌ　ｗｉｄｔｈ, e\u0301, J\u030c, ȷ\u030c",
    "天地玄黃 宇宙洪荒, ไทย, हिन्दी, العربية, עברית, 한국어",
    "zero\u200bwidth, soft\u00adhyphen, no\u00a0break, line\u2028break, \ufeffmark, tab\there",
    "\x1b[31mred\x1b[0m, a\x00b, a\x1fb, half \ud83d and whole \ud83d\ude00",
    "<br>line</br> <e> &lt;e&gt; </w>",
    "a dog <|endoftext|> a cat, dog<|endoftext|>cat, <|startoftext|> a dog",
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
        del tokenizer.cache[theirs]
        tokenizer.cache[openai] = openai
        pattern = pattern.replace(theirs, regex.escape(openai))
    tokenizer.pat = regex.compile(pattern, tokenizer.pat.flags)
    return tokenizer


@pytest.fixture(scope="module")
def openai():
    return openai_tokenizer()


def ids_of(openai, text):
    return list(TextTransform(openai, 10**6, clean_caption)([text])[0])


def reference_ids(reference, text):
    return [49406, *reference.encode(text), 49407]


def test_vocabulary_and_special_tokens_are_openais(openai, reference):
    assert len(openai) == openai.vocab_size == 49_408
    assert openai.get_vocab() == reference.encoder
    assert (openai.bos_token_id, openai.eos_token_id, openai.pad_token_id) == (49406, 49407, 49407)
    assert openai.is_fast
    assert openai.model_max_length > 10**9


@pytest.mark.parametrize("context", [3, 20, 77, 248, 10**6])
def test_captions_have_openais_ids_and_end_where_openais_end(openai, reference, context):
    texts = CAPTIONS + [LONG[:length] for length in range(200, 1200, 30)]
    ours = TextTransform(openai, context, clean_caption)(texts)
    whole = [reference_ids(reference, text) for text in texts]
    for row, expected in zip(ours, whole):
        assert list(row) == (expected if len(expected) <= context else [*expected[: context - 1], 49407])
    assert ours.truncated == sum(len(row) > context for row in whole)


def is_documented_difference(text):
    cleaned = clean_caption(text)
    return "'ſ" in cleaned or "\u0345" in cleaned or not is_normalized("NFC", cleaned)


PIECES = [piece for caption in CAPTIONS[:-4] for piece in (*caption.split(), " ")]
PIECES += ["'", "'S", "&", "&#769;", "<", "Σ"]
unicode_text = st.text(st.characters(exclude_categories=["Cn"]), min_size=1, max_size=20)  # Cn: letters to be
mixed_text = st.lists(st.one_of(st.sampled_from(PIECES), unicode_text), min_size=1, max_size=8).map("".join)


@given(st.one_of(unicode_text, mixed_text))
@example("'S 'T 'Re 'vE 'M 'Ll 'D ’s ''s")
@example("ab1cd2ef-gh_ij.kl")
def test_any_text_has_openais_ids(openai, reference, text):
    if clean_caption(text) and not is_documented_difference(text):
        assert ids_of(openai, text) == reference_ids(reference, text)


@pytest.mark.parametrize("text", ["'ſ", "a\u0345b", "<e&#769;>", "J\u030cΣ", "!<|endoftext|>", "<|ENDOFTEXT|>"])
def test_the_documented_differences_are_there(openai, reference, text):
    """If one of them goes, the docstring of `openai_tokenizer` has a line to lose."""
    assert ids_of(openai, text) != reference_ids(reference, text)


@pytest.mark.parametrize("which", ["openai", "trained"])
def test_reopened_by_transformers_it_gives_the_same_ids(tmp_path, openai, tokenizer, which):
    written = {"openai": openai, "trained": tokenizer}[which]
    written.save_pretrained(tmp_path)
    reopened = CLIPTokenizer.from_pretrained(tmp_path)
    assert all(ids_of(reopened, caption) == ids_of(written, caption) for caption in CAPTIONS)
    assert openai_tokenizer(tmp_path, len(written)).get_vocab() == written.get_vocab()


def test_the_vocabulary_next_to_the_model_comes_before_that_of_packages(tmp_path, monkeypatch):
    """Which are not imported."""
    assert find_bpe_file(tmp_path).parent.name in BPE_PACKAGES
    assert "open_clip" not in sys.modules
    for place in (".", "model", "../model"):
        checkpoints = tmp_path / place.replace(".", "x") / "checkpoints"
        (checkpoints / place).mkdir(parents=True)
        (checkpoints / place / BPE_FILE).touch()
        assert find_bpe_file(checkpoints).samefile(checkpoints / place / BPE_FILE)
    monkeypatch.setattr("hnclip.models.preprocessing.BPE_PACKAGES", ("no_such_package",))
    with pytest.raises(ValueError, match="open_clip_torch"):
        openai_tokenizer(tmp_path)


def test_files_of_another_tokenizer_next_to_the_model_are_not_used(tmp_path, openai):
    """Of another CLIP, of BERT, and a damaged file."""
    CLIPTokenizer(vocab={"a</w>": 0, "<|startoftext|>": 1, "<|endoftext|>": 2}, merges=[]).save_pretrained(tmp_path)
    assert openai_tokenizer(tmp_path).get_vocab() == openai.get_vocab()
    bert_tokenizer().save_pretrained(tmp_path)
    assert openai_tokenizer(tmp_path).get_vocab() == openai.get_vocab()
    (tmp_path / "tokenizer.json").write_text("{")
    assert openai_tokenizer(tmp_path).get_vocab() == openai.get_vocab()


@given(st.text(st.characters(exclude_categories=["Cs", "Cc", "Cn", "Co"]), min_size=1))
@example("Zwölf Boxkämpfer jagen Viktor, it's 5 o'clock — 天地玄黃 🦜 ﬁ")
def test_a_trained_tokenizer_keeps_any_text(tokenizer, text):
    """Except for case and white space, which CLIP's rules drop."""
    ids = tokenizer(text)["input_ids"]
    assert ids.count(tokenizer.unk_token_id) == 1  # the end token, which CLIP also uses for the unknown
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(decoded.split()) == "".join(normalize("NFC", text).lower().split())


def test_a_trained_vocabulary_is_the_same_in_every_process(tokenizer, captions):
    code = (
        "import json, sys; from hnclip.models.preprocessing import train_tokenizer; "
        "print(json.dumps(train_tokenizer(json.load(sys.stdin), 900).get_vocab()))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    other = subprocess.check_output(command, env=environment, input=json.dumps(captions), text=True)
    assert json.loads(other) == tokenizer.get_vocab()
