from __future__ import annotations

import json
from statistics import fmean, median, pstdev
from typing import Any

import pytest

from hnclip.analysis.gradient_dynamics import gradient_dynamics


def measured(epoch: int, **changes: Any) -> dict[str, Any]:
    entry = {
        "kind": "gradients",
        "epoch": epoch,
        "step": 0,
        "infonce": 0.5,
        "hn": 2.0,
        "infonce_norm": 1.0,
        "hn_norm": 10.0,
        "cosine": 0.5,
        "ratio": 10.0,
        "infonce_saturated": 0.25,
        "hn_saturated": 0.0,
        "gamma": 0.5,
        "negatives": "micro",
        "dtype": "float32",
        "towers": "fp32",
    }
    return {**entry, **changes}


ZERO = {"infonce": 0.0, "infonce_norm": 0.0, "cosine": None, "ratio": None, "infonce_saturated": 1.0}
ENTRIES = [
    measured(1, infonce=0.4, hn=3.0, infonce_norm=2.0, hn_norm=8.0, ratio=4.0, cosine=0.9),
    measured(1, infonce=0.0004, hn=1.0, infonce_norm=0.01, hn_norm=6.0, ratio=600.0, cosine=-0.1),
    measured(1, infonce=0.001, hn=2.0, infonce_norm=0.1, hn_norm=100.0, ratio=1000.0, cosine=0.3),
    measured(1, **ZERO, hn=0.0005, hn_norm=0.5),
    measured(3, **ZERO, hn=1e-9, hn_norm=0.0, hn_saturated=1.0),
]


def test_epochs_and_the_whole_by_hand() -> None:
    found = gradient_dynamics(ENTRIES)
    assert list(found.epochs) == [1, 3]
    first = found.epochs[1]
    assert (first.measurements, found.measurements) == (4, 5)
    # Quartiles of 0, 0.0004, 0.001, 0.4: three quarters of the way from the first to the second, and so on.
    assert first.infonce.lower == pytest.approx(0.0003)
    assert first.infonce.median == pytest.approx(median([0, 0.0004, 0.001, 0.4]))
    assert first.infonce.upper == pytest.approx(0.001 + 0.25 * 0.399)
    assert first.hn_norm.upper == pytest.approx(8 + 0.25 * 92)
    assert first.infonce_norm.median == pytest.approx(0.055)
    assert first.hn.median == pytest.approx(1.5)
    assert first.ratio is not None
    assert first.ratio.median == 600  # only where the InfoNCE gradient is not zero
    assert first.cosine is not None
    assert first.cosine.median == pytest.approx(0.3)
    assert first.cosine_mean == pytest.approx(fmean([0.9, -0.1, 0.3]))
    assert first.cosine_std == pytest.approx(pstdev([0.9, -0.1, 0.3]))
    assert first.cosine_positive == pytest.approx(2 / 3)
    assert (first.infonce_solved, first.hn_solved) == (0.5, 0.25)  # 0.001 itself is not below it
    assert (first.infonce_zero, first.hn_zero) == (0.25, 0.0)
    assert first.infonce_saturated == pytest.approx((3 * 0.25 + 1) / 4)
    assert found.overall.infonce_zero == pytest.approx(0.4)
    assert found.overall.hn_zero == pytest.approx(0.2)
    assert found.overall.hn_solved == pytest.approx(0.4)
    assert found.overall.hn_saturated == pytest.approx(0.2)
    assert found.overall.ratio == first.ratio


def test_an_epoch_without_gradients_has_no_angles() -> None:
    last = gradient_dynamics(ENTRIES).epochs[3]
    assert (last.ratio, last.cosine, last.cosine_mean, last.cosine_std, last.cosine_positive) == (None,) * 5
    assert (last.infonce_zero, last.hn_zero) == (1.0, 1.0)


def test_it_is_json_without_holes() -> None:
    text = json.dumps(gradient_dynamics(ENTRIES).to_dict(), allow_nan=False)
    found = json.loads(text)
    assert list(found["epochs"]) == ["1", "3"]
    assert found["epochs"]["3"]["ratio"] is None
    assert found["overall"]["hn_norm"]["upper"] == 8.0
    assert found["dtypes"] == ["float32"]


def test_the_table() -> None:
    found = gradient_dynamics(ENTRIES)
    names, first, last, overall = found.rows()
    assert {len(row) for row in found.rows()} == {len(names)}
    cells = dict(zip(names, first))
    assert (cells["epoch"], cells["measured"]) == ("1", "4")
    assert (cells["InfoNCE < 0.001"], cells["L_HN < 0.001"]) == ("50%", "25%")
    assert (cells["zero ∇InfoNCE"], cells["zero ∇L_HN"]) == ("25%", "0%")
    assert (cells["‖∇InfoNCE‖"], cells["‖∇L_HN‖"], cells["ratio"], cells["cosine"]) == ("0.055", "7", "6e+02", "+0.30")
    assert last[-2:] == ["–", "–"]
    assert overall[:2] == ["all", "5"]
    text = found.to_text()
    assert "losses in float32, towers in fp32, γ 0.5, --optim.negatives micro" in text
    assert "mixed" not in text
    assert len(text.splitlines()) == 2 + 2 + 1 + 1 + 2


@pytest.mark.parametrize("other", [{"dtype": "float64"}, {"towers": "bf16"}])
def test_mixed_dtypes_are_said(other: dict[str, str]) -> None:
    found = gradient_dynamics([measured(1), measured(2, gamma=0.3, negatives="batch", **other)])
    assert "mixed dtypes" in found.to_text()
    assert found.gammas == (0.3, 0.5)
    assert found.negatives == ("batch", "micro")
    assert found.dtype == ("float32 and float64" if "dtype" in other else "float32")


def test_nothing_measured_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="train with --probe-gradients 5"):
        gradient_dynamics([])
