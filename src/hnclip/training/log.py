"""The metrics of a run: metrics.jsonl, and TensorBoard if asked."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hnclip.util.optional import import_extra

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"


class MetricsLog:
    """Appends one JSON object per line.

    Args:
        run: directory of the run.
        length: bytes to keep: lines that a killed run wrote after its last checkpoint are deleted.
        step: of the checkpoint; TensorBoard hides events after it.
        tensorboard: also write TensorBoard events.
    """

    def __init__(self, run: Path, length: int, step: int, *, tensorboard: bool = False) -> None:
        path = run / METRICS
        self._file = path.open("ab")
        if self._file.tell() < length:
            log.warning(f"{path} has lost {length - self._file.tell()} bytes since the checkpoint: metrics are missing")
        self._file.truncate(min(length, self._file.tell()))
        self._file.seek(0, os.SEEK_END)
        self._board = None
        if tensorboard:
            board = import_extra("torch.utils.tensorboard", "TensorBoard events", "track")
            self._board = board.SummaryWriter(str(run / "tensorboard"), purge_step=step + 1 if length else None)

    def write(self, entry: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        if self._board is not None and entry["kind"] != "data":
            for name, value in _scalars(entry):
                self._board.add_scalar(f"{entry['kind']}/{name}", value, entry["step"])

    @property
    def length(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _scalars(entry: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """All numbers of an entry by name, those of its directions as `text_to_image/R@1`."""
    for name, value in entry.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and name != "step":
            yield f"{prefix}{name}", value


def read_metrics(run: Path, kind: str) -> list[dict[str, Any]]:
    """The entries of one kind ("data", "step", "gradients", "evaluation" or "watched") of a run, in order."""
    path = run / METRICS
    entries = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                entry = json.loads(line)
                if entry["kind"] == kind:
                    entries.append(entry)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}, is damaged ({error}): restore it or delete the line"
                ) from error
    return entries
