"""A report as data: sections of text, tables, figures, findings and captions with images.

The same report is printed in a terminal and written as Markdown, LaTeX, JSON and a self-contained HTML page.
Evaluation, studies, diagnosis and the demo make reports; nothing but this room knows how one is rendered.
"""

from __future__ import annotations

import json
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from PIL.Image import Image

from hnclip.util.files import replace_file
from hnclip.util.tables import TEXT_MARKS, latex_escape, latex_table, markdown_table, text_table
from hnclip.util.text import Passage, slugify

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

FORMATS = ("txt", "md", "tex", "json", "html")
Level = Literal["good", "note", "act"]
LEVELS: dict[Level, str] = {"good": "✓", "note": "·", "act": "!"}  # of findings, and how a terminal marks them
PNG_DPI = 180  # sharp on a dense screen at the full width of the page
_WIDTH = 120  # of a terminal, for sentences; tables are as wide as they are
_CLIP = re.compile(rb'<clipPath id="(\w+)"')
_CONTROLS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # names and captions may hold what moves a cursor


@dataclass(frozen=True, init=False)
class Text:
    """Paragraphs of plain text."""

    paragraphs: tuple[str, ...]

    def __init__(self, *paragraphs: str) -> None:
        object.__setattr__(self, "paragraphs", paragraphs)


@dataclass(frozen=True)
class Table:
    """Cells of plain text; the first column names the rows.

    Args:
        rows: an empty row is a rule. Cells that stand out are `Marked`.
        title: above it; not needed where a section's heading says it.
        spans: titles above the headers from the second column on, each with the number of columns it spans.
        notes: below it; `{best}` and `{second}` become what the format marks cells with.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    spans: Sequence[tuple[str, int]] = ()
    notes: Sequence[str] = ()

    @property
    def has_spans(self) -> bool:
        """A single title over all columns says nothing that the table's own does not."""
        return len({title for title, _ in self.spans}) > 1

    @property
    def flat_headers(self) -> Sequence[str]:
        """Headers with the titles that span them, for formats without spans."""
        if not self.has_spans:
            return self.headers
        titles = [title for title, columns in self.spans for _ in range(columns)]
        return [self.headers[0], *(f"{title} {header}" for title, header in zip(titles, self.headers[1:]))]

    def notes_with(self, best: str, second: str) -> list[str]:
        # Not `format`: a note may name data, and a name may hold any brace.
        return [note.replace("{best}", best).replace("{second}", second) for note in self.notes]


@dataclass(frozen=True)
class Figure:
    """A figure, drawn only when a file or page is written.

    Args:
        name: of its file, without an ending.
        title: what it is, also for readers who cannot see it.
        draw: makes it; called once.
        caption: below it.
    """

    name: str
    title: str
    draw: Callable[[], Drawing]
    caption: str = ""

    @cached_property
    def drawing(self) -> Drawing:
        return self.draw()

    def render(self, suffix: str) -> bytes:
        """The file of that ending: without dates and random names, the same figure is the same file."""
        from matplotlib import rc_context

        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": None}[suffix]
        buffer = BytesIO()
        with rc_context({"svg.hashsalt": self.name}), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # of a caption: no font here has it
            self.drawing.savefig(buffer, format=suffix, dpi=PNG_DPI, metadata=metadata)
        content = buffer.getvalue()
        if (
            suffix == "svg"
        ):  # matplotlib names clip paths after places, whose last bit changes with the order of a solver
            for number, name in enumerate(dict.fromkeys(_CLIP.findall(content))):
                content = content.replace(name, b"clip%d" % number)
        return content


@dataclass(frozen=True)
class Finding:
    """One thing that an analysis found: the number itself, what it means, what to do.

    `level`: "good" needs nothing, "note" is worth knowing, "act" should be dealt with first.
    """

    level: Level
    title: str
    number: str
    meaning: str
    advice: str = ""


@dataclass(frozen=True)
class Findings:
    items: Sequence[Finding]


@dataclass(frozen=True)
class CaptionedImage:
    """A caption with its image, or None where that cannot be shown; `label` says what it is: "cosine 0.934"."""

    label: str
    text: Passage
    image: Image | None = None

    @property
    def caption(self) -> str:
        return "".join(piece for piece, _ in self.text)


@dataclass(frozen=True)
class CaptionRow:
    """A caption and the negatives that are nearest to it, words that they share highlighted."""

    query: CaptionedImage
    negatives: tuple[CaptionedImage, ...]

    @property
    def items(self) -> tuple[CaptionedImage, ...]:
        return (self.query, *self.negatives)


@dataclass(frozen=True)
class CaptionRows:
    rows: Sequence[CaptionRow]


@dataclass(frozen=True)
class Missing:
    """In place of something that could not be measured or shown: why."""

    reason: str


Block = Text | Table | Figure | Findings | CaptionRows | Missing


