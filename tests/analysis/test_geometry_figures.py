"""Figures of the caption geometry: shares, means, buckets and heat maps as they were given."""

from __future__ import annotations

import numpy as np
import pytest

from hnclip.analysis.figures import HATCHES, batch_figure, bucket_figure, motivation_figure, statistics_figure
from hnclip.analysis.histogram import Histogram

LONG = "A data set with a name of $forty$ letters"


def histogram(*values: float, bins: int = 2000) -> Histogram:
    counts, _ = np.histogram(values, bins, (-1, 1))
    return Histogram(counts, float(np.mean(values)))


def spread(middle: float, width: float, count: int = 20_000) -> Histogram:
    return histogram(*np.clip(np.random.default_rng(0).normal(middle, width, count), -1, 1))


def both(middle: float) -> tuple[Histogram, Histogram]:
    return spread(middle, 0.04), spread(middle + 0.08, 0.02, 400)


def drawn(figure) -> None:
    """Lay out all of the figure: pytest turns what matplotlib warns about into errors."""
    figure.draw_without_rendering()


def names(legend) -> list[str]:
    return [text.get_text() for text in legend.get_texts()]


def test_a_distribution_is_given_per_hundredth_of_cosine():
    figure = motivation_figure({"DOCCI": both(0.84), "DCI": both(0.8)})
    drawn(figure)
    pairs, hardest = figure.axes
    for axes, what in ((pairs, "pairs"), (hardest, "captions")):
        assert axes.get_xlabel().startswith("cosine")
        assert axes.get_ylabel() == f"share of {what} per 0.01 of cosine (%)"
        assert len(axes.patches) == 4  # of each set an area and its outline
        for patch in axes.patches:
            density, edges, _ = patch.get_data()
            assert (density * np.diff(edges) / 0.01).sum() == pytest.approx(100)  # all of them, in percent
    density, edges, _ = pairs.patches[1].get_data()
    assert edges[density.argmax()] == pytest.approx(0.84, abs=0.03)
    assert density.max() == pytest.approx(100 * 0.01 / (0.04 * np.sqrt(2 * np.pi)), rel=0.1)  # of the normal


def test_the_density_of_a_known_histogram():
    # 1000 values in [0, 0.5) and 3000 in [0.5, 1), evenly: 20 % and 60 % per half, of which 0.01 is a fiftieth.
    counts = np.zeros(200, dtype=np.int64)
    counts[100:150], counts[150:] = 20, 60
    figure = motivation_figure({"a": (Histogram(counts, 0.6), Histogram(counts, 0.6))})
    density, edges, _ = figure.axes[0].patches[1].get_data()
    middles = (edges[1:] + edges[:-1]) / 2
    inside = (np.abs(middles - 0.25) < 0.2) | (np.abs(middles - 0.75) < 0.2)
    np.testing.assert_allclose(density[inside], np.where(middles[inside] < 0.5, 0.5, 1.5))
    assert not density[middles < -0.05].any()


def test_means_are_dotted_and_named():
    figure = motivation_figure({"DOCCI": (histogram(0.5, 0.7), histogram(0.9)), LONG: (histogram(0.1), histogram(0.3))})
    drawn(figure)
    pairs, hardest = figure.axes
    assert [line.get_xdata()[0] for line in pairs.lines] == [pytest.approx(0.6), pytest.approx(0.1)]
    assert [line.get_xdata()[0] for line in hardest.lines] == [pytest.approx(0.9), pytest.approx(0.3)]
    assert {line.get_linestyle() for line in pairs.lines} == {":"}
    assert [" ".join(name.split()) for name in names(pairs.get_legend())] == [
        "DOCCI, mean 0.600",
        f"{LONG}, mean 0.100",
    ]
    assert pairs.get_legend().get_title().get_text() == "(a) all pairs of captions"
    first, second = pairs.patches[1], pairs.patches[3]
    assert first.get_edgecolor() != second.get_edgecolor()
    assert first.get_linestyle() != second.get_linestyle()


def test_the_axis_follows_the_data():
    figure = motivation_figure({"a": (spread(0.1, 0.02), spread(0.98, 0.02))})
    pairs, hardest = figure.axes
    low, high = pairs.get_xlim()
    assert -0.05 < low < 0.05
    assert 0.15 < high < 0.25
    assert 1 < hardest.get_xlim()[1] < 1.02  # nothing can lie beyond 1
    assert motivation_figure({"a": (histogram(1.0), histogram(1.0))}).axes[0].get_xlim()[1] > 1


