"""Captions beside pictures: the right pixels, words where they belong, nothing over its neighbour."""

from __future__ import annotations

import io
from itertools import pairwise

import pytest
from matplotlib.patches import Rectangle
from PIL import Image

from hnclip.analysis.figures import (
    CORRECT,
    HIGHLIGHT,
    WRONG,
    Example,
    near_duplicate_figure,
    retrieval_figure,
)
from hnclip.analysis.shown import CompanionRow, Passage, Shown

ODD_TEXTS = {
    "han": "白い犬が走る。" * 40,
    "arabic": "كلب أبيض يركض على العشب. " * 10,
    "emoji and marks": "🐶🐕‍🦺 z\u0301\u0301 \x00\ud800",
    "formula": r"costs $5 and $\frac{}" + "_" * 40,
    "one word": "x" * 3000,
    "nothing": "",
    "10 MB": "word " * 2_000_000,
}


def plain(colour: str, size: tuple[int, int] = (8, 8), mode: str = "RGB") -> Image.Image:
    return Image.new(mode, size, colour)


def drawn(figure) -> None:
    """Draw all of the figure: pytest turns what matplotlib warns about into errors."""
    figure.savefig(io.BytesIO(), dpi=60)


def words(figure) -> list[str]:
    texts = [*figure.texts]
    for axes in figure.axes:
        texts += [*axes.texts, axes.xaxis.label]
    return [text.get_text() for text in texts if text.get_text()]


def _rgb(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))


def passage(*pieces: str) -> Passage:
    """Every second piece is highlighted."""
    return tuple((piece, number % 2 == 1) for number, piece in enumerate(pieces))


def row(*texts: Passage, picture: Image.Image | None = None) -> CompanionRow:
    query, *companions = [Shown(f"label {number}", text, picture) for number, text in enumerate(texts)]
    return CompanionRow(query, tuple(companions))


def highlights(figure) -> list[Rectangle]:
    return [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]


def test_answers_are_marked_in_words_and_colour():
    answers = {"InfoNCE": (plain("red"), False), "HN-CLIP": (plain("blue"), True)}
    figure = retrieval_figure([Example("A blue square.", plain("blue"), answers)])
    assert words(figure) == ["A blue square.", "the caption's picture", "InfoNCE ✗ wrong", "HN-CLIP ✓ correct"]
    _, right, wrong_answer, right_answer = figure.axes
    frames = [axes.spines["left"].get_edgecolor() for axes in (wrong_answer, right_answer)]
    assert frames == [pytest.approx((*_rgb(colour), 1)) for colour in (WRONG, CORRECT)]
    shown = [tuple(axes.images[0].get_array()[0, 0]) for axes in (right, wrong_answer, right_answer)]
    assert shown == [(0, 0, 255), (255, 0, 0), (0, 0, 255)]


def test_a_row_is_as_high_as_its_caption():
    def example(caption: str) -> Example:
        return Example(caption, plain("blue"), {"a": (plain("red"), False), "b": (plain("blue"), True)})

    long = r"A long sentence with no formula: $\frac$. " * 40
    figure = retrieval_figure([example("Short."), example(long)])
    drawn(figure)  # lays the rows out
    box = figure.axes[4].texts[0].get_window_extent()
    assert " ".join(figure.axes[4].texts[0].get_text().split()) == long.strip()
    assert box.y0 >= 0
    assert box.y1 <= figure.axes[0].texts[0].get_window_extent().y0
    assert box.x1 <= figure.axes[5].get_window_extent().x0


@pytest.mark.parametrize("text", ODD_TEXTS.values(), ids=ODD_TEXTS)
def test_captions_of_any_kind_keep_to_their_place(text):
    name = (text or "犬")[:40]
    figure = retrieval_figure([Example(text, plain("blue"), {name: (plain("red"), False)})])
    drawn(figure)
    assert figure.get_size_inches()[1] < 10
    caption, right, answer = figure.axes
    assert caption.texts[0].get_window_extent().x1 <= right.get_window_extent().x0
    labels = [axes.xaxis.label.get_window_extent() for axes in (right, answer)]
    assert labels[0].x1 < labels[1].x0
    assert labels[1].x1 <= figure.bbox.x1


def test_no_examples_are_said_in_words():
    assert "both models put the right picture first, or neither did" in words(retrieval_figure([]))[0]


def test_a_row_holds_query_and_companions_from_left_to_right():
    query = Shown("query", passage("A ", "red", " house."), plain("red"))
    near = Shown("cosine 0.934", passage("One ", "red", " car."), plain("blue"))
    lost = Shown("cosine 0.912", passage("A boat."), None)
    figure = near_duplicate_figure([CompanionRow(query, (near, lost))])
    drawn(figure)
    canvas, *pictures = figure.axes
    assert [tuple(axes.images[0].get_array()[0, 0]) for axes in pictures[:2]] == [(255, 0, 0), (0, 0, 255)]
    assert not pictures[2].images
    assert [text.get_text() for text in pictures[2].texts] == ["no picture"]
    assert [text.get_text() for text in canvas.texts] == [
        *("query", "A", "red", "house."),
        *("cosine 0.934", "One", "red", "car."),
        *("cosine 0.912", "A", "boat."),
    ]
    lefts = [axes.get_position().x0 for axes in pictures]
    assert lefts == sorted(lefts)
    for axes, label in zip(pictures, ("query", "cosine 0.934", "cosine 0.912")):
        box = next(text for text in canvas.texts if text.get_text() == label).get_window_extent()
        whole = axes.get_window_extent()
        assert box.y1 < whole.y0  # underneath
        assert whole.x0 - 5 < box.x0 < whole.x1


