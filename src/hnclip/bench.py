"""`hnclip bench`: finds the benchmarks of the repository and runs one.

A benchmark is a file of `benchmarks/` with a docstring, a frozen dataclass `Options` and
`run(options: Options, say: Callable[[str], None]) -> hnclip.measure.Report`.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType

DIRECTORY = Path(__file__).resolve().parents[2] / "benchmarks"


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

    sys.path.insert(0, str(DIRECTORY))  # benchmarks share what is not a benchmark itself
    return load_file(DIRECTORY / f"{name}.py")
