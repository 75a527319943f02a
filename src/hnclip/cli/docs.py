"""`hnclip docs`: the documentation that comes with the package."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import field
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated

import tyro
from pydantic.dataclasses import dataclass

from hnclip.cli.options import Output, OutputGroup, Printed
from hnclip.util.text import did_you_mean

PARTS = ("", "tutorials", "how-to", "reference", "explanation")  # folders in the order of the list
API_ENTRY = re.compile(r"^::: ([\w.]+)\n((?: +.+\n)*)", re.MULTILINE)  # of mkdocstrings: a name, and options


@dataclass(frozen=True)
class Docs:
    """List the pages of the documentation, or print one."""

    page: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="PAGE")] = None
    """Name of a page, with or without its folder."""
    output: OutputGroup = field(default_factory=Output)

    def run(self) -> Printed | None:
        pages = find_pages()
        if self.page is None:
            titles = {
                name: page.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for name, page in pages.items()
            }
            width = max(map(len, titles))
            lines = ["usage: hnclip docs PAGE", "", *(f"  {name:<{width}}  {title}" for name, title in titles.items())]
            return Printed("\n".join(lines), titles)
        wanted = self.page.removesuffix(".md").removeprefix("docs/")
        found = [name for name in pages if wanted in (name, name.rpartition("/")[2])]
        if not found:
            hint = did_you_mean(wanted, [*pages, *(name.rpartition("/")[2] for name in pages)])
            raise ValueError(f"hnclip docs lists all pages; there is no {wanted!r}{hint}")
        text = API_ENTRY.sub(_summarize, pages[found[0]].read_text(encoding="utf-8"))
        if self.output.json or not sys.stdout.isatty():
            return Printed(text, {"page": found[0], "text": text})
        from rich.console import Console
        from rich.markdown import Markdown

        with (console := Console()).pager(styles=True):
            console.print(Markdown(text))
        return None


def find_pages() -> dict[str, Path]:
    """The pages by name, part by part."""
    top = Path(__file__).parents[1] / "pages"
    pages = {path.relative_to(top).with_suffix("").as_posix(): path for path in top.rglob("*.md")}
    return dict(sorted(pages.items(), key=lambda item: (PARTS.index(item[0].rpartition("/")[0]), item[0])))


def _summarize(entry: re.Match[str]) -> str:
    """A name and the members that its options list, each with the first paragraph of its docstring."""
    members = re.search(r"members: \[(.+)\]", entry[2])
    names = [f"{entry[1]}.{name}" for name in members[1].split(", ")] if members else []
    docs = {name: inspect.getdoc(resolve_name(name)) or "" for name in (entry[1], *names)}
    first = {name: " ".join(doc.partition("\n\n")[0].split()) for name, doc in docs.items()}
    return "".join(f"- `{name}`: {paragraph}\n" for name, paragraph in first.items())
