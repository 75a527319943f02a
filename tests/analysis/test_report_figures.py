"""Figures: the right data in the lines, the right words on the axes."""

from __future__ import annotations

import io
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from hnclip.analysis.figures import (
    FLOOR,
    Example,
    convergence_figure,
    retrieval_figure,
    running,
    sample_efficiency_figure,
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


@pytest.mark.parametrize("draw", [saturation_figure, convergence_figure, sample_efficiency_figure])
def test_nothing_to_draw_is_an_error(draw):
    with pytest.raises(ValueError, match="runs is empty"):
        draw({})
    with pytest.raises(ValueError, match="'HN-CLIP' has no entries"):
        draw({"HN-CLIP": []})


def test_the_average_of_both_directions_is_one_panel():
    figure = convergence_figure({"InfoNCE": epochs((0, 1), (10, 20))}, average=True)
    (axes,) = figure.axes
    assert axes.lines[0].get_xydata().tolist() == [[0, 0.5], [1, 15]]
    assert axes.get_ylabel() == "validation R@1, average of both directions (%)"


def test_a_single_epoch_has_whole_ticks():
    figure = convergence_figure({"a": epochs((3, 4))})
    figure.draw_without_rendering()
    ticks = figure.axes[0].get_xticks()
    assert 0 in ticks
    assert (ticks == ticks.round()).all()


def test_sample_efficiency_has_a_tick_for_each_fraction():
    series = {"HN-CLIP": [(100, 84, 83, 85.5), (5, 60, 58, 63)], "InfoNCE": [(5, 50), (20, 68), (100, 79)]}
    figure = sample_efficiency_figure(series, ("StructXLIP", 76.25))
    figure.draw_without_rendering()
    (axes,) = figure.axes
    hard, *intervals, plain, reference = axes.lines
    assert hard.get_xydata().tolist() == [[5, 60], [100, 84]]  # in order
    assert plain.get_xydata().tolist() == [[5, 50], [20, 68], [100, 79]]
    assert [line.get_xydata().tolist() for line in intervals] == [[[5, 58], [5, 63]], [[100, 83], [100, 85.5]]]
    assert [*reference.get_ydata()] == [76.25, 76.25]
    assert reference.get_linestyle() == ":"
    assert axes.get_xscale() == "log"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["5", "20", "100"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("training pairs used (%)", "average R@1 (%)")
    low, high = axes.get_ylim()
    assert low < 50
    assert high > 85.5
    assert legend_names(figure) == ["HN-CLIP", "InfoNCE", "StructXLIP: 76.2 %"]


def test_close_fractions_do_not_write_over_each_other():
    figure = sample_efficiency_figure({"a": [(0.1, 1), (98, 2), (99, 3), (100, 4)]})
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["0.1", "", "", "100"]
    figure = sample_efficiency_figure({"a": [(100, 4)]})
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["100"]


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ((5, 1, 2), r"\(fraction, recall\) or \(fraction, recall, low, high\)"),
        ((0, 1), "a percentage above 0"),
        ((101, 1), "at most 100"),
        ((5, float("nan")), "finite numbers"),
    ],
)
def test_points_that_are_none(point, message):
    with pytest.raises(ValueError, match=message):
        sample_efficiency_figure({"a": [point]})


def legend_names(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize(
    "draw",
    [
        lambda names: saturation_figure({name: steps([1.0, 2.0]) for name in names}),
        lambda names: convergence_figure({name: epochs((1, 2)) for name in names}),
        lambda names: sample_efficiency_figure({name: [(5, 1)] for name in names}),
    ],
)
def test_names_are_shown_as_they_are_and_stay_within_the_figure(draw):
    names = ["_private", "$\\frac", "a name of more than forty characters, number 3", "a" * 500]
    figure = draw(names)
    figure.draw_without_rendering()
    assert legend_names(figure)[:3] == names[:3]
    assert legend_names(figure)[3].endswith("a…")
    boxes = [text.get_window_extent() for text in figure.legends[0].get_texts()]
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
    assert all(not a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


@pytest.mark.parametrize(
    "figure",
    [
        saturation_figure({"a": steps([3.0, 0.1, 1e-4])}),
        convergence_figure({"a": epochs((0, 0), (1, 2))}),
        sample_efficiency_figure({"a": [(5, 1), (100, 2)]}),
        retrieval_figure([Example("Text.", plain("blue"), {"a": (plain("red"), False), "b": (plain("blue"), True)})]),
        retrieval_figure([]),
    ],
    ids=["saturation", "convergence", "sample efficiency", "retrieval", "no examples"],
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
