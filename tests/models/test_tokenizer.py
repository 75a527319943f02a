from __future__ import annotations

import json
import os
import subprocess
import sys

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hnclip.data.scenes import scene_records
from hnclip.data.texts import TextTransform


def plain(text):
    """Without what CLIP's rules leave out on purpose: case, and how much space stands where."""
    return "".join(text.split())


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(exclude_categories=["Cs", "Cc", "Cn", "Co"]), min_size=1))
@example("Zwölf Boxkämpfer jagen Viktor, it's 5 o'clock — 天地玄黃 🦜 ﬁ")
def test_any_text_survives_the_round_trip(tokenizer, text):
    from unicodedata import normalize

    ids = tokenizer(text)["input_ids"]
    assert ids.count(tokenizer.unk_token_id) == 1  # the end token, which CLIP also uses for the unknown
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    assert plain(decoded) == plain(normalize("NFC", text).lower())


def test_captions_decode_to_their_words(tokenizer, captions):
    for caption in captions[:20]:
        decoded = tokenizer.decode(TextTransform(tokenizer, 248)([caption]).ids[0], skip_special_tokens=True)
        assert plain(decoded) == plain(caption.lower())


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


def test_a_larger_vocabulary_gives_shorter_captions(captions, tokenizer):
    from hnclip.models.preprocessing import train_tokenizer

    letters = train_tokenizer(captions, 0)
    few, many = (sum(map(len, TextTransform(t, 10**6)(captions).ids)) for t in (tokenizer, letters))
    assert 2 * few < many


def test_reopened_by_transformers_it_gives_the_same_ids(tmp_path, tokenizer, captions):
    from transformers import CLIPTokenizer

    tokenizer.save_pretrained(tmp_path)
    reopened = CLIPTokenizer.from_pretrained(tmp_path)
    texts = [*captions[:10], "Something Else!  ÄÖ 天"]
    assert TextTransform(reopened, 248)(texts) == TextTransform(tokenizer, 248)(texts)


def test_scenes_fit_the_contexts_they_are_made_for(tokenizer):
    records = [r for style in ("park", "shelf") for r in scene_records(style, "validation")]
    assert TextTransform(tokenizer, 77)([r.short for r in records]).truncated == 0
    dense = TextTransform(tokenizer, 248)([r.captions[0] for r in records])
    assert dense.truncated == 0
    assert min(map(len, dense.ids)) > 77
