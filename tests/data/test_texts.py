"""Captions into ids, for tokenizers of every kind: CLIP's, BERT's, SigLIP's, and one without special tokens."""

from __future__ import annotations

import html
import io
import pickle
from dataclasses import replace

import ftfy
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hnclip.data.texts import TextTransform, clean_caption

CAPTIONS = [
    "A red house",
    "a photo of two small windows and the green roof of a house on the street with a tree",
    "dog",
    "the dog on the small street with the red house and a tree and a tree and a tree",
]
WORDS = sorted({word for caption in CAPTIONS for word in caption.lower().split()})
EDGES = {"clip": (1, 1), "bert": (1, 1), "siglip": (0, 1), "bare": (0, 0)}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return {
        "clip": clip_tokenizer(),
        "bert": bert_tokenizer(),
        "siglip": siglip_tokenizer(tmp_path_factory.mktemp("siglip") / "spiece.model"),
        "bare": bare_tokenizer(unk_token="[UNK]"),
    }


def clip_tokenizer():
    from hnclip.models.preprocessing import train_tokenizer

    return train_tokenizer(CAPTIONS, 600)


def bert_tokenizer():
    from transformers import BertTokenizer

    symbols = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "##s"]
    return BertTokenizer(vocab={symbol: index for index, symbol in enumerate(symbols)})


def siglip_tokenizer(file):
    import sentencepiece
    from transformers import SiglipTokenizer

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.lower() for text in CAPTIONS * 20),
        model_writer=model,
        vocab_size=60,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    file.write_bytes(model.getvalue())
    return SiglipTokenizer(str(file))


