"""Figures of gradient dynamics: medians, quartiles, zeros and gaps as measured."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hnclip.analysis.figures import FLOOR, gradient_figure, scale_grid_figure


def entry(step: int, **changes: object) -> dict[str, object]:
    return {
        "epoch": 1 + (step - 1) // 4,
        "step": 5 * step,
        "infonce": 0.1 / step,
        "hn": 1.0 / step,
        "infonce_norm": 0.2,
        "hn_norm": 20.0,
        "cosine": 0.5,
        "infonce_saturated": 0.0,
        "hn_saturated": 0.0,
        "dtype": "float32",
    } | changes


def evaluation(epoch: int, text: float, image: float) -> dict[str, object]:
    return {"epoch": epoch, "text_to_image": {"R@1": text}, "image_to_text": {"R@1": image}}


def drawn(figure) -> None:
    """Lay out all of the figure: pytest turns what matplotlib warns about into errors."""
    figure.draw_without_rendering()


def ticks(axes) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


def test_losses_are_drawn_raw_and_as_running_medians():
    losses = [1.0, 0.0, 1e-44, 2.0]
    figure = gradient_figure([entry(i, infonce=loss) for i, loss in enumerate(losses, start=1)], [])
    raw, median, hard, _ = figure.axes[0].lines
    assert raw.get_xdata().tolist() == [5, 10, 15, 20]
    assert raw.get_ydata().tolist() == [1.0, FLOOR, FLOOR, 2.0]
    assert [*median.get_ydata()] == pytest.approx([(1 + FLOOR) / 2, FLOOR, FLOOR, (2 + FLOOR) / 2], rel=1e-12)
    assert hard.get_ydata().tolist() == [1, 1 / 2, 1 / 3, 1 / 4]
    assert raw.get_linewidth() < median.get_linewidth()
    assert figure.axes[0].get_ylabel() == "loss on the batch (nats)"
    assert figure.axes[0].get_xlabel().startswith("optimiser step")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["InfoNCE", "L_HN"]
    assert median.get_color() != hard.get_color()
    assert median.get_linestyle() != figure.axes[0].lines[3].get_linestyle()


def test_saturation_is_the_mean_of_an_epoch():
    shares = [0.0, 1.0, 0.5, 0.5, 1.0]
    entries = [entry(i, infonce_saturated=share, hn_saturated=0.25) for i, share in enumerate(shares, start=1)]
    plain, hard = gradient_figure(entries, []).axes[1].lines
    assert plain.get_xydata().tolist() == [[1, 50], [2, 100]]
    assert hard.get_xydata().tolist() == [[1, 25], [2, 25]]


def test_norms_are_medians_between_quartiles_over_the_epochs():
    rng = np.random.default_rng(0)
    norms = rng.lognormal(size=7)
    entries = [entry(i, infonce_norm=norm) for i, norm in enumerate(norms, start=1)]
    axes = gradient_figure(entries, []).axes[2]
    plain, _ = axes.lines
    epochs = (norms[:4], norms[4:])
    assert [*plain.get_xdata()] == [1, 2]
    np.testing.assert_allclose(plain.get_ydata(), [np.median(values) for values in epochs])
    corners = axes.collections[0].get_paths()[0].vertices
    for epoch, values in enumerate(epochs, start=1):
        heights = corners[corners[:, 0] == epoch][:, 1]
        assert (heights.min(), heights.max()) == pytest.approx(tuple(np.quantile(values, (0.25, 0.75))))
    assert axes.get_yscale() == "log"


def test_a_lost_measurement_does_not_hide_its_epoch():
    norms = [1.0, None, 3.0, math.inf, 5.0]
    entries = [entry(i, infonce_norm=norm, infonce_saturated=0.5) for i, norm in enumerate(norms, start=1)]
    entries[0]["infonce_saturated"] = None
    _, share, norm, _ = gradient_figure(entries, []).axes
    assert norm.lines[0].get_xydata().tolist() == [[1, 2], [2, 5]]
    assert share.lines[0].get_xydata().tolist() == [[1, 50], [2, 50]]


def test_exact_zeros_are_counted_and_drawn_at_the_floor():
    norms = [0.0, 1e-44, 0.0, 3.0]  # the second is tiny, but not zero
    figure = gradient_figure([entry(i, infonce_norm=norm) for i, norm in enumerate(norms, start=1)], [])
    drawn(figure)
    axes = figure.axes[2]
    assert axes.lines[0].get_ydata().tolist() == [FLOOR]
    assert "exactly zero in 50.0 % (InfoNCE)\nand 0.0 % (L_HN) of measurements" in axes.get_xlabel()
    assert axes.get_title() == "(b) gradient norms, computed in float32"
    assert ticks(axes)[0] == "$\\leq 10^{-10}$"
    assert axes.get_ylim()[0] < FLOOR


def test_without_zeros_no_tick_is_a_bound():
    figure = gradient_figure([entry(1), entry(2, dtype="bfloat16")], [])
    drawn(figure)
    assert not any("leq" in label for label in ticks(figure.axes[2]))
    assert figure.axes[2].get_title() == "(b) gradient norms, computed in bfloat16 and float32"


def test_error_is_what_recall_leaves():
    figure = gradient_figure([entry(1)], [evaluation(0, 60.0, 55.0), evaluation(1, 75.0, 70.5)])
    drawn(figure)
    axes = figure.axes[3]
    assert [line.get_xydata().tolist() for line in axes.lines] == [[[0, 40], [1, 25]], [[0, 45], [1, 29.5]]]
    assert axes.get_ylabel() == "100 − validation R@1 (%)"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["text→image", "image→text"]


def test_a_run_without_evaluations_says_so():
    axes = gradient_figure([entry(1)], []).axes[3]
    assert [text.get_text() for text in axes.texts] == ["The run was not evaluated after its epochs."]
    assert not axes.axison


EXTREMES = {
    "one": [entry(1)],
    "all zero": [
        entry(i, infonce=0.0, hn=0.0, infonce_norm=0.0, hn_norm=0.0, cosine=None, infonce_saturated=1.0)
        for i in range(1, 9)
    ],
    "denormal": [entry(i, infonce=1e-44, infonce_norm=1e-44, hn_norm=1e-3) for i in range(1, 9)],
    "lost": [entry(i, infonce=None, hn=math.inf, infonce_norm=None, hn_norm=math.nan, cosine=None) for i in (1, 2)],
    "huge": [entry(i, infonce_norm=1e-300, hn_norm=1e300) for i in (1, 2)],
}


@pytest.mark.parametrize("entries", EXTREMES.values(), ids=EXTREMES)
def test_extremes_are_drawn(entries):
    for figure in (gradient_figure(entries, [evaluation(0, 0, 0)]), scale_grid_figure({("5 %", "DCI"): entries})):
        drawn(figure)
        for axes in figure.axes:
            if axes.get_yscale() == "log":
                low, high = axes.get_ylim()
                assert low >= FLOOR / 100
                assert high / low >= 10
            whole = axes.get_xticks()
            assert (whole == whole.round()).all()


def test_cells_are_fractions_by_data_sets():
    runs = {(fraction, data): [entry(1), entry(2)] for fraction in ("5 %", "100 %") for data in ("DOCCI", "_D$ 犬")}
    figure = scale_grid_figure(runs)
    drawn(figure)
    assert len(figure.axes) == 12
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titles[0] == "5 % of DOCCI"
    assert titles[1].startswith("5 % of _D$ ")
    assert [title.split(" of ")[0] for title in titles] == ["5 %", "5 %", "100 %", "100 %"]
    places = {axes.get_title(): axes.get_position() for axes in figure.axes if axes.get_title()}
    assert places["5 % of DOCCI"].y0 > places["100 % of DOCCI"].y1
    assert places["5 % of DOCCI"].x1 < places[titles[1]].x0
    assert {axes.get_ylim() for axes in figure.axes[0:2]} == {figure.axes[6].get_ylim()}  # common scales
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels == ["loss (nats)", "", "norm, ratio", "", "cosine", ""] * 2


def test_a_cell_shows_losses_norms_their_ratio_and_the_cosine():
    entries = [entry(1), entry(2, infonce_norm=0.0, cosine=None), entry(3, infonce_norm=1e-44, cosine=-0.25)]
    figure = scale_grid_figure({("5 %", "DCI"): entries})
    loss, norm, cosine = figure.axes
    assert loss.lines[0].get_ydata().tolist() == [0.1, 0.05, 0.1 / 3]
    assert norm.lines[0].get_ydata().tolist() == [0.2, FLOOR, FLOOR]
    assert norm.lines[2].get_ydata().tolist() == [20.0] * 3
    ratio = norm.lines[4]
    # Where the divisor is zero there is none; a denormal one does not stretch the axis.
    assert ratio.get_ydata().tolist() == pytest.approx([100.0, math.nan, 1 / FLOOR], nan_ok=True)
    assert ratio.get_linestyle() == "--"
    assert ratio.get_markevery() == [0, 2]  # between gaps a line alone would show nothing
    assert cosine.lines[1].get_ydata().tolist() == pytest.approx([0.5, math.nan, -0.25], nan_ok=True)
    assert cosine.get_ylim() == (-1.1, 1.1)
    assert cosine.get_xlabel() == "optimiser step"
    assert not cosine.texts
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["InfoNCE", "L_HN", "ratio of the norms, L_HN / InfoNCE"]


def test_what_was_not_measured_is_said():
    runs = {("5 %", "A"): [], ("5 %", "B"): [entry(1)], ("100 %", "A"): [entry(2, cosine=None)]}
    figure = scale_grid_figure(runs)
    drawn(figure)
    grid = np.array(figure.axes).reshape(6, 2)  # three panels of two rows, two columns
    assert [text.get_text() for text in grid[1, 0].texts] == ["not measured"]
    assert [text.get_text() for text in grid[4, 1].texts] == ["not measured"]
    assert [text.get_text() for text in grid[5, 0].texts] == ["none: a gradient is zero"]
    assert grid[0, 1].get_ylabel() == "loss (nats)"  # the first cell of the row that was


def test_nothing_measured_is_an_error():
    with pytest.raises(ValueError, match="entries is empty"):
        gradient_figure([], [evaluation(0, 1, 1)])
    for runs in ({}, {("5 %", "DCI"): []}):
        with pytest.raises(ValueError, match="runs is empty"):
            scale_grid_figure(runs)
