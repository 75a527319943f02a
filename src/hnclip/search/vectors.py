"""Vectors on disk: an append-only file of float16 rows for each kind, mapped into memory.

A row never changes. Writers append behind the rows that are committed; what lies there already was left by a killed
writer and is overwritten. Readers map the rows that were committed when they opened the index.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import numpy as np

LENGTH_TOLERANCE = 0.01  # of a row's length from 1; float16 rounds it by less than a thousandth
_BLOCK = 2**24  # bytes that are read or written at once


def append_bytes(file: Path, start: int, content: bytes) -> None:
    """Write bytes from `start` on, the end of the committed ones, and flush them to disk."""
    with file.open("r+b" if file.exists() else "w+b") as opened:
        opened.seek(start)
        opened.write(content)
        opened.truncate()
        opened.flush()
        os.fsync(opened.fileno())


def map_rows(file: Path, count: int, width: int) -> np.ndarray:
    """The first rows of a file [N, D] float16, mapped: they stay readable when the file is deleted."""
    if count == 0:
        return np.empty((0, width), np.float16)  # an empty file cannot be mapped
    # Copy on write instead of read only: torch warns about arrays that it could not write to.
    return np.asarray(np.memmap(file, np.float16, "c", shape=(count, width)))


def score_rows(vectors: np.ndarray, query: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Cosines [n] of a query [D] float32 with some rows [n]; that of a row does not depend on the other rows."""
    # A matrix product would sum in an order that depends on the number of rows.
    return (vectors[rows].astype(np.float32) * query).sum(axis=1)  # [n]


def unit_rows(vectors: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Some rows [n, D] in float64, with length 1, which float16 has changed a little."""
    found = vectors[rows].astype(np.float64)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def invalid_rows(vectors: np.ndarray) -> np.ndarray:
    """The indices of vectors [n, D] that are not finite or not of length 1."""
    with np.errstate(invalid="ignore", over="ignore"):
        lengths = np.linalg.norm(vectors.astype(np.float32), axis=1)  # [n]
    return np.flatnonzero(~(np.abs(lengths - 1) <= LENGTH_TOLERANCE))


def checksum(file: Path, size: int) -> int:
    """CRC-32 of the first bytes of a file."""
    found = 0
    with file.open("rb") as opened:
        while size and (block := opened.read(min(size, _BLOCK))):
            found = zlib.crc32(block, found)
            size -= len(block)
    return found
