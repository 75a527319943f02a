"""Summaries of measured gradients, by hand."""

from __future__ import annotations

from statistics import fmean, pstdev
from typing import Any

import pytest

from hnclip.analysis.gradients import gradient_summary


def measured(epoch: int, **changes: Any) -> dict[str, Any]:
    values = {"infonce": 0.5, "hn": 2.0, "infonce_norm": 1.0, "hn_norm": 10.0, "cosine": 0.5, "ratio": 10.0}
    kinds = {"gamma": 0.5, "negatives": "micro", "dtype": "float32", "towers": "fp32"}
    return {"epoch": epoch, "step": 0, "infonce_saturated": 0.25, "hn_saturated": 0.0, **values, **kinds, **changes}


ZERO = {"infonce": 0.0, "infonce_norm": 0.0, "cosine": None, "ratio": None, "infonce_saturated": 1.0}
ENTRIES = [
    measured(1, infonce=0.4, hn=3.0, infonce_norm=2.0, hn_norm=8.0, ratio=4.0, cosine=0.9),
    measured(1, infonce=0.0004, hn=1.0, infonce_norm=0.01, hn_norm=6.0, ratio=600.0, cosine=-0.1),
    measured(1, infonce=0.001, hn=2.0, infonce_norm=0.1, hn_norm=100.0, ratio=1000.0, cosine=0.3),
    measured(1, **ZERO, hn=0.0005, hn_norm=0.5),
    measured(3, **ZERO, hn=1e-9, hn_norm=0.0, hn_saturated=1.0, dtype="float64"),
]


def test_numbers_by_hand() -> None:
    found = gradient_summary(ENTRIES)
    first, last = found.epochs[1], found.epochs[3]
    assert (list(found.epochs), first["measurements"], found.overall["measurements"]) == ([1, 3], 4, 5)
    # A quarter of 0, 0.0004, 0.001, 0.4 lies three quarters of the way from the first to the second, and so on.
    assert first["infonce"] == pytest.approx([0.0003, 0.0007, 0.001 + 0.25 * 0.399])
    assert first["hn_norm"][2] == pytest.approx(8 + 0.25 * 92)
    assert first["ratio"][1] == 600  # only where the gradient of InfoNCE is not zero
    cosines = [0.9, -0.1, 0.3]
    assert first["cosine"][1] == pytest.approx(0.3)
    assert (first["cosine_mean"], first["cosine_std"]) == pytest.approx((fmean(cosines), pstdev(cosines)))
    assert first["cosine_positive"] == pytest.approx(2 / 3)
    assert (first["infonce_solved"], first["hn_solved"]) == (0.5, 0.25)  # 0.001 itself is not below it
    assert first["infonce_saturated"] == pytest.approx((3 * 0.25 + 1) / 4)
    assert (first["infonce_zero"], last["hn_zero"]) == (0.25, 1.0)
    assert (last["ratio"], last["cosine"], last["cosine_mean"]) == (None, None, None)
    assert [row[:1] for row in found.table().rows] == [["1"], ["3"], [], ["all"]]
    assert "float32 and float64" in found.to_text()
