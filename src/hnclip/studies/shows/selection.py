"""How much a result is flattered when its epoch is chosen on the data that it is reported on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from hnclip.studies.findings import Findings
from hnclip.studies.notes import missing_note, versions_note
from hnclip.studies.parts import Part, Shown, TablePart, WordsPart
from hnclip.studies.statistics import level


@dataclass(frozen=True)
class Chosen:
    """Test R@1 of one run, mean of both directions, at epochs that were chosen in three ways.

    Attributes:
        by_validation, last, by_test: epoch, and R@1 in percent there.
    """

    by_validation: tuple[int, float]
    last: tuple[int, float]
    by_test: tuple[int, float]

    @property
    def optimism(self) -> float:
        """What choosing on the test split adds, in points; never negative."""
        return self.by_test[1] - self.by_validation[1]


def chosen(best: int, watched: Sequence[Mapping[str, Any]]) -> Chosen | None:
    """From the logged evaluations of a run on watched test data; None if it watched none.

    The model before training, epoch 0, is no choice. Of equal epochs the first is chosen, as a run does.

    Args:
        best: the epoch that validation chose.
    """
    test = {entry["epoch"]: level(entry["mean_R@1"]) for entry in watched if entry["epoch"] > 0}
    if best not in test:
        return None
    by_test, last = max(test, key=lambda epoch: test[epoch]), max(test)
    return Chosen((best, test[best]), (last, test[last]), (by_test, test[by_test]))


def show(findings: Findings) -> Shown:
    """A row per run, and the mean of what choosing on the test split adds."""
    found: dict[tuple[str, str, int], Chosen] = {}
    for row in findings.study.rows:
        for domain in findings.domains:
            for seed in findings.seeds:
                run = findings.training(row.name, domain, seed)
                watched = findings.metrics(row.name, domain, seed, "watched")
                if run is not None and (one := chosen(run["best"]["epoch"], watched)) is not None:
                    found[row.name, domain.name, seed] = one
    parts: list[Part] = [_table(findings, found)]
    if found:
        parts.append(WordsPart((_sentence(list(found.values())),)))
    runs = [
        {"row": row, "domain": domain, "seed": seed, **asdict(one), "optimism": one.optimism}
        for (row, domain, seed), one in found.items()
    ]
    mean = fmean(one.optimism for one in found.values()) if found else None
    return Shown(tuple(parts), {"runs": runs, "mean_optimism": mean})


def _table(findings: Findings, found: Mapping[tuple[str, str, int], Chosen]) -> TablePart:
    several = len(findings.seeds) > 1
    lines: list[tuple[str, ...]] = []
    for (row, domain, seed), one in found.items():
        name = f"{row}, {domain}, seed {seed}" if several else f"{row}, {domain}"
        at = [f"{recall:.2f} (epoch {epoch})" for epoch, recall in (one.by_validation, one.last, one.by_test)]
        lines.append((name, *at, f"{one.optimism:.2f}"))
    if found:
        means = [
            fmean(getattr(one, name)[1] for one in found.values()) for name in ("by_validation", "last", "by_test")
        ]
        optimism = fmean(one.optimism for one in found.values())
        lines += [(), ("mean", *(f"{mean:.2f}" for mean in means), f"{optimism:.2f}")]
    return TablePart(
        f"{findings.study.title}. R@1 on the test split in percent, mean of both directions",
        ("", "epoch by validation", "last epoch", "epoch by test", "flattered by"),
        tuple(lines),
        notes=(
            "Flattered by: what choosing the epoch on the test split adds to choosing it by validation, in points.",
            *missing_note(findings),
            *versions_note(findings),
        ),
    )


def _sentence(found: Sequence[Chosen]) -> str:
    optimism = [one.optimism for one in found]
    epochs = sorted({one.last[0] for one in found})
    named = " or ".join(map(str, epochs))
    return (
        f"Choosing among {named} epochs on the test split flatters R@1 by {fmean(optimism):.2f} points on average over "
        f"{len(found)} {'run' if len(found) == 1 else 'runs'}, by {max(optimism):.2f} at most."
    )
