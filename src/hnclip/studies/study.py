"""What a study is: rows, columns and comparisons, as data. The studies themselves are in `catalogue`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hnclip.studies.variant import Variant

SEEDS = (42, 1337, 3407)  # the paper's

Columns = Literal["own", "others", "all"]


@dataclass(frozen=True)
class Study:
    """A table or figure of the paper, or a control that it lacks.

    Args:
        name: on the command line.
        title: in tables.
        question: what it answers, a sentence.
        rows: of the table, in order.
        shows: what is made of the runs, names of files of `hnclip.studies.shows`, in order.
        columns: test galleries of each training domain: its own, the others, or all.
        ks: lengths of the result list.
        seeds: how many unless told.
        tables: of the paper, by their printed numbers, that hold the same rows.
        watch: every epoch of its runs is also evaluated on the domain's own test gallery.
        probe: both losses and their gradients are measured along its runs.
        whole: also evaluate on the whole data set as one gallery, training pairs included, as Long-DCI is.
    """

    name: str
    title: str
    question: str
    rows: tuple[Variant, ...]
    shows: tuple[str, ...]
    columns: Columns = "own"
    ks: tuple[int, ...] = (1, 5, 10)
    seeds: int = 1
    tables: tuple[str, ...] = ()
    watch: bool = False
    probe: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        names = [row.name for row in self.rows]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"study {self.name} has two rows {name!r}")
        for row in self.rows:
            for other in row.against:
                if other not in names:
                    raise ValueError(
                        f"study {self.name}: {row.name!r} is compared with {other!r}, which is no row of it"
                    )

    def row(self, name: str) -> Variant:
        return next(row for row in self.rows if row.name == name)


@dataclass(frozen=True)
class Domain:
    """Data to train on, and the galleries that are its own: its test split, and those that the benchmark's protocol
    evaluates the same models on."""

    data: str
    galleries: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.data.partition("=")[0]
