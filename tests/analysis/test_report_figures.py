"""Figures: the right data in the lines, the right words on the axes."""

from __future__ import annotations

import io
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from hnclip.analysis.figures import (
    CORRECT,
    FLOOR,
    WRONG,
    Example,
    convergence_figure,
    retrieval_figure,
    running,
    saturation_figure,
)


def steps(infonce: list[float]) -> list[dict[str, float]]:
    """Entries whose gradient norm is ten times their loss."""
    return [
        {"step": i, "infonce": value, "grad_norm": 10 * value, "saturated": float(value < 1e-3)}
        for i, value in enumerate(infonce, start=1)
    ]


def epochs(*recalls: tuple[float, float]) -> list[dict[str, object]]:
    return [
        {"epoch": epoch, "text_to_image": {"R@1": text}, "image_to_text": {"R@1": image}}
        for epoch, (text, image) in enumerate(recalls)
    ]


def plain(colour: str) -> Image.Image:
    return Image.new("RGB", (8, 8), colour)


def png(figure) -> Image.Image:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=60)
    return Image.open(buffer)


def words(figure) -> list[str]:
    texts = [*figure.texts]
    for axes in figure.axes:
        texts += [*axes.texts, axes.xaxis.label]
    return [text.get_text() for text in texts if text.get_text()]


def test_running_window_shrinks_at_both_ends():
    assert running([9.0, 1.0, 5.0, 3.0], 3, np.median) == [5.0, 5.0, 3.0, 4.0]
    assert running([9.0, 1.0, 5.0, 3.0], 3, np.mean) == pytest.approx([5, 5, 3, 4])
    assert running([7.0], 3, np.median) == [7.0]


def test_saturation_draws_every_step_and_its_running_median():
    figure = saturation_figure({"InfoNCE": steps([4.0, 0.0, 1e-12, 2.0]), "HN-CLIP": steps([1.0, 1.0])})
    loss, norm, share = figure.axes
    raw, median, other_raw, _ = (line.get_data() for line in loss.lines)
    assert list(raw[0]) == [1, 2, 3, 4]
    assert list(raw[1]) == [4.0, FLOOR, FLOOR, 2.0]
    assert list(median[1]) == pytest.approx([(4 + FLOOR) / 2, FLOOR, FLOOR, (2 + FLOOR) / 2], rel=1e-12)
    assert list(other_raw[0]) == [1, 2]
    assert list(norm.lines[0].get_ydata()) == [40.0, FLOOR, FLOOR, 20.0]
    assert list(share.lines[0].get_ydata()) == pytest.approx([50, 200 / 3, 200 / 3, 50])
    assert list(share.lines[1].get_ydata()) == [0, 0]
    assert loss.lines[0].get_linewidth() < loss.lines[1].get_linewidth()


def test_the_window_grows_with_the_run():
    values = [1.0] * 100
    values[50:52] = [1e-4, 1e-4]  # two of five: a median of three would follow them, a median of five does not
    figure = saturation_figure({"a": steps(values)})
    assert set(figure.axes[0].lines[1].get_ydata()) == {1.0}
    assert "running median of 5 steps" in figure.axes[2].get_xlabel()


def test_saturation_axes_say_what_they_show():
    figure = saturation_figure({"InfoNCE": steps([1.0, 2.0]), "HN-CLIP": steps([1.0])})
    loss, norm, share = figure.axes
    assert (loss.get_yscale(), norm.get_yscale(), share.get_yscale()) == ("log", "log", "linear")
    assert "InfoNCE" in loss.get_ylabel()
    assert "(nats)" in loss.get_ylabel()
    assert "own objective, before clipping" in norm.get_ylabel()
    assert "InfoNCE < 0.001 (%)" in share.get_ylabel()
    assert share.get_xlabel().startswith("optimiser step")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["InfoNCE", "HN-CLIP"]
    first, second = (handle for handle in figure.legends[0].legend_handles)
    assert first.get_color() != second.get_color()
    assert first.get_linestyle() != second.get_linestyle()


