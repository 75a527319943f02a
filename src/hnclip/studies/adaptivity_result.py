"""What the study of margins found: a table of cells, paired differences, and a sentence for each question."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any, Literal

from hnclip.analysis.head_probe import Change, recall_change
from hnclip.evaluate.bootstrap import Estimate, mark_best
from hnclip.evaluate.ranks import ARROWS, Ranks
from hnclip.studies.tower_heads import MarginLoss, Negatives
from hnclip.util.tables import Mark, latex_table, markdown_table, text_table

Family = Literal["infonce", "fixed", "hn", "affine"]
FAMILIES: dict[Family, str] = {
    "infonce": "InfoNCE",
    "fixed": "fixed margin m",
    "hn": "L_HN, γ·Ḡ",
    "affine": "affine, m + γ(Ḡ − mean)",
}
NEGATIVES: dict[Negatives, str] = {"micro": "micro-batch", "batch": "whole batch"}
SETTING = "setting"  # the comparison at one γ, beside the cells of the crossed table
KS = (1, 5, 10)
_HEADERS = ["negatives", "loss", "chosen", *(f"{arrow} R@1" for arrow in ARROWS.values()), "mean, against InfoNCE"]
_FIRST = 3  # column of the first recall


def row_key(block: str, family: Family) -> str:
    return f"{block}/{family}"


@dataclass(frozen=True)
class Row:
    """A cell of the table: the configuration that validation chose for it, and what it does on test.

    Attributes:
        validation: mean R@1 of both directions and all seeds.
        scale, similarity: inverse temperature, and mean of Ḡ over the negatives seen until the chosen epoch; means of
            the seeds.
        recall: in percent by direction and K, one for each seed.
    """

    key: str
    negatives: Negatives
    loss: MarginLoss
    rate: float
    epoch: int
    validation: float
    scale: float
    similarity: float
    recall: Mapping[str, Mapping[int, tuple[float, ...]]]

    @property
    def title(self) -> str:
        """The row in a sentence."""
        block, _, family = self.key.partition("/")
        same_mean = ", as large as L_HN's on average" if (block, family) == (SETTING, "fixed") else ""
        return f"{self.loss.name}{same_mean} ({NEGATIVES[self.negatives]})"

    def cells(self) -> list[str]:
        family: Any = self.key.partition("/")[2]
        chosen = [f"m {self.loss.margin:.3g}"] * bool(self.loss.margin)
        chosen += [f"γ {self.loss.gamma:g}"] * bool(self.loss.gamma)
        chosen += [f"rate {self.rate:g}", f"epoch {self.epoch}"]
        recalls = [spread(self.recall[name][1]) for name in ARROWS]
        return [NEGATIVES[self.negatives], FAMILIES[family], ", ".join(chosen), *recalls]

    def to_dict(self) -> dict[str, Any]:
        recall = {
            name: {
                f"R@{k}": {"mean": fmean(values), "std": stdev(values) if len(values) > 1 else None, "seeds": values}
                for k, values in by_k.items()
            }
            for name, by_k in self.recall.items()
        }
        own = {name: value for name, value in vars(self).items() if name not in ("loss", "recall")}
        return {**own, "name": self.loss.name, "loss": asdict(self.loss), **recall}


@dataclass(frozen=True)
class Comparison:
    """A question, and the row that answers it minus another row: R@1, with intervals over queries and seeds."""

    question: str
    ours: str
    base: str
    change: Change

    def sentence(self, rows: Mapping[str, Row]) -> str:
        ours, base, mean = rows[self.ours], rows[self.base], self.change.mean
        found = {
            "raises": "clearly higher than",
            "lowers": "clearly lower than",
            "undecided": "not clearly different from",
        }[self.change.verdict]
        return f"{self.question} R@1 of {ours.title} is {found} that of {base.title}: {interval(mean)} points."

    def to_dict(self, rows: Mapping[str, Row]) -> dict[str, Any]:
        return {
            "question": self.question,
            "ours": self.ours,
            "base": self.base,
            **self.change.to_dict(),
            "sentence": self.sentence(rows),
        }


@dataclass(frozen=True)
class Adaptivity:
    """Rows by cell, first the crossed table, then the comparison at one setting; what they say about each other.

    Attributes:
        marks: by block of rows, row and direction; a mark claims no difference that intervals do not support.
        pictures, captions: by split.
        settings: of the study, ready for JSON.
        grid: every point that validation chose from, at its best epoch.
    """

    rows: tuple[Row, ...]
    comparisons: tuple[Comparison, ...]
    marks: Mapping[str, Mapping[tuple[str, str], Mark]]
    pictures: Mapping[str, int]
    captions: Mapping[str, int]
    settings: Mapping[str, Any]
    grid: tuple[Mapping[str, Any], ...]
    seconds: float

    @property
    def by_key(self) -> dict[str, Row]:
        return {row.key: row for row in self.rows}

    def sentences(self) -> list[str]:
        """One for each question."""
        return [comparison.sentence(self.by_key) for comparison in self.comparisons]

    def notes(self) -> list[str]:
        """How alike captions were in training, and choices that a wider grid might change."""
        hn = self.by_key[row_key(SETTING, "hn")]
        mean = hn.loss.gamma * hn.similarity
        notes = [
            f"Until its chosen epoch {hn.title} saw a mean Ḡ of {hn.similarity:.3f} among its negatives: its mean "
            f"margin is {mean:.3f}"
            + (", which the fixed margin beside it has." if mean > 0 else ", too small to imitate.")
        ]
        edges = [f"{row.title}: {', '.join(at)}" for row in self.rows if (at := self._edges(row))]
        return [*notes, f"Chosen at the edge of their grid: {'; '.join(edges)}."] if edges else notes

    def _edges(self, row: Row) -> list[str]:
        block, _, family = row.key.partition("/")
        gammas = "affine_gammas" if family == "affine" else "gammas"
        values = {"rate": ("rates", row.rate)}
        if block != SETTING:
            values |= {"m": ("margins", row.loss.margin), "γ": (gammas, row.loss.gamma)}
        found = []
        for name, (grid, value) in values.items():
            known = self.settings[grid]
            if value and len(known) > 1 and value in (min(known), max(known)):
                found.append(f"{name} {value:g}")
        return found + ["the last epoch"] * (row.epoch == self.settings["heads"]["epochs"])

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": [row.to_dict() for row in self.rows],
            "comparisons": [comparison.to_dict(self.by_key) for comparison in self.comparisons],
            "notes": self.notes(),
            "grid": list(self.grid),
            "pictures": dict(self.pictures),
            "captions": dict(self.captions),
            "settings": dict(self.settings),
            "seconds": self.seconds,
        }

    def to_text(self) -> str:
        return "\n\n".join([self._about(), self._table(text_table), "\n".join([*self.sentences(), *self.notes()])])

    def to_markdown(self) -> str:
        found = "\n".join(f"- {text}" for text in [*self.sentences(), *self.notes()])
        return "\n\n".join([self._about(), self._table(markdown_table), found])

    def to_latex(self) -> str:
        return self._table(latex_table)

    def _about(self) -> str:
        heads, seeds = self.settings["heads"], self.settings["seeds"]
        pairs = ", ".join(
            f"{split} {count:,}" + (f" ({self.captions[split]:,} captions)" if self.captions[split] != count else "")
            for split, count in self.pictures.items()
        )
        return (
            f"Frozen towers {self.settings['model']} on {self.settings['data']}; pictures: {pairs}. Linear heads into "
            f"{heads['width']} dimensions, {heads['epochs']} epochs of {heads['micro_batch']} × {heads['accumulate']} "
            f"pairs; seeds {', '.join(map(str, seeds))}. m, γ, learning rate and epoch of every row are chosen on "
            "validation; test R@1 as mean ± standard deviation over seeds. Differences have 95 % intervals over "
            "queries and seeds, each for itself; they are of the mean of both directions. The best row of the crossed "
            "table, and of the comparison below it, is marked if it is clearly above all others."
        )

    def _table(self, draw: Any) -> str:
        base = {row.key: row_key(row.negatives, "infonce") for row in self.rows}
        changes = {found.ours: found.change.mean for found in self.comparisons if found.base == base[found.ours]}
        cells: list[list[str]] = []
        marks: dict[tuple[int, int], Mark] = {}
        before = ""
        for block, keys in blocks(set(self.by_key)).items():
            for key in keys:
                row = self.by_key[key]
                together = f"{block}/{row.negatives}"
                if before not in ("", together):
                    cells.append([])
                before = together
                for column, name in enumerate(ARROWS, start=_FIRST):
                    if mark := self.marks[block].get((key, name)):
                        marks[len(cells), column] = mark
                cells.append([*row.cells(), interval(changes[key]) if key in changes else ""])
        return draw(_HEADERS, cells, marks=marks)


def blocks(keys: set[str]) -> dict[str, list[str]]:
    """Rows that stand together, and that a mark is among: the crossed table, and the comparison at one setting."""
    crossed = [row_key(negatives, family) for negatives in NEGATIVES for family in FAMILIES]
    setting = [row_key("micro", "infonce"), row_key(SETTING, "fixed"), row_key(SETTING, "hn")]
    return {"crossed": crossed, SETTING: [key for key in setting if key in keys]}


def questions(keys: set[str]) -> Iterator[tuple[str, str, str]]:
    """Every question with the row that answers it and the row beside it, those that are there."""
    asked: list[tuple[str, str, str]] = []
    for block in NEGATIVES:
        asked += [
            ("Does a fixed margin help?", f"{block}/fixed", f"{block}/infonce"),
            ("Does L_HN help?", f"{block}/hn", f"{block}/infonce"),
            ("Does an affine margin help?", f"{block}/affine", f"{block}/infonce"),
            ("Does L_HN do more than a fixed margin?", f"{block}/hn", f"{block}/fixed"),
            ("What is left for adaptivity itself, γ > 0 at any mean margin?", f"{block}/affine", f"{block}/fixed"),
        ]
    asked += [(f"Do more negatives help {FAMILIES[f]}?", f"batch/{f}", f"micro/{f}") for f in FAMILIES]
    asked += [
        ("Does L_HN do more than more negatives?", "micro/hn", "batch/infonce"),
        ("Does a fixed margin do more than more negatives?", "micro/fixed", "batch/infonce"),
        ("At the given γ, does L_HN help?", f"{SETTING}/hn", "micro/infonce"),
        ("Does a fixed margin of the same mean help?", f"{SETTING}/fixed", "micro/infonce"),
        ("Does L_HN do more than a fixed margin of the same mean?", f"{SETTING}/hn", f"{SETTING}/fixed"),
    ]
    return (question for question in asked if {question[1], question[2]} <= keys)


def clear_marks(ranks: Mapping[str, Sequence[Ranks]], families: Any) -> dict[tuple[str, str], Mark]:
    """`mark_best` by row and direction, by intervals over queries and seeds."""
    found: dict[tuple[str, str], Mark] = {}
    for name in ARROWS:
        heights = {key: sum(int((getattr(run, name) == 1).sum()) for run in runs) for key, runs in ranks.items()}

        def is_above(row: str, other: str, name: str = name) -> bool:
            return getattr(recall_change(ranks[row], ranks[other], families), name).low > 0

        found |= {(key, name): mark for key, mark in mark_best(heights, is_above).items()}
    return found


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation."""
    return f"{fmean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def interval(estimate: Estimate) -> str:
    return f"{estimate.mean:+.1f} [{estimate.low:+.1f}, {estimate.high:+.1f}]"
