"""Groups of options that commands share, each shown under a heading of its own in the help, and how all are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, is_dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import tyro
from pydantic import ValidationError
from pydantic.dataclasses import dataclass
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructTypeInfo

from hnclip.config import Count, Opening, ReadConfig, one_line
from hnclip.recipes import RECIPES

if TYPE_CHECKING:
    Recipe = str
else:
    Recipe = Literal[tuple(RECIPES)]

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

    batch: Count = 128
    """Images or captions encoded at once."""
    device: str = "auto"
    """auto uses an accelerator if there is one; or cpu, cuda, mps …"""


OutputGroup = tyro.conf.OmitArgPrefixes[Output]


@dataclass(frozen=True, kw_only=True)
class ModelOnData:
    """The groups of a command that runs models on data."""

    compute: tyro.conf.OmitArgPrefixes[Compute] = field(default_factory=Compute)
    opening: ModelOpening = field(default_factory=Opening)
    read: ReadConfig = field(default_factory=ReadConfig)
    output: OutputGroup = field(default_factory=Output)


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


class Refused(Exception):
    """A dataclass refuses the values of its options. Not a ValueError: tyro would print it in a box of its own."""


REGISTRY = ConstructorRegistry()
NOT_NONE: Any = tyro.conf.DisallowNone
_reading = set[Any]()


@REGISTRY.struct_rule
def dataclass_rule(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Dataclasses as tyro reads them, but with the help of each field as one paragraph (tyro keeps line ends), without
    None as a value where it is the default, and with `Refused` for wrong values."""
    if not is_dataclass(info.type) or info.type in _reading:
        return None
    _reading.add(info.type)
    try:
        spec = ConstructorRegistry.get_struct_spec(info)  # asks this rule again
    finally:
        _reading.remove(info.type)
    assert isinstance(spec, StructConstructorSpec)

    @wraps(info.type, updated=())  # tyro prints its docstring
    def create(**values: Any) -> Any:
        try:
            return spec.instantiate(**values)
        except ValueError as error:
            raise Refused(info.type) from error

    def paragraph(text: Any) -> str | None:
        found = text() if callable(text) else text
        return found and " ".join(found.split())

    described = []
    for found in spec.fields:
        kind = NOT_NONE[found.type] if found.default is None else found.type
        described.append(replace(found, type=kind, helptext=partial(paragraph, found.helptext)))
    return replace(spec, instantiate=create, fields=tuple(described))


def parse_options(kind: type, name: str, words: Sequence[str], **extra: Any) -> Any:
    """The options of a command from the command line. Prints help, and options that do not exist, by itself and exits.

    Raises:
        ValueError: values of options are refused.
    """
    try:
        return tyro.cli(kind, prog=f"hnclip {name}", args=words, registry=REGISTRY, **extra)
    except Refused as refused:
        error = refused.__cause__
        if not isinstance(error, ValidationError):
            raise ValueError(error) from error
        groups = {hint: f"{group}." for group, hint in get_type_hints(kind, include_extras=True).items()}
        raise ValueError(one_line(error, f"--{groups.get(refused.args[0], '')}")) from error
