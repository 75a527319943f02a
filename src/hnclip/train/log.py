"""The metrics of a run: metrics.jsonl, and TensorBoard if asked."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"


class MetricsLog:
    """Appends one JSON object per line. Opened at `length` bytes: what a killed run wrote beyond its last checkpoint
    is cut off, so a step never appears twice."""

    def __init__(self, run: Path, length: int, *, tensorboard: bool = False) -> None:
        path = run / METRICS
        self._file = path.open("ab")
        self._file.truncate(min(length, self._file.tell()))
        self._file.seek(0, os.SEEK_END)
        self._board = _board(run) if tensorboard else None

    def write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        if self._board is not None:
            for name, value in entry.items():
                if isinstance(value, int | float) and name != "step":
                    self._board.add_scalar(f"{entry['kind']}/{name}", value, entry["step"])

    @property
    def length(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _board(run: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(
            "tensorboard is not installed: pip install 'hnclip[track]', or leave --tensorboard out"
        ) from error
    return SummaryWriter(str(run / "tensorboard"))


def read_metrics(run: Path, kind: str) -> list[dict[str, Any]]:
    """The entries of one kind ("data", "step", "gradients" or "evaluation") of a run, in order."""
    with (run / METRICS).open(encoding="utf-8") as file:
        entries = [json.loads(line) for line in file]
    return [entry for entry in entries if entry["kind"] == kind]
