"""What was measured in one column of a study, read once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hnclip.evaluate.result import Result
from hnclip.studies.findings import Column, Findings
from hnclip.studies.statistics import Standings, queries_of


@dataclass(frozen=True)
class Measured:
    """The results of a column by row and seed; an untrained model's stand under None and count for every seed."""

    column: Column
    results: Mapping[str, Mapping[int | None, Result]]

    def standings(self, *, held_out: bool = False) -> Standings:
        """How the rows stand to each other, or with `held_out` on the held-out part alone."""
        return Standings({row: queries_of(found, held_out=held_out) for row, found in self.results.items()})

    def all(self) -> Iterator[Result]:
        return (result for found in self.results.values() for result in found.values())


def measure(findings: Findings, column: Column) -> Measured:
    """Every row of the study on a column."""
    results: dict[str, Mapping[int | None, Result]] = {}
    for row in findings.study.rows:
        found = findings.results(row.name, column)
        results[row.name] = {seed if row.trained else None: result for seed, result in found.items()}
    return Measured(column, results)
