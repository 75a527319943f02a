"""Vectors on disk: bf16 as torch has it, codes within their slack, and files that only ever grow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hnclip.search.index.layout import Storage
from hnclip.search.index.vectors import (
    StoredVectors,
    append,
    from_bf16,
    mapped,
    quantise,
    row_files,
    to_bf16,
    whole_rows,
    write_at,
)


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)))
def test_bf16_is_that_of_torch(values: list[float]) -> None:
    numbers = np.array(values, np.float32)
    expected = torch.from_numpy(numbers).to(torch.bfloat16)
    assert (from_bf16(to_bf16(numbers)) == expected.float().numpy()).all()
    assert (to_bf16(numbers) == expected.view(torch.int16).numpy().view(np.uint16)).all()


def test_bf16_rounds_ties_to_even() -> None:
    ties = np.array([0x3F80_8000, 0x3F81_8000, 0x3F80_8001, 0x3F80_7FFF], np.uint32).view(np.float32)
    assert [hex(bits) for bits in to_bf16(ties)] == ["0x3f80", "0x3f82", "0x3f81", "0x3f80"]


@given(st.integers(1, 9), st.integers(1, 70), st.integers(0, 99), st.sampled_from([1.0, 1e-3, 40.0]))
def test_codes_lie_within_half_a_step_of_their_rows(count: int, width: int, seed: int, size: float) -> None:
    rows = size * np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)  # [n, D]
    codes, scales = quantise(rows)
    steps = from_bf16(scales)[:, None]  # [n, 1]
    assert (np.abs(rows - codes * steps) <= 0.5001 * steps).all()
    largest = np.abs(codes).max(axis=1)
    assert (largest <= 127).all()
    assert (largest >= 125).all()  # the scale is rounded up by less than one part in 128


def test_a_row_of_zeros_has_codes_of_zero() -> None:
    codes, scales = quantise(np.zeros((2, 5), np.float32))
    assert not codes.any()
    assert (from_bf16(scales) > 0).all()


@pytest.mark.parametrize("storage", ["bf16", "int8"])
def test_rows_are_appended_and_what_was_not_committed_is_written_over(storage: Storage, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    first, lost, second = (random.normal(size=(count, 12)).astype(np.float32) for count in (5, 9, 3))
    files = row_files(tmp_path, "images", 12, storage)
    assert whole_rows(files) == 0
    slack = append(files, 0, first)
    early = StoredVectors(files, 5, 12, slack)
    append(files, 5, lost)
    slack = max(slack, append(files, 5, second))
    assert whole_rows(files) == 8
    both = np.concatenate([first, second])  # [8, D]
    stored = StoredVectors(files, 8, 12, slack)
    codes, scales = quantise(from_bf16(to_bf16(both)))
    expected = from_bf16(to_bf16(both)) if storage == "bf16" else codes * from_bf16(scales)[:, None]
    assert (stored.rows(slice(None)) == expected).all()
    assert (stored.rows(np.array([7, 0, 3])) == expected[[7, 0, 3]]).all()
    assert (early.rows(slice(None)) == expected[:5]).all()
    assert len(early) == 5
    rest = np.linalg.norm(expected - stored.codes * from_bf16(stored.scales)[:, None], axis=1)
    assert rest.max() <= stored.slack + 1e-7
    assert rest.max() >= stored.slack - 1e-6


def test_a_file_is_cut_behind_what_was_written(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    write_at(file, 0, b"abcdefgh")
    write_at(file, 3, b"XY")
    assert file.read_bytes() == b"abcXY"


def test_a_mapped_file_stays_when_its_name_goes(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    file.write_bytes(bytes(range(12)))
    rows = mapped(file, np.dtype(np.uint8), (2, 5))
    file.unlink()
    assert rows.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert mapped(file, np.dtype(np.uint8), (0, 5)).shape == (0, 5)
