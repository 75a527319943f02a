"""Results of `evaluate_models` for people: a terminal, Markdown, LaTeX; and for programs, JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hnclip.evaluate.matrix import Results
from hnclip.evaluate.protocol import Compared
from hnclip.evaluate.published import PublishedResult, paper_title, published
from hnclip.evaluate.result import Result
from hnclip.evaluate.table import ARROWS, format_results
from hnclip.tables import text_table
from hnclip.util.files import replace_file

KS = (1, 5, 10, 25, 50)
MAIN_TABLE = "1"  # the paper's comparison of methods; its other tables are variations of it


@dataclass(frozen=True)
class Report:
    """Results, each model against the first, and whether the paper's numbers stand beside."""

    results: Results
    comparisons: Sequence[Compared]
    with_paper: bool = True

    def paper(self, data: str, split: str) -> list[PublishedResult]:
        """The paper evaluates on test splits."""
        return published(data, table=MAIN_TABLE) if self.with_paper and split == "test" else []

    def galleries(self) -> dict[tuple[str, str], list[Result]]:
        """Results by data and split, in order."""
        found: dict[tuple[str, str], list[Result]] = {}
        for result in self.results.results:
            found.setdefault((result.data, result.split), []).append(result)
        return found

    def sentences(self, data: str, split: str) -> list[str]:
        return [
            f"{'held-out, ' if found.held_out else ''}{found.comparison.sentence(found.model, found.against)}"
            for found in self.comparisons
            if (found.data, found.split) == (data, split)
        ]


def to_dict(report: Report) -> dict[str, Any]:
    """Everything, ready for JSON; the paper's numbers under a name of their own."""
    paper = [row for gallery in report.galleries() for row in report.paper(*gallery)]
    return {
        **report.results.to_dict(),
        "comparisons": [
            {
                "data": found.data,
                "split": found.split,
                "held_out": found.held_out,
                "model": found.model,
                "against": found.against,
                **found.comparison.to_dict(),
            }
            for found in report.comparisons
        ],
        "paper": [
            {"paper": paper_title(), "name": row.name, "benchmark": row.benchmark, "recall": row.recall}
            for row in paper
        ],
    }


def to_text(report: Report) -> str:
    """For a terminal: a section per data set, with intervals, and a matrix of R@1 if there are several."""
    sections = [_section(report, *gallery) for gallery in report.galleries()]
    if len(sections) > 1:
        sections.append("all data sets\n" + report.results.to_text(paper=_all_paper(report)))
    return "\n\n".join(sections)


def to_markdown(report: Report) -> str:
    """A table per data set, and a matrix of R@1 if there are several."""
    parts = []
    for (data, split), found in report.galleries().items():
        table = Results(tuple(found)).to_markdown(ks=KS, paper=report.paper(data, split))
        compared = "\n".join(f"- {sentence}" for sentence in report.sentences(data, split))
        parts += [f"## {data} {split}", table, *([compared] if compared else [])]
    if len(report.galleries()) > 1:
        parts += ["## All data sets", report.results.to_markdown(paper=_all_paper(report))]
    return "\n\n".join(parts) + "\n"


def to_latex(report: Report) -> str:
    """The same tables for LaTeX, with the package booktabs."""
    parts = [
        Results(tuple(found)).to_latex(ks=KS, paper=report.paper(data, split), label=_label(f"{data}-{split}"))
        for (data, split), found in report.galleries().items()
    ]
    if len(parts) > 1:
        parts.append(report.results.to_latex(paper=_all_paper(report), label="tab:all"))
    return "\n\n".join(parts) + "\n"


FORMS: dict[str, Callable[[Report], str]] = {
    ".txt": lambda report: to_text(report) + "\n",
    ".md": to_markdown,
    ".tex": to_latex,
    ".json": lambda report: json.dumps(to_dict(report), indent=2) + "\n",
}


def check_form(path: Path) -> None:
    """Before any work is done: the ending of a file says its form."""
    if path.suffix not in FORMS:
        raise ValueError(f"{path}: results are written as {', '.join(FORMS)}, by the ending of the file's name")


def write_report(path: Path, report: Report) -> None:
    check_form(path)
    with replace_file(path) as partial:
        partial.write_text(FORMS[path.suffix](report), encoding="utf-8")


def _label(name: str) -> str:
    """LaTeX allows few signs in a label."""
    return "tab:" + "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name).strip("-")


def _section(report: Report, data: str, split: str) -> str:
    found = report.galleries()[data, split]
    lines = [f"{data} {split}: {found[0].images:,} images, {found[0].captions:,} captions"]
    if found[0].unread:
        lines.append(f"warning: {found[0].unread:,} rows of the source cannot be read; hnclip data check lists them")
    if found[0].skipped:
        lines.append(f"warning: {found[0].skipped:,} records cannot be used and are left out")
    for result in found:
        if result.truncated:
            lines.append(f"warning: {result.truncated:,} captions are cut at the context of {result.model}")
        if result.caption_similarity is not None:
            pairwise, hardest = (result.caption_similarity[name] for name in ("pairwise", "hardest"))
            alike = f"{pairwise:.2f} on average, {hardest:.2f} to the hardest companion"
            lines.append(f"caption similarity to {result.model}: {alike}")
    lines.append(format_results({result.model: result.metrics for result in found}, ks=KS))
    apart = {result.model: result.held_out for result in found if result.held_out is not None}
    if apart:
        pictures = next(iter(apart.values()))["image_to_text"]["queries"]
        lines += [f"among the {pictures:,} held-out pictures alone", format_results(apart, ks=KS)]
    lines += report.sentences(data, split)
    if paper := report.paper(data, split):
        lines += ["published in the paper, not measured here", _paper_table(paper)]
    return "\n".join(lines)


def _paper_table(paper: Sequence[PublishedResult]) -> str:
    ks = [k for k in KS if any(k in values for row in paper for values in row.recall.values())]
    headers = ["", *(f"{arrow} R@{k}" for arrow in ARROWS.values() for k in ks)]
    rows = [
        [row.name, *(f"{row.recall[way][k]:.1f}" if k in row.recall[way] else "–" for way in ARROWS for k in ks)]
        for row in paper
    ]
    return text_table(headers, rows)


def _all_paper(report: Report) -> list[PublishedResult]:
    return [row for gallery in report.galleries() for row in report.paper(*gallery)]
