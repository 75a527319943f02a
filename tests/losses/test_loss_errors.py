"""Every wrong argument is named, with what was expected and what came."""

from __future__ import annotations

import pytest
import torch

from hnclip.losses import GLOBAL_LOSSES, HardNegativeLoss, debiased_floor_rows

NAN, INF = float("nan"), float("inf")
LOSSES = {**GLOBAL_LOSSES, "floor rows": debiased_floor_rows}
SHARED = {
    "image ndim": ("image", {"image": torch.ones(4)}),
    "text ndim": ("text", {"text": torch.ones(4, 3, 1)}),
    "integer image": ("image", {"image": torch.ones(4, 3, dtype=torch.long)}),
    "integer text": ("text", {"text": torch.ones(4, 3, dtype=torch.long)}),
    "fewer texts": ("image and text", {"text": torch.ones(3, 3)}),
    "other width": ("image and text", {"text": torch.ones(4, 2)}),
    "no pairs": ("image", {"image": torch.ones(0, 3), "text": torch.ones(0, 3)}),
    "one pair": ("image", {"image": torch.ones(1, 3), "text": torch.ones(1, 3)}),
    "NaN image": ("image", {"image": torch.full((4, 3), NAN)}),
    "infinite text": ("text", {"text": torch.full((4, 3), INF)}),
    "NaN scale": ("scale", {"scale": NAN}),
    "infinite scale": ("scale", {"scale": torch.tensor(INF)}),
    "zero scale": ("scale", {"scale": 0.0}),
    "negative scale": ("scale", {"scale": torch.tensor(-1.0)}),
    "scale per row": ("scale", {"scale": torch.ones(4)}),
    "short ids": ("ids", {"ids": torch.arange(3)}),
    "deep ids": ("ids", {"ids": torch.zeros(4, 1, 1, dtype=torch.long)}),
    "float ids": ("ids", {"ids": torch.arange(4.0)}),
    "bool ids": ("ids", {"ids": torch.ones(4, dtype=torch.bool)}),
    "negative offset": ("offset", {"offset": -1, "rows": 2}),
    "offset past the end": ("offset", {"offset": 4, "rows": 1}),
    "rows past the end": ("rows", {"offset": 2, "rows": 3}),
    "no rows": ("rows", {"rows": 0}),
    "offset alone": ("rows", {"offset": 2}),
}
OWN = [
    *[("hn", "gamma", value) for value in (-0.1, NAN, INF)],
    *[(name, "margin", value) for name in ("hn", "fixed_margin", "max_hinge") for value in (-0.1, NAN)],
    *[("hn", "center", value) for value in ("median", NAN)],
    ("hn", "margin_text", torch.ones(3, 3)),
    ("hn", "margin_text", torch.ones(4)),
    ("hn", "margin_text", torch.ones(4, 3, dtype=torch.long)),
    ("hn", "margin_text", torch.full((4, 3), NAN)),
    *[("smoothed", "smoothing", value) for value in (-0.1, 1.0, NAN)],
    ("score_margin", "strength", -1.0),
    ("score_margin", "directions", "sideways"),
    ("hn_nce", "alpha", -1.0),
    *[(name, "beta", value) for name in ("hn_nce", "hcl", "floor rows") for value in (-1.0, NAN)],
    *[(name, "tau_plus", v) for name in ("hcl", "debiased", "floor rows") for v in (-0.1, 1.0, NAN)],
    ("siglip", "gamma", -0.1),
    ("siglip", "bias", NAN),
    ("siglip", "bias", torch.tensor(INF)),
    ("siglip", "bias", torch.zeros(4)),
]


def arguments() -> dict:
    generator = torch.Generator().manual_seed(0)
    image, text = (torch.randn(4, 3, generator=generator) for _ in range(2))
    return {"image": image, "text": text, "scale": 5.0}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("argument", "change"), SHARED.values(), ids=SHARED)
def test_shared_arguments(name, argument, change):
    with pytest.raises(ValueError, match=rf"^{argument} must .*got"):
        LOSSES[name](**{**arguments(), **change})


@pytest.mark.parametrize(("name", "argument", "value"), OWN, ids=str)
def test_own_arguments(name, argument, value):
    with pytest.raises(ValueError, match=rf"^{argument} must .*got"):
        LOSSES[name](**arguments(), **{argument: value})


@pytest.mark.parametrize("name", LOSSES)
def test_good_arguments_pass(name):
    one_element = torch.tensor([5.0])
    plain = LOSSES[name](**arguments())
    assert plain.ndim == 0
    assert LOSSES[name](**{**arguments(), "scale": one_element}) == plain
    assert LOSSES[name](**arguments(), ids=torch.arange(4), rows=4, check_values=False) == pytest.approx(plain)


@pytest.mark.parametrize("name", GLOBAL_LOSSES)
def test_values_are_not_looked_at_when_told(name):
    nan = torch.full((4, 3), NAN)
    loss = GLOBAL_LOSSES[name](**{**arguments(), "image": nan, "scale": torch.tensor(NAN)}, check_values=False)
    assert loss.isnan()


@pytest.mark.parametrize("options", [{"gamma": -1.0}, {"margin": -1.0}, {"center": "median"}], ids=str)
def test_module_refuses_at_construction(options):
    with pytest.raises(ValueError, match=f"^{next(iter(options))} must"):
        HardNegativeLoss(**options)