def test_a_tail_does_not_stretch_the_axis_but_is_told():
    values = [*np.linspace(0.8, 0.9, 9999), -0.9]
    figure = motivation_figure({"a": (histogram(*values), histogram(0.8, 0.9))})
    pairs, hardest = figure.axes
    assert pairs.get_xlim()[0] > 0.7
    assert pairs.get_xlabel() == "cosine\nup to 0.01 % of a set lie beyond the axis"
    assert hardest.get_xlabel() == "cosine"


def test_bars_are_the_means_of_the_sets():
    sets = {"DOCCI": both(0.84), "_x$ 犬": (histogram(-0.2), histogram(0.0))}
    figure = statistics_figure(sets)
    drawn(figure)
    pairs, hardest = figure.axes
    assert [bar.get_width() for bar in pairs.patches] == [sets["DOCCI"][0].mean, -0.2]
    assert [bar.get_width() for bar in hardest.patches] == [sets["DOCCI"][1].mean, 0.0]
    assert [text.get_text() for text in pairs.texts] == [f"{sets['DOCCI'][0].mean:.3f}", "-0.200"]
    assert pairs.get_yticklabels()[0].get_text() == "DOCCI"
    assert pairs.get_yticklabels()[1].get_text().startswith("_x$ ")
    assert pairs.get_ylim()[0] > pairs.get_ylim()[1]  # the first set on top
    assert pairs.get_xlabel() == hardest.get_xlabel() == "mean cosine"
    # The number of a negative bar keeps off the names.
    assert pairs.texts[1].get_window_extent().x0 > pairs.get_window_extent().x0
    assert statistics_figure({"DOCCI": both(0.84)}).axes[0].get_xlim()[0] == 0


def test_buckets_are_stacked_to_one_hundred_percent():
    labels = ["below 0.8", "0.8 to 0.9", "0.9 and above"]
    figure = bucket_figure({"DOCCI": (0.14, 0.80, 0.06), LONG: (0.0, 0.4, 0.6)}, labels)
    drawn(figure)
    (axes,) = figure.axes
    bars = np.array([[(bar.get_x(), bar.get_width()) for bar in bucket] for bucket in axes.containers])  # [3, 2, 2]
    np.testing.assert_allclose(bars[:, 0], [(0, 14), (14, 80), (94, 6)], atol=1e-9)
    np.testing.assert_allclose(bars[:, 1], [(0, 0), (0, 40), (40, 60)], atol=1e-9)
    assert names(figure.legends[0]) == labels
    assert axes.get_xlabel() == "share of in-batch negatives (%)"
    assert axes.get_xlim() == (0, 100)
    texts = [text.get_text() for text in axes.texts]
    # In the bars where there is room, otherwise beside them.
    assert texts == ["14.0 %", "80.0 %", "40.0 %", "60.0 %", "6.0 % 0.9 and above", "0.0 % below 0.8"]
    assert [bucket[0].get_hatch() or "" for bucket in axes.containers] == [*HATCHES[:3]]
    greys = [np.dot(bucket[0].get_facecolor()[:3], (0.299, 0.587, 0.114)) for bucket in axes.containers]
    assert greys == sorted(greys, reverse=True)  # the harder, the darker


def test_many_narrow_buckets_keep_apart():
    figure = bucket_figure(
        {"a": (0.01, 0.01, 0.01, 0.01, 0.96), "b": (0.96, 0.01, 0.01, 0.01, 0.01)}, [f"bucket {i}" for i in range(5)]
    )
    drawn(figure)
    first, second = (text.get_window_extent() for text in figure.axes[0].texts[-2:])
    assert first.y0 > second.y1


@pytest.mark.parametrize(
    ("sets", "labels", "message"),
    [
        ({}, ["x"], "empty"),
        ({"a": ()}, [], "empty"),
        ({"a": (1.0,)}, ["x", "y"], "'a' has 1 shares for 2 labels"),
        ({"a": (0.5, 0.4)}, ["x", "y"], "'a' must not be negative and must sum to 1"),
        ({"a": (1.5, -0.5)}, ["x", "y"], "'a' must not be negative"),
        ({"a": (float("nan"), 1.0)}, ["x", "y"], "sum to 1"),
    ],
)
def test_shares_that_are_none(sets, labels, message):
    with pytest.raises(ValueError, match=message):
        bucket_figure(sets, labels)


