"""The outcome of a study for people: a terminal, Markdown, LaTeX, figures; and for programs, JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from hnclip.studies.findings import Findings
from hnclip.studies.identity import versions
from hnclip.studies.parts import FigurePart, Part, Shown, TablePart
from hnclip.studies.study import Study
from hnclip.util.files import replace_file
from hnclip.util.tables import TEXT_MARKS, latex_escape, latex_table, markdown_table, text_table

FIGURE = ".svg"
_WIDTH = 120  # of a terminal, for sentences; tables are as wide as they are


@dataclass(frozen=True)
class Outcome:
    """A study, and what its shows made of its runs."""

    study: Study
    shown: tuple[Shown, ...]
    about: dict[str, Any]

    @property
    def parts(self) -> list[Part]:
        return [part for shown in self.shown for part in shown.parts]

    @property
    def figures(self) -> list[FigurePart]:
        return [part for part in self.parts if isinstance(part, FigurePart)]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; what the shows found under their names."""
        found = {name: dict(shown.data) for name, shown in zip(self.study.shows, self.shown)}
        return {"study": self.study.name, "title": self.study.title, **self.about, **found}

    def to_text(self) -> str:
        return "\n\n".join([f"{self.study.title}: {self.study.question}", *map(_text, self.parts)])

    def to_markdown(self, *, level: int = 1, figures: str = "") -> str:
        """Args:
        level: of the heading.
        figures: where the figures lie, seen from the file, with a slash at its end.
        """
        head = f"{'#' * level} {self.study.title}\n\n{self.study.question}"
        return "\n\n".join([head, *(_markdown(part, figures) for part in self.parts)]) + "\n"

    def to_latex(self) -> str:
        """Tables and figures as floats; needs the packages booktabs and graphicx."""
        head = f"% {self.study.title}"
        return (
            "\n\n".join([head, *(_latex(self.study.name, number, part) for number, part in enumerate(self.parts))])
            + "\n"
        )

    def write(self, directory: Path) -> list[Path]:
        """`study.txt`, `.md`, `.tex`, `.json` and the figures, each whole or not at all."""
        texts = {
            "txt": self.to_text() + "\n",
            "md": self.to_markdown(),
            "tex": self.to_latex(),
            "json": json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n",
        }
        paths = []
        for ending, text in texts.items():
            paths.append(directory / f"{self.study.name}.{ending}")
            with replace_file(paths[-1]) as partial:
                partial.write_text(text, encoding="utf-8")
        return [*paths, *self.write_figures(directory)]

    def write_figures(self, directory: Path, *, endings: Sequence[str] = (FIGURE, ".pdf")) -> list[Path]:
        """By default one for pages and one for LaTeX."""
        from matplotlib import rc_context

        paths = []
        for part in self.figures:
            for ending in endings:
                paths.append(directory / f"{part.name}{ending}")
                with replace_file(paths[-1]) as partial:
                    # The file's own format decides, not the name of the temporary one. Without dates and chance
                    # names, the same figure is the same file.
                    dates = {"CreationDate": None} if ending == ".pdf" else {"Date": None}
                    with rc_context({"svg.hashsalt": part.name}):
                        part.figure.savefig(partial, format=ending[1:], metadata=dates)
        return paths


def show(findings: Findings) -> Outcome:
    """Let a study's shows make tables and figures of its runs."""
    shown = tuple(import_module(f"hnclip.studies.shows.{name}").show(findings) for name in findings.study.shows)
    about = {
        "model": findings.setting.base.model,
        "domains": [domain.name for domain in findings.domains],
        "seeds": list(findings.seeds),
        "versions": versions(),
    }
    return Outcome(findings.study, shown, about)


def _notes(notes: Sequence[str], best: str, second: str) -> list[str]:
    # Not `format`: a note may name data, and a name may hold any brace.
    return [note.replace("{best}", best).replace("{second}", second) for note in notes]


def _text(part: Part) -> str:
    if isinstance(part, TablePart):
        headers = _flat(part)
        notes = _notes(part.notes, TEXT_MARKS["best"], TEXT_MARKS["second"])
        wrapped = [textwrap.fill(note, _WIDTH, break_long_words=False, break_on_hyphens=False) for note in notes]
        return "\n".join([part.title, text_table(headers, part.rows, marks=part.marks), *wrapped])
    if isinstance(part, FigurePart):
        return f"figure {part.name}{FIGURE}: {part.title}. {part.caption}"
    return "\n".join(part.sentences)


def _markdown(part: Part, figures: str) -> str:
    if isinstance(part, TablePart):
        table = markdown_table(_flat(part), part.rows, marks=part.marks)
        return "\n\n".join([f"**{part.title}**", table, *_notes(part.notes, "bold", "italic")])
    if isinstance(part, FigurePart):
        return f"![{part.title}]({figures}{part.name}{FIGURE})\n\n*{part.title}.* {part.caption}"
    return "\n".join(f"- {sentence}" for sentence in part.sentences)


def _latex(study: str, number: int, part: Part) -> str:
    label = f"{study}-{number + 1}"
    if isinstance(part, TablePart):
        caption = " ".join([f"{part.title}.", *_notes(part.notes, "bold", "underlined")])
        return latex_table(
            part.headers, part.rows, marks=part.marks, spans=part.spans, caption=caption, label=f"tab:{label}"
        )
    if isinstance(part, FigurePart):
        lines = [r"\begin{figure}", r"\centering", f"\\includegraphics[width=\\linewidth]{{{part.name}}}"]
        lines += [f"\\caption{{{latex_escape(f'{part.title}. {part.caption}')}}}", f"\\label{{fig:{label}}}"]
        return "\n".join([*lines, r"\end{figure}"])
    return "\n\n".join(latex_escape(sentence) for sentence in part.sentences)


def _flat(part: TablePart) -> list[str]:
    """Headers with the titles that span them, for forms that know no spans."""
    titles = [title for title, columns in part.spans for _ in range(columns)]
    if len(set(titles)) < 2:
        return list(part.headers)
    return [part.headers[0], *(f"{title} {header}" for title, header in zip(titles, part.headers[1:]))]
