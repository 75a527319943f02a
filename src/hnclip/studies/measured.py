"""What was measured in one column of a study, read once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hnclip.evaluate.retrieval import EvaluationResult
from hnclip.studies.findings import Column, Findings
from hnclip.studies.statistics import Runs, Standings, queries_of


@dataclass(frozen=True)
class Measured:
    """The results of a column by row and seed; an untrained model's stand under None and count for every seed."""

    column: Column
    results: Mapping[str, Mapping[int | None, EvaluationResult]]

    def standings(self, *, held_out: bool = False) -> Standings:
        """How the rows stand to each other, or with `held_out` on the held-out part alone."""
        return Standings({row: queries_of(found, held_out=held_out) for row, found in self.results.items()})

    def all(self) -> Iterator[EvaluationResult]:
        return (result for found in self.results.values() for result in found.values())


def measure(findings: Findings, column: Column) -> Measured:
    """Every row of the study on a column."""
    return Measured(column, {row.name: _results(findings, row.name, column) for row in findings.study.rows})


def runs_of(findings: Findings, row: str, column: Column) -> Runs:
    """The queries of one row on a column."""
    return queries_of(_results(findings, row, column))


def _results(findings: Findings, row: str, column: Column) -> dict[int | None, EvaluationResult]:
    trained = findings.study.row(row).trained
    return {seed if trained else None: result for seed, result in findings.results(row, column).items()}
