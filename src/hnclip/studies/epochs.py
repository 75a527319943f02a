"""What happens along the epochs of runs: convergence on validation, the chosen epochs, and what choosing on test data
adds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from hnclip.evaluate.ranks import ARROWS
from hnclip.report.document import Block, Figure, Missing, Table
from hnclip.report.run_figures import convergence_grid_figure
from hnclip.studies.paper import MISSING, paper_rows
from hnclip.studies.results import StudyResults, rounded
from hnclip.studies.spec import Domain
from hnclip.studies.tables import missing_note

PEER = "InfoNCE"  # convergence is told by when a row reaches its best epoch

Entries = Sequence[Mapping[str, Any]]
Choice = tuple[int, float]
"""An epoch and its R@1 in percent, mean of both directions."""


def convergence(results: StudyResults) -> list[Block]:
    """Validation R@1 after each epoch, of every row and domain, means over seeds; and when each row reaches InfoNCE."""
    domains = {domain.name: found for domain in results.domains if (found := epoch_recalls(results, domain))}
    if not domains:
        return [Missing(" ".join(missing_note(results)) or "no run logged a validation")]
    draw = partial(convergence_grid_figure, domains)
    caption = "Both directions and their mean; epoch 0 is the model before training."
    blocks: list[Block] = [Figure("convergence", "Validation R@1 after each epoch", draw, caption)]
    for name, rows in domains.items():
        peer = PEER if PEER in rows else next(iter(rows))
        averages = {row: {entry["epoch"]: _average(entry) for entry in entries} for row, entries in rows.items()}
        best = max(value for epoch, value in averages[peer].items() if epoch > 0)
        epochs = sorted({epoch for values in averages.values() for epoch in values})
        lines = []
        for row, values in averages.items():
            cells = [f"{values[epoch]:.1f}" if epoch in values else MISSING for epoch in epochs]
            reached = next((str(epoch) for epoch, value in values.items() if epoch > 0 and value >= best), "never")
            lines.append((row, *cells, reached))
        blocks.append(
            Table(
                ("", *(f"epoch {epoch}" for epoch in epochs), f"epochs to {best:.1f}"),
                lines,
                title=f"Validation R@1 in percent, average of both directions, {name}",
                notes=[
                    f"The last column: the first epoch that reaches the best one of {peer}.",
                    *missing_note(results),
                ],
            )
        )
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
    return rounded(fmean(entry[direction]["R@1"] for direction in ARROWS))


def epochs(results: StudyResults) -> list[Block]:
    """The epoch that validation chose for every run, and those that the paper printed for the same benchmarks."""
    lines: list[tuple[str, ...]] = []
    for name, _, run in _finished(results, "evaluation"):
        best, last = run["best"], run["last"]
        lines.append((name, f"{best['epoch']} of {last['epoch']}", *(f"{one['mean_R@1']:.2f}" for one in (best, last))))
    if not lines:
        return [Missing(" ".join(missing_note(results)))]
    printed = [(column, one) for column in results.columns for one in paper_rows(results.study, column) if one.epoch]
    if printed:
        lines += [(), *((f"{one.name}, {column.name}", str(one.epoch), "", "") for column, one in printed)]
    notes = ["R@1 on the validation split in percent, average of both directions; of equal epochs the first is chosen."]
    headers = ("", "best epoch", "R@1 at best", "R@1 at last")
    return [Table(headers, lines, title=f"{results.study.title}. Epochs chosen by validation", notes=notes)]


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
    choices = {
        name: found
        for name, watched, run in _finished(results, "watched")
        if (found := epoch_choices(run["best"]["epoch"], watched)) is not None
    }
    if not choices:
        return [Missing(" ".join(missing_note(results)) or "no run evaluated its epochs on the test split")]
    lines: list[tuple[str, ...]] = [
        (name, *(f"{recall:.2f} (epoch {epoch})" for epoch, recall in found), f"{found[2][1] - found[0][1]:.2f}")
        for name, found in choices.items()
    ]
    means = [fmean(recall for _, recall in found) for found in zip(*choices.values())]
    lines += [(), ("mean", *(f"{mean:.2f}" for mean in means), f"{means[2] - means[0]:.2f}")]
    return [
        Table(
            ("", "epoch by validation", "last epoch", "epoch by test", "difference"),
            lines,
            title=f"{results.study.title}. R@1 on the test split in percent, average of both directions",
            notes=["Difference: what choosing the epoch on the test split adds to choosing it by validation."],
        )
    ]


def _finished(results: StudyResults, kind: str) -> Iterator[tuple[str, list[dict[str, Any]], dict[str, Any]]]:
    """Every finished run: its name, its log entries of a kind, and its `TrainResult`."""
    for row in results.study.rows:
        for domain in results.domains:
            for seed in results.seeds:
                if (run := results.training(row.name, domain, seed)) is not None:
                    suffix = f", seed {seed}" if len(results.seeds) > 1 else ""
                    yield f"{row.name}, {domain.name}{suffix}", results.metrics(row.name, domain, seed, kind), run
