"""Figures: drawn without warnings from small and extreme inputs, away from pyplot, and the right numbers in them."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from every_block import HOSTILE, LONG_WORD, caption_row
from matplotlib.figure import Figure as Drawing
from PIL import Image

from hnclip.report.caption_figures import (
    Distribution,
    Example,
    batch_figure,
    bucket_figure,
    motivation_figure,
    near_duplicate_figure,
    retrieval_figure,
    statistics_figure,
)
from hnclip.report.document import CaptionedImage, CaptionRow, Figure
from hnclip.report.run_figures import (
    FLOOR,
    convergence_grid_figure,
    curve_figure,
    gradient_figure,
    sample_efficiency_figure,
    saturation_figure,
    scale_grid_figure,
)

EDGES = np.linspace(-1, 1, 20_001)
RED, BLUE = Image.new("RGB", (8, 6), "red"), Image.new("RGBA", (3, 9), "blue")


def distribution(*values: float) -> Distribution:
    return Distribution(np.histogram(values, EDGES)[0], EDGES)


def measurement(step: int, infonce: float, hn: float, *, epoch: int = 1, cosine: float | None = 0.5) -> dict[str, Any]:
    """Gradient norms are ten times the losses."""
    saturated = {"infonce_saturated": float(infonce < 1e-3), "hn_saturated": float(hn < 1e-3)}
    norms = {"infonce_norm": 10 * infonce, "hn_norm": 10 * hn, "grad_norm": 10 * infonce}
    plain = {"epoch": epoch, "step": step, "infonce": infonce, "hn": hn, "cosine": cosine, "dtype": "float32"}
    return {**plain, **norms, **saturated, "saturated": float(infonce < 1e-3)}


def evaluations(*recalls: tuple[float, float]) -> list[dict[str, Any]]:
    return [
        {"epoch": epoch, "text_to_image": {"R@1": text}, "image_to_text": {"R@1": image}}
        for epoch, (text, image) in enumerate(recalls)
    ]


ONE, ZERO = [measurement(1, 2.0, 3.0)], [measurement(1, 0.0, 0.0, cosine=None), measurement(2, 1e300, 1e-300)]
NARROW = (distribution(1.0, 1.0), distribution(-1.0))
WIDE = (distribution(-1.0, *np.linspace(-0.5, 1, 3000)), distribution(0.2, 0.3))
NAMES = ["$x_1$ {", "_hidden", "数据集", HOSTILE, LONG_WORD]
CAPTION = CaptionedImage("\x00 $", ((LONG_WORD + " \ud800 " + "一" * 200, True),), None)

DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "motivation": lambda: motivation_figure({"a": NARROW, **dict.fromkeys(NAMES, WIDE)}),
    "statistics": lambda: statistics_figure({"a": NARROW, **dict.fromkeys(NAMES, WIDE)}),
    "buckets": lambda: bucket_figure(dict.fromkeys(NAMES, (0, 1e-9, 0.5, 0.5)), NAMES[:4]),
    "batch": lambda: batch_figure({name: np.random.default_rng(0).random((40, 40)) for name in NAMES}),
    "near-duplicates": lambda: near_duplicate_figure([caption_row(), CaptionRow(CAPTION, (CAPTION,) * 3)]),
    "retrieval": lambda: retrieval_figure([Example(LONG_WORD, RED, dict.fromkeys(NAMES[:2], (BLUE, True)))]),
    "gradient, zero": lambda: gradient_figure(ZERO, evaluations((0, 0))),
    "scale grid": lambda: scale_grid_figure({("5 %", name): ZERO if name == "_hidden" else [] for name in NAMES}),
    "saturation": lambda: saturation_figure({"a": ONE, **dict.fromkeys(NAMES, ZERO)}),
    "convergence grid": lambda: convergence_grid_figure({HOSTILE: {"a": evaluations((1, 2), (3, 4))}, "b": {}}),
    "samples": lambda: sample_efficiency_figure(dict.fromkeys(NAMES, ((1, 2), (0.1, 3, 2, 4))), ("$0", 50.0)),
    "curve": lambda: curve_figure({name: {"x": [(0, 1), (1, 2, 1, 3)], "_": [(0, 1)]} for name in NAMES}, "γ"),
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_figures_draw_without_warnings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hnclip.report.document.PNG_DPI", 40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Figure("name", "title", DRAWINGS[name]).render("png").startswith(b"\x89PNG")


def test_matplotlib_is_loaded_only_for_a_drawing_and_pyplot_never() -> None:
    code = (
        "import sys\n"
        "from hnclip.report import caption_figures, document, html, results, run_figures\n"
        "assert 'matplotlib' not in sys.modules\n"
        "document.Figure('f', 't', lambda: run_figures.sample_efficiency_figure({'a': [(1, 2)]})).render('svg')\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def heights(line: Any) -> list[float]:
    return list(line.get_ydata())


def test_gradients_are_medians_by_epoch_clamped_to_the_floor() -> None:
    entries = [measurement(1, 2.0, 4.0), measurement(2, 0.0, 4.0), measurement(3, 1.0, 1.0)]
    entries += [measurement(4, 0.0, 0.5, epoch=2), measurement(5, 1e-4, 0.5, epoch=2)]
    loss, share, norm, error = gradient_figure(entries, evaluations((10, 30), (20, 50))).axes
    assert heights(loss.lines[0]) == [2.0, FLOOR, 1.0, FLOOR, 1e-4]
    assert heights(loss.lines[1]) == pytest.approx([(2 + FLOOR) / 2, 1.0, FLOOR, 1e-4, (1e-4 + FLOOR) / 2])
    assert heights(share.lines[0]) == pytest.approx([100 / 3, 100.0])
    assert heights(norm.lines[0]) == pytest.approx([10.0, (1e-3 + FLOOR) / 2])
    assert [heights(line) for line in error.lines] == [[90, 80], [70, 50]]