def test_heat_maps_leave_out_the_diagonal_and_share_a_scale():
    easy = np.array([[1, 0.1, 0.2], [0.1, 1, 0.6], [0.2, 0.6, 1]])
    hard = np.full((12, 12), 0.8)
    hard[3, 7] = 0.95
    figure = batch_figure({"easy": easy, LONG: hard})
    drawn(figure)
    first, second, bar = figure.axes
    (image,), (other,) = first.images, second.images
    assert image.get_array().mask.tolist() == np.eye(3, dtype=bool).tolist()
    assert image.get_array().compressed().tolist() == easy[~np.eye(3, dtype=bool)].tolist()
    assert image.get_clim() == other.get_clim() == (0.1, 0.95)
    assert first.get_title() == "easy\nmean 0.300, highest 0.600 at 1, 2"
    assert second.get_title().endswith(f"\nmean {(131 * 0.8 + 0.95) / 132:.3f}, highest 0.950 at 3, 7")
    assert bar.get_ylabel() == "cosine of two captions (dark: hard)"
    assert {axes.get_xlabel() for axes in (first, second)} == {"caption of the batch, by number"}
    dark, light = (np.dot(image.cmap(value)[:3], (0.299, 0.587, 0.114)) for value in (1.0, 0.0))
    assert dark < light


def test_small_batches_have_their_numbers_in_the_cells():
    matrix = np.eye(10) + np.triu(np.arange(100).reshape(10, 10) / 100, 1)
    figure = batch_figure({"ten": matrix})
    drawn(figure)
    texts = {text.get_position(): text.get_text() for text in figure.axes[0].texts}
    assert len(texts) == 90
    assert texts[9, 0] == "0.09"
    assert texts[0, 9] == "0.00"
    (frame,) = figure.axes[0].patches
    assert frame.get_bbox().bounds == pytest.approx((8.5, 7.5, 1, 1))  # around the highest: row 8, column 9
    light, dark = (
        next(text for text in figure.axes[0].texts if text.get_position() == place) for place in ((0, 9), (9, 8))
    )
    assert (light.get_color(), dark.get_color()) == ("black", "white")


@pytest.mark.parametrize("size", [11, 128])
@pytest.mark.parametrize("corner", [(0, 1), (-1, -2), (0, -1), (-1, 0)])
def test_the_highest_of_many_is_pointed_at(size, corner):
    matrix = np.full((size, size), 0.5)
    matrix[corner] = 0.75
    figure = batch_figure({"many": matrix})
    drawn(figure)
    axes = figure.axes[0]
    (note,) = axes.texts
    row, column = (place % size for place in corner)
    assert note.get_text() == "0.750"
    assert note.xy == (column, row)
    box, whole = note.get_window_extent(), axes.get_window_extent()
    assert whole.x0 < box.x0 < box.x1 < whole.x1
    assert whole.y0 < box.y0 < box.y1 < whole.y1
    middle = axes.patches[0].get_bbox()
    assert (middle.x0 + middle.x1, middle.y0 + middle.y1) == pytest.approx((2 * column, 2 * row))
    assert middle.width >= size / 32


def test_similarities_that_are_not_numbers_are_gaps():
    matrix = np.full((4, 4), 0.5)
    matrix[1] = matrix[:, 1] = np.nan
    matrix[2, 3] = 0.9
    figure = batch_figure({"some": matrix})
    drawn(figure)
    assert figure.axes[0].get_title() == f"some\nmean {(5 * 0.5 + 0.9) / 6:.3f}, highest 0.900 at 2, 3"
    assert figure.axes[0].images[0].get_array().mask.sum() == 10


def test_equal_captions_and_odd_numbers_of_maps():
    figure = batch_figure({name: np.ones((size, size)) for name, size in (("a", 2), ("犬", 3), ("c", 20))})
    drawn(figure)
    assert sum(axes.axison for axes in figure.axes) == 4  # three maps and the bar; the fourth place is empty


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (np.ones((1, 1)), "at least 2 captions"),
        (np.ones((2, 3)), r"square matrix .* \(2, 3\)"),
        (np.ones(4), "square matrix"),
        (np.full((3, 3), np.nan), "does the encoder return NaN"),
    ],
)
def test_matrices_that_are_no_batch(matrix, message):
    with pytest.raises(ValueError, match=message):
        batch_figure({"a": matrix})


def test_nothing_to_draw_is_told():
    with pytest.raises(ValueError, match="matrices is empty"):
        batch_figure({})
    for draw in (motivation_figure, statistics_figure):
        with pytest.raises(ValueError, match="sets is empty"):
            draw({})
        with pytest.raises(ValueError, match="'a' is empty or has no finite mean"):
            draw({"a": (histogram(0.5), Histogram(np.zeros(20, dtype=np.int64), float("nan")))})
