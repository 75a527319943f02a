"""Memory and time to open a table of a million rows, and those of reading the same rows with the csv module.

Each way reads the file in a process of its own. `rows` is what the csv module alone needs to hold every row as a list
of strings, `text` the same with only the captions kept. Memory is the rise of the process's peak resident size since
before opening, imports excluded. The images are not there: opening does not read them.
"""

from __future__ import annotations

import csv
import json
import logging
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hnclip.measure import Report, fresh_result, machine, resident_peak, restart_peak

log = logging.getLogger("hnclip.bench")

WAYS = {
    "hnclip": "hnclip: open_data",
    "rows": "peer: csv.reader, all rows in a list",
    "text": "peer: csv.reader, only the captions in a list",
}
COLUMNS = {
    "way": "way",
    "format": "format",
    "megabytes": "file MB",
    "seconds": "seconds",
    "memory": "peak MB",
    "over_file": "MB over the file",
    "bytes": "bytes a row over the file",
}


@dataclass(frozen=True)
class Options:
    """Opening a large table."""

    rows: int = 1_000_000
    words: int = 40
    """Words of each caption."""


def write(directory: Path, rows: int, words: int) -> list[Path]:
    """The same table as CSV, as JSON lines and as a JSON list."""
    files = [directory / f"table.{suffix}" for suffix in ("csv", "jsonl", "json")]
    text = " ".join(f"word{number % 10}" for number in range(words))
    with files[0].open("w", newline="") as table, files[1].open("w") as lines, files[2].open("w") as whole:
        writer = csv.writer(table)
        writer.writerow(["image", "caption", "split"])
        for number in range(rows):
            row = [
                f"images/{number // 1000:05}/{number:09}.jpg",
                f"{number} {text}",
                "test" if number % 50 == 0 else "train",
            ]
            writer.writerow(row)
            line = json.dumps(dict(zip(("image", "caption", "split"), row)))
            lines.write(f"{line}\n")
            whole.write(f"{', ' if number else '['}{line}")
        whole.write("]")
    return files


def open_file(way: str, file: str) -> dict[str, Any]:
    """One row of the report, measured in a process of its own."""
    from hnclip.data.readers import collect  # noqa: F401, importing is not opening
    from hnclip.data.sources import open_data

    path = Path(file)
    before, start = restart_peak(), time.perf_counter()
    found: Any
    if way == "hnclip":
        found = open_data(file).records
    else:
        with path.open(newline="") as table:
            rows = csv.reader(table)
            found = [row if way == "rows" else row[1] for row in rows]
    seconds, memory, size = time.perf_counter() - start, resident_peak() - before, path.stat().st_size
    return {
        "way": WAYS[way],
        "format": path.suffix[1:],
        "megabytes": size / 1e6,
        "seconds": seconds,
        "memory": memory / 1e6,
        "over_file": (memory - size) / 1e6,
        "bytes": (memory - size) / len(found),
    }


def run(options: Options) -> Report:
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        log.info(f"writing tables of {options.rows:,} rows")
        for file in write(Path(directory), options.rows, options.words):
            for way in WAYS if file.suffix == ".csv" else ("hnclip",):
                log.info(f"{file.suffix}: {WAYS[way]}")
                rows.append(fresh_result(__file__, "open_file", way=way, file=str(file)))
    return Report("open_table", COLUMNS, rows, machine())
