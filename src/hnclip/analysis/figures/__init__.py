"""The figures of the paper's analysis, one function each, from plain entries of `metrics.jsonl`, histograms, matrices
and examples.

A figure belongs to whoever asked for it: nothing here touches the global state of matplotlib, which is imported only
when a figure is drawn. Colours are told apart by colour-blind readers, dashes, markers and hatches by all on grey
prints, and every axis names its unit.
"""

from __future__ import annotations

from hnclip.analysis.figures.geometry import batch_figure, bucket_figure, motivation_figure, statistics_figure
from hnclip.analysis.figures.gradients import gradient_figure, scale_grid_figure
from hnclip.analysis.figures.pictures import HIGHLIGHT, Example, near_duplicate_figure, retrieval_figure
from hnclip.analysis.figures.runs import (
    Runs,
    convergence_figure,
    convergence_grid_figure,
    sample_efficiency_figure,
    saturation_figure,
)
from hnclip.analysis.figures.style import (
    COLOURS,
    CORRECT,
    DASHES,
    FLOOR,
    HATCHES,
    MARKERS,
    NEUTRAL,
    WIDTH,
    WRONG,
    running,
)
from hnclip.analysis.figures.words import drawable

__all__ = [
    "COLOURS",
    "CORRECT",
    "DASHES",
    "FLOOR",
    "HATCHES",
    "HIGHLIGHT",
    "MARKERS",
    "NEUTRAL",
    "WIDTH",
    "WRONG",
    "Example",
    "Runs",
    "batch_figure",
    "bucket_figure",
    "convergence_figure",
    "convergence_grid_figure",
    "drawable",
    "gradient_figure",
    "motivation_figure",
    "near_duplicate_figure",
    "retrieval_figure",
    "running",
    "sample_efficiency_figure",
    "saturation_figure",
    "scale_grid_figure",
    "statistics_figure",
]