@dataclass(frozen=True)
class Section:
    """A part of a report with a heading of its own."""

    heading: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Report:
    """Args:
    title, summary: plain text, like all text here.
    sections: the rest, in order.
    data: the numbers behind the report, finite and ready for JSON.
    """

    title: str
    summary: Sequence[str]
    sections: Sequence[Section]
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def blocks(self) -> Iterator[Block]:
        for section in self.sections:
            yield from section.blocks

    @property
    def figures(self) -> list[Figure]:
        return [block for block in self.blocks if isinstance(block, Figure)]

    def to_text(self) -> str:
        """For a terminal; figures are named."""
        parts = [self.title, *map(_fill, self.summary)]
        for section in self.sections:
            parts += [section.heading] if section.heading else []
            parts += [text for block in section.blocks if (text := _text(block))]
        return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), "\n\n".join(parts))

    def to_markdown(self) -> str:
        """With figures as SVG files next to it."""
        parts = [f"# {self.title}", *self.summary]
        for section in self.sections:
            parts += [f"## {section.heading}"] if section.heading else []
            parts += [text for block in section.blocks if (text := _markdown(block))]
        return "\n\n".join(parts) + "\n"

    def to_latex(self, label: str) -> str:
        """Tables and figures as floats, which need the packages booktabs and graphicx; text stays in the other formats.

        Args:
            label: what the labels of tables and figures begin with.
        """
        floats = [block for block in self.blocks if isinstance(block, (Table, Figure))]
        parts = [_latex(block, f"{label}-{number}") for number, block in enumerate(floats, start=1)]
        return "\n\n".join([f"% {self.title}", *parts]) + "\n"

    def to_json(self) -> str:
        return json.dumps(self.data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def to_html(self) -> str:
        """A page that needs no other file and no network."""
        from hnclip.report.html import render_page

        return render_page(self)

    def render(self, suffix: str, label: str = "report") -> str:
        """The report in one of `FORMATS`."""
        renderers = {
            "txt": lambda: self.to_text() + "\n",
            "md": self.to_markdown,
            "tex": lambda: self.to_latex(label),
            "json": self.to_json,
            "html": self.to_html,
        }
        return renderers[suffix]()

    def write(
        self,
        directory: Path,
        name: str = "report",
        *,
        formats: Sequence[str] = ("json", "html"),
        figures: Sequence[str] = ("png",),
    ) -> list[Path]:
        """Write the report as `name` in several formats, and its figures under their own names.

        Everything is rendered before the first file is written, and each file is replaced in one step: a failure leaves
        an older report as it was.
        """
        files = {f"{block.name}.{suffix}": block.render(suffix) for block in self.figures for suffix in figures}
        files |= {f"{name}.{suffix}": _encode(self.render(suffix, name)) for suffix in formats}
        for file, content in files.items():
            with replace_file(directory / file) as partial:
                partial.write_bytes(content)
        return [directory / file for file in files]

    def write_file(self, path: Path) -> None:
        """Write the report alone, in the format of the file's ending."""
        check_format(path)
        with replace_file(path) as partial:
            partial.write_bytes(_encode(self.render(path.suffix[1:], slugify(path.stem))))


def check_format(path: Path) -> None:
    """Raise ValueError if a report cannot be written in the format of the file's ending."""
    if path.suffix[1:] not in FORMATS:
        raise ValueError(f"{path}: its ending must be one of .{', .'.join(FORMATS)}")


def _encode(text: str) -> bytes:
    return text.encode(errors="replace")  # captions may hold halves of characters, which UTF-8 has no bytes for


def _fill(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _text(block: Block) -> str:
    match block:
        case Text(paragraphs):
            return "\n".join(map(_fill, paragraphs))
        case Table():
            table = text_table(block.flat_headers, block.rows)
            notes = map(_fill, block.notes_with(TEXT_MARKS["best"], TEXT_MARKS["second"]))
            return "\n".join([*([block.title] if block.title else []), table, *notes])
        case Figure():
            return _fill(f"Figure {block.name}: {block.caption or block.title}")
        case Findings(items):
            return "\n\n".join(map(_finding_text, items))
        case CaptionRows(rows):
            return "\n\n".join(_fill(f"{item.label}: {item.caption}") for row in rows for item in row.items)
        case Missing(reason):
            return _fill(f"not shown: {reason}")


def _finding_text(finding: Finding) -> str:
    lines = [f"{LEVELS[finding.level]} {finding.title}: {finding.number}"]
    lines += [f"  {text}" for text in (finding.meaning, f"→ {finding.advice}" if finding.advice else "") if text]
    return "\n".join(lines)


def _markdown(block: Block) -> str:
    match block:
        case Text(paragraphs):
            return "\n\n".join(paragraphs)
        case Table():
            table = markdown_table(block.flat_headers, block.rows)
            title = [f"**{block.title}**"] if block.title else []
            return "\n\n".join([*title, table, *block.notes_with("bold", "italic")])
        case Figure():
            return f"![{block.title}]({block.name}.svg)\n\n*{block.title}.* {block.caption}".rstrip()
        case Findings(items):
            said = [f"- **{item.title}: {item.number}.** {item.meaning} {item.advice}".rstrip() for item in items]
            return "\n".join(said)
        case CaptionRows(rows):
            return "\n\n".join(f"*{item.label}*: {item.caption}" for row in rows for item in row.items)
        case Missing(reason):
            return f"*Not shown: {reason}*"


def _latex(block: Table | Figure, label: str) -> str:
    if isinstance(block, Table):
        notes = block.notes_with("bold", "underlined")
        caption = " ".join([f"{block.title}.", *notes] if block.title else notes)
        spans = block.spans if block.has_spans else ()
        names = {"caption": caption, "label": f"tab:{label}"}
        return latex_table(block.headers, block.rows, spans=spans, **names)
    lines = [r"\begin{figure}", r"\centering", f"\\includegraphics[width=\\linewidth]{{{block.name}}}"]
    lines += [f"\\caption{{{latex_escape(f'{block.title}. {block.caption}')}}}", f"\\label{{fig:{label}}}"]
    return "\n".join([*lines, r"\end{figure}"])
