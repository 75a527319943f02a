"""Image processors against transformers; token ids against OpenAI's tokenizer, as open_clip contains it."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from unicodedata import is_normalized, normalize

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from hnclip.data.images import OPENAI_MEAN, OPENAI_STD, ImageTransform, preprocess_image
from hnclip.data.texts import TextTransform, clean_caption
from hnclip.models import preprocessing
from hnclip.models.preprocessing import (
    BPE_FILE,
    build_processor,
    default_transform,
    find_bpe_file,
    openai_tokenizer,
    read_image_transform,
    transform_of,
)

HALF = (0.5, 0.5, 0.5)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
OPENAI = {"image_mean": list(OPENAI_MEAN), "image_std": list(OPENAI_STD)}
IMAGENET = {"image_mean": list(IMAGENET_MEAN), "image_std": list(IMAGENET_STD)}
STEPS = {"do_normalize": True, "do_resize": True}

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
    "facebook/deit-base-patch16-224": (
        {**STEPS, **IMAGENET, "crop_size": 224, "do_center_crop": True, "resample": 3, "size": 256,
         "feature_extractor_type": "DeiTFeatureExtractor"},
        224, ImageTransform(224, shortest=256, squash=True, mean=IMAGENET_MEAN, std=IMAGENET_STD),
    ),
    "facebook/dinov3-vitb16-pretrain-lvd1689m": (
        {**STEPS, **IMAGENET, "crop_size": None, "do_center_crop": None, "image_processor_type":
         "DINOv3ViTImageProcessorFast", "resample": 2, "size": {"height": 224, "width": 224}},
        None, ImageTransform(224, squash=True, resample="bilinear", mean=IMAGENET_MEAN, std=IMAGENET_STD),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_reads_the_settings_of_published_models(name, tmp_path):
    settings, size, expected = PUBLISHED[name]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    assert read_image_transform(tmp_path, "vision-text-dual-encoder", size) == expected


def test_settings_without_a_processor_type_are_those_of_the_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    settings = {**STEPS, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": 224}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    expected = ImageTransform(224, squash=True, resample="bilinear", mean=HALF, std=HALF)
    assert read_image_transform(tmp_path, "vision-text-dual-encoder", 224) == expected


def test_a_size_that_is_not_specified_is_the_models(tmp_path):
    settings = {"image_processor_type": "CLIPImageProcessor", "image_mean": [0.5, 0.5, 0.5], "image_std": 0.25}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    assert read_image_transform(tmp_path, "clip", 48) == ImageTransform(48, mean=HALF, std=(0.25,) * 3)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**settings, "do_normalize": False}))
    found = read_image_transform(tmp_path, "clip", 48)
    assert (found.mean, found.std) == ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def test_defaults_of_families():
    assert default_transform("clip", 96) == ImageTransform(96)
    assert default_transform("siglip", 96) == ImageTransform(96, squash=True, mean=HALF, std=HALF)
    assert default_transform("siglip2", 96) == ImageTransform(96, squash=True, resample="bilinear", mean=HALF, std=HALF)
    with pytest.raises(ValueError, match="preprocessor_config"):
        default_transform("vision-text-dual-encoder", 96)


@pytest.mark.parametrize(
    "change",
    [
        {"image_processor_type": "NoSuchImageProcessor"},
        {"do_resize": False},
        {"do_rescale": False},
        {"rescale_factor": 1 / 127.5},
        {"do_pad": True},
        {"do_center_crop": False},
        {"size": {"height": 224, "width": 200}},
        {"crop_size": 240},
        {"crop_size": 200},
        {"resample": 17},
        {"image_mean": [0.5]},
        {"image_std": [0, 0, 0]},
    ],
    ids=str,
)
def test_unsupported_settings_name_the_file(change, tmp_path):
    settings = {**PUBLISHED["openai/clip-vit-base-patch32"][0], "image_processor_type": "CLIPImageProcessor", **change}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"preprocessor_config\.json"):
        read_image_transform(tmp_path, "clip", 224)


sides = st.integers(1, 500)
channels = st.tuples(*[st.floats(0.01, 1)] * 3)
filters = st.sampled_from(["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"])
kinds = st.sampled_from(["clip", "siglip", "vision-text-dual-encoder"])


@settings(max_examples=60)
@given(sides, st.none() | sides, st.booleans(), filters, channels, channels, kinds)
def test_a_processor_keeps_every_transform(size, margin, squash, resample, mean, std, kind):
    shortest = None if margin is None else size + margin
    transform = ImageTransform(size, shortest=shortest, squash=squash, resample=resample, mean=mean, std=std)
    processor = build_processor(transform, kind)
    assert transform_of(processor, json.loads(processor.to_json_string()), size) == transform


@given(st.integers(1, 30), st.sampled_from([8, 14, 16]), channels)
def test_a_naflex_processor_keeps_every_square(patches, patch_size, mean):
    transform = ImageTransform(patches * patch_size, squash=True, resample="bilinear", mean=mean)
    processor = build_processor(transform, "siglip2", patch_size=patch_size)
    assert processor.max_num_patches == patches**2
    assert transform_of(processor, json.loads(processor.to_json_string()), transform.size) == transform
    with pytest.raises(ValueError, match="siglip2"):
        build_processor(ImageTransform(transform.size), "siglip2", patch_size=patch_size)


@pytest.fixture(scope="module")
def image():
    values = np.random.default_rng(0).integers(0, 256, (50, 83, 3), dtype=np.uint8)
    values[:25] = np.linspace(0, 255, 83, dtype=np.uint8)[None, :, None]
    return Image.fromarray(values)


@pytest.mark.parametrize(
    "transform",
    [
        ImageTransform(24, mean=HALF, std=(0.25, 0.3, 0.35)),
        ImageTransform(24, shortest=30, resample="lanczos"),
        ImageTransform(24, squash=True, resample="bilinear"),
        ImageTransform(24, squash=True, shortest=30),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["clip", "siglip", "vision-text-dual-encoder"])
def test_the_saved_processor_gives_the_same_pixels_in_transformers(tmp_path, image, transform, kind):
    from transformers import AutoImageProcessor

    build_processor(transform, kind).save_pretrained(tmp_path)
    assert read_image_transform(tmp_path, kind, 24) == transform
    processor = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    mean, std = torch.tensor(transform.mean)[:, None, None], torch.tensor(transform.std)[:, None, None]
    for mode in ("RGB", "L", "RGBA"):
        expected = processor(image.convert(mode), return_tensors="pt")["pixel_values"][0]
        found = (preprocess_image(image.convert(mode), transform) / 255 - mean) / std
        assert ((found - expected).abs() <= (1.01 / 255 / std).expand_as(found)).all()  # one grey level


def test_a_whole_processor_is_read_too(tmp_path, model_directory):
    from transformers import CLIPProcessor, CLIPTokenizer

    transform = ImageTransform(48, shortest=56, resample="bilinear", mean=HALF, std=HALF)
    tokenizer = CLIPTokenizer.from_pretrained(model_directory)
    CLIPProcessor(build_processor(transform, "clip"), tokenizer).save_pretrained(tmp_path)
    assert read_image_transform(tmp_path, "clip", 48) == transform


LONG = " ".join(f"The {n}th house, it's “No. {n}” on Elm & Oak St., has {n % 7} windows." for n in range(40))
CAPTIONS = [
    "A photo of a cat",
    "It's the dog's bowl; they've seen what I'd said, you're not who we'll meet, I'm sure, DON'T!",
    "Room 101: 3.14159, 1,000,000 & 24/7, 50% off (½ price), Ⅷ",
    "“Curly” quotes, ‘single’ ones, it’s… an em—dash and an en–dash",
    "&lt;b&gt;Bold&lt;/b&gt; &amp; &quot;quoted&quot; &amp;amp; caf&eacute; &#x1F600; &amp;eacute; &notanentity;",
    "schÃ¶n, itâ€™s a cafÃ© â€” voilÃ le travail",
    "ﬁsh and ﬂour, oﬃce, ﬅop",
    "🦜 a parrot, 👩‍🚀 an astronaut, 🇩🇪, ❤️, 👍🏽",
    "ΟΔΟΣ Αθηνών, ΣΑΣ, Σ",
    "İSTANBUL, ıspanak, STRASSE, straße, ẞ, ŉ, ǅ, K, Å",
    "天地玄黃 宇宙洪荒, ไทย, हिन्दी, العربية, עברית, 한국어",
    "ｆｕｌｌ　ｗｉｄｔｈ, e\u0301, J\u030c, ȷ\u030c",
    "zero\u200bwidth, soft\u00adhyphen, no\u00a0break, line\u2028break, \ufeffmark, tab\there",
    "\x1b[31mred\x1b[0m, a\x00b, a\x1fb",
    "half \ud83d and whole \ud83d\ude00",
    "<br>line</br> <e> &lt;e&gt; </w>",
    "a" * 300,
    "!!!??...---",
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
    return list(TextTransform(openai, 10**6, clean_caption)([text]).ids[0])


def reference_ids(reference, text):
    return [49406, *reference.encode(text), 49407]


def test_vocabulary_and_special_tokens_are_openais(openai, reference):
    assert len(openai) == openai.vocab_size == 49_408
    assert openai.get_vocab() == reference.encoder
    assert (openai.bos_token_id, openai.eos_token_id, openai.pad_token_id) == (49406, 49407, 49407)
    assert openai.is_fast
    assert openai.model_max_length > 10**9


@pytest.mark.parametrize("caption", CAPTIONS, ids=range(len(CAPTIONS)))
def test_captions_have_openais_ids(openai, reference, caption):
    assert ids_of(openai, caption) == reference_ids(reference, caption)


@pytest.mark.parametrize("context", [3, 20, 77, 248])
def test_long_captions_end_where_openais_end(openai, reference, context):
    texts = CAPTIONS + [LONG[:length] for length in range(200, 1200, 30)]
    ours = TextTransform(openai, context, clean_caption)(texts)
    theirs = reference(texts, context)  # [N, context], padded with zeros
    for row, expected in zip(ours.ids, theirs.tolist()):
        assert [*row, *[0] * (context - len(row))] == expected
    assert ours.truncated == sum(len(reference.encode(text)) + 2 > context for text in texts)


def is_documented_difference(text):
    cleaned = clean_caption(text)
    return "'ſ" in cleaned or "\u0345" in cleaned or not is_normalized("NFC", cleaned)


PIECES = [piece for caption in CAPTIONS[:-3] for piece in (*caption.split(), " ")]
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


@pytest.mark.parametrize("text", ["a dog <|endoftext|> a cat", "dog<|endoftext|>cat", "<|startoftext|> a dog"])
def test_special_tokens_written_in_a_caption_are_special_as_in_openais(openai, reference, text):
    ids = ids_of(openai, text)
    assert ids == reference_ids(reference, text)
    assert 49407 in ids[1:-1] or 49406 in ids[1:-1]


def test_offsets_point_at_the_words(openai):
    caption = "A Red House, it's No. 12:  Unmistakeably pink, don't!"
    encoded = openai(caption, return_offsets_mapping=True)
    pieces = [caption[start:end] for start, end in encoded["offset_mapping"]]
    assert pieces[:12] == ["", "A", "Red", "House", ",", "it", "'s", "No", ".", "1", "2", ":"]
    assert pieces[-5:] == [",", "don", "'t", "!", ""]
    assert "".join(pieces) == caption.replace(" ", "")
    assert encoded.char_to_token(caption.index("House")) == 3


def test_reopened_by_transformers_it_gives_the_same_ids(tmp_path, openai):
    from transformers import CLIPTokenizer

    openai.save_pretrained(tmp_path)
    reopened = CLIPTokenizer.from_pretrained(tmp_path)
    assert all(ids_of(reopened, caption) == ids_of(openai, caption) for caption in CAPTIONS)
    assert openai_tokenizer(tmp_path).get_vocab() == openai.get_vocab()


@pytest.mark.parametrize("place", [".", "model", "../model"])
@pytest.mark.parametrize("as_file", [True, False])
def test_the_vocabulary_next_to_the_model_comes_first(tmp_path, place, as_file):
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / place).mkdir(parents=True)
    (checkpoints / place / BPE_FILE).write_bytes(b"")
    (checkpoints / "longclip-L.pt").write_bytes(b"")
    found = find_bpe_file(checkpoints / "longclip-L.pt" if as_file else checkpoints)
    assert found.samefile(checkpoints / place / BPE_FILE)


def test_packages_are_searched_without_being_imported(tmp_path, monkeypatch):
    package = tmp_path / "longclip"
    (package / "deep" / "inside").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "deep" / "inside" / BPE_FILE).write_bytes(b"")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "in_memory", ModuleType("in_memory"))
    monkeypatch.setattr(preprocessing, "BPE_PACKAGES", ("no_such_package", "in_memory", "longclip"))
    assert find_bpe_file(tmp_path) == package / "deep" / "inside" / BPE_FILE
    assert "longclip" not in sys.modules
    monkeypatch.setattr(preprocessing, "BPE_PACKAGES", ("no_such_package",))
    with pytest.raises(ValueError, match="pip install --no-deps open_clip_torch"):
        openai_tokenizer(tmp_path / "weights.pt")


def test_a_damaged_vocabulary_is_named(tmp_path):
    whole = find_bpe_file().read_bytes()
    lines = gzip.decompress(whole).decode().split("\n")[:48_895]
    damaged = [whole[:500_000], b"no gzip", gzip.compress(b"\xff\xfe")]
    damaged += [gzip.compress("\n".join([*lines[:-1], *end]).encode()) for end in ([], ["a b c"])]
    for damage in damaged:
        (tmp_path / BPE_FILE).write_bytes(damage)
        with pytest.raises(ValueError, match=BPE_FILE):
            openai_tokenizer(tmp_path)


def test_hugging_face_files_next_to_the_model_come_first_if_they_fit(tmp_path, tokenizer, openai):
    """A tokenizer.json of another model is not used, nor is a damaged one."""
    tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "weights.pt"
    assert openai_tokenizer(file, len(tokenizer)).get_vocab() == tokenizer.get_vocab()
    assert openai_tokenizer(file).get_vocab() == openai.get_vocab()  # 49,408 symbols
    state = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "tokenizer.json").write_text("{")
    assert openai_tokenizer(file).get_vocab() == openai.get_vocab()
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(state["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, state["merges"])]))
    opened = openai_tokenizer(file, len(tokenizer))
    assert ids_of(opened, "It's a red house") == ids_of(tokenizer, "It's a red house")


def test_files_of_another_tokenizer_next_to_the_model_are_not_used(tmp_path, openai):
    from transformers import BertTokenizer

    symbols = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "house"]
    BertTokenizer(vocab={symbol: index for index, symbol in enumerate(symbols)}).save_pretrained(tmp_path)
    assert openai_tokenizer(tmp_path / "weights.pt").get_vocab() == openai.get_vocab()


def plain(text):
    """Without what CLIP's rules leave out on purpose: case, and how much space stands where."""
    return "".join(text.split())


