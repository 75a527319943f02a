from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from hnclip.losses import GLOBAL_LOSSES, clip_loss, hard_negative_loss
from hnclip.objectives.embeddings import Embeddings, ViewEmbeddings
from hnclip.objectives.global_term import GlobalTerm

IDS = torch.tensor([[0, 0], [0, 1], [2, 1], [3, 3], [4, 4]])


def unit(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)


def made() -> Embeddings:
    return Embeddings(
        {"full": ViewEmbeddings(unit(5, 8, seed=0)), "crop": ViewEmbeddings(unit(5, 8, seed=1))},
        {"caption": ViewEmbeddings(unit(5, 8, seed=2)), "sentence": ViewEmbeddings(unit(5, 8, seed=3))},
        torch.tensor(20.0, dtype=torch.float64),
        ids=IDS,
        margin_text=unit(5, 3, seed=4),
    )


@pytest.mark.parametrize("name", GLOBAL_LOSSES)
def test_it_is_the_loss_of_whole_pictures_and_captions(name: str) -> None:
    e = made()
    image, text = e.images["full"].vectors, e.texts["caption"].vectors
    found = GlobalTerm(GLOBAL_LOSSES[name], margins=name == "hn")(e)
    assert found == GLOBAL_LOSSES[name](image, text, e.scale, ids=IDS)
    part = replace(e, offset=1, rows=2)
    assert GlobalTerm(GLOBAL_LOSSES[name])(part) == GLOBAL_LOSSES[name](image, text, e.scale, ids=IDS, offset=1, rows=2)


def test_margins_stay_those_of_whole_captions() -> None:
    """Other vectors in the captions' place change what pictures are compared with, not how alike captions are."""
    e, other = made(), unit(5, 8, seed=9)
    image, text = e.images["full"].vectors, e.texts["caption"].vectors
    found = GlobalTerm(hard_negative_loss, margins=True)(e, text=other)
    assert found == hard_negative_loss(image, other, e.scale, margin_text=text, ids=IDS)
    assert found != hard_negative_loss(image, other, e.scale, ids=IDS)
    assert GlobalTerm(clip_loss)(e, text=other) == clip_loss(image, other, e.scale, ids=IDS)


def test_frozen_margins_come_from_the_batch() -> None:
    e = made()
    image, text = e.images["full"].vectors, e.texts["caption"].vectors
    term = GlobalTerm(hard_negative_loss, margins=True, frozen=True)
    for given in (None, unit(5, 8, seed=9)):
        compared = text if given is None else given
        assert term(e, text=given) == hard_negative_loss(image, compared, e.scale, margin_text=e.margin_text, ids=IDS)
    with pytest.raises(ValueError, match="margin_text"):
        term(replace(e, margin_text=None))
