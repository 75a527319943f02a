from __future__ import annotations

import pickle
import re
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from hnclip.data.views.grammar import Entries, drop_words
from hypothesis import given
from hypothesis import strategies as st

from hnclip.data.lexicon import CATEGORIES, filter_caption, filter_version, load_filter, word_list
from hnclip.data.views import lexicon

CAREFUL = {
    # articles
    "An orange tree beside a gold statue": "A tree beside a statue",
    "a red apple and an ivory horse": "an apple and a horse",
    "a red hour hand, a red university, a white X-ray": "an hour hand, a university, an X-ray",
    "a black SUV, an orange BMW, a white MP3 player": "an SUV, a BMW, an MP3 player",
    "A RED UMBRELLA NEAR A TALL TREE": "AN UMBRELLA NEAR A TALL TREE",
    # hyphens
    "a red-haired woman beside a wood-burning stove": "a woman beside a stove",
    "a black-and-white photo of a cat": "a photo of a cat",
    "a blue-green lake and a snow-white swan": "a lake and a swan",
    "a semi-metal gate and plexi-glass walls": "a semi-metal gate and plexi-glass walls",
    "a dark-blue bus with gold-framed windows": "a bus with framed windows",
    # coordinations
    "red and blue balloons float": "balloons float",
    "a red, white and blue flag waves": "a flag waves",
    "a big, red ball and a big and blue box": "a big ball and a big box",
    "a red, round ball and a red and tall box": "a round ball and a tall box",
    "both black and white dogs run": "dogs run",
    # predicates
    "The car is red. The bus stops.": "The car. The bus stops.",
    "The car is red and has two doors.": "The car has two doors.",
    "The car is red and parked.": "The car is parked.",
    "The leaves are mostly dark green with holes.": "The leaves with holes.",
    "The wall, which is white, has a door.": "The wall has a door.",
    "It is black. The dog runs away.": "The dog runs away.",
    "The dog runs away. It is black.": "The dog runs away.",
    "The rocks are grey in color and seem flat.": "The rocks seem flat.",
    "The table is made of wood and has four legs.": "The table has four legs.",
    "A table made out of dark wood, with chairs.": "A table, with chairs.",
    "There are three poles that are gray and made of metal.": "There are three poles.",
    "The base is large and made of white cement, and old.": "The base is large, and old.",
    "A house beneath a tall sky and that is also made of stone.": "A house beneath a tall sky.",
    "It is made of wood and stands here.": "It stands here.",
    "planes, some of which are white, stand here": "planes, some of which are white, stand here",
    "a red one and the blue ones stand here": "a red one and the ones stand here",
    "There is red brick on the road.": "There is brick on the road.",
    "A woman in black with blonde hair walks.": "A woman with hair walks.",
    "The door is painted white.": "The door is painted.",
    # things
    "an orange on the table": "an orange on the table",
    "a glass of water and the glass is full": "a glass of water and the glass is full",
    "a brick lies on the road": "a brick lies on the road",
    "a small red brick lies on the road": "a small brick lies on the road",
    "the glass filled with water": "the glass filled with water",
    "He wears black.": "He wears black.",
    "The glass's edge and the brick's side": "The glass's edge and the brick's side",
    # beginnings, shades, names, quotes
    "Red cars stand here": "Cars stand here",
    "A very dark red umbrella stands": "An umbrella stands",
    'A red sign reads "RED CAR" near the White House': 'A sign reads "RED CAR" near the White House',
    'A sign says "a red car" in the park': 'A sign says "a red car" in the park',
    'A white "NO PARKING" sign hangs': 'A "NO PARKING" sign hangs',
    "The light stands on a tall table": "The light stands on a tall table",
    "A Greenland map of a redwood forest": "A Greenland map of a redwood forest",  # whole words
}


@pytest.mark.parametrize("text", CAREFUL)
def test_careful_filter(text: str) -> None:
    assert filter_caption(text) == CAREFUL[text]


def test_a_second_part_that_stands_alone_stays() -> None:
    assert filter_caption("a white-striped shirt on a man", ["colours"]) == "a striped shirt on a man"
    assert filter_caption("a white-striped shirt on a man") == "a shirt on a man"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("An orange tree beside a gold statue", "An tree beside a statue"),
        ("A man in a white-striped shirt", "A man in a -striped shirt"),
        ("The car is red, and the Dark Blue bus stops .", "The car is, and the bus stops."),
        ("A stainless steel sink, redwood", "A stainless steel sink, redwood"),
    ],
)
def test_blunt_filter_cuts_words_and_nothing_else(text: str, expected: str) -> None:
    assert filter_caption(text, ["colours"], careful=False) == expected


def test_the_longest_entry_is_taken() -> None:
    entries = Entries({"colours": ["navy", "navy royal", "navy royal club"]})
    assert drop_words("a navy royal house, a navy-royal club house", entries) == "a house, a house"


def test_categories_are_apart() -> None:
    text = "a red wooden shiny chair near a stainless steel sink"
    assert filter_caption(text, ["colours"]) == "a wooden shiny chair near a stainless steel sink"
    assert filter_caption(text, ["materials"]) == "a red shiny chair near a sink"
    assert filter_caption(text, ["textures"]) == "a red wooden chair near a stainless steel sink"
    assert filter_caption(text) == "a chair near a sink"
    assert filter_caption(text, []) == filter_caption(text, [], careful=False) == text