@given(st.text(st.characters(exclude_categories=["Cs", "Cc", "Cn", "Co"]), min_size=1))
@example("Zwölf Boxkämpfer jagen Viktor, it's 5 o'clock — 天地玄黃 🦜 ﬁ")
def test_any_text_survives_the_round_trip(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert ids.count(tokenizer.unk_token_id) == 1  # the end token, which CLIP also uses for the unknown
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    assert plain(decoded) == plain(normalize("NFC", text).lower())


def test_the_vocabulary_has_openais_order(tokenizer):
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    symbols = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    assert symbols[:256] == letters
    assert symbols[256:512] == [f"{letter}</w>" for letter in letters]
    assert symbols[-2:] == ["<|startoftext|>", "<|endoftext|>"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (len(symbols) - 2, len(symbols) - 1)
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(symbols)))


VOCABULARY = """
import json, sys
from hnclip.models.preprocessing import train_tokenizer

print(json.dumps(train_tokenizer(json.load(sys.stdin), 900).get_vocab()))
"""


def test_the_vocabulary_is_the_same_in_every_process(tokenizer, captions):
    other = subprocess.run(
        [sys.executable, "-c", VOCABULARY],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        input=json.dumps(captions),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert json.loads(other.stdout) == tokenizer.get_vocab()


def test_a_trained_tokenizer_reopened_by_transformers_gives_the_same_ids(tmp_path, tokenizer, captions):
    from transformers import CLIPTokenizer

    tokenizer.save_pretrained(tmp_path)
    reopened = CLIPTokenizer.from_pretrained(tmp_path)
    texts = [*captions[:10], "Something Else!  ÄÖ 天"]
    assert TextTransform(reopened, 248)(texts) == TextTransform(tokenizer, 248)(texts)
