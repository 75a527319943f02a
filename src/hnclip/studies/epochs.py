"""What happens along the epochs of runs: convergence on validation, the chosen epochs, and what choosing on test data
adds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

from hnclip.evaluate.ranks import ARROWS
from hnclip.report.document import Block, Figure, Missing, Table
from hnclip.report.run_figures import convergence_grid_figure
from hnclip.studies.paper import MISSING, paper_rows
from hnclip.studies.results import StudyResults, rounded
from hnclip.studies.spec import Domain
from hnclip.studies.tables import missing_note

PEER = "InfoNCE"  # convergence is told by when a row reaches its best epoch

Entries = Sequence[Mapping[str, Any]]


def convergence(results: StudyResults) -> list[Block]:
    """Validation R@1 after each epoch, of every row and domain, means over seeds; and when each row reaches InfoNCE."""
    domains = {domain.name: found for domain in results.domains if (found := epoch_recalls(results, domain))}
    if not domains:
        return [Missing(missing_note(results) or "no run logged a validation")]
    blocks: list[Block] = [
        Figure(
            "convergence",
            "Validation R@1 after each epoch",
            partial(convergence_grid_figure, domains),
            "Both directions and their mean; epoch 0 is the model before training.",
        )
    ]
    for name, rows in domains.items():
        peer = PEER if PEER in rows else next(iter(rows))
        best = max(average(entry) for entry in rows[peer] if entry["epoch"] > 0)
        epochs = sorted({entry["epoch"] for entries in rows.values() for entry in entries})
        lines = []
        for row, entries in rows.items():
            values = {entry["epoch"]: average(entry) for entry in entries}
            reached = epochs_to(entries, best)
            cells = [f"{values[epoch]:.1f}" if epoch in values else MISSING for epoch in epochs]
            lines.append((row, *cells, "never" if reached is None else str(reached)))
        note = f"The last column: the first epoch that reaches the best one of {peer}."
        headers = ("", *(f"epoch {epoch}" for epoch in epochs), f"epochs to {best:.1f}")
        title = f"Validation R@1 in percent, average of both directions, {name}"
        blocks.append(Table(headers, lines, title=title, notes=[note, *filter(None, [missing_note(results)])]))
    return blocks


def average(entry: Mapping[str, Any]) -> float:
    """R@1 of a log entry, mean of both directions."""
    return rounded(fmean(entry[direction]["R@1"] for direction in ARROWS))


def epochs_to(entries: Entries, recall: float) -> int | None:
    """The first epoch of training whose average R@1 is at least this; None if no epoch's is."""
    return next((entry["epoch"] for entry in entries if entry["epoch"] > 0 and average(entry) >= recall), None)


def epoch_recalls(results: StudyResults, domain: Domain) -> dict[str, list[dict[str, Any]]]:
    """Validation entries of every row that has some: means over seeds, of the epochs that all its runs have."""
    found = {}
    for row in results.study.rows:
        runs = [results.metrics(row.name, domain, seed, "evaluation") for seed in results.seeds]
        by_epoch = [{entry["epoch"]: entry for entry in run} for run in runs if run]
        shared = sorted(set.intersection(*map(set, by_epoch))) if by_epoch else []
        if shared:
            found[row.name] = [
                {"epoch": epoch} | {way: {"R@1": fmean(run[epoch][way]["R@1"] for run in by_epoch)} for way in ARROWS}
                for epoch in shared
            ]
    return found


def epochs(results: StudyResults) -> list[Block]:
    """The epoch that validation chose for every run, and those that the paper printed for the same benchmarks."""
    lines: list[tuple[str, ...]] = []
    for name, _, run in _finished(results, "evaluation"):
        best, last = run["best"], run["last"]
        lines.append((name, f"{best['epoch']} of {last['epoch']}", *(f"{one['mean_R@1']:.2f}" for one in (best, last))))
    printed = [(column, row) for column in results.columns for row in paper_rows(results.study, column)]
    epochs_of = [(f"{row.name}, {column.name}", str(row.result.epoch)) for column, row in printed if row.result.epoch]
    lines += [(), *((name, epoch, MISSING, MISSING) for name, epoch in epochs_of)] if epochs_of else []
    if not lines:
        return [Missing(missing_note(results))]
    notes = ["R@1 on the validation split in percent, average of both directions; of equal epochs the first is chosen."]
    headers = ("", "best epoch", "R@1 at best", "R@1 at last")
    return [Table(headers, lines, title=f"{results.study.title}. Epochs chosen by validation", notes=notes)]


class EpochChoice(NamedTuple):
    """Test R@1 of one run, mean of both directions, at epochs chosen in three ways: (epoch, R@1) each."""

    by_validation: tuple[int, float]
    last: tuple[int, float]
    by_test: tuple[int, float]

    @property
    def optimism(self) -> float:
        """What choosing on the test split adds, in points; never negative."""
        return self.by_test[1] - self.by_validation[1]


def epoch_choice(best: int, watched: Sequence[Mapping[str, Any]]) -> EpochChoice | None:
    """From the logged evaluations on watched test data; None if there are none. The untrained model, epoch 0, cannot
    be chosen; of equal epochs the first is.

    Args:
        best: the epoch that validation chose.
    """
    test = {entry["epoch"]: rounded(entry["mean_R@1"]) for entry in watched if entry["epoch"] > 0}
    if best not in test:
        return None
    by_test, last = max(test, key=lambda epoch: test[epoch]), max(test)
    return EpochChoice((best, test[best]), (last, test[last]), (by_test, test[by_test]))


def selection(results: StudyResults) -> list[Block]:
    """What choosing the epoch on the test split adds to a result."""
    choices = {
        name: choice
        for name, watched, run in _finished(results, "watched")
        if (choice := epoch_choice(run["best"]["epoch"], watched)) is not None
    }
    if not choices:
        return [Missing(missing_note(results) or "no run evaluated its epochs on the test split")]
    lines: list[tuple[str, ...]] = [
        (name, *(f"{recall:.2f} (epoch {epoch})" for epoch, recall in one), f"{one.optimism:.2f}")
        for name, one in choices.items()
    ]
    means = [fmean(recall for _, recall in way) for way in zip(*choices.values())]
    optimism = fmean(one.optimism for one in choices.values())
    lines += [(), ("mean", *(f"{mean:.2f}" for mean in means), f"{optimism:.2f}")]
    return [
        Table(
            ("", "epoch by validation", "last epoch", "epoch by test", "difference"),
            lines,
            title=f"{results.study.title}. R@1 on the test split in percent, average of both directions",
            notes=[
                "Difference: what choosing the epoch on the test split adds to choosing it by validation, in points."
            ],
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
