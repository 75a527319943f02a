"""Captions into tokens, for tokenizers of every kind: CLIP's, BERT's and SigLIP's."""

from __future__ import annotations

import html
import pickle

import ftfy
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hnclip.data.texts import CHUNK, TextTransform, clean_caption, first_sentence, split_sentences
from hnclip.models.preprocessing import train_tokenizer
from small_families import bert_tokenizer, sentencepiece_tokenizer

CAPTIONS = [
    "A red house",
    "a dog and the green tree on the grass under a blue house near the bench with a cat and a tree",
    "dog",
    "the dog on the grass with the red house and a tree and a tree and a tree",
]
EDGES = {"clip": (1, 1), "bert": (1, 1), "siglip": (0, 1)}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return {
        "clip": train_tokenizer(CAPTIONS, 600),
        "bert": bert_tokenizer(),
        "siglip": sentencepiece_tokenizer(tmp_path_factory.mktemp("siglip")),
    }


@pytest.fixture(params=EDGES)
def kind(request) -> str:
    return request.param


@pytest.mark.parametrize("context", [3, 4, 8, 17, 20, 1000])
def test_truncation_removes_the_last_words_and_keeps_special_tokens(tokenizers, kind, context):
    """Against one text at a time, and the last word removed until the rest fits."""
    tokenizer, transform = tokenizers[kind], TextTransform(tokenizers[kind], context)
    assert transform.edges == EDGES[kind]
    expected = [tokenizer.encode(text, verbose=False) for text in CAPTIONS]
    truncated = sum(len(row) > context for row in expected)
    for row in expected:
        while len(row) > context:
            del row[len(row) - EDGES[kind][1] - 1]
    found = transform(CAPTIONS)
    assert [row.tolist() for row in found] == expected
    assert (found.truncated, found.lengths.tolist()) == (truncated, [len(row) for row in expected])
    assert (found.tokens.dtype, found.tokens.size) == (np.int32, found.lengths.sum())  # four bytes for each token


def test_chunks_of_many_texts_are_joined_in_order(tokenizers):
    transform = TextTransform(tokenizers["bert"], 12)
    texts = [CAPTIONS[index % 4] + " tree" * (index % 3) for index in range(2 * CHUNK + 5)]
    found = transform(texts)
    for index in (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 4, -1):
        assert found[index].tolist() == transform([texts[index]])[0].tolist()
    assert (len(found), found.truncated) == (len(texts), sum(transform([text]).truncated for text in texts[:12]) * 683)
    assert list(transform.offsets(texts))[-2] == next(transform.offsets(texts[-2:]))


# Texts without words; [UNK] is no word, and BERT knows no word of more than 100 letters.
UNREADABLE = [
    "",
    " \n",
    None,
    7,
    "dog \ud83d",
    "<|endoftext|>",
    "!!!",
    "🦜",
    "zzz" * 50,
    "&nbsp;",
    "\ufeff",
    "zzz " * 9,
]


@pytest.mark.parametrize("clean", [str, clean_caption])
def test_validate_agrees_with_tokenising(tokenizers, kind, clean):
    transform = TextTransform(tokenizers[kind], 77, clean)
    texts = [*UNREADABLE, "zzz " * 9 + "dog", "一只狗 dog", "&amp;dog", "7"]
    for text, reason in zip(texts, transform.validate(texts), strict=True):
        if reason is None:
            assert len(transform([text])) == 1
        else:
            with pytest.raises(ValueError, match=r"texts\[2\]"):
                transform(["dog", "a dog", text])


def test_padding_and_truncation_of_the_tokenizer_are_not_used_and_wrong_calls_are_errors():
    tokenizer = train_tokenizer(CAPTIONS, 600)
    expected = TextTransform(tokenizer, 10)(CAPTIONS).tokens.tolist()
    tokenizer.backend_tokenizer.enable_padding(length=30)
    tokenizer.backend_tokenizer.enable_truncation(5)
    transform = pickle.loads(pickle.dumps(TextTransform(tokenizer, 10)))
    assert transform(CAPTIONS).tokens.tolist() == expected
    with pytest.raises(ValueError, match="context"):
        TextTransform(tokenizer, 2)(["dog"])
    with pytest.raises(ValueError, match="single string"):
        transform("a dog")


# Cleaning


def literal_clean(text: str) -> str:
    """OpenAI's basic_clean and whitespace_clean, step by step."""
    return " ".join(html.unescape(html.unescape(ftfy.fix_text(text))).strip().split()).strip()


ASCII = [chr(code) for code in range(128)]
SEQUENCES = ["\x1b[31m", "\r\n", "&amp;", "&amp;lt;", "&#38;", "&#28;", "<br>", "&nbsp", "&#xD;", "A&E", "&&"]


@given(st.lists(st.sampled_from(ASCII + SEQUENCES)).map("".join) | st.text(st.characters()))
@example("a\x1fb\x0bc\x1cb\fc\td\re")  # white space to Python, control characters to ftfy
@example("<b> caf&amp;eacute;")  # ftfy does not decode entities next to a "<"
@example("schÃ¶n, itâ€™s “curly” ﬁne &amp;eacute; e\u0301")
@example("&Sigma;ΑΣ.")
def test_cleaning_equals_openais(text):
    """A final sigma makes the caption lower case."""
    expected = literal_clean(text)
    assert clean_caption(text) == (expected.lower() if "Σ" in expected else expected)


# Sentences, separated by bars here; two bars where there is no space

SENTENCES = [
    "A pole of 3.5 m stands here.|It costs $1.50.",
    "Mr. Smith and Dr. Lee of St. Louis wave.|They smile.",
    "Fruit, e.g. apples, i.e. red ones, lie approx. 2 m away.|Good.",
    "It goes on... and on.|It stops...|Then it goes on…|Really.|It ends . . .|Next.",
    'It reads "No parking." in red.|It reads "Stop."|A dog (it is old.)|A cat (young!) sleeps.',
    "A line\nthat was wrapped.|First paragraph|\n\n|second paragraph",
    "the dog sits.|it is small.|一只狗。||一只猫！||树",
    "The files www.example.Museum, photo.final.jpg and docs/readme.Text are shown.",
]


@pytest.mark.parametrize("case", SENTENCES)
def test_careful_sentences(case):
    text = case.replace("||", "\0").replace("|\n\n|", "\n\n").replace("|", " ").replace("\0", "")
    assert split_sentences(text) == [part.strip() for part in case.split("|") if part.strip()]


@given(st.text(alphabet=st.sampled_from(list("aB1.!?… \n\t\"')(。-,")) | st.characters(), max_size=80))
def test_sentences_are_stripped_and_keep_every_character(text):
    found = split_sentences(text)
    assert all(part.strip() == part != "" for part in found)
    assert "".join("".join(found).split()) == "".join(text.split())
    # GOAL's released code
    assert split_sentences(text, "dots") == [part.strip() for part in text.split(".") if part.strip()]
    assert text.strip().replace("\n", " ").startswith(first_sentence(text))