def test_convergence_has_one_panel_per_direction():
    figure = convergence_figure({"InfoNCE": epochs((0, 1), (10, 11)), "HN-CLIP": epochs((0, 1), (20, 21), (30, 31))})
    text_to_image, image_to_text = figure.axes
    assert text_to_image.get_ylabel() == "validation R@1, text→image (%)"
    assert image_to_text.get_ylabel() == "validation R@1, image→text (%)"
    assert "epoch" in text_to_image.get_xlabel()
    assert [line.get_xydata().tolist() for line in text_to_image.lines] == [
        [[0, 0], [1, 10]],
        [[0, 0], [1, 20], [2, 30]],
    ]
    assert [line.get_ydata()[-1] for line in image_to_text.lines] == [11, 31]
    assert text_to_image.get_ylim()[0] == 0


@pytest.mark.parametrize("draw", [saturation_figure, convergence_figure])
def test_nothing_to_draw_is_an_error(draw):
    with pytest.raises(ValueError, match="runs is empty"):
        draw({})
    with pytest.raises(ValueError, match="'HN-CLIP' has no entries"):
        draw({"HN-CLIP": []})


def test_answers_are_marked_in_words_and_colour():
    answers = {"InfoNCE": (plain("red"), False), "HN-CLIP": (plain("blue"), True)}
    figure = retrieval_figure([Example("A blue square.", plain("blue"), answers)])
    assert words(figure) == ["A blue square.", "the caption's picture", "InfoNCE ✗ wrong", "HN-CLIP ✓ correct"]
    _, right, wrong_answer, right_answer = figure.axes
    frames = [axes.spines["left"].get_edgecolor() for axes in (wrong_answer, right_answer)]
    assert frames == [pytest.approx((*_rgb(colour), 1)) for colour in (WRONG, CORRECT)]
    shown = [tuple(axes.images[0].get_array()[0, 0]) for axes in (right, wrong_answer, right_answer)]
    assert shown == [(0, 0, 255), (255, 0, 0), (0, 0, 255)]


def _rgb(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))


def test_a_row_is_as_high_as_its_caption():
    def example(caption: str) -> Example:
        return Example(caption, plain("blue"), {"a": (plain("red"), False), "b": (plain("blue"), True)})

    long = r"A long sentence with no formula: $\frac$. " * 40
    figure = retrieval_figure([example("Short."), example(long)])
    png(figure)  # lays the rows out
    box = figure.axes[4].texts[0].get_window_extent()
    assert " ".join(figure.axes[4].texts[0].get_text().split()) == long.strip()
    assert box.y0 >= 0
    assert box.y1 <= figure.axes[0].texts[0].get_window_extent().y0
    assert box.x1 <= figure.axes[5].get_window_extent().x0


def test_no_examples_are_said_in_words():
    assert "both models put the right picture first, or neither did" in words(retrieval_figure([]))[0]


@pytest.mark.parametrize(
    "figure",
    [
        saturation_figure({"a": steps([3.0, 0.1, 1e-4])}),
        convergence_figure({"a": epochs((0, 0), (1, 2))}),
        retrieval_figure([Example("Text.", plain("blue"), {"a": (plain("red"), False), "b": (plain("blue"), True)})]),
        retrieval_figure([]),
    ],
    ids=["saturation", "convergence", "retrieval", "no examples"],
)
def test_a_figure_is_a_picture(figure):
    picture = png(figure)
    assert picture.width == 540  # 9 inches
    assert len(picture.convert("RGB").getcolors(1 << 24)) > 20


def test_figures_leave_pyplot_alone():
    code = (
        "import sys, hnclip.analysis.figures as f; assert 'matplotlib' not in sys.modules;"
        "f.retrieval_figure([]); assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
