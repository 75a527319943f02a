"""Descriptions: words, the tokens that they are made of, and what the context leaves out."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_index import bundled

from hnclip.data.texts import TokenizedTexts
from hnclip.models.dual_encoder import DualEncoder
from hnclip.search.description import read_description, token_vectors, word_vectors

TEXT = "A mid-sized, checked umbrella; the dog's leash (red) lies under it — isn't it?"


@pytest.fixture(scope="module")
def model() -> DualEncoder:
    return bundled()


def cut_by(offsets: list[tuple[int, int]]) -> SimpleNamespace:
    """A model whose tokenizer finds these tokens."""

    class Transform:
        edges = (1, 1)
        clean = str

        def __call__(self, texts: list[str]) -> TokenizedTexts:
            return TokenizedTexts(np.arange(len(offsets) + 2), np.array([0, len(offsets) + 2]), 0)

        def offsets(self, texts: list[str]) -> list[list[tuple[int, int]]]:
            return [offsets]

    return SimpleNamespace(text_transform=Transform())


def test_words_are_what_people_call_words_and_marks_are_none(model: DualEncoder) -> None:
    found = read_description(model, TEXT)
    said = ["A", "mid-sized", "checked", "umbrella", "the", "dog's", "leash", "red", "lies", "under", "it", "isn't"]
    assert [word.text for word in found.words] == [*said, "it"]
    assert all(found.text[word.start : word.stop] == word.text for word in found.words)
    assert not found.cut


def test_the_tokens_of_a_word_spell_it(model: DualEncoder) -> None:
    found = read_description(model, TEXT)
    ids = model.text_transform([TEXT])[0][1:-1]
    for word in found.words:
        spelt = model.tokenizer.decode([ids[place] for place in word.tokens])
        assert spelt.replace(" ", "") == word.text.lower()
    places = [place for word in found.words for place in word.tokens]
    assert places == sorted(set(places))
    assert len(places) < len(ids)  # marks have tokens too


def test_positions_are_those_of_the_cleaned_text(model: DualEncoder) -> None:
    found = read_description(model, "  two &amp;\n\t trees ")
    assert found.text == "two & trees"
    assert [(word.text, word.start, word.stop) for word in found.words] == [("two", 0, 3), ("trees", 6, 11)]


def test_what_the_context_leaves_out_is_no_word(model: DualEncoder) -> None:
    room = model.context - 2
    whole, cut = read_description(model, "tree " * room), read_description(model, "tree " * (room + 1))
    assert len(model.text_transform(["tree"])[0]) == 3  # so that the numbers here are those of tokens
    assert (len(whole.words), whole.cut) == (room, False)
    assert (len(cut.words), cut.cut) == (room, True)
    assert max(place for word in cut.words for place in word.tokens) == len(token_vectors(model, "tree " * 999)) - 1


def test_a_word_that_the_context_ends_within_has_the_tokens_that_were_read(model: DualEncoder) -> None:
    long = "umbrellatreehouse"
    pieces = len(model.text_transform([long])[0]) - 2
    assert pieces > 1
    found = read_description(model, "tree " * (model.context - 3) + long)
    assert found.cut
    assert (found.words[-1].text, len(found.words[-1].tokens)) == (long, 1)


@pytest.mark.parametrize("text", ["", "  \n", "...", "?! — “”", "​"])
def test_a_description_without_a_word_is_refused(model: DualEncoder, text: str) -> None:
    with pytest.raises(ValueError, match="the description has no word"):
        read_description(model, text)


def test_half_a_letter_is_refused_in_words_of_the_description(model: DualEncoder) -> None:
    plain = SimpleNamespace(text_transform=replace(model.text_transform, clean=str))  # the model's own would mend it
    with pytest.raises(ValueError, match=r"^the description is .*surrogate"):
        read_description(plain, "a tree \ud83d")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a 🐶 runs", ["a", "🐶", "runs"]),
        ("红房子", ["红", "房", "子"]),
        ("सड़क पर", ["सड़क", "पर"]),
        ("3 trees, 2.5 m", ["3", "trees", "2", "5", "m"]),
    ],
)
def test_other_scripts_numbers_and_emoji(model: DualEncoder, text: str, words: list[str]) -> None:
    offsets = [(place, place + 1) for place in range(len(text))]
    assert [word.text for word in read_description(cut_by(offsets), text).words] == words  # type: ignore[arg-type]
    assert [word.text for word in read_description(model, text).words] == words


def test_what_one_token_reaches_over_is_one_word() -> None:
    tokens = [(0, 2), (1, 2), (2, 3), (3, 4), (4, 4), (5, 8)]
    found = read_description(cut_by(tokens), "红房子。 abc")  # type: ignore[arg-type]
    assert [(word.text, word.tokens) for word in found.words] == [("红房", (0, 1)), ("子", (2,)), ("abc", (5,))]


@pytest.mark.parametrize(
    "text",
    [
        "<b> &amp;amp;amp;lt;&amp;amp;amp;gt; dog cat tree",
        "<b> red &amp;amp;amp;amp; dog and a very small cat <b> . . . .",
    ],
)
def test_a_text_is_cleaned_once(model: DualEncoder, text: str) -> None:
    """Of what a second cleaning would change, each word has the vectors of its own tokens."""
    found = read_description(model, text)
    assert model.text_transform.clean(found.text) != found.text
    with torch.no_grad():
        said = model.encode_texts(model.tokenize([text]), tokens=True).tokens
    assert said is not None
    (offsets,) = model.text_transform.offsets([text])
    for word, vector in zip(found.words, word_vectors(model, found), strict=True):
        inside = [place + 1 for place, (a, b) in enumerate(offsets) if a < word.stop and b > word.start]
        torch.testing.assert_close(vector, said[0, inside].mean(dim=0), atol=1e-5, rtol=0)


def test_a_word_is_the_mean_of_its_tokens(model: DualEncoder) -> None:
    found = read_description(model, TEXT)
    tokens = token_vectors(model, TEXT)
    words = word_vectors(model, found)
    torch.testing.assert_close(tokens.norm(dim=1), torch.ones(len(tokens)))
    assert any(len(word.tokens) > 1 for word in found.words)
    for word, vector in zip(found.words, words, strict=True):
        expected = sum(tokens[place] for place in word.tokens) / len(word.tokens)
        torch.testing.assert_close(vector, expected)
