"""Curves and what happens along runs, as figures and tables: settings, shares of the data, epochs, gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from math import isfinite
from statistics import fmean
from typing import Any

from hnclip.analysis.gradients import GradientSummary, gradient_summary
from hnclip.evaluation.ranks import ARROWS
from hnclip.report.document import Block, Figure, Table
from hnclip.report.run_figures import (
    convergence_grid_figure,
    curve_figure,
    gradient_figure,
    sample_efficiency_figure,
    scale_grid_figure,
)
from hnclip.studies.paper import GRADIENTS, paper_rows, runs_on_paper_data
from hnclip.studies.results import MEAN, Column, StudyResults, Term, rounded
from hnclip.studies.spec import Domain
from hnclip.studies.tables import spread_cell
from hnclip.util.tables import MISSING
from hnclip.util.text import slugify

ALL = ("all", "all")  # rows and domains
Entries = Sequence[Mapping[str, Any]]
Points = dict[str, list[tuple[float, ...]]]
"""(x, R@1) or (x, R@1, low, high) by series."""
Choice = tuple[int, float]
"""An epoch and its R@1 in percent, mean of both directions."""


def curve(results: StudyResults) -> list[Block]:
    """Average R@1 over the setting that the rows differ by, such as γ, a panel for each column."""
    panels = {column.name: points for column in results.columns if (points := curve_points(results, column))}
    if not panels:
        return []
    fields = [name for row in results.study.rows for name, value in row.set.items() if value == row.x] or ["x"]
    axis = {"objective.gamma": "boost strength γ"}.get(fields[0], fields[0])
    bars = "the 95 % interval over queries, which does not say how another seed would do"
    if len(results.seeds) > 1:
        bars = f"the standard deviation over {len(results.seeds)} seeds"
    caption = f"Average of both directions. Bars: {bars}; every panel has its own scale."
    title, draw = f"{results.study.title}. Average R@1", partial(curve_figure, panels, axis)
    return [Figure(f"{results.study.name}-curve", title, draw, caption)]


def curve_points(results: StudyResults, column: Column) -> Points:
    """Points of every series: ± the standard deviation over seeds, of one seed the interval over queries."""
    found: Points = {}
    for row in results.study.rows:
        if row.x is None or (recall := column.recall(row.name, MEAN, 1)) is None:
            continue
        ends: tuple[float, ...] = ()
        if recall.std is not None:
            ends = (recall.mean - recall.std, recall.mean + recall.std)
        elif (interval := column.weighted_sum([Term(1, row.name)])) is not None and isfinite(interval.low):
            ends = (interval.low, interval.high)
        found.setdefault(row.series or "", []).append((row.x, recall.mean, *ends))
    return {name: sorted(points) for name, points in found.items()}


def samples(results: StudyResults) -> list[Block]:
    """Average R@1 by share of the training pairs: a figure and a table for each column (the paper's Table A9)."""
    blocks: list[Block] = []
    # The rows that are compared with others are the method that the study is about.
    own = next((row.series for row in results.study.rows if row.against and row.series), None)
    for column in results.columns:
        curves = curve_points(results, column)
        if not curves:
            continue
        points = {name: [(100 * x, recall) for x, recall, *_ in line] for name, line in curves.items()}
        shares = sorted({x for line in points.values() for x, _ in line})
        ends = [(f"{name}, all data", recall) for name, line in points.items() for x, recall in line[-1:] if x == 100]
        rivals = [end for end in ends if end[0] != f"{own}, all data"]
        cells = {
            f"{row.name} (no training)": dict.fromkeys(shares, spread_cell(column.recall(row.name, MEAN, 1)))
            for row in results.study.rows
            if not row.trained
        }
        cells |= {name: {x: f"{recall:.2f}" for x, recall in line} for name, line in points.items()}
        title = f"Sample efficiency: {column.name}"
        draw = partial(sample_efficiency_figure, points, max(rivals, key=lambda end: end[1], default=None))
        caption = "Average R@1 of both directions. Smaller shares lie inside larger ones, the same for every method."
        lines = [(name, *(found.get(share, MISSING) for share in shares)) for name, found in cells.items()]
        headers = ("", *(f"{share:g} %" for share in shares))
        blocks.append(Figure(slugify("samples", column.name), title, draw, caption))
        blocks.append(Table(headers, lines, title=f"{title}, R@1 in percent, average of both directions"))
    return blocks


def convergence(results: StudyResults) -> list[Block]:
    """Validation R@1 after each epoch, of every row and domain, means over seeds."""
    domains = {domain.name: found for domain in results.domains if (found := epoch_recalls(results, domain))}
    if not domains:
        return []
    draw = partial(convergence_grid_figure, domains)
    caption = "Both directions and their mean; epoch 0 is the model before training."
    blocks: list[Block] = [Figure("convergence", "Validation R@1 after each epoch", draw, caption)]
    for name, rows in domains.items():
        averages = {row: {entry["epoch"]: _average(entry) for entry in entries} for row, entries in rows.items()}
        epochs = sorted({epoch for values in averages.values() for epoch in values})
        lines = [
            (row, *(f"{values[epoch]:.1f}" if epoch in values else MISSING for epoch in epochs))
            for row, values in averages.items()
        ]
        title = f"Validation R@1 in percent, average of both directions, {name}"
        blocks.append(Table(("", *(f"epoch {epoch}" for epoch in epochs)), lines, title=title))
    return blocks


def epoch_recalls(results: StudyResults, domain: Domain) -> dict[str, list[dict[str, Any]]]:
    """Validation entries of every row that has some: means over seeds."""
    found = {}
    for row in results.study.rows:
        runs = [results.metrics(row.name, domain, seed, "evaluation") for seed in results.seeds]
        if epochs := [*zip(*filter(None, runs))]:
            found[row.name] = [
                {"epoch": of_seeds[0]["epoch"]}
                | {direction: {"R@1": fmean(entry[direction]["R@1"] for entry in of_seeds)} for direction in ARROWS}
                for of_seeds in epochs
            ]
    return found


def _average(entry: Mapping[str, Any]) -> float:
    return fmean(entry[direction]["R@1"] for direction in ARROWS)


def epochs(results: StudyResults) -> list[Block]:
    """The epoch that validation chose for every run, and those that the paper printed for the same benchmarks."""
    lines: list[tuple[str, ...]] = []
    for name, _, run in _finished(results, "evaluation"):
        best, last = run["best"], run["last"]
        lines.append((name, f"{best['epoch']} of {last['epoch']}", *(f"{one['mean_R@1']:.2f}" for one in (best, last))))
    for column in results.columns:
        printed = [one for one in paper_rows(results.study, column) if one.epoch]
        lines += [(f"{one.name}, {column.name}", str(one.epoch), MISSING, MISSING) for one in printed]
    headers = ("", "best epoch", "R@1 at best", "R@1 at last")
    title = f"{results.study.title}. Epochs chosen by validation, with validation R@1, average of both directions"
    return [Table(headers, lines, title=title)] if lines else []


def epoch_choices(best: int, watched: Entries) -> tuple[Choice, Choice, Choice] | None:
    """The epoch chosen by validation, the last, and the best on the watched test data; None if there are no entries.

    The untrained model, epoch 0, cannot be chosen; of equal epochs the first is.

    Args:
        best: the epoch that validation chose.
    """
    test = {entry["epoch"]: rounded(entry["mean_R@1"]) for entry in watched if entry["epoch"] > 0}
    if best not in test:
        return None
    last, by_test = max(test), max(test, key=lambda epoch: test[epoch])
    return (best, test[best]), (last, test[last]), (by_test, test[by_test])


def selection(results: StudyResults) -> list[Block]:
    """What choosing the epoch on the test split adds to a result."""
    lines: list[tuple[str, ...]] = []
    choices = []
    for name, watched, run in _finished(results, "watched"):
        if (found := epoch_choices(run["best"]["epoch"], watched)) is not None:
            choices.append([recall for _, recall in found])
            cells = [f"{recall:.2f} (epoch {epoch})" for epoch, recall in found]
            lines.append((name, *cells, f"{choices[-1][2] - choices[-1][0]:.2f}"))
    if not lines:
        return []
    means = [fmean(recalls) for recalls in zip(*choices)]
    lines += [(), ("mean", *(f"{mean:.2f}" for mean in means), f"{means[2] - means[0]:.2f}")]
    headers = ("", "epoch by validation", "last epoch", "epoch by test", "by test − by validation")
    title = f"{results.study.title}. R@1 on the test split in percent, average of both directions"
    return [Table(headers, lines, title=title)]


def _finished(results: StudyResults, kind: str) -> Iterator[tuple[str, list[dict[str, Any]], dict[str, Any]]]:
    """Every finished run: its name, its log entries of a kind, and its `TrainResult`."""
    for row in results.study.rows:
        for domain in results.domains:
            for seed in results.seeds:
                if (run := results.training(row.name, domain, seed)) is not None:
                    suffix = f", seed {seed}" if len(results.seeds) > 1 else ""
                    yield f"{row.name}, {domain.name}{suffix}", results.metrics(row.name, domain, seed, kind), run


def gradients(results: StudyResults) -> list[Block]:
    """Losses and gradients of InfoNCE and L_HN along the runs: the run with all data, all runs as a grid, a table."""
    found = gradient_entries(results)
    if not found:
        return []
    blocks: list[Block] = []
    seed = results.seeds[0]
    whole = next((row.name for row in results.study.rows if row.x in (None, 1.0)), "")  # the run with all data
    for domain in [domain for domain in results.domains if (whole, domain.name) in found]:
        evaluations = results.metrics(whole, domain, seed, "evaluation")
        draw = partial(gradient_figure, found[whole, domain.name][0], evaluations)
        name, title = slugify("gradients", domain.name), f"Gradients: {domain.name}"
        blocks.append(Figure(name, title, draw, f"{whole}, seed {seed}."))
    shares = {row.name: row.name if row.x is None else f"{100 * row.x:g} %" for row in results.study.rows}
    grid = {(shares[row], domain): runs[0] for (row, domain), runs in found.items()}
    caption = (
        "From the top of each cell: both losses on the batch of a step, both gradient norms and their ratio, the "
        f"cosine between both gradients. Seed {seed}."
    )
    title = "Gradients across data scales"
    blocks.append(Figure("gradients", title, partial(scale_grid_figure, grid), caption))
    summaries = gradient_summaries(results)
    every = summaries.pop(ALL)
    lines = [_gradient_line(f"{domain}, {shares[row]}", one) for (row, domain), one in summaries.items()]
    lines += [(), _gradient_line("all", every)]
    lines += [(), *GRADIENTS] if runs_on_paper_data(results.setting) else []
    notes = [
        "Shares are of the measurements, each of one batch; a gradient is zero if it is exactly that. Ratio of the "
        "norms (L_HN over InfoNCE, where that is not zero) and cosine are medians.",
        *every.notes()[1:],
    ]
    title = "Gradients of InfoNCE and of L_HN on the batches of the same runs"
    losses = ("InfoNCE < 0.001, epoch 1", "InfoNCE < 0.001", "L_HN < 0.001")
    norms = ("zero gradient of InfoNCE", "of L_HN", "ratio of norms", "cosine", "cosine > 0")
    return [*blocks, Table(("", "measured", *losses, *norms), lines, title=title, notes=notes)]


def gradient_entries(results: StudyResults) -> dict[tuple[str, str], list[Entries]]:
    """Measurements of every seed that has some, by row and domain."""
    found: dict[tuple[str, str], list[Entries]] = {
        (row.name, domain.name): [
            entries for seed in results.seeds if (entries := results.metrics(row.name, domain, seed, "gradients"))
        ]
        for row in results.study.rows
        for domain in results.domains
    }
    return {place: runs for place, runs in found.items() if runs}


def gradient_summaries(results: StudyResults) -> dict[tuple[str, str], GradientSummary]:
    """The measurements of all seeds, by row and domain, and last of `ALL` together; empty without measurements."""
    found = {place: [*chain.from_iterable(runs)] for place, runs in gradient_entries(results).items()}
    found |= {ALL: [*chain.from_iterable(found.values())]} if found else {}
    return {place: gradient_summary(entries) for place, entries in found.items()}


def _gradient_line(name: str, found: GradientSummary) -> tuple[str, ...]:
    every, start = found.overall, found.epochs.get(1, {})
    shares = [start.get("infonce_solved"), *(every[key] for key in ("infonce_solved", "hn_solved", "infonce_zero"))]

    def percent(share: float | None) -> str:
        return MISSING if share is None else f"{100 * share:.0f} %"

    return (
        name,
        f"{every['measurements']:,}",
        *map(percent, [*shares, every["hn_zero"]]),
        MISSING if every["ratio"] is None else f"{every['ratio'][1]:.2g}",
        MISSING if every["cosine"] is None else f"{every['cosine'][1]:.2f}",
        percent(every["cosine_positive"]),
    )
