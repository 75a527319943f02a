"""Groups of options that commands share, each shown under a heading of its own in the help."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from hnclip.cli.errors import user_message
from hnclip.config import Opening

log = logging.getLogger("hnclip")

Recipe = Literal[
    "demo",
    "paper",
    "paper/docci",
    "paper/dci",
    "paper/urban-1k",
    "tiny",
    "results",
    "lora",
    "dora",
    "long_clip",
    "finelip",
    "goal",
    "smartclip",
    "structxlip",
]

Repeatable = Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction]
"""`--out X Y` and `--out X --out Y`: the values of each occurrence."""

Data = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA")]
SeveralData = Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[DATA …]")]
ModelOpening = tyro.conf.OmitArgPrefixes[Opening]


@dataclass(frozen=True)
class Output:
    """Messages and results."""

    json: bool = False
    """Print the result as JSON; messages are then limited to warnings."""
    quiet: bool = False
    """Only warnings and errors, no progress."""
    log_file: Path | None = None
    """Also append all messages, with time and level, to this file."""
    traceback: bool = False
    """Show the traceback of an error instead of its message."""


@dataclass(frozen=True)
class Compute:
    """Where and in which portions a model computes."""

    batch: int = 128
    """Images or captions encoded at once."""
    device: str = "auto"
    """auto uses an accelerator if there is one; or cpu, cuda, mps …"""

    def __post_init__(self) -> None:
        at_least(1, self, "batch")


OutputGroup = tyro.conf.OmitArgPrefixes[Output]
ComputeGroup = tyro.conf.OmitArgPrefixes[Compute]


@dataclass(frozen=True)
class Printed:
    """What a command prints, as text and as JSON, and its exit code."""

    text: str
    content: Any
    exit_code: int = 0

    def to_text(self) -> str:
        return self.text

    def to_dict(self) -> Any:
        return self.content


def at_least(least: int, options: Any, *names: str) -> None:
    """ValueError if an option that is given is smaller."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")


def several(given: tuple[tuple[str, ...], ...]) -> list[str]:
    """The values of all occurrences of an option."""
    return [value for values in given for value in values]


def sources(given: tuple[str, ...]) -> list[str]:
    """Names separated by spaces or commas; an existing path may contain commas."""
    return [part for name in given for part in ([name] if Path(name).exists() else name.split(",")) if part]


def check_free(out: Path, replace: bool) -> None:
    """Refuse to overwrite existing files, before any work is done."""
    if out.exists() and not replace and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists already; choose another directory or pass --replace")


def arguments_of(options: Any) -> dict[str, Any]:
    """The options of a command as arguments of the function that it calls."""
    own = {name: value for name, value in vars(options).items() if name not in ("output", "compute")}
    return own | (vars(options.compute) if hasattr(options, "compute") else {})


def parse_options(kind: type, name: str, words: Sequence[str], **extra: Any) -> Any:
    """The options of a command from the command line; exits with 2 if they are wrong."""
    try:
        return tyro.cli(kind, prog=f"hnclip {name}", args=words, **extra)
    except ValueError as error:  # values that the dataclasses of a command refuse together
        log.error(f"hnclip {name}: {user_message(error) or error}")
        raise SystemExit(2) from error
