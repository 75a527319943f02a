"""What happens along the epochs of runs: convergence on validation, the chosen epochs, and what choosing on test data
adds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from hnclip.evaluation.ranks import ARROWS
from hnclip.report.document import Block, Figure, Table
from hnclip.report.run_figures import convergence_grid_figure
from hnclip.studies.paper import MISSING, paper_rows
from hnclip.studies.results import StudyResults, rounded
from hnclip.studies.spec import Domain

Entries = Sequence[Mapping[str, Any]]
Choice = tuple[int, float]
"""An epoch and its R@1 in percent, mean of both directions."""


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
