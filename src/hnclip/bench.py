"""`hnclip bench`: finds the benchmarks of the repository and runs one.

A benchmark is a file of `benchmarks/` with a docstring, a frozen dataclass `Options` and
`run(options: Options) -> hnclip.measure.Report`; messages go to the logger `hnclip.bench`.
"""

from __future__ import annotations

import ast
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Generic, TypeVar

import tyro

from hnclip import __version__
from hnclip.cli.options import Output
from hnclip.util.console import configure_logging
from hnclip.util.files import replace_file

DIRECTORY = Path(__file__).resolve().parents[2] / "benchmarks"
Options = TypeVar("Options")


@dataclass(frozen=True)
class Call(Generic[Options]):
    """The options of one benchmark, and those that all have."""

    options: Annotated[Options, tyro.conf.arg(name="")]
    out: Path | None = None
    """Also write the result as JSON, with the seconds of every turn, to this file."""
    output: Annotated[Output, tyro.conf.arg(name="")] = field(default_factory=Output)


def benchmarks() -> dict[str, str]:
    """The first sentence of every benchmark, by name; the files are read, not run."""
    if not DIRECTORY.is_dir():
        raise ValueError(
            "the benchmarks come with the repository, not with the package: clone it, install it with "
            "`pip install --editable .`, and call `hnclip bench` from that installation"
        )
    found = {}
    for path in sorted(DIRECTORY.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body):
            found[path.stem] = " ".join((ast.get_docstring(tree) or "").split("\n\n")[0].split())
    return found


def open_benchmark(name: str) -> ModuleType:
    """The module of a benchmark; ValueError lists those there are."""
    names = benchmarks()
    if name not in names:
        raise ValueError(f"there is no benchmark {name!r}; there are {', '.join(names)}")

    from hnclip.measure import load_file

    if str(DIRECTORY) not in sys.path:
        sys.path.insert(0, str(DIRECTORY))  # benchmarks share what is not a benchmark itself
    return load_file(DIRECTORY / f"{name}.py")


def run_benchmark(name: str, arguments: Sequence[str]) -> str:
    """Run a benchmark with these options of the command line; what is to be printed."""
    module = open_benchmark(name)
    # `Call` of a class that is only known now is no type that mypy could follow.
    kind: Any = Call[module.Options]  # type: ignore[name-defined]
    call = tyro.cli(kind, prog=f"hnclip bench {name}", description=module.__doc__, args=arguments)
    output = call.output
    configure_logging(quiet=output.quiet or output.json, log_file=output.log_file)
    if call.out is not None and call.out.is_dir():
        raise ValueError(f"--out {call.out} is a directory; name a file")  # said before the minutes of measuring
    start = time.perf_counter()
    report = module.run(call.options)
    found = {
        **report.to_dict(),
        "command": shlex.join(["hnclip", "bench", name, *arguments]),
        "version": __version__,
        "seconds": time.perf_counter() - start,
    }
    text = json.dumps(found, allow_nan=False)
    if call.out is not None:
        with replace_file(call.out) as partial:
            partial.write_text(text + "\n", encoding="utf-8")
    return text if output.json else report.to_text()