@pytest.mark.parametrize("dpi", [60, 100, 180])
def test_highlights_lie_behind_their_words(dpi):
    text = passage(
        "The ", "red", ", ", "large house", " stands alone on a hill over the valley of ", "green meadows", "."
    )
    figure = near_duplicate_figure([row(text, text, text, text)])
    figure.savefig(io.BytesIO(), dpi=dpi)
    figure.set_dpi(dpi)
    marked = highlights(figure)
    assert len(marked) == 4 * 5
    found = []
    for patch in marked:
        assert patch.get_facecolor() == pytest.approx((*_rgb(HIGHLIGHT), 1))
        behind = patch.get_window_extent()
        inside = [
            text.get_text()
            for text in figure.axes[0].texts
            if behind.contains(*(text.get_window_extent().min + text.get_window_extent().max) / 2)
        ]
        found += inside
        (word,) = (text for text in figure.axes[0].texts if [text.get_text()] == inside and _overlap(text, behind))
        assert word.get_window_extent().width == pytest.approx(behind.width, rel=0.25)
    assert found == ["red", "large", "house", "green", "meadows"] * 4


def _overlap(text, box) -> bool:
    return text.get_window_extent().overlaps(box)


def test_words_stay_in_their_column_and_apart():
    text = passage("This is a sentence about ", "several", " things that are rather close to each other. " * 9)
    figure = near_duplicate_figure([row(text, text, text, text, picture=plain("red"))])
    drawn(figure)
    canvas, *pictures = figure.axes
    boxes = [text.get_window_extent() for text in canvas.texts]
    for box in boxes:
        assert any(axes.get_window_extent().x0 - 2 <= box.x0 <= box.x1 <= axes.bbox.x1 + 2 for axes in pictures)
        assert box.y0 >= 0
    lines = sorted({round(text.get_position()[1], 3) for text in canvas.texts})
    assert min(b - a for a, b in pairwise(lines[1:])) == pytest.approx(0.15, abs=1e-3)


def test_a_broken_word_stays_in_its_column_where_pixels_widen_it():
    figure = near_duplicate_figure([row(*[passage("x" * 3000)] * 4)])
    figure.set_dpi(100)
    figure.draw_without_rendering()
    canvas, *pictures = figure.axes
    last = max(text.get_window_extent().x1 for text in canvas.texts)
    assert pictures[-1].bbox.x1 - 20 < last < pictures[-1].bbox.x1 + 2


def test_long_texts_are_cut_after_some_lines():
    long = passage("many words ", "and more ", "so that they fill line after line " * 60)
    figure = near_duplicate_figure([row(long, passage("short"))])
    drawn(figure)
    texts = figure.axes[0].texts
    assert len({text.get_position()[1] for text in texts}) == 1 + 16  # labels, and lines
    assert [text.get_text() for text in texts].count("…") == 1


def test_scripts_from_the_right_begin_at_the_right():
    figure = near_duplicate_figure([row(passage("כלב ", "לבן", " רץ"), passage("a ", "dog"))])
    drawn(figure)
    _, first, marked, last, *_ = figure.axes[0].texts
    assert [text.get_text() for text in (first, marked, last)] == ["כלב", "לבן", "רץ"]
    boxes = [text.get_window_extent() for text in (first, marked, last)]
    assert boxes[0].x0 > boxes[1].x1 > boxes[1].x0 > boxes[2].x1
    behind = highlights(figure)[0].get_window_extent()
    assert behind.x0 - 2 < boxes[1].x0 < boxes[1].x1 < behind.x1 + 2
    assert boxes[0].x1 == pytest.approx(figure.axes[1].bbox.x1, abs=2)


@pytest.mark.parametrize("text", ODD_TEXTS.values(), ids=ODD_TEXTS)
def test_texts_of_any_kind_are_drawn(text):
    odd = ((text, True),)
    figure = near_duplicate_figure([CompanionRow(Shown(text, odd), (Shown("a", odd), Shown("b", odd)))])
    drawn(figure)
    assert figure.get_size_inches()[1] < 5
    for label in figure.axes[0].texts:
        assert label.get_window_extent().x1 <= figure.bbox.x1


@pytest.mark.parametrize(
    "picture",
    [
        plain("red", (3000, 2)),
        plain("red", (2, 3000)),
        Image.new("L", (5, 5), 128),
        Image.new("RGBA", (5, 5), (255, 0, 0, 0)),
        Image.new("1", (1, 1)),
        Image.new("CMYK", (5, 5)),
    ],
    ids=["flat", "tall", "grey", "transparent", "bits", "cmyk"],
)
def test_pictures_of_any_kind_keep_to_their_place(picture):
    figure = near_duplicate_figure([row(passage("a"), passage("b"), picture=picture)])
    drawn(figure)
    assert figure.get_size_inches()[1] < 6
    assert max(figure.axes[1].images[0].get_array().shape) <= 600
    assert figure.axes[1].images[0].get_array().shape[2] == 3


def test_transparent_palettes_do_not_warn():
    picture = Image.new("P", (4, 4))
    picture.info["transparency"] = b"\x00\xff"
    drawn(near_duplicate_figure([row(passage("a"), passage("b"), picture=picture)]))


def test_rows_are_below_each_other():
    figure = near_duplicate_figure([row(passage("first " * 50), passage("b")), row(passage("second"), passage("d"))])
    drawn(figure)
    canvas, first, _, second, _ = figure.axes
    lowest = min(text.get_window_extent().y0 for text in canvas.texts if text.get_text() == "first")
    assert first.bbox.y0 > lowest > second.bbox.y1


def test_no_near_duplicates_are_said_in_words():
    assert words(near_duplicate_figure([])) == ["No near-duplicate captions to show."]