def bare_tokenizer(**special):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = ["[UNK]", "[END]", *WORDS]
    words = Tokenizer(models.WordLevel({symbol: index for index, symbol in enumerate(symbols)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def literal_ids(tokenizer, text, context, after):
    """One text at a time, and the last word taken away until the rest fits."""
    row = tokenizer.encode(text, verbose=False)
    while len(row) > context:
        del row[len(row) - after - 1]
    return tuple(row)


@pytest.mark.parametrize("kind", EDGES)
def test_the_special_tokens_around_a_text_are_counted(tokenizers, kind):
    assert TextTransform(tokenizers[kind], 64).edges == EDGES[kind]


@pytest.mark.parametrize("kind", EDGES)
@pytest.mark.parametrize("context", [3, 4, 5, 8, 12, 16, 17, 18, 19, 20, 21, 22, 64, 1000])
def test_a_text_too_long_loses_its_last_words_alone(tokenizers, kind, context):
    tokenizer = tokenizers[kind]
    tokenized = TextTransform(tokenizer, context)(CAPTIONS)
    expected = [literal_ids(tokenizer, text, context, EDGES[kind][1]) for text in CAPTIONS]
    assert list(tokenized.ids) == expected
    assert tokenized.truncated == sum(len(tokenizer.encode(text, verbose=False)) > context for text in CAPTIONS)
    assert max(map(len, tokenized.ids)) <= context


def test_clip_is_cut_as_openai_cuts(tokenizers):
    tokenizer = tokenizers["clip"]
    whole = TextTransform(tokenizer, 100)(CAPTIONS).ids
    cut = TextTransform(tokenizer, 9)(CAPTIONS).ids
    for long, short in zip(whole, cut):
        assert short == (long if len(long) <= 9 else (*long[:8], tokenizer.eos_token_id))


@pytest.mark.parametrize(
    ("kind", "first", "last"),
    [("clip", "<|startoftext|>", "<|endoftext|>"), ("bert", "[CLS]", "[SEP]"), ("siglip", "▁a", "</s>")],
)
def test_a_cut_text_keeps_its_first_and_last_token(tokenizers, kind, first, last):
    tokenizer = tokenizers[kind]
    row = TextTransform(tokenizer, 6)(CAPTIONS[1:2]).ids[0]
    assert tokenizer.convert_ids_to_tokens([row[0], row[-1]]) == [first, last]
    assert len(row) == 6


@pytest.mark.parametrize("kind", EDGES)
def test_a_context_without_room_for_a_word_is_refused(tokenizers, kind):
    room = sum(EDGES[kind])
    with pytest.raises(ValueError, match=f"context is {room}: beside {room} special tokens"):
        TextTransform(tokenizers[kind], room)(["dog"])
    tokenized = TextTransform(tokenizers[kind], room + 1)(["a dog"])
    assert (len(tokenized.ids[0]), tokenized.truncated) == (room + 1, 1)


@pytest.mark.parametrize("kind", EDGES)
def test_offsets_say_where_each_token_stands(tokenizers, kind):
    transform = TextTransform(tokenizers[kind], 64)
    texts = ["a red house. the dog, on the street", "dog", "a dog's tree"]
    for text, offsets, ids in zip(texts, transform.offsets(texts), transform(texts).ids, strict=True):
        before, after = transform.edges
        tokens = transform.tokenizer.convert_ids_to_tokens(ids[before : len(ids) - after])
        assert len(offsets) == len(tokens)
        assert offsets == sorted(offsets)
        assert [text[start:stop] for start, stop in offsets if text[start:stop] in WORDS] == [
            word for word in text.replace(".", " ").replace(",", " ").replace("'", " ").split() if word in WORDS
        ]
        for token, (start, stop) in zip(tokens, offsets):
            bare = token.replace("</w>", "").replace("##", "").replace("▁", "")
            assert bare in text[start:stop] or token == "[UNK]"


@pytest.mark.parametrize("kind", EDGES)
def test_offsets_are_those_of_the_cleaned_text(tokenizers, kind):
    plain, cleaning = (TextTransform(tokenizers[kind], 64, clean) for clean in (str, clean_caption))
    assert list(cleaning.offsets(["a   red\n house"])) == list(plain.offsets(["a red house"]))


@pytest.mark.parametrize("kind", EDGES)
def test_offsets_reach_beyond_the_context(tokenizers, kind):
    """By one token at least, so that a part that is cut can be told from one that is not."""
    whole, cut = (list(TextTransform(tokenizers[kind], context).offsets(CAPTIONS)) for context in (1000, 6))
    room = 6 - sum(EDGES[kind])
    for long, short in zip(whole, cut):
        assert short == long[: len(short)]
        assert len(short) == len(long) or len(short) > room


def test_offsets_come_in_order_however_many_there_are(tokenizers, monkeypatch):
    transform = TextTransform(tokenizers["clip"], 64)
    expected = list(transform.offsets(CAPTIONS))
    monkeypatch.setattr("hnclip.data.texts._TOGETHER", 3)
    assert list(transform.offsets(CAPTIONS)) == expected
    assert list(transform.offsets([])) == []


def test_siglip_reads_small_letters_without_punctuation(tokenizers):
    transform = TextTransform(tokenizers["siglip"], 64)
    assert transform(["A red, HOUSE!"]).ids == transform(["a red house"]).ids


def test_padding_and_truncation_in_the_tokenizers_file_are_left_aside():
    tokenizer = clip_tokenizer()
    expected = TextTransform(tokenizer, 10)(CAPTIONS)
    tokenizer.backend_tokenizer.enable_padding(length=30)
    tokenizer.backend_tokenizer.enable_truncation(5)
    assert TextTransform(tokenizer, 10)(CAPTIONS) == expected


def test_pads_are_the_tokenizers_own_or_else_end_tokens(tokenizers):
    assert TextTransform(tokenizers["bert"], 64).pad == 0
    assert TextTransform(tokenizers["clip"], 64).pad == tokenizers["clip"].eos_token_id
    assert TextTransform(bare_tokenizer(eos_token="[END]"), 64).pad == 1
    with pytest.raises(ValueError, match="set its pad_token"):
        _ = TextTransform(tokenizers["bare"], 64).pad


@pytest.mark.parametrize("kind", EDGES)
def test_the_transform_reaches_other_processes(tokenizers, kind):
    transform = TextTransform(tokenizers[kind], 8, clean_caption)
    expected = transform(CAPTIONS)
    assert pickle.loads(pickle.dumps(transform))(CAPTIONS) == expected


def test_no_texts_are_no_ids(tokenizers):
    for tokenizer in tokenizers.values():
        tokenized = TextTransform(tokenizer, 8)([])
        assert (tokenized.ids, tokenized.truncated) == ((), 0)


@pytest.mark.parametrize("kind", EDGES)
@pytest.mark.parametrize("empty", ["", "  \n", None, 7, b"dog"])
def test_an_empty_text_is_named_by_its_index(tokenizers, kind, empty):
    with pytest.raises(ValueError, match=r"texts\[1\] is empty"):
        TextTransform(tokenizers[kind], 77)(["dog", empty])


@pytest.mark.parametrize("empty", ["&nbsp;", "\x00\x1b[31m", "\ufeff", "&amp;nbsp; &#8195;"])
def test_a_text_that_cleaning_empties_is_named_by_its_index(tokenizers, empty):
    transform = TextTransform(tokenizers["clip"], 77, clean_caption)
    with pytest.raises(ValueError, match=r"texts\[2\] is empty"):
        transform(["dog", "a dog", empty])
    assert replace(transform, clean=str)([empty]).truncated == 0


@pytest.mark.parametrize(
    ("kind", "text"), [("siglip", "!!!"), ("bert", "🦜"), ("clip", "<|endoftext|>"), ("bare", "?")]
)
def test_a_text_of_special_tokens_alone_is_named_by_its_index(tokenizers, kind, text):
    with pytest.raises(ValueError, match=r"texts\[1\] .* finds no word in it"):
        TextTransform(tokenizers[kind], 77)(["dog", text, "a dog"])


def test_half_an_emoji_is_named_by_its_index_unless_cleaning_mends_it(tokenizers):
    for tokenizer in tokenizers.values():
        with pytest.raises(ValueError, match=r"texts\[1\] .* half of a surrogate pair"):
            TextTransform(tokenizer, 77)(["dog", "a dog \ud83d"])
    transform = TextTransform(tokenizers["clip"], 77, clean_caption)
    assert transform(["a dog \ud83d"]) == transform(["a dog \ufffd"])


def test_one_string_is_not_a_list_of_letters(tokenizers):
    with pytest.raises(ValueError, match="texts is a single string"):
        TextTransform(tokenizers["clip"], 77)("a dog")


def literal_clean(text):
    """OpenAI's basic_clean and whitespace_clean, step by step."""
    text = ftfy.fix_text(text)
    text = html.unescape(html.unescape(text))
    text = text.strip()
    text = " ".join(text.split())
    return text.strip()


ASCII = [chr(code) for code in range(128)]
SEQUENCES = ["\x1b[31m", "\r\n", "&amp;", "&amp;lt;", "&#38;", "&#28;", "<br>", "&nbsp", "&#xD;", "A&E", "&&"]


@given(st.lists(st.sampled_from(ASCII + SEQUENCES)).map("".join))
@example("a\x1fb")  # white space to Python, a control character to ftfy
@example("a\x0bb")
@example("a\x1cb\fc\td\re")
@example("\x1b[31mred\x1b[0m")
@example("[31mred")
@example("<b> caf&amp;eacute;")  # ftfy leaves entities alone beside a "<"
def test_ascii_is_cleaned_as_the_long_way_cleans_it(text):
    assert clean_caption(text) == literal_clean(text)


def test_every_ascii_letter_is_cleaned_as_the_long_way_cleans_it():
    for left in ASCII:
        for right in ASCII:
            assert clean_caption(f"a{left}{right}b") == literal_clean(f"a{left}{right}b")


@given(st.text(st.characters()))
@example("schÃ¶n, itâ€™s “curly” ﬁne &amp;eacute; e\u0301")
def test_any_text_is_cleaned_as_the_long_way_cleans_it(text):
    expected = literal_clean(text)
    assert clean_caption(text) == (expected.lower() if "Σ" in expected else expected)


def test_the_final_sigma_survives_tokenizers_that_know_none():
    assert clean_caption("ΟΔΟΣ  5") == "οδος 5"
    assert clean_caption("&Sigma;ΑΣ.") == "σας."
    assert clean_caption("ΟΔ 5") == "ΟΔ 5"


def test_ordinary_captions_take_the_short_way(monkeypatch):
    monkeypatch.setattr(ftfy, "fix_text", lambda text: pytest.fail(f"{text!r} went the long way"))
    plain = {chr(code) for code in range(32, 127)} - {"&"} | set("\t\n\f\r")
    text = "".join(sorted(plain))
    assert clean_caption(text) == " ".join(text.split())
