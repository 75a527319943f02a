"""Write docs/reference/commands.md from the help of every command: python scripts/commands_page.py

Groups of options that several commands share are listed once, at the end of the page.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from hnclip.cli.commands import COMMANDS
from hnclip.cli.docs import find_pages

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "commands.md"
WIDTH = 100  # columns; with more, tyro may set groups of options side by side
EXIT_CODES = {
    0: "success",
    1: "an error that the message names, or invalid records of `hnclip data check`",
    2: "wrong arguments",
    130: "interrupted; the message names the command that continues",
}
REFERENCE = re.compile(r"\(hnclip docs ([a-z-]+)\)")
PLACEHOLDER = re.compile(r"\{None\}\|")  # how tyro spells an optional value
DEFAULT = re.compile(r" *\((?:default: (None|\(\))?(?P<value>[^()]*)|required)\)$")


@dataclass
class Group:
    """Options under one heading of the help: names and values, and what they mean."""

    title: str
    about: str = ""
    rows: list[tuple[str, str]] = field(default_factory=list)

    def to_markdown(self) -> list[str]:
        return [
            *([REFERENCE.sub(_link, self.about), ""] if self.about else []),
            "| option | |",
            "|---|---|",
            *(f"| `{name}` | {text} |" for name, text in self.rows),
        ]


@dataclass
class CommandHelp:
    usage: str
    about: str
    groups: list[Group]


def parse_help(text: str) -> CommandHelp:
    """The parts of a command's help.

    >>> found = parse_help("usage: x [-h]\\n\\nDoes it.\\n\\n options\\n -----\\n  --k INT  Hits. (default: 20)\\n")
    >>> found.about, found.groups
    ('Does it.', [Group(title='options', about='', rows=[('--k INT', 'Hits. Default: `20`.')])])
    """
    lines = text.splitlines()
    usage = lines[0].removeprefix("usage: ")
    headings = [at - 1 for at, line in enumerate(lines) if re.fullmatch(r" -{3,}\s*", line)]
    about = " ".join(" ".join(lines[1 : headings[0]]).split())
    groups = []
    for start, end in zip(headings, [*headings[1:], len(lines)]):
        group = Group(lines[start].strip())
        entries: list[list[str]] = []
        for line in lines[start + 2 : end]:
            if re.fullmatch(r"  -+\s*", line):  # above it is a description of the group
                group.about, entries = " ".join(" ".join(map(" ".join, entries)).split()), []
            elif re.match(r"  \S", line):
                name, _, description = line.strip().partition("  ")
                if entries and entries[-1][0].endswith(","):  # a long list of choices
                    entries[-1] = [entries[-1][0] + name, description]
                else:
                    entries.append([name, description])
            elif entries and line.strip():
                entries[-1].append(line)
        for name, *words in entries:
            if not name.startswith("-h"):
                group.rows.append(_row(name, " ".join(" ".join(words).split())))
        groups.append(group)
    return CommandHelp(usage, about, [group for group in groups if group.rows])


def _row(name: str, text: str) -> tuple[str, str]:
    """An option without what is repeated in every row: its negation, and None as a default."""
    name = re.sub(r", --[\w.]*no-[\w-]+$", "", PLACEHOLDER.sub("", name))
    shown = ""
    if found := DEFAULT.search(text):
        text, value = text[: found.start()], found["value"]
        shown = f" Default: `{value.strip()}`." if value and value.strip() and not found[1] else ""
        shown = " Required." if "(required)" in found[0] else shown
    if choices := re.search(r" \{([^{}]*,[^{}]*)\}$", name):
        name = name[: choices.start()]
        text += f" One of {', '.join(f'`{choice}`' for choice in choices[1].split(','))}."
    text += shown
    text = REFERENCE.sub(_link, text)
    return name.replace("|", " or "), text.strip().replace("|", "\\|")


def _link(found: re.Match[str]) -> str:
    """`(hnclip docs NAME)` as a link to the page."""
    path = next(path for name, path in find_pages().items() if found[1] in (name, name.rpartition("/")[2]))
    return f"([{found[1]}]({os.path.relpath(path.resolve(), PAGE.parent)}))"


def commands_page() -> str:
    """The page, from the installed command."""
    os.environ["COLUMNS"] = str(WIDTH)
    from hnclip.cli.completion import command_help

    helps = {name: parse_help(command_help(name)) for name in COMMANDS}
    count = Counter(str(group) for found in helps.values() for group in found.groups)
    shared: dict[str, Group] = {}
    lines = [
        "# Commands",
        "",
        "Written by `python scripts/commands_page.py` from the help of the commands: `hnclip COMMAND --help` prints "
        "the same. Data are given by position or with `--data`. `--option` switches a switch on, `--no-option` off. "
        "The defaults of `hnclip train` are those of the recipe; shown here are those of `--recipe paper`.",
        "",
        "| exit code | |",
        "|---:|---|",
        *(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()),
    ]
    for name, found in helps.items():
        plain = [group for group in found.groups if group.title in ("positional arguments", "options")]
        others = [group for group in found.groups if group not in plain]
        own = [Group("", rows=[row for group in plain for row in group.rows])]
        own += [group for group in others if count[str(group)] == 1]
        common = [group for group in others if count[str(group)] > 1]
        shared |= {group.title: group for group in common}
        lines += ["", f"## hnclip {name}", "", f"`{found.usage}`", "", REFERENCE.sub(_link, found.about)]
        for group in own:
            lines += ["", f"**{group.title}**"] if group.title else []
            lines += ["", *group.to_markdown()] if group.rows else []
        if common:
            links = (f"[{group.title}](#{group.title.replace(' ', '-')})" for group in common)
            lines += ["", f"And {', '.join(links)}."]
    lines += ["", "## Shared options"]
    for title, group in shared.items():
        lines += ["", f"### {title}", "", *group.to_markdown()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(commands_page(), encoding="utf-8")
    print(f"written: {PAGE}")
