"""Vectors on disk, a row each: as bf16, and as codes of 8 bits that are searched first.

Three files of a kind: `codes` [N, D] int8, `scales` [N] bf16, and with storage bf16 `bf16` [N, D]. A code times its
row's scale is at most `slack` away from the row, in length: |q·x − q·(scale·code)| ≤ ‖q‖·slack, which is what lets the
exact engine leave out rows by their codes alone and still be exact (search/engines/exact.py).

numpy knows no bf16: it is kept as the upper half of a float32, in uint16.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hnclip.search.index.layout import Kind, Storage

LARGEST = 127  # code
LONGEST = 1.01  # rows have length 1 up to bf16; the exact engine's bound holds for no longer ones


@dataclass(frozen=True)
class Row:
    """The name and the bytes of one row in each file of a kind."""

    codes: tuple[Path, int]
    scales: tuple[Path, int]
    bf16: tuple[Path, int] | None

    def files(self) -> list[tuple[Path, int]]:
        return [file for file in (self.codes, self.scales, self.bf16) if file is not None]


def row_files(directory: Path, kind: Kind, width: int, storage: Storage) -> Row:
    return Row(
        codes=(directory / f"{kind}.codes", width),
        scales=(directory / f"{kind}.scales", 2),
        bf16=(directory / f"{kind}.bf16", 2 * width) if storage == "bf16" else None,
    )


class StoredVectors:
    """The first `count` rows of a kind, mapped into memory; whoever appends does not disturb them.

    Args:
        slack: largest length of a row minus its code times its scale; 0 if the codes are all there is.

    Shape:
        codes [N, D] int8; scales [N] uint16, bf16; bf16 [N, D] uint16, or None if there are only codes.
    """

    def __init__(self, files: Row, count: int, width: int, slack: float) -> None:
        self.shape = (count, width)
        self.slack = slack if files.bf16 else 0.0
        self.codes = mapped(files.codes[0], np.dtype(np.int8), (count, width))
        self.scales = mapped(files.scales[0], np.dtype(np.uint16), (count,))
        self.bf16 = mapped(files.bf16[0], np.dtype(np.uint16), (count, width)) if files.bf16 else None

    def __len__(self) -> int:
        return self.shape[0]

    def rows(self, chosen: np.ndarray | slice) -> np.ndarray:
        """Some rows [n, D] as float32: what `nearest` of every engine scores with."""
        if self.bf16 is not None:
            return from_bf16(self.bf16[chosen])
        return self.codes[chosen].astype(np.float32) * from_bf16(self.scales[chosen])[:, None]


def whole_rows(files: Row) -> int:
    """Rows that all files hold."""
    return min(path.stat().st_size // row if path.exists() else 0 for path, row in files.files())


def append(files: Row, count: int, vectors: np.ndarray) -> float:
    """Write vectors [n, D] float32 behind the first `count` rows, to the disk; returns the largest slack of them.

    What lies there already was written by somebody who did not live to commit it.
    """
    exact = to_bf16(vectors)  # [n, D]
    codes, scales = quantise(from_bf16(exact))
    for (path, row), content in zip(files.files(), (codes, scales, exact)):
        write_at(path, count * row, np.ascontiguousarray(content).tobytes())
    rest = from_bf16(exact) - codes * from_bf16(scales)[:, None]  # [n, D]
    return float(np.linalg.norm(rest, axis=1).max(initial=0.0))


def write_at(file: Path, start: int, content: bytes) -> None:
    """Bytes from a place on, to the disk; what lay behind it was never committed."""
    with file.open("r+b" if file.exists() else "w+b") as opened:
        opened.seek(start)
        opened.write(content)
        opened.truncate()
        opened.flush()
        os.fsync(opened.fileno())


def first_bad(vectors: np.ndarray) -> int | None:
    """The first of vectors [n, D] that is not finite, or too long once it is stored; None if all are good."""
    stored = from_bf16(to_bf16(np.nan_to_num(vectors, nan=0.0, posinf=0.0, neginf=0.0)))  # [n, D]
    lengths = np.linalg.norm(stored.astype(np.float64), axis=1)  # [n]
    bad = ~np.isfinite(vectors).all(axis=1) | (lengths > LONGEST)  # [n]
    return int(bad.argmax()) if bad.any() else None


def quantise(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes [n, D] int8 and scales [n], bf16, of vectors [n, D]: a row's largest number becomes 127 or a little less.

    Scales are rounded up to bf16 before codes are made with them, so that no kernel rounds them once more.
    """
    largest = np.abs(vectors).max(axis=1, initial=0.0)  # [n]
    wanted = np.maximum(largest / LARGEST, np.float32(1e-20)).astype(np.float32)
    scales = to_bf16(wanted)
    scales = scales + (from_bf16(scales) < wanted).astype(np.uint16)  # the next number of bf16
    codes = np.rint(vectors / from_bf16(scales)[:, None])
    return codes.clip(-LARGEST, LARGEST).astype(np.int8), scales


def to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 to the nearest bf16, ties to the even one, as uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """bf16 as uint16, to float32."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def mapped(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """The beginning of a file as an array; it stays there when the file's name is removed."""
    if 0 in shape:
        return np.empty(shape, dtype)  # no file of no bytes can be mapped
    # Copy on write rather than read only: torch warns of arrays that it could not write to.
    return np.asarray(np.memmap(path, dtype, "c", shape=shape))