@pytest.mark.parametrize("careful", [True, False])
def test_too_little_left_leaves_the_caption_alone(careful: bool) -> None:
    assert filter_caption("a red and blue ball", careful=careful) == "a red and blue ball"  # "ball" alone
    assert filter_caption("a red ball rolls", careful=careful) == "a ball rolls"
    assert filter_caption("Red", careful=careful) == "Red"


listed = st.sampled_from([entry for category in CATEGORIES for entry in word_list(category)])
GLUE = "a an the and or is are was of in with made which that it there very dark both all has runs on not"
NOUNS = "car apple hour house dogs building lettering painted Tower tall round striped it's SUV BMW"
others = st.sampled_from(f"{GLUE} {NOUNS}".split())
marks = st.sampled_from([" ", " ", " ", " ", " ", "-", ", ", ". ", ".", ",", ' "', '" ', " (", ") ", "\n", "'s ", "/"])
texts = st.lists(st.tuples(listed | others, marks, st.booleans()), min_size=1, max_size=14).map(
    lambda parts: "".join((word.capitalize() if high else word) + mark for word, mark, high in parts)
)


@given(texts | st.text(max_size=40))
def test_filtering_twice_is_filtering_once_and_adds_nothing(text: str) -> None:
    once = filter_caption(text)
    assert filter_caption(once) == once
    assert not text.strip() or once.strip()
    words, before = (re.findall(r"\w+", part.lower()) for part in (once, text))
    remaining = iter(before)
    # In the order of the caption; of articles either form will do.
    same = [{"a", "an"} if word in ("a", "an") else {word} for word in words]
    assert all(any(other in wanted for other in remaining) for wanted in same)


@given(texts)
def test_blunt_filter_leaves_no_listed_word_or_everything(text: str) -> None:
    once = filter_caption(text, careful=False)
    assert once.strip()
    if once != text:
        assert not {"red", "wooden", "shiny"} & set(re.findall(r"\w+", once.lower()))


def test_word_lists_are_clean() -> None:
    for category in CATEGORIES:
        entries = word_list(category)
        assert len(set(entries)) == len(entries) > 40
        assert all(re.fullmatch(r"[a-z]+(?:[ -][a-z]+)*", entry) for entry in entries)
    assert {"grey", "gray", "dark blue"} <= set(word_list("colours"))
    assert {"aluminium", "aluminum", "stainless steel"} <= set(word_list("materials"))


def test_filters_by_name() -> None:
    text = "An orange wooden door beside a gold statue"
    assert load_filter("lexicon")(text) == "A door beside a statue"
    assert load_filter("lexicon:colours")(text) == "A wooden door beside a statue"
    assert load_filter("lexicon:colours,materials")(text) == "A door beside a statue"
    assert load_filter("blunt")(text) == "An door beside a statue"
    assert load_filter("blunt:materials")(text) == "An orange door beside a gold statue"
    assert pickle.loads(pickle.dumps(load_filter("lexicon:colours")))(text) == load_filter("lexicon:colours")(text)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "my_filters.py"
    path.write_text("def small(text): return text.lower()\ndef none(text): return ' '\nnumber = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_filters", raising=False)
    return path


def test_own_functions(module: Path) -> None:
    assert load_filter("my_filters:small")("A Dog") == "a dog"
    with pytest.raises(ValueError, match=r"my_filters:none returned ' ' for 'A Dog': it must return text"):
        load_filter("my_filters:none")("A Dog")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lexikon", "there is no filter 'lexikon': use lexicon, blunt"),
        ("lexicon:colors", "word list 'colors': choose from colours, materials, textures"),
        ("lexicon:", "word list '': choose"),
        ("my_filters:absent", "my_filters has no function 'absent'"),
        ("my_filters:number", "my_filters has no function 'number'"),
        ("not_there:small", r"importing not_there fails \(ModuleNotFoundError.*PYTHONPATH"),
    ],
)
def test_filters_that_are_none(module: Path, name: str, message: str) -> None:
    for ask in (load_filter, filter_version):
        with pytest.raises(ValueError, match=message):
            ask(name)


def test_bad_categories_are_refused() -> None:
    with pytest.raises(ValueError, match=r"single string: give a list such as \['colours'\]"):
        filter_caption("A dog", "colours")
    for careful in (True, False):
        with pytest.raises(ValueError, match="no word list 'colors'"):
            filter_caption("A dog", ["colors"], careful=careful)


def test_versions_change_with_what_they_are_made_of(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = filter_version("my_filters:small")
    module.write_text(module.read_text() + "# changed\n")
    assert filter_version("my_filters:small") != own
    assert filter_version("builtins:str") == "builtins:str"  # no file to look at
    assert filter_version("lexicon") != filter_version("lexicon:colours")

    room = files("hnclip.data.views")
    (tmp_path / "words").mkdir()
    for name in ("lexicon.py", "grammar.py", *(f"words/{category}.txt" for category in lexicon.LISTS)):
        (tmp_path / name).write_bytes((room / name).read_bytes())
    before = filter_version("lexicon")
    monkeypatch.setattr(lexicon, "_ROOM", tmp_path)
    assert filter_version("lexicon") == before
    for name in ("words/textures.txt", "grammar.py"):
        with (tmp_path / name).open("a") as file:
            file.write("# changed\n")
        assert filter_version("lexicon") != before
        before = filter_version("lexicon")
